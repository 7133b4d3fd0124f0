"""Best-first draft tree: of all prefixes that per-depth log-probabilities span, the most probable ones (DDTree).

Two launches. The first, one program, holds of every node its best child not yet taken, in registers; a step takes the
best of all: two reductions and two loads. The second, grid (ceil(N / 32),), climbs from every node to the root and
sets the bits it passes: apart, so that it reads no parent that its own launch wrote. Bytes: 24 a node written, and
N * ceil(N / 64) * 8 of words.
"""

from array import array
from heapq import heappop, heappush
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from whiflash_triton.autotune.lookup import pick

WORDS_BLOCK = 32  # nodes a program of the second launch climbs from
MAX_BUDGET, MAX_K, MAX_DEPTH = 1024, 1024, 32


class TreeNodes(NamedTuple):
    """A tree of budget + 1 nodes: tokens int64 [1, N], parents and depths int32 [N], words int64 [N, ceil(N / 64)], scores
    float64 [N] (sum of log-probabilities along the path, -inf where nothing was left to take)."""

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    words: Tensor
    scores: Tensor


@triton.jit
def _tree_build_kernel(
    log_probs_ptr,  # fp32 [L, K]
    tokens_ptr,  # int64 [L, K]
    anchor_ptr,  # int64 [1]
    token_ptr,  # int64 [N]
    parent_ptr,  # int32 [N]
    depth_ptr,  # int32 [N]
    score_ptr,  # fp64 [N]
    stride_log_probs,
    stride_tokens,
    levels,
    ranks,
    budget,
    BLOCK: tl.constexpr,
):
    node = tl.arange(0, BLOCK)
    # Of every node: its own score, depth, parent and rank, and the score and rank of the best child not yet taken.
    score = tl.where(node == 0, 0.0, float("-inf")).to(tl.float64)
    depth = tl.zeros([BLOCK], tl.int32)
    parent = tl.full([BLOCK], -1, tl.int32)
    rank = tl.zeros([BLOCK], tl.int32)
    next_rank = tl.zeros([BLOCK], tl.int32)
    offer = tl.where(node == 0, score + tl.load(log_probs_ptr).to(tl.float64), float("-inf"))
    offer = tl.where(offer == offer, offer, float("-inf"))

    best, best_at = tl.max(offer, 0, return_indices=True)  # the lowest index among equals
    step = 1
    while (step <= budget) & (best > float("-inf")):
        packed = tl.sum(tl.where(node == best_at, depth * 2048 + next_rank, 0), 0)  # one reduction for two numbers
        level = packed // 2048
        taken = packed % 2048
        row_ptr = log_probs_ptr + level.to(tl.int64) * stride_log_probs
        sibling = tl.load(row_ptr + taken + 1, mask=taken + 1 < ranks, other=float("-inf")).to(tl.float64)
        child = tl.load(row_ptr + stride_log_probs, mask=level + 1 < levels, other=float("-inf")).to(tl.float64)
        new = node == step
        score = tl.where(new, best, score)
        depth = tl.where(new, level + 1, depth)
        parent = tl.where(new, best_at, parent)
        rank = tl.where(new, taken, rank)
        next_rank = tl.where(node == best_at, taken + 1, next_rank)
        offer = tl.where(node == best_at, score + sibling, tl.where(new, best + child, offer))
        offer = tl.where(offer == offer, offer, float("-inf"))  # NaN is never taken
        best, best_at = tl.max(offer, 0, return_indices=True)
        step += 1

    inside = node <= budget
    drafted = parent >= 0
    at = (depth - 1).to(tl.int64) * stride_tokens + rank
    token = tl.load(tokens_ptr + at, mask=drafted, other=0)
    tl.store(token_ptr + node, tl.where(node == 0, tl.load(anchor_ptr), token), mask=inside)
    tl.store(parent_ptr + node, parent, mask=inside)
    tl.store(depth_ptr + node, depth, mask=inside)
    tl.store(score_ptr + node, score, mask=inside)


@triton.jit
def _ancestor_words_kernel(
    parents_ptr,  # int32 [N]
    words_ptr,  # int64 [N, W]
    n_nodes,
    n_words,
    BLOCK: tl.constexpr,
    WORDS: tl.constexpr,
):
    node = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = tl.arange(0, WORDS)
    inside = node < n_nodes
    words = tl.zeros([BLOCK, WORDS], tl.int64)
    at = tl.where(inside, node, -1)
    while tl.max(at, 0) >= 0:  # a parent lies below its child, so every climb ends
        bit = tl.full([BLOCK], 1, tl.int64) << (at & 63).to(tl.int64)
        words |= tl.where((at >> 6)[:, None] == word[None, :], bit[:, None], 0)
        above = tl.load(parents_ptr + at, mask=at >= 0, other=-1)
        at = tl.where(above < at, above, -1)
    offset = node.to(tl.int64)[:, None] * n_words + word[None, :]
    tl.store(words_ptr + offset, words, mask=inside[:, None] & (word < n_words)[None, :])


