"""Best-first draft tree: of all prefixes that per-depth log-probabilities span, the most probable ones (DDTree)."""

from heapq import heappop, heappush
from typing import NamedTuple

import torch
from torch import Tensor

MAX_BUDGET, MAX_K, MAX_DEPTH = 1024, 1024, 32


class TreeNodes(NamedTuple):
    """A tree of budget + 1 nodes: tokens int64 [1, N], parents and depths int32 [N], words int64 [N, ceil(N / 64)], scores
    float64 [N] (sum of log-probabilities along the path)."""

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    words: Tensor
    scores: Tensor


def _check(log_probs: Tensor, tokens: Tensor, anchor: Tensor, budget: int) -> None:
    assert log_probs.ndim == 2 and log_probs.shape == tokens.shape, "log_probs and tokens must have one shape [L, K]"
    depth, k = log_probs.shape
    assert 0 < depth <= MAX_DEPTH and 0 < k <= MAX_K, f"[L, K] must lie in [1..{MAX_DEPTH}, 1..{MAX_K}], got [{depth}, {k}]"
    assert 1 <= budget <= MAX_BUDGET, f"budget must lie in 1..{MAX_BUDGET}, got {budget}"
    assert log_probs.dtype == torch.float32 and tokens.dtype == torch.int64, "log_probs must be float32, tokens int64"
    assert anchor.shape == (1,) and anchor.dtype == torch.int64, "anchor must be int64 [1]"
    assert log_probs.stride(1) == tokens.stride(1) == 1, "rows must be contiguous"


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
    device = log_probs.device
    return TreeNodes(
        torch.tensor([node_tokens + [0] * pads], device=device),
        torch.tensor(parents, dtype=torch.int32, device=device),
        torch.tensor(depths + [0] * pads, dtype=torch.int32, device=device),
        _words(parents).to(device),
        torch.tensor(scores + [minus_inf] * pads, dtype=torch.float64, device=device),
    )


def ancestor_words_torch(parents: Tensor) -> Tensor:
    """PyTorch reference of `ancestor_words`, on host integers."""
    assert parents.ndim == 1 and parents.dtype == torch.int32, "parents must be int32 [N]"
    return _words(parents.tolist()).to(parents.device)


def _words(parents: list[int]) -> Tensor:
    n_bytes = (len(parents) + 63) // 64 * 8
    sets = []  # of each node: itself and its ancestors, as bits of one integer
    for node, parent in enumerate(parents):
        sets.append(1 << node | (sets[parent] if 0 <= parent < node else 0))
    packed = bytearray().join(bits.to_bytes(n_bytes, "little") for bits in sets)
    return torch.frombuffer(packed, dtype=torch.int64).view(len(parents), -1)
