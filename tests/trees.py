"""Fed drafters, trees as paths, and random proposals, for the tests of tree arms."""

from __future__ import annotations

import random

import torch

from tests.oracle import build, prompt_ids
from whiflash_triton.tree import Proposal, chain

ROWS, START = 80, 17


def example(target) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens [1, 30], features of taps 1, 2, 3)."""
    tokens = torch.tensor([prompt_ids(30, seed=9)])
    with torch.no_grad():
        _, features = target.forward(chain(tokens), target.new_cache(30, 1), (1, 2, 3), prefill=True)
    return tokens, features


def fed(drafter, text, start: int = START):
    tokens, features = text
    drafter.ingest(features[:, :, :start], tokens[:, :start])
    return drafter


def pair(target, text, scratch: bool = False) -> dict:
    return {kind: fed(build(kind, target, ROWS, scratch), text) for kind in ("dflash", "eagle3")}


def paths(tree) -> list[tuple[int, ...]]:
    """The drafted tokens from the root to every node."""
    out: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens.flatten().tolist(), tree.parents.tolist(), strict=True):
        out.append((*out[parent], token) if parent >= 0 else ())
    return out


def random_proposal(rng: random.Random, size: int, deepest: int, tokens: int, pads: int = 0) -> Proposal:
    """A tree with scores that tie now and then, steps of probability 1 among them."""
    parents, ids, depths, scores, taken = [-1], [3], [0], [0.0], set()
    while len(ids) <= size:
        parent, token = rng.randrange(len(ids)), rng.randrange(tokens)
        if depths[parent] < deepest and (parent, token) not in taken:
            taken.add((parent, token))
            parents.append(parent)
            ids.append(token)
            depths.append(depths[parent] + 1)
            scores.append(scores[parent] - rng.choice([0.0, 0.25, 0.5, 3.0]))
    ids, parents, depths, scores = ids + [0] * pads, parents + [-1] * pads, depths + [0] * pads, scores + [float("-inf")] * pads
    int32 = dict(dtype=torch.int32)
    return Proposal(torch.tensor(ids), torch.tensor(parents, **int32), torch.tensor(depths, **int32), torch.tensor(scores).double())
