"""The pieces every decoder layer here is made of."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F

_PACK_ROWS = 8  # what oneDNN lays the weight out for; it serves every other row count well too


class Linear:
    """weights [N_i, K] each; several stay apart where they must not be copied (q, k, v of a live model)."""

    __slots__ = ("weights", "biases", "packs", "packed")

    def __init__(self, weights: list[torch.Tensor], biases: list[torch.Tensor | None] | None = None):
        self.weights, self.biases = weights, biases or [None] * len(weights)
        self.packs = False
        self.packed = None  # made at the first product: loading stays quick

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] -> [..., sum N_i]."""
        if self.packs:
            return self._from_packed(x)
        if len(self.weights) == 1:
            return F.linear(x, self.weights[0], self.biases[0])
        return torch.cat([F.linear(x, w, b) for w, b in zip(self.weights, self.biases, strict=True)], -1)

    def pack(self) -> None:
        """Allow a second copy of the weight, laid out for the few rows of a verification.

        In float32 by oneDNN: MKL's plain product of 2 rows takes twice as long as of 1. In bfloat16 on a CPU that has no bfloat16
        instructions as float16 by FBGEMM, which multiplies in float32: PyTorch's plain product takes as long again for every row.
        Does nothing where that would not help: other dtypes and devices, several weights, libraries PyTorch was built without.
        """
        w = self.weights[0]
        if len(self.weights) > 1 or w.device.type != "cpu":
            return
        if w.dtype == torch.float32:
            self.packs = torch.backends.mkldnn.is_available()
        elif w.dtype == torch.bfloat16 and not cpu_computes_bfloat16():
            self.packs = "fbgemm" in torch.backends.quantized.supported_engines and _fits_half(w)

    def _from_packed(self, x: torch.Tensor) -> torch.Tensor:
        w, bias = self.weights[0], self.biases[0]
        if w.dtype == torch.float32:
            if self.packed is None:
                self.packed = torch.ops.mkldnn._reorder_linear_weight(w, _PACK_ROWS)
            return torch.ops.mkldnn._linear_pointwise(x, self.packed, bias, "none", [], "")
        if self.packed is None:
            self.packed = torch.ops.quantized.linear_prepack_fp16(w.float(), None if bias is None else bias.float())
        return torch.ops.quantized.linear_dynamic_fp16(x.float(), self.packed).to(w.dtype)


@lru_cache
def cpu_computes_bfloat16() -> bool:
    """Whether this CPU has bfloat16 instructions (AVX-512 or AMX)."""
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return "avx512_bf16" in flags or "amx_bf16" in flags


def _fits_half(w: torch.Tensor) -> bool:
    """bfloat16 weights are exact in float16 between 2^-17 and 65504; what lies outside must not show in a product."""
    exact = w.float()
    return bool((w.half().float() - exact).norm() <= 2**-12 * exact.norm())


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
