"""Entropy rule (WhiFlash, arXiv 2606.07710): the target's entropy at the last accepted position against a threshold.

Which side gets the diffusion arm is not published; `above=False` gives it the confident positions, where long drafts pay.
"""

from __future__ import annotations

from .. import ops
from ..arms import Arm
from .base import RoundState


class EntropyRouter:
    """threshold in nats; diffusion runs where entropy > threshold if `above`, else where entropy < threshold."""

    def __init__(self, diffusion: Arm, autoregressive: Arm, threshold: float = 0.05, above: bool = False):
        if not threshold >= 0:  # nor NaN
            raise ValueError(f"entropy threshold {threshold}: entropies are in nats, from 0 up")
        self.arms, self.threshold, self.above = (diffusion, autoregressive), threshold, above

    def choose(self, state: RoundState) -> Arm:
        decision = ops.entropy_rule(state.entropy.view(1), self.threshold, self.above)
        return self.arms[0] if int(decision) else self.arms[1]
