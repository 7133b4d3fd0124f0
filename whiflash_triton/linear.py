"""Linear: y = x W^T + b over one weight or several side by side."""

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
