"""Replay: what an arm's rounds would commit along a greedy text that is known, without verifying anything.

The text says what the target would take, and one prefill of it gives the features of every round; only the drafts are computed. So
tau of many arms over many prompts costs minutes where decoding costs hours. It says nothing of speed.
"""

from __future__ import annotations

import torch

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
                at += _accepted(copied(copies, text[: at + 1], anchor, min(arm.size, room)), text[at + 1 :])
            elif room >= 1 and arm.kind != "ar":
                at += _accepted(draft(decoder.drafters, anchor, arm, room), text[at + 1 :])
            at, rounds = at + 1, rounds + 1
        forwards[str(arm)] = rounds
        progress()
    work.rows = None
    return forwards


def _accepted(tree: DraftTree, following: list[int]) -> int:
    """Length of the path of the tree that the text follows."""
    node, length, tokens, parents = 0, 0, tree.tokens[0].tolist(), tree.parents.tolist()
    while True:
        node = next((j for j in range(node + 1, len(tokens)) if parents[j] == node and tokens[j] == following[length]), None)
        if node is None:
            return length
        length += 1
