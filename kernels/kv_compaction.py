"""Commit of a round: the accepted rows of the draft scratch move to the end of the cache, every layer in one launch.

Grid (tiles, path slots, B): a tile is a few (layer, K or V, head) rows of head_dim, or a piece of one feature row. A
program whose path slot lies past the accepted length exits after one load. Bytes: every accepted row read and written
once; rows move as raw integers, 16 bytes a thread where strides and widths are multiples of 16 elements.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from whiflash_triton.autotune.lookup import pick


@triton.jit
def _kv_compaction_kernel(
    scratch_ptr,  # [L, 2, B, Hkv, N, D]
    cache_ptr,  # [L, 2, B, Hkv, S, D]
    scratch_features_ptr,  # [F, B, N, H]
    features_ptr,  # [F, B, R, H]
    path_ptr,  # int32 [B, P]
    path_len_ptr,  # int32 [B]
    start_ptr,  # int32 [B]
    feature_start_ptr,  # int32 [B]
    stride_sl,
    stride_sk,
    stride_sb,
    stride_sh,
    stride_sn,
    stride_cl,
    stride_ck,
    stride_cb,
    stride_ch,
    stride_cn,
    stride_xf,
    stride_xb,
    stride_xn,
    stride_yf,
    stride_yb,
    stride_yn,
    stride_path,
    n_scratch,  # N
    n_cache,  # S
    n_features,  # R
    n_kv,  # L * 2 * Hkv
    heads,
    dim,
    width,  # H
    kv_tiles,
    tiles_per_feature,
    HAS_FEATURES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    tile = tl.program_id(0)
    slot = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    if slot < tl.load(path_len_ptr + batch):
        row = tl.load(path_ptr + batch * stride_path + slot).to(tl.int64)
        if (row >= 0) & (row < n_scratch):
            if tile < kv_tiles:
                to = tl.load(start_ptr + batch).to(tl.int64) + slot
                if (to >= 0) & (to < n_cache):
                    piece = tile * BLOCK_R + tl.arange(0, BLOCK_R)
                    offs_d = tl.arange(0, BLOCK_D)
                    mask = (piece < n_kv)[:, None] & (offs_d < dim)[None, :]
                    head = (piece % heads).to(tl.int64)
                    half = (piece // heads % 2).to(tl.int64)  # K or V
                    layer = (piece // (2 * heads)).to(tl.int64)
                    source = layer * stride_sl + half * stride_sk + batch * stride_sb + head * stride_sh + row * stride_sn
                    target = layer * stride_cl + half * stride_ck + batch * stride_cb + head * stride_ch + to * stride_cn
                    rows = tl.load(scratch_ptr + source[:, None] + offs_d[None, :], mask=mask)
                    tl.store(cache_ptr + target[:, None] + offs_d[None, :], rows, mask=mask)
            elif HAS_FEATURES:
                to = tl.load(feature_start_ptr + batch).to(tl.int64) + slot
                if (to >= 0) & (to < n_features):
                    feature = ((tile - kv_tiles) // tiles_per_feature).to(tl.int64)
                    offs_h = (tile - kv_tiles) % tiles_per_feature * BLOCK_H + tl.arange(0, BLOCK_H)
                    mask_h = offs_h < width
                    source = feature * stride_xf + batch * stride_xb + row * stride_xn
                    target = feature * stride_yf + batch * stride_yb + to * stride_yn
                    values = tl.load(scratch_features_ptr + source + offs_h, mask=mask_h)
                    tl.store(features_ptr + target + offs_h, values, mask=mask_h)


def kv_compaction(
    scratch_kv: Tensor,
    cache_kv: Tensor,
    path: Tensor,
    path_len: Tensor,
    start: Tensor,
    scratch_features: Tensor | None = None,
    features: Tensor | None = None,
    feature_start: Tensor | None = None,
) -> None:
    """Write cache row start[b] + j = scratch row path[b, j] for every j < path_len[b], all layers, K and V, in place.

    scratch_kv [L, 2, B, Hkv, N, D], cache_kv [L, 2, B, Hkv, S, D] of one 2- or 4-byte dtype; path int32 [B, P] (pad
    -1), path_len and start int32 [B], read on the device. With features, features [F, B, R, H] row feature_start[b] + j
    = scratch_features [F, B, N, H] row path[b, j] likewise. Rows move bit by bit. Destination rows past the end are not
    written; path entries below 0 or >= N move nothing. Raises AssertionError on wrong shapes, dtypes or strides, and
    if a source shares its storage with a destination.
    """
    _check(scratch_kv, cache_kv, path, path_len, start, scratch_features, features, feature_start)
    layers, _, batch, heads, n_scratch, dim = scratch_kv.shape
    options = pick("kv_compaction", D=dim)
    n_kv = layers * 2 * heads
    kv_tiles = triton.cdiv(n_kv, options["BLOCK_R"])
    has_features = features is not None
    feature_count, _, n_features, width = features.shape if has_features else (0, 0, 0, 0)
    tiles_per_feature = triton.cdiv(width, options["BLOCK_H"])
    grid = (kv_tiles + feature_count * tiles_per_feature, path.shape[1], batch)
    if 0 in grid:
        return
    _kv_compaction_kernel[grid](
        *(_bits(scratch_kv), _bits(cache_kv)),
        *((_bits(scratch_features), _bits(features)) if has_features else (None, None)),
        *(path, path_len, start, feature_start if has_features else None),
        *(scratch_kv.stride()[:5] + cache_kv.stride()[:5]),
        *(scratch_features.stride()[:3] + features.stride()[:3] if has_features else (0,) * 6),
        *(path.stride(0), n_scratch, cache_kv.shape[4], n_features, n_kv, heads, dim, width),
        *(kv_tiles, tiles_per_feature),
        HAS_FEATURES=has_features,
        BLOCK_D=triton.next_power_of_2(dim),
        **options,
    )


def _bits(x: Tensor) -> Tensor:
    """The same memory as integers, so that no conversion can touch a NaN's payload."""
    return x.view({2: torch.int16, 4: torch.int32}[x.element_size()])


