"""The pieces every decoder layer here is made of."""

from __future__ import annotations

import torch
import torch.nn.functional as F

_PACK_ROWS = 8  # MKL packs a weight for one row count; fewer rows are padded to it
_PACK_RANGE = range(4, 33)  # below, and above, a plain product is as fast


class Linear:
    """weights [N_i, K] each; several stay apart where they must not be copied (q, k, v of a live model)."""

    __slots__ = ("weights", "biases", "packs", "packed")

    def __init__(self, weights: list[torch.Tensor], biases: list[torch.Tensor | None] | None = None):
        self.weights, self.biases = weights, biases or [None] * len(weights)
        self.packs = False
        self.packed: torch.Tensor | None = None  # made at the first product of a few rows: loading stays quick

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] -> [..., sum N_i]."""
        if self.packs and x.numel() // x.shape[-1] in _PACK_RANGE:
            return self._few_rows(x)
        if len(self.weights) == 1:
            return F.linear(x, self.weights[0], self.biases[0])
        return torch.cat([F.linear(x, w, b) for w, b in zip(self.weights, self.biases, strict=True)], -1)

    def pack(self) -> None:
        """Allow a second copy laid out for few rows: in float32 MKL takes 2.5 times as long for 4 rows as for 3 without it.

        Does nothing where it would not help: other dtypes and devices, several weights, PyTorch without MKL.
        """
        w = self.weights[0]
        on_cpu = w.device.type == "cpu" and torch.backends.mkl.is_available()
        self.packs = len(self.weights) == 1 and w.dtype == torch.float32 and on_cpu

    def _few_rows(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed is None:
            self.packed = torch.ops.mkl._mkl_reorder_linear_weight(self.weights[0].contiguous(), _PACK_ROWS)
        flat = x.reshape(-1, x.shape[-1])
        rows = flat.shape[0]
        padded = F.pad(flat, (0, 0, 0, -rows % _PACK_ROWS))
        parts = [
            torch.ops.mkl._mkl_linear(part, self.packed, self.weights[0], self.biases[0], _PACK_ROWS)
            for part in padded.split(_PACK_ROWS)
        ]
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[:rows].view(*x.shape[:-1], -1)


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
