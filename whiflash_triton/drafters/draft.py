"""From an arm to its draft: which drafters it needs, what it may ask of them, and who builds the tree."""

from __future__ import annotations

import torch

from ..arms import SHAPED, Arm
from ..tree import DraftTree, chain
from .base import Drafter
from .ddtree import ddtree
from .eagle3 import MAX_TREE_ROWS
from .eagle3_tree import eagle3_tree
from .lookup import MAX_DRAFT as LOOKUP_LIMIT
from .lookup import SuffixAutomaton
from .mixed import mixed

MAX_NODES, MAX_TOP_K = 1024, 16


def check_arm(drafters: dict[str, Drafter], arm: Arm) -> None:
    """ValueError for an arm that these drafters cannot draft, naming the drafter that is missing or the number out of range."""
    for name in arm.needs:
        if name not in drafters:
            raise ValueError(f"arm {arm} needs a {name} drafter, none is loaded: give {name}=... to from_pretrained")
    if arm.kind in ("ddtree", *SHAPED):
        if not 1 <= arm.size <= MAX_NODES:
            raise ValueError(f"arm {arm} is out of range: a tree has 1 to {MAX_NODES} nodes")
        if arm.kind in SHAPED:
            _check_shape(arm, drafters["eagle3"].max_draft)
    elif arm.kind != "ar":
        limit = LOOKUP_LIMIT if arm.kind == "lookup" else drafters[arm.kind].max_draft
        if not 1 <= arm.size <= limit:
            raise ValueError(f"arm {arm} is out of range: this drafter drafts {arm.kind}:1 to {arm.kind}:{limit}")


def _check_shape(arm: Arm, max_draft: int) -> None:
    if not 1 <= arm.top_k <= MAX_TOP_K:
        raise ValueError(f"arm {arm}: top_k must lie in 1..{MAX_TOP_K}")
    deepest = min(max_draft, 1 + (MAX_TREE_ROWS - 1) // arm.top_k)
    if not 1 <= arm.depth <= deepest:
        raise ValueError(f"arm {arm}: with top_k {arm.top_k} the depth must lie in 1..{deepest}")
    nodes = arm.top_k + (arm.depth - 1) * arm.top_k**2
    if arm.kind == "eagle3-tree" and arm.size > nodes:
        raise ValueError(f"arm {arm}: top_k {arm.top_k} and depth {arm.depth} propose only {nodes} nodes: raise one of them")


def draft(
    drafters: dict[str, Drafter], anchor: torch.Tensor, arm: Arm, max_depth: int, copies: SuffixAutomaton | None = None
) -> DraftTree:
    """The tree of `arm` over anchor int64 [B, 1], no path of it deeper than max_depth >= 1 drafted tokens.

    A chain shrinks to max_depth, a tree loses its deeper nodes. The arm is one that `check_arm` lets pass. copies has read the text
    up to the anchor: a mixed tree takes from it too.
    """
    if arm.kind == "ar":
        return chain(anchor)
    if arm.kind == "ddtree":
        return ddtree(drafters["dflash"], anchor, arm, max_depth)
    if arm.kind == "eagle3-tree":
        return eagle3_tree(drafters["eagle3"], anchor, arm, max_depth)
    if arm.kind == "mixed":
        return mixed(drafters["dflash"], drafters["eagle3"], anchor, arm, max_depth, copies)
    return drafters[arm.kind].draft(anchor, arm, max_depth)
