"""Attention of T tree nodes over a KV cache of device-side length and the tree's own keys, masked by ancestor words.

Split grid (ceil(T * group / BLOCK_M) * kv_heads, splits + 1, B): a program owns BLOCK_M rows, a row being a node and a
query head of the group, so that a cache row is read once for its whole group; programs 0..splits-1 of the second axis
share the unmasked prefix, the last takes the tree. Merge grid (T * q_heads, B): log-sum-exp over the splits.
Bytes: cache_len * kv_heads * D * 2 * itemsize, and (splits + 1) * T * q_heads * D * 4 of partials, written and read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn.functional import scaled_dot_product_attention

from whiflash_triton.autotune.lookup import pick

LOG2_E = 1.4426950408889634
PROGRAMS = 256  # about two for each multiprocessor of a large GPU
MIN_SPLIT_KEYS = 256
MAX_SPLITS = 31  # with the tree's one a power of two, the merge kernel's tile


@triton.jit
def _load_rows(ptr, rows, stride, mask, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows [R, BLOCK_D] of a matrix with unit column stride; masked rows and padding columns are zero."""
    cols = tl.arange(0, BLOCK_D)
    return tl.load(ptr + rows.to(tl.int64)[:, None] * stride + cols[None, :], mask=mask[:, None] & (cols < D)[None, :], other=0.0)