def tree_build(log_probs: Tensor, tokens: Tensor, anchor: Tensor, budget: int) -> TreeNodes:
    """The `budget` most probable prefixes of L depths of K candidates as a tree of budget + 1 nodes, parents first.

    log_probs fp32 [L, K], a depth's candidates ranked best first, log-probabilities over the whole vocabulary; tokens
    int64 [L, K], their ids; anchor int64 [1], the token of node 0 (parent -1, depth 0, score 0). L <= 32, K <= 1024,
    1 <= budget <= 1024. A node's score is its parent's plus its own log-probability, in float64; nodes are numbered in
    the order of taking: highest score first, then lowest parent, then best rank, so that a smaller budget's tree is the
    beginning of a larger one's. -inf and NaN end the list of their depth; where nothing is left to take, the rest are
    pads: token 0, parent -1, depth 0, score -inf, their own bit in words. No host sync. Raises AssertionError on wrong
    shapes, dtypes or strides. Ringel and Romano, DDTree, algorithm 1.
    """
    _check(log_probs, tokens, anchor, budget)
    n_nodes, device = budget + 1, log_probs.device
    node_tokens = torch.empty(1, n_nodes, dtype=torch.int64, device=device)
    parents, depths = (torch.empty(n_nodes, dtype=torch.int32, device=device) for _ in range(2))
    scores = torch.empty(n_nodes, dtype=torch.float64, device=device)
    block = triton.next_power_of_2(n_nodes)
    _tree_build_kernel[(1,)](
        *(log_probs, tokens, anchor, node_tokens, parents, depths, scores),
        *(log_probs.stride(0), tokens.stride(0), *log_probs.shape, budget),
        BLOCK=block,
        **pick("tree_build", N=block),
    )
    return TreeNodes(node_tokens, parents, depths, ancestor_words(parents), scores)


def ancestor_words(parents: Tensor) -> Tensor:
    """Bit words int64 [N, ceil(N / 64)] from parents int32 [N]: bit j % 64 of word j // 64 of a node is set iff j is the
    node or one of its ancestors (bit 63 is the sign bit).

    A parent that is negative, or not below its node's own index, is none: roots and pads have their own bit alone.
    Raises AssertionError on a wrong shape, dtype or stride.
    """
    _check_parents(parents)
    n_nodes = len(parents)
    n_words = triton.cdiv(n_nodes, 64)
    words = torch.empty(n_nodes, n_words, dtype=torch.int64, device=parents.device)
    widths = {"BLOCK": WORDS_BLOCK, "WORDS": triton.next_power_of_2(n_words)}
    _ancestor_words_kernel[(triton.cdiv(n_nodes, WORDS_BLOCK),)](parents, words, n_nodes, n_words, **widths, num_warps=1)
    return words


def _check(log_probs: Tensor, tokens: Tensor, anchor: Tensor, budget: int) -> None:
    assert log_probs.ndim == 2 and log_probs.shape == tokens.shape, "log_probs and tokens must have one shape [L, K]"
    depth, k = log_probs.shape
    assert 0 < depth <= MAX_DEPTH and 0 < k <= MAX_K, f"[L, K] must lie in [1..{MAX_DEPTH}, 1..{MAX_K}], got [{depth}, {k}]"
    assert 1 <= budget <= MAX_BUDGET, f"budget must lie in 1..{MAX_BUDGET}, got {budget}"
    assert log_probs.dtype == torch.float32 and tokens.dtype == torch.int64, "log_probs must be float32, tokens int64"
    assert anchor.shape == (1,) and anchor.dtype == torch.int64, "anchor must be int64 [1]"
    assert log_probs.stride(1) == tokens.stride(1) == 1, "rows must be contiguous"


def _check_parents(parents: Tensor) -> None:
    assert parents.ndim == 1 and len(parents) and parents.dtype == torch.int32, "parents must be int32 [N], N > 0"
    assert parents.stride(0) == 1, "parents must be contiguous"


def tree_build_torch(log_probs: Tensor, tokens: Tensor, anchor: Tensor, budget: int) -> TreeNodes:
    """PyTorch reference of `tree_build`, a heap on host lists."""
    _check(log_probs, tokens, anchor, budget)
    minus_inf = float("-inf")
    best, ids = log_probs[:, :budget].tolist(), tokens[:, :budget].tolist()
    levels, ranks = len(best), len(best[0])
    node_tokens, parents, depths, scores = [int(anchor)], [-1], [0], [0.0]
    heap = [(-best[0][0], 0, 0)] if best[0][0] > minus_inf else []  # (-score, parent, rank): the order of taking
    while heap and len(parents) <= budget:
        cost, parent, rank = heappop(heap)
        depth = depths[parent]
        node_tokens.append(ids[depth][rank])
        parents.append(parent)
        depths.append(depth + 1)
        scores.append(-cost)
        if rank + 1 < ranks and best[depth][rank + 1] > minus_inf:  # False for NaN too
            heappush(heap, (-(scores[parent] + best[depth][rank + 1]), parent, rank + 1))
        if depth + 1 < levels and best[depth + 1][0] > minus_inf:
            heappush(heap, (cost - best[depth + 1][0], len(parents) - 1, 0))
    pads = budget + 1 - len(parents)
    parents += [-1] * pads
    parts = (
        _host_tensor("q", node_tokens + [0] * pads, torch.int64)[None],
        _host_tensor("i", parents, torch.int32),
        _host_tensor("i", depths + [0] * pads, torch.int32),
        _words(parents),
        _host_tensor("d", scores + [minus_inf] * pads, torch.float64),
    )
    return TreeNodes(*(part.to(log_probs.device) for part in parts))


def _host_tensor(code: str, values: list, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(array(code, values), dtype=dtype)  # several times faster than torch.tensor


def ancestor_words_torch(parents: Tensor) -> Tensor:
    """PyTorch reference of `ancestor_words`, on host integers."""
    _check_parents(parents)
    return _words(parents.tolist()).to(parents.device)


def _words(parents: list[int]) -> Tensor:
    n_bytes = (len(parents) + 63) // 64 * 8
    sets = []  # of each node: itself and its ancestors, as bits of one integer
    for node, parent in enumerate(parents):
        sets.append(1 << node | (sets[parent] if 0 <= parent < node else 0))
    packed = bytearray().join(bits.to_bytes(n_bytes, "little") for bits in sets)
    return torch.frombuffer(packed, dtype=torch.int64).view(len(parents), -1)
