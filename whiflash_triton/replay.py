"""Replay: what an arm's rounds would commit along a greedy text that is known, without verifying anything.

The text says what the target would take, and one prefill of it gives the features of every round; only the drafts are computed. So
tau of many arms over many prompts costs minutes where decoding costs hours. It says nothing of speed.
"""

from __future__ import annotations

import torch

from . import ops
from .arms import Arm
from .decoder import WhiFlashDecoder
from .drafters.draft import check_arm, draft
from .drafters.lookup import SuffixAutomaton, copied
from .tree import DraftTree


@torch.inference_mode()
def replay(decoder: WhiFlashDecoder, text: list[int], prompt: int, arms: list[Arm], progress=lambda: None) -> dict[str, int]:
    """Target forwards that each arm needs for text[prompt + 1 :], greedy text of the target after `prompt` tokens.

    Leaves the drafters' caches empty: no stream of this decoder may be open.
    """
    work, target = decoder.work, decoder.target
    ids, cache = torch.tensor([text], device=target.device), target.new_cache(len(text), 1)
    _, parts = target.prefill(ids, cache, work.taps)
    features = torch.cat(parts, 2)
    forwards = {}
    for arm in arms:
        check_arm(decoder.drafters, arm)
        for drafter in decoder.drafters.values():
            drafter.reset()
        copies, known, at, rounds = SuffixAutomaton(), 0, prompt, 0  # at: the anchor's place
        while at < len(text) - 1:
            for name in arm.needs:
                rows = work.tap_rows[name]
                decoder.drafters[name].ingest(features[rows][:, :, known:at], ids[:, known:at])
            known, anchor, room = at, ids[:, at : at + 1], len(text) - at - 2
            if room >= 1 and arm.kind == "lookup":
                at += _accepted(copied(copies, text[: at + 1], anchor, min(arm.size, room)), ids[0, at + 1 :])
            elif room >= 1 and arm.kind != "ar":
                if arm.copies:
                    copies.read(text[: at + 1])
                tree = draft(decoder.drafters, anchor, arm, room, copies if arm.copies else None)
                at += _accepted(tree, ids[0, at + 1 :])
            at, rounds = at + 1, rounds + 1
        forwards[str(arm)] = rounds
        progress()
    work.rows = None
    return forwards


def _accepted(tree: DraftTree, following: torch.Tensor) -> int:
    """Drafted tokens that the text takes, following int64 [more than the tree is deep]: at every depth it chose the token there."""
    choices = following[tree.depths.long()]
    return int(ops.tree_walk(tree.tokens, tree.parents.view(1, -1), choices.view(1, -1))[1]) - 1
