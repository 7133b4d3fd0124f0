"""Context K and V of all draft layers, from one projection into the draft cache: k_norm, RoPE and scatter.

One launch, grid (tiles of (layer, head) rows, C, B): a program normalises and rotates its K rows in fp32 and copies its
V rows. Bytes: the projection read once, as much written.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from whiflash_triton.autotune.lookup import pick


@triton.jit
def _kv_injection_kernel(
    projected_ptr,  # [B, C, L, 2, Hkv, D]
    k_norm_ptr,  # [L, D]
    cos_ptr,  # fp32 [C, D]
    sin_ptr,  # fp32 [C, D]
    cache_ptr,  # [L, 2, B, Hkv, S, D]
    start_ptr,  # int32 [B]
    stride_pb,
    stride_pc,
    stride_pl,
    stride_pk,
    stride_ph,
    stride_norm,
    stride_cos,
    stride_sin,
    stride_cl,
    stride_ck,
    stride_cb,
    stride_ch,
    stride_cn,
    n_cache,  # S
    n_rows,  # L * Hkv
    heads,
    half,  # D / 2
    eps,
    HAS_NORM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    context = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    to = tl.load(start_ptr + batch).to(tl.int64) + context
    if (to >= 0) & (to < n_cache):
        row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
        head = (row % heads).to(tl.int64)
        layer = (row // heads).to(tl.int64)
        offs = tl.arange(0, BLOCK_HALF)  # element i rotates with element i + D / 2
        inside = offs < half
        mask = (row < n_rows)[:, None] & inside[None, :]
        source = batch * stride_pb + context * stride_pc + layer * stride_pl + head * stride_ph
        target = layer * stride_cl + batch * stride_cb + head * stride_ch + to * stride_cn
        source_ptr = projected_ptr + source[:, None] + offs[None, :]  # [BLOCK_R, BLOCK_HALF]
        target_ptr = cache_ptr + target[:, None] + offs[None, :]

        low = tl.load(source_ptr, mask=mask, other=0.0).to(tl.float32)
        high = tl.load(source_ptr + half, mask=mask, other=0.0).to(tl.float32)
        if HAS_NORM:
            mean = (tl.sum(low * low, 1) + tl.sum(high * high, 1)) / (2 * half)
            scale = tl.rsqrt(mean + eps)[:, None]
            norm_ptr = k_norm_ptr + (layer * stride_norm)[:, None] + offs[None, :]
            low = low * scale * tl.load(norm_ptr, mask=mask, other=0.0).to(tl.float32)
            high = high * scale * tl.load(norm_ptr + half, mask=mask, other=0.0).to(tl.float32)
        cos_at = cos_ptr + context * stride_cos + offs
        sin_at = sin_ptr + context * stride_sin + offs
        cos_low = tl.load(cos_at, mask=inside, other=0.0)[None, :]
        cos_high = tl.load(cos_at + half, mask=inside, other=0.0)[None, :]
        sin_low = tl.load(sin_at, mask=inside, other=0.0)[None, :]
        sin_high = tl.load(sin_at + half, mask=inside, other=0.0)[None, :]
        dtype = cache_ptr.dtype.element_ty
        tl.store(target_ptr, (low * cos_low - high * sin_low).to(dtype), mask=mask)
        tl.store(target_ptr + half, (high * cos_high + low * sin_high).to(dtype), mask=mask)

        source_ptr += stride_pk  # V
        target_ptr += stride_ck
        tl.store(target_ptr, tl.load(source_ptr, mask=mask), mask=mask)
        tl.store(target_ptr + half, tl.load(source_ptr + half, mask=mask), mask=mask)


def kv_injection(
    projected: Tensor, k_norm: Tensor | None, cos: Tensor, sin: Tensor, cache_kv: Tensor, start: Tensor, eps: float
) -> None:
    """Write cache rows start[b] .. start[b] + C - 1 of every draft layer from projected context K and V, in place.

    projected [B, C, L, 2, Hkv, D] and cache_kv [L, 2, B, Hkv, S, D] of one dtype (fp16, bf16, fp32). K: RMSNorm over D
    with weights k_norm [L, D] (None: no norm), then RoPE on halves with cos and sin fp32 [C, D] of the rows' positions,
    all in fp32 and rounded once; V: copied. start int32 [B], read on the device; rows past S are not written. Context
    K and V are those of DFlash (arXiv 2602.06036). Raises AssertionError on wrong shapes, dtypes or strides.
    """
    _check(projected, k_norm, cos, sin, cache_kv, start)
    batch, context, layers, _, heads, dim = projected.shape
    options = pick("kv_injection", D=dim)
    grid = (triton.cdiv(layers * heads, options["BLOCK_R"]), context, batch)
    if 0 in grid:
        return
    _kv_injection_kernel[grid](
        *(projected, k_norm, cos, sin, cache_kv, start),
        *(projected.stride()[:5] + (k_norm.stride(0) if k_norm is not None else 0, cos.stride(0), sin.stride(0))),
        *(cache_kv.stride()[:5] + (cache_kv.shape[4], layers * heads, heads, dim // 2, eps)),
        HAS_NORM=k_norm is not None,
        BLOCK_HALF=triton.next_power_of_2(dim // 2),
        **options,
    )


def _check(projected: Tensor, k_norm: Tensor | None, cos: Tensor, sin: Tensor, cache_kv: Tensor, start: Tensor) -> None:
    assert projected.ndim == 6 and projected.shape[3] == 2, "projected must be [B, C, layers, 2, kv_heads, head_dim]"
    batch, rows, layers, _, heads, dim = projected.shape
    fits = cache_kv.ndim == 6 and cache_kv.shape[:4] == (layers, 2, batch, heads) and cache_kv.shape[5] == dim
    assert fits, f"cache must be [layers={layers}, 2, B={batch}, kv_heads={heads}, rows, head_dim={dim}]"
    assert projected.dtype == cache_kv.dtype, "projected and cache must have one dtype"
    assert dim % 2 == 0, "rotate-half needs an even head_dim"
    assert projected.stride(5) == cache_kv.stride(5) == 1, "rows of projected and cache must be contiguous"
    assert cos.shape == sin.shape == (rows, dim), f"cos and sin must be [C={rows}, head_dim={dim}]"
    assert cos.dtype == sin.dtype == torch.float32, "cos and sin must be float32"
    assert cos.stride(1) == sin.stride(1) == 1, "rows of cos and sin must be contiguous"
    if k_norm is not None:
        assert k_norm.shape == (layers, dim) and k_norm.stride(1) == 1, "k_norm must be [layers, head_dim]"
    assert start.shape == (batch,) and start.dtype == torch.int32 and start.is_contiguous(), "start must be int32 [B]"


def kv_injection_torch(
    projected: Tensor, k_norm: Tensor | None, cos: Tensor, sin: Tensor, cache_kv: Tensor, start: Tensor, eps: float
) -> None:
    """PyTorch reference of `kv_injection`."""
    _check(projected, k_norm, cos, sin, cache_kv, start)
    k, v = projected.permute(3, 0, 2, 4, 1, 5)  # each [B, L, Hkv, C, D]
    k = k.to(torch.promote_types(k.dtype, torch.float32))  # float64 stays, for tests of exactness
    if k_norm is not None:
        k = k * torch.rsqrt(k.square().mean(-1, keepdim=True) + eps) * k_norm.to(k.dtype)[:, None, None]
    low, high = k.chunk(2, -1)
    k = k * cos + torch.cat((-high, low), -1) * sin
    for b, at in enumerate(start.tolist()):
        rows = max(0, min(k.shape[3], cache_kv.shape[4] - at))
        cache_kv[:, 0, b, :, at : at + rows] = k[b, :, :, :rows]
        cache_kv[:, 1, b, :, at : at + rows] = v[b, :, :, :rows]
