"""Context K and V of all draft layers, from one projection into the draft cache: k_norm, RoPE and scatter."""

import torch
from torch import Tensor


def _check(projected: Tensor, k_norm: Tensor | None, cos: Tensor, sin: Tensor, cache_kv: Tensor, start: Tensor) -> None:
    assert projected.ndim == 6 and projected.shape[3] == 2, "projected must be [B, C, layers, 2, kv_heads, head_dim]"
    batch, rows, layers, _, heads, dim = projected.shape
    assert cache_kv.ndim == 6 and cache_kv.shape[:4] == (layers, 2, batch, heads) and cache_kv.shape[5] == dim
    assert dim % 2 == 0, "rotate-half needs an even head_dim"
    assert projected.stride(5) == cache_kv.stride(5) == 1
    assert cos.shape == sin.shape == (rows, dim) and cos.dtype == sin.dtype == torch.float32
    assert cos.stride(1) == sin.stride(1) == 1
    assert k_norm is None or (k_norm.shape == (layers, dim) and k_norm.stride(1) == 1)
    assert start.shape == (batch,) and start.dtype == torch.int32


def kv_injection_torch(
    projected: Tensor, k_norm: Tensor | None, cos: Tensor, sin: Tensor, cache_kv: Tensor, start: Tensor, eps: float
) -> None:
    """PyTorch reference of `kv_injection`."""
    _check(projected, k_norm, cos, sin, cache_kv, start)
    k, v = projected.permute(3, 0, 2, 4, 1, 5)  # each [B, L, Hkv, C, D]
    k = k.float()
    if k_norm is not None:
        k = k * torch.rsqrt(k.square().mean(-1, keepdim=True) + eps) * k_norm.float()[:, None, None]
    low, high = k.chunk(2, -1)
    k = k * cos + torch.cat((-high, low), -1) * sin
    for b, at in enumerate(start.tolist()):
        rows = max(0, min(k.shape[3], cache_kv.shape[4] - at))
        cache_kv[:, 0, b, :, at : at + rows] = k[b, :, :, :rows]
        cache_kv[:, 1, b, :, at : at + rows] = v[b, :, :, :rows]
