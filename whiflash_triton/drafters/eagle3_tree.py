"""EAGLE-2's dynamic tree (arXiv 2406.16858) over an EAGLE-3 drafter: grow the likeliest nodes, keep the best of all.

The newest row proposes top_k tokens. Then depth - 1 times the best top_k of the newest proposals, the frontier, run as one
forward under the tree mask and propose top_k tokens each. The best nodes by path probability make the tree. Path probabilities
never rise with depth and parents precede their children in the pool, so the tree holds the ancestors of all its nodes.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from .. import ops
from ..arms import Arm
from ..cache import Block
from ..tree import DraftTree, Proposal, best_nodes, from_nodes, mask_to_words, words_to_mask
from .base import likeliest
from .calibration import Calibration
from .eagle3 import Eagle3Drafter


def eagle3_tree(drafter: Eagle3Drafter, anchor: torch.Tensor, arm: Arm, max_depth: int) -> DraftTree:
    """anchor int64 [B, 1] -> the tree of an `eagle3-tree` arm, no deeper than max_depth; pads only where candidates run out."""
    nodes = propose(drafter, anchor, arm.size, arm.top_k, min(arm.depth, max_depth))
    return from_nodes(nodes.tokens[None], nodes.parents, nodes.depths, ops.ancestor_words(nodes.parents))


def propose(
    drafter: Eagle3Drafter,
    anchor: torch.Tensor,
    size: int,
    top_k: int,
    depth: int,
    calibration: Calibration | None = None,
    prune: bool | None = None,
) -> Proposal:
    """The best `size` nodes by (-score, age), oldest first, root in front.

    prune: skip frontier rows that cannot reach the best `size` any more. It changes no node, but asks the device for a count
    every level, so the default is not to where rows wait in scratch.
    """
    cache, device = drafter.cache, anchor.device
    prune = not cache.uses_scratch if prune is None else prune
    hidden, tokens = drafter.catch_up(anchor)
    cache.shift(-1)  # as in a chain, the newest committed row runs again as draft row 0
    own_bits = _own_bits(1 + top_k * (depth - 1), device)
    first, words, frontier, scores = 0, own_bits[:1], _zeros(device), _zeros(device).double()
    pool: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]] = []  # tokens, parents, depths, scores
    levels = [1]  # rows of every level
    base = 1  # pool index of the level's first node; the root is 0
    for level in range(1, depth + 1):
        rows = tokens.shape[1]
        visible = None if cache.uses_scratch else words_to_mask(words, first + rows)
        block = Block(words, _depths(tuple(levels), device), visible, cache.length, first, rows, not cache.uses_scratch)
        hidden, normed = drafter.forward(hidden, tokens, level - 1, block)
        steps, found = likeliest(drafter.head(normed)[0], top_k)  # [rows, k]
        if calibration is not None:
            steps = calibration.apply(steps, level)
        grown, found, width = (scores[:, None] + steps).view(-1), drafter.draft_ids[found].view(-1), steps.shape[1]
        pool.append((found, frontier.repeat_interleave(width), torch.full_like(found, level), grown))
        if level == depth:
            break
        best = grown.sort(descending=True, stable=True).indices[:top_k]
        if prune:
            best = best[: int((grown[best] > _worst_kept([p[3] for p in pool], size)).sum())]
            if not len(best):
                break
        parents = best // width
        first += rows
        levels.append(len(best))
        words = words[parents] | own_bits[first : first + len(best)]
        frontier, base = base + best, base + len(grown)
        hidden, tokens, scores = hidden[:, parents], found[best][None], grown[best]
    cache.shift(1)
    return best_nodes(anchor[0], *(torch.cat(part) for part in zip(*pool, strict=True)), size)


@lru_cache(maxsize=256)
def _depths(levels: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """int32 [rows] of rows that come level by level."""
    return torch.tensor([depth for depth, rows in enumerate(levels) for _ in range(rows)], dtype=torch.int32, device=device)


def _worst_kept(scores: list[torch.Tensor], size: int) -> torch.Tensor | float:
    """Score of the last of the best `size` so far; a node must beat it, as ties go to the older one."""
    if sum(map(len, scores)) < size:
        return float("-inf")
    return torch.cat(scores).topk(size).values[-1]


@lru_cache(maxsize=64)
def _zeros(device: torch.device) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int64, device=device)


@lru_cache(maxsize=64)
def _own_bits(rows: int, device: torch.device) -> torch.Tensor:
    """Ancestor words int64 [rows, W] of draft rows that see only themselves."""
    return mask_to_words(torch.eye(rows, dtype=torch.bool)).to(device)