def _check(
    scratch_kv: Tensor,
    cache_kv: Tensor,
    path: Tensor,
    path_len: Tensor,
    start: Tensor,
    scratch_features: Tensor | None,
    features: Tensor | None,
    feature_start: Tensor | None,
) -> None:
    assert scratch_kv.ndim == cache_kv.ndim == 6, "KV must be [layers, 2, B, kv_heads, rows, head_dim]"
    same = scratch_kv.shape[:4] == cache_kv.shape[:4] and scratch_kv.shape[5] == cache_kv.shape[5]
    assert same, f"scratch {tuple(scratch_kv.shape)} and cache {tuple(cache_kv.shape)} may differ in rows only"
    assert scratch_kv.dtype == cache_kv.dtype, "scratch and cache must have one dtype"
    assert scratch_kv.stride(5) == cache_kv.stride(5) == 1, "KV rows must be contiguous"
    batch = cache_kv.shape[2]
    assert path.ndim == 2 and path.shape[0] == batch and path.dtype == torch.int32, "path must be int32 [B, P]"
    assert path.stride(1) == 1, "path rows must be contiguous"
    lengths = [path_len, start]
    sources, destinations = [scratch_kv], [cache_kv]
    given = {x is None for x in (scratch_features, features, feature_start)}
    assert len(given) == 1, "scratch_features, features and feature_start come together"
    if features is not None:
        assert scratch_features.ndim == features.ndim == 4, "features must be [F, B, rows, H]"
        rows = (features.shape[0], batch, scratch_kv.shape[4], features.shape[3])
        assert features.shape[1] == batch and scratch_features.shape == rows, f"scratch_features must be {rows}"
        assert scratch_features.dtype == features.dtype, "scratch_features and features must have one dtype"
        assert scratch_features.stride(3) == features.stride(3) == 1, "feature rows must be contiguous"
        lengths.append(feature_start)
        sources.append(scratch_features)
        destinations.append(features)
    for x in lengths:
        assert x.shape == (batch,) and x.dtype == torch.int32 and x.is_contiguous(), "lengths must be int32 [B]"
    # Source and destination never share memory, so no program can read a row another one has overwritten.
    held = {x.untyped_storage().data_ptr() for x in sources}
    assert all(x.untyped_storage().data_ptr() not in held for x in destinations), "scratch and cache share storage"


def kv_compaction_torch(
    scratch_kv: Tensor,
    cache_kv: Tensor,
    path: Tensor,
    path_len: Tensor,
    start: Tensor,
    scratch_features: Tensor | None = None,
    features: Tensor | None = None,
    feature_start: Tensor | None = None,
) -> None:
    """PyTorch reference of `kv_compaction`."""
    _check(scratch_kv, cache_kv, path, path_len, start, scratch_features, features, feature_start)
    for b, rows in enumerate(path.tolist()):
        rows = rows[: int(path_len[b])]
        _move_rows(scratch_kv[:, :, b], cache_kv[:, :, b], rows, int(start[b]))
        if features is not None:
            _move_rows(scratch_features[:, b], features[:, b], rows, int(feature_start[b]))


def _move_rows(source: Tensor, destination: Tensor, rows: list[int], start: int) -> None:
    """destination[..., start + j, :] = source[..., rows[j], :] wherever both rows exist."""
    pairs = [(row, start + j) for j, row in enumerate(rows) if 0 <= row < source.shape[-2]]
    pairs = [(row, to) for row, to in pairs if 0 <= to < destination.shape[-2]]
    if pairs:
        taken, to = torch.tensor(pairs, device=source.device).unbind(1)
        destination.index_copy_(-2, to, source.index_select(-2, taken))
