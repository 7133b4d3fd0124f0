"""Neural router (WhiFlash model cards): a two-layer MLP reads the target's final hidden state and predicts a gain.

Gain = diffusion minus autoregressive acceptance length (or the reverse, if the config says `positive: autoregressive`); the arm
that gains runs when the prediction passes the threshold, which moves the operating point without retraining.
"""

from __future__ import annotations

import logging

import torch

from .. import ops
from ..arms import Arm
from ..checkpoints import RouterConfig
from .base import RoundState

log = logging.getLogger(__name__)


class NeuralRouter:
    def __init__(
        self,
        config: RouterConfig,
        tensors: dict[str, torch.Tensor],
        diffusion: Arm,
        autoregressive: Arm,
        device: torch.device,
        threshold: float | None = None,
    ):
        if not config.hidden_is_normed:
            raise ValueError("this router reads the state before the final norm, which is not supported")
        self.config, self.threshold = config, config.threshold if threshold is None else threshold
        self.weights = {name: t.to(device=device, dtype=torch.float32) for name, t in tensors.items()}
        positive_first = config.positive == "diffusion"
        self.arms = (diffusion, autoregressive) if positive_first else (autoregressive, diffusion)
        log.info(
            "neural router: %s runs where the predicted gain passes %g; reads the state after the final norm",
            self.arms[0],
            self.threshold,
        )

    def choose(self, state: RoundState) -> Arm:
        w = self.weights
        _, decision = ops.router_mlp(state.hidden.view(1, -1).float(), w["w1"], w["b1"], w["w2"], w["b2"], self.threshold)
        return self.arms[0] if int(decision) else self.arms[1]
