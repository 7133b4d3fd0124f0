"""The pieces every decoder layer here is made of."""

from __future__ import annotations

import torch
import torch.nn.functional as F


class Linear:
    """weights [N_i, K] each; several stay apart where they must not be copied (q, k, v of a live model)."""

    __slots__ = ("weights", "biases")

    def __init__(self, weights: list[torch.Tensor], biases: list[torch.Tensor | None] | None = None):
        self.weights, self.biases = weights, biases or [None] * len(weights)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] -> [..., sum N_i]."""
        if len(self.weights) == 1:
            return F.linear(x, self.weights[0], self.biases[0])
        return torch.cat([F.linear(x, w, b) for w, b in zip(self.weights, self.biases, strict=True)], -1)


def fused(weights: list[torch.Tensor], biases: list[torch.Tensor | None] | None = None) -> Linear:
    """One weight holding all of them, rows in order."""
    bias = None if biases is None or biases[0] is None else torch.cat(biases)
    return Linear([torch.cat(weights) if len(weights) > 1 else weights[0]], [bias])


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension, statistics in float32."""
    if x.dtype != torch.float64:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    h = x.float()  # transformers normalises float64 in float32 too; parity to 1e-9 needs the same rounding
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return weight * h.to(x.dtype)


def swiglu(x: torch.Tensor, gate_up: Linear, down: Linear) -> torch.Tensor:
    gate, up = gate_up(x).chunk(2, -1)
    return down(F.silu(gate) * up)
