"""DDTree (arXiv 2604.12989): the most probable prefixes under a DFlash block's marginals, as one tree."""

from __future__ import annotations

import torch

from .. import ops
from ..arms import Arm
from ..tree import DraftTree, from_nodes
from .base import likeliest
from .calibration import Calibration
from .dflash import DFlashDrafter


def ddtree(drafter: DFlashDrafter, anchor: torch.Tensor, arm: Arm, max_depth: int) -> DraftTree:
    """anchor int64 [B, 1] -> the tree of a `ddtree` arm, no deeper than max_depth; pads only where candidates run out."""
    nodes = propose(drafter, anchor, arm.size, max_depth)
    return from_nodes(*nodes[:4])


def propose(drafter: DFlashDrafter, anchor: torch.Tensor, size: int, max_depth: int, calibration: Calibration | None = None):
    """The best `size` prefixes as the TreeNodes of `ops.tree_build`; every slot ranks the whole head, whatever its parent."""
    slots = min(drafter.max_draft, max_depth)
    logits = drafter.head(drafter.block_hidden(anchor)[0, 1 : slots + 1])  # [slots, rows of the head]
    steps, found = likeliest(logits, size)
    if calibration is not None:
        steps = calibration.apply(steps, 1, slots - 1)
    if drafter.draft_ids is not None:
        found = drafter.draft_ids[found]
    return ops.tree_build(steps, found, anchor.view(1), size)