@triton.jit
def _fold(q, k, bias, visible, scale, top, total, acc):
    """Online softmax in base 2: weights [M, N] of a tile of keys, the new maximum and sum, and the output rescaled."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(visible, scores + bias, float("-inf"))  # [M, N]
    new_top = tl.maximum(top, tl.max(scores, 1))
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # nothing seen yet: -inf - -inf is NaN
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(top - shift)
    return weights, new_top, total * decay + tl.sum(weights, 1), acc * decay[:, None]


# fmt: off
@triton.jit(do_not_specialize=["T", "N", "q0", "window"])  # they change from call to call
def _tree_attention_split_kernel(
    q_ptr, k_ptr, v_ptr, len_ptr, k_tree_ptr, v_tree_ptr, words_ptr, depths_ptr, part_ptr, lse_ptr,
    stride_qb, stride_qt, stride_qh,
    stride_kb, stride_kh, stride_ks,
    stride_vb, stride_vh, stride_vs,
    stride_kb_tree, stride_kh_tree, stride_kn_tree,
    stride_vb_tree, stride_vh_tree, stride_vn_tree,
    stride_wt, T, N, q0, window, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: on
    head = tl.program_id(0) % HEADS
    split = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0) // HEADS * BLOCK_M + tl.arange(0, BLOCK_M)  # row = node * GROUP + head of the group
    nodes = rows // GROUP
    row_mask = rows < T * GROUP

    length = tl.load(len_ptr + batch)
    head = head.to(tl.int64)
    q_heads = head * GROUP + rows % GROUP
    q_base = q_ptr + batch * stride_qb + nodes.to(tl.int64) * stride_qt + q_heads * stride_qh
    cols = tl.arange(0, BLOCK_D)
    q_mask = row_mask[:, None] & (cols < D)[None, :]
    q = tl.load(q_base[:, None] + cols[None, :], mask=q_mask, other=0.0)  # [M, BLOCK_D]
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if WINDOWED:
        depths = tl.load(depths_ptr + q0 + nodes, mask=row_mask, other=0)  # [M]

    if split < SPLITS:
        first = 0
        if WINDOWED:
            first = tl.maximum(length - window + 1, 0)  # what the anchor, at depth 0, still sees
        share = tl.cdiv(tl.cdiv(length - first, SPLITS), BLOCK_N) * BLOCK_N
        begin = first + split * share
        end = tl.minimum(begin + share, length)
        k_base = k_ptr + batch * stride_kb + head * stride_kh
        v_base = v_ptr + batch * stride_vb + head * stride_vh
        for start in range(begin, end, BLOCK_N):
            keys = start + tl.arange(0, BLOCK_N)
            inside = keys < end
            k = _load_rows(k_base, keys, stride_ks, inside, D, BLOCK_D)  # [N, BLOCK_D]
            visible = inside[None, :]
            if WINDOWED:
                visible = visible & (length + depths[:, None] - keys[None, :] < window)
            weights, top, total, acc = _fold(q, k, 0.0, visible, scale, top, total, acc)
            v = _load_rows(v_base, keys, stride_vs, inside, D, BLOCK_D)
            acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    else:
        k_base = k_tree_ptr + batch * stride_kb_tree + head * stride_kh_tree
        v_base = v_tree_ptr + batch * stride_vb_tree + head * stride_vh_tree
        TREE_N: tl.constexpr = BLOCK_N if BLOCK_N < 32 else 32  # a tile of tree keys lies within one word
        for start in range(0, N, TREE_N):
            keys = start + tl.arange(0, TREE_N)
            words = tl.load(words_ptr + nodes.to(tl.int64) * stride_wt + start // 64, mask=row_mask, other=0)  # [M]
            visible = ((words[:, None] >> (keys % 64)[None, :].to(tl.int64)) & 1) != 0
            visible = visible & (keys < N)[None, :]
            if WINDOWED:
                behind = depths[:, None] - tl.load(depths_ptr + keys, mask=keys < N, other=0)[None, :]
                visible = visible & (behind >= 0) & (behind < window)
            seen = tl.max(visible.to(tl.int32), 0) != 0  # [N]
            v = _load_rows(v_base, keys, stride_vn_tree, seen, D, BLOCK_D)
            k = _load_rows(k_base, keys, stride_kn_tree, seen, D, BLOCK_D)
            broken = tl.sum((v - v).to(tl.float32), 1)  # [N]: zero, or NaN where v has a NaN or an infinity
            weights, top, total, acc = _fold(q, k, broken[None, :], visible, scale, top, total, acc)
            v = tl.where(v - v == 0, v, 0.0)  # 0 * NaN is NaN: only rows that see the key turn NaN, by their weights
            acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")

    row_base = (batch * (SPLITS + 1) + split) * HEADS + head
    out_rows = row_base * T * GROUP + rows  # of part [B, SPLITS + 1, HEADS, T * GROUP, D]
    safe = tl.where(total == 0, 1.0, total)
    lse = tl.where(total == 0, float("-inf"), top + tl.log2(safe))
    tl.store(lse_ptr + out_rows, lse, mask=row_mask)
    seen_any = row_mask & (total != 0)  # the merge does not read the others
    out = acc / safe[:, None]
    tl.store(part_ptr + out_rows[:, None] * D + cols[None, :], out, mask=seen_any[:, None] & (cols < D)[None, :])


# fmt: off
@triton.jit(do_not_specialize=["T"])
def _tree_attention_merge_kernel(
    part_ptr, lse_ptr, out_ptr, T,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: on
    row = tl.program_id(0) % (T * GROUP)
    head = tl.program_id(0) // (T * GROUP)
    batch = tl.program_id(1).to(tl.int64)
    parts = tl.arange(0, PARTS)
    offs = ((batch * PARTS + parts) * HEADS + head) * T * GROUP + row  # [PARTS], int64
    lse = tl.load(lse_ptr + offs)
    top = tl.max(lse, 0)
    weights = tl.exp2(lse - tl.where(top == float("-inf"), 0.0, top))
    cols = tl.arange(0, BLOCK_D)
    mask = (lse != float("-inf"))[:, None] & (cols < D)[None, :]
    part = tl.load(part_ptr + offs[:, None] * D + cols[None, :], mask=mask, other=0.0)  # [PARTS, BLOCK_D]
    total = tl.sum(weights, 0)
    out = tl.sum(weights[:, None] * part, 0) / tl.where(total == 0, 1.0, total)  # a query that sees nothing: zeros
    node = batch * T + row // GROUP
    out_offs = (node * HEADS * GROUP + head * GROUP + row % GROUP) * D + cols
    tl.store(out_ptr + out_offs, out, mask=cols < D)


def split_count(programs: int, keys: int) -> int:
    """How many programs share a prefix of at most ``keys`` rows, from shapes alone: 2**n - 1, at least one."""
    wanted = max(1, min(PROGRAMS // programs, triton.cdiv(keys, MIN_SPLIT_KEYS), MAX_SPLITS))
    return 2 ** ((wanted + 1).bit_length() - 1) - 1


def tree_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cache_len: torch.Tensor,
    k_tree: torch.Tensor,
    v_tree: torch.Tensor,
    words: torch.Tensor,
    *,
    scale: float,
    depths: torch.Tensor | None = None,
    window: int = 0,
    q0: int = 0,
) -> torch.Tensor:
    """Attention of tree nodes q0..q0+T-1 over the first ``cache_len`` cache rows and the tree keys their words name.

    q [B,T,Hq,D]; k_cache, v_cache [B,Hkv,S,D], D up to 256; k_tree, v_tree [B,Hkv,N,D] with N >= q0 + T: fp16, bf16 or
    fp32 alike, last stride 1, other strides free. cache_len int32 [B], read on the device, at most S. words int64
    [T, ceil(N/64) or more]: tree key j is visible to node q0+t iff bit j % 64 of words[t, j // 64] is set; a zero row
    sees the prefix only. With ``window`` > 0 a key is also hidden unless 0 <= query position - key position < window, where
    cache row r has position r and tree row j has cache_len + depths[j] (int32 [N or more], not negative).
    Returns [B,T,Hq,D] contiguous in q's dtype. A query that sees nothing gives zeros; one that sees a NaN key, or a
    value row with a NaN or an infinity, gives NaN, and no other does. Wrong shapes raise ``AssertionError``.
    """
    B, T, Hq, D = q.shape
    Hkv, S = k_cache.shape[1:3]
    N = k_tree.shape[2]
    _check(q, k_cache, v_cache, cache_len, k_tree, v_tree, words, depths, window, q0)
    group = Hq // Hkv
    BLOCK_D = max(16, triton.next_power_of_2(D))
    options = pick("tree_attention", D=max(64, BLOCK_D), M=max(16, triton.next_power_of_2(T * group)), dtype=q.dtype)
    tiles = triton.cdiv(T * group, options["BLOCK_M"]) * Hkv
    splits = split_count(tiles * B, min(S, window) if window else S)
    shape = {"HEADS": Hkv, "GROUP": group, "D": D, "BLOCK_D": BLOCK_D}
    part = torch.empty(B, splits + 1, Hkv, T * group, D, dtype=torch.float32, device=q.device)
    lse = torch.empty(B, splits + 1, Hkv, T * group, dtype=torch.float32, device=q.device)
    out = torch.empty(B, T, Hq, D, dtype=q.dtype, device=q.device)
    _tree_attention_split_kernel[(tiles, splits + 1, B)](
        *(q, k_cache, v_cache, cache_len, k_tree, v_tree, words, depths, part, lse),
        *(stride for x in (q, k_cache, v_cache, k_tree, v_tree) for stride in x.stride()[:3]),
        *(words.stride(0), T, N, q0, window, scale * LOG2_E),
        **shape,
        SPLITS=splits,
        WINDOWED=window > 0,
        **options,
    )
    _tree_attention_merge_kernel[(T * Hq, B)](part, lse, out, T, **shape, PARTS=splits + 1, num_warps=4)
    return out


def tree_attention_torch(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cache_len: torch.Tensor,
    k_tree: torch.Tensor,
    v_tree: torch.Tensor,
    words: torch.Tensor,
    *,
    scale: float,
    depths: torch.Tensor | None = None,
    window: int = 0,
    q0: int = 0,
) -> torch.Tensor:
    """The same in PyTorch, for CPU and as the kernel's reference; reads ``cache_len`` on the host."""
    B, T, Hq, D = q.shape
    Hkv, N = k_tree.shape[1:3]
    _check(q, k_cache, v_cache, cache_len, k_tree, v_tree, words, depths, window, q0)
    bits = torch.arange(N, device=q.device)
    tree_visible = (words[:, bits // 64] >> (bits % 64) & 1).bool()  # [T, N]
    if window:
        behind = depths[q0 : q0 + T, None] - depths[None, :N]
        tree_visible &= (behind >= 0) & (behind < window)
    out = torch.empty(B, T, Hq, D, dtype=q.dtype, device=q.device)
    for b, length in enumerate(cache_len.tolist()):
        first = max(0, length - window + 1) if window else 0
        prefix_visible = tree_visible.new_ones(T, length - first)
        if window:
            ages = length + depths[q0 : q0 + T, None] - torch.arange(first, length, device=q.device)
            prefix_visible = ages < window
        visible = torch.cat((prefix_visible, tree_visible), 1)
        blind = (window or not length) and not bool(visible.any(1).all())
        visible = visible[:, None].expand(T, Hq // Hkv, -1).flatten(0, 1)  # [T * group, keys]
        k, v = (_join(cache[b], tree[b], first, length) for cache, tree in ((k_cache, k_tree), (v_cache, v_tree)))
        rows = q[b].unflatten(1, (Hkv, -1)).transpose(0, 1).flatten(1, 2)  # [Hkv, T * group, D]
        result = scaled_dot_product_attention(rows[None], k[None], v[None], attn_mask=visible, scale=scale)[0]
        if blind or not result.sum().isfinite():  # rare: a broken key or value somewhere, or rows that see nothing
            result = _masked_exactly(rows, k, v, visible, scale)
        out[b] = result.unflatten(1, (T, -1)).transpose(0, 1).flatten(1, 2)
    return out


def _masked_exactly(q, k, v, visible, scale) -> torch.Tensor:
    """Softmax attention: a broken key or value row reaches only those that see it; rows that see nothing are zero."""
    wide = torch.promote_types(q.dtype, torch.float32)
    broken = (v - v).sum(-1).to(wide)  # [Hkv, keys]: zero, or NaN where v has a NaN or an infinity
    scores = (q.to(wide) @ k.to(wide).mT * scale + broken[:, None]).masked_fill(~visible, float("-inf"))
    weights = scores.softmax(-1).masked_fill(~visible, 0.0)
    return (weights @ torch.where(v - v == 0, v, 0.0).to(wide)).to(q.dtype)


def _join(cache: torch.Tensor, tree: torch.Tensor, first: int, length: int) -> torch.Tensor:
    """Cache rows first..length-1 and the tree's rows [Hkv, keys, D]: a view where the tree lies in the cache's tail."""
    end = length + tree.shape[1]
    if end <= cache.shape[1] and tree.stride() == cache.stride() and tree.data_ptr() == cache[:, length:].data_ptr():
        return cache[:, first:end]
    return torch.cat((cache[:, first:length], tree), 1)


def _check(q, k_cache, v_cache, cache_len, k_tree, v_tree, words, depths, window, q0) -> None:
    B, T, Hq, D = q.shape
    Hkv, N = k_tree.shape[1:3]
    assert k_cache.shape == v_cache.shape and k_cache.shape[:2] == (B, Hkv) and k_cache.shape[3] == D, k_cache.shape
    assert k_tree.shape == v_tree.shape == (B, Hkv, N, D) and N >= q0 + T and q0 >= 0, (k_tree.shape, q0, T)
    assert Hq % Hkv == 0 and D <= 256, (Hq, Hkv, D)
    assert all(x.dtype == q.dtype and x.stride(-1) == 1 for x in (q, k_cache, v_cache, k_tree, v_tree))
    assert cache_len.shape == (B,) and cache_len.dtype == torch.int32, cache_len
    assert words.shape[0] == T and words.shape[1] * 64 >= N and words.dtype == torch.int64, (words.shape, words.dtype)
    assert words.stride(-1) == 1, "rows of words must be contiguous"
    assert window >= 0 and (not window or depths is not None), "a window needs the depths of the tree rows"
    if depths is not None:
        assert depths.ndim == 1 and len(depths) >= N and depths.dtype == torch.int32, (depths.shape, depths.dtype)
        assert depths.stride(0) == 1, "depths must be contiguous"
