"""Commit of a round: the accepted rows of the draft scratch move to the end of the cache, every layer in one launch."""

import torch
from torch import Tensor


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
    assert scratch_kv.shape[:4] == cache_kv.shape[:4] and scratch_kv.shape[5] == cache_kv.shape[5]
    assert scratch_kv.dtype == cache_kv.dtype and scratch_kv.stride(5) == cache_kv.stride(5) == 1
    batch = cache_kv.shape[2]
    assert path.ndim == 2 and path.shape[0] == batch and path.dtype == torch.int32 and path.stride(1) == 1
    sources, destinations = [scratch_kv], [cache_kv]
    lengths = [path_len, start]
    if features is not None:
        assert scratch_features is not None and feature_start is not None, "features come with scratch and start"
        assert scratch_features.ndim == features.ndim == 4, "features must be [F, B, rows, H]"
        assert scratch_features.shape[:2] == features.shape[:2] and features.shape[1] == batch
        assert scratch_features.shape[2:] == (scratch_kv.shape[4], features.shape[3])
        assert scratch_features.dtype == features.dtype and scratch_features.stride(3) == features.stride(3) == 1
        sources.append(scratch_features)
        destinations.append(features)
        lengths.append(feature_start)
    assert all(x.shape == (batch,) and x.dtype == torch.int32 for x in lengths), "lengths must be int32 [B]"
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
