"""One tree from all that drafts: a DDTree, an EAGLE-3 tree and a copy of earlier text, laid over each other.

Each drafter's steps are calibrated first, so that their probabilities mean the same. A node that several propose gets the largest
of its steps: a step is conditional on its parent being right, whoever proposed the parent, so steps multiply along a path and a
score never rises with depth. The best nodes of the union are kept, parents first.
"""

from __future__ import annotations

import torch

from .. import ops
from ..arms import Arm
from ..tree import DraftTree, Proposal, best_nodes, from_nodes
from . import ddtree, eagle3_tree, lookup
from .dflash import DFlashDrafter
from .eagle3 import Eagle3Drafter
from .lookup import SuffixAutomaton

NOTHING = float("-inf")


def mixed(
    dflash: DFlashDrafter,
    eagle3: Eagle3Drafter,
    anchor: torch.Tensor,
    arm: Arm,
    max_depth: int,
    copies: SuffixAutomaton | None = None,
) -> DraftTree:
    """anchor int64 [B, 1] -> the tree of a `mixed` arm, no deeper than max_depth; both drafters end up caught up.

    copies: has read the text up to the anchor; None leaves copying out.
    """
    wide = ddtree.propose(dflash, anchor, arm.size, max_depth, dflash.calibration)
    wide = Proposal(wide.tokens[0], wide.parents, wide.depths, wide.scores)
    deep = eagle3_tree.propose(eagle3, anchor, arm.size, arm.top_k, min(arm.depth, max_depth), eagle3.calibration)
    copy = None if copies is None else lookup.proposal(copies, anchor, min(arm.size, max_depth))
    if not anchor.is_cuda:
        nodes = merge_on_host([wide, deep] + [copy] * (copy is not None), arm.size)
    else:
        depth, whole = min(max_depth, max(dflash.max_draft, arm.depth)), len(wide.tokens) + len(deep.tokens)
        nodes = merge(wide, deep, arm.size if copy is None else whole, depth)
        if copy is not None:
            nodes = merge(nodes, copy, arm.size, max(depth, len(copy.tokens) - 1))
    return from_nodes(nodes.tokens[None], nodes.parents, nodes.depths, ops.ancestor_words(nodes.parents))


def merge(a: Proposal, b: Proposal, size: int, depth: int) -> Proposal:
    """The best `size` nodes of the union, by score and then a's first, without a host sync. No path is deeper than `depth`.

    The same tree as `merge_on_host`, which takes a tenth of its time on a CPU. Where candidates run out, pads follow.
    """
    (parents_a, steps_a), (parents_b, steps_b) = _steps(a), _steps(b)
    count = len(parents_a)
    equal = (a.tokens[:, None] == b.tokens) & ((a.parents >= 0)[:, None] & (b.parents >= 0))
    equal[0, 0] = True
    same = torch.zeros_like(equal)
    same[0, 0] = True
    for _ in range(depth):  # round d finds the nodes of depth d whose whole paths are equal
        same = equal & same[parents_a][:, parents_b]
    is_twin, twin = same.max(0)  # of every node of b; siblings are distinct, so there is one at most
    steps = torch.cat((torch.where(same, steps_b, NOTHING).amax(1).maximum(steps_a), steps_b.masked_fill(is_twin, NOTHING)))
    here = torch.where(is_twin, twin, torch.arange(count, count + len(twin), device=twin.device))
    parents, depths = torch.cat((parents_a, here[parents_b])), torch.cat((a.depths, b.depths))
    scores = torch.zeros_like(steps)
    for _ in range(depth):
        scores = steps + scores[parents]
    return best_nodes(a.tokens[:1], torch.cat((a.tokens, b.tokens))[1:], parents[1:], depths[1:], scores[1:], size)


def _steps(nodes: Proposal) -> tuple[torch.Tensor, torch.Tensor]:
    """Parents int64 [N], the root its own, and log-probabilities of the steps float64 [N], 0 for the root."""
    parents = nodes.parents.clamp(min=0).long()
    return parents, (nodes.scores - nodes.scores[parents]).nan_to_num(nan=NOTHING, neginf=NOTHING)


def merge_on_host(proposals: list[Proposal], size: int) -> Proposal:
    """`merge` of any number, with lists and a dictionary; no pads."""
    tokens: list[int] = []
    parents: list[int] = []
    depths: list[int] = []
    steps: list[float] = []
    index: dict[tuple[int, int], int] = {}  # (parent, token) -> node
    for nodes in proposals:
        own, here = nodes.scores.tolist(), []  # here: the union's index of every node of this drafter
        for token, parent, depth, score in zip(
            nodes.tokens.tolist(), nodes.parents.tolist(), nodes.depths.tolist(), own, strict=True
        ):
            if score == NOTHING:
                break
            key, step = (-1, token) if parent < 0 else (here[parent], token), score - own[max(parent, 0)]
            node = index.setdefault(key, len(tokens))
            here.append(node)
            if node < len(tokens):
                steps[node] = max(steps[node], step)
                continue
            tokens.append(token)
            parents.append(key[0])
            depths.append(depth)
            steps.append(step)
    scores = [0.0]
    for node in range(1, len(tokens)):
        scores.append(steps[node] + scores[parents[node]])
    kept = sorted(sorted(range(1, len(tokens)), key=lambda node: -scores[node])[:size])
    place = {0: 0} | {node: i for i, node in enumerate(kept, 1)}
    return Proposal(
        torch.tensor([tokens[0], *(tokens[node] for node in kept)]),
        torch.tensor([-1, *(place[parents[node]] for node in kept)], dtype=torch.int32),
        torch.tensor([0, *(depths[node] for node in kept)], dtype=torch.int32),
        torch.tensor([0.0, *(scores[node] for node in kept)], dtype=torch.float64),
    )
