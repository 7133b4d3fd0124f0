"""Mixed trees: both merges against a union of paths, and what calibration makes of a drafter."""

from __future__ import annotations

import math
import random

import pytest
import torch

from tests.oracle import models
from tests.trees import START, example, pair, paths, random_proposal
from whiflash_triton.arms import Arm
from whiflash_triton.drafters import ddtree, eagle3_tree
from whiflash_triton.drafters.calibration import Calibration
from whiflash_triton.drafters.draft import draft
from whiflash_triton.drafters.lookup import COPY, SuffixAutomaton, proposal
from whiflash_triton.drafters.mixed import merge, merge_on_host
from whiflash_triton.tree import Proposal


def union(proposals: list[Proposal], size: int) -> list[tuple[tuple[int, ...], float]]:
    """The merge on paths: the largest step of each, summed from the root; best first, the first proposal's first among equals."""
    steps: dict[tuple[int, ...], float] = {}
    for nodes in proposals:
        for path, parent, score in zip(paths(nodes), nodes.parents.tolist(), nodes.scores.tolist(), strict=True):
            if path:
                steps[path] = max(steps.get(path, float("-inf")), score - float(nodes.scores[parent]))
    scores = {path: sum(steps[path[: d + 1]] for d in range(len(path))) for path in steps}
    order = list(scores)
    kept = sorted(sorted(range(len(order)), key=lambda i: -scores[order[i]])[:size])
    return [(order[i], scores[order[i]]) for i in kept]


@pytest.mark.parametrize("seed", range(30))
def test_both_merges_are_the_union_of_paths(seed):
    rng = random.Random(seed)
    deepest = rng.randint(1, 5)
    a, b = (random_proposal(rng, rng.randint(1, 5 if deepest == 1 else 20), deepest, 6, rng.randrange(3)) for _ in range(2))
    for size in (1, 4, 12, 60):
        expected = union([a, b], size)
        host, device = merge_on_host([a, b], size), merge(a, b, size, deepest)
        assert paths(host)[1:] == [path for path, _ in expected]
        assert host.scores[1:].tolist() == [score for _, score in expected]
        n = len(host.tokens)
        assert all(torch.equal(getattr(host, f), getattr(device, f)[:n]) for f in ("tokens", "parents", "depths", "scores"))
        assert (device.parents[n:] == -1).all() and (device.scores[n:] == float("-inf")).all() and not device.depths[n:].any()
        assert len(device.tokens) == 1 + min(size, len(a.tokens) + len(b.tokens) - 2 + 1)


@pytest.mark.parametrize("seed", range(20))
def test_three_merge_at_once_and_two_by_two(seed):
    """What a mixed tree does on the host and on a device."""
    rng = random.Random(seed)
    parts = [random_proposal(rng, rng.randint(1, 12), 4, 5, rng.randrange(2)) for _ in range(3)]
    whole = len(parts[0].tokens) + len(parts[1].tokens)
    for size in (1, 5, 20):
        expected = union(parts, size)
        host, device = merge_on_host(parts, size), merge(merge(*parts[:2], whole, 4), parts[2], size, 4)
        assert paths(host)[1:] == [path for path, _ in expected]
        n = len(host.tokens)
        assert sorted(paths(host)) == sorted(paths(Proposal(device.tokens[:n], device.parents[:n], None, None)))
        assert (device.parents[n:] == -1).all()


def test_mixed_takes_a_copy_of_the_text_in():
    target = models("qwen3")[1]
    text = example(target)
    anchor, arm = text[0][:, START : START + 1], Arm("mixed", 6, 3, 4)
    worthless = Calibration((1.0, 1.0), (-60.0, -60.0))
    copies, last = SuffixAutomaton(), int(anchor)
    copies.read([5, 6, 7, 8, last, 11, 12, 9, 6, 7, 8, last])
    chance = [COPY[3], COPY[4], COPY[5], COPY[6], COPY[7], COPY[8]]  # a match of four, then of five...
    copy = proposal(copies, anchor, 6)
    assert paths(copy)[-1] == (11, 12, 9, 6, 7, 8)
    assert copy.scores.tolist() == pytest.approx([0.0] + [sum(map(math.log, chance[: i + 1])) for i in range(6)])
    drafters = pair(target, text)
    with torch.no_grad():
        without = paths(draft(drafters, anchor, arm, 99))
        assert (11,) not in without
        both = paths(draft(drafters, anchor, arm, 99, copies))
        assert len(both) == 7 and (11, 12) in both, "every drafted token of a random model is unlikely"
        for drafter in drafters.values():
            drafter.calibration = worthless
        assert paths(draft(drafters, anchor, arm, 99, copies)) == paths(copy)
        cut = paths(draft(drafters, anchor, arm, 2, copies))
        assert (11, 12) in cut and max(map(len, cut)) == 2, "no deeper than what still fits"
    copies.read([*copies.text, 4321])
    assert proposal(copies, anchor, 6) is None


def test_mixed_weighs_both_drafters_by_their_calibration():
    """Uncalibrated: the union of both trees. A drafter whose steps are known to be worthless adds nothing."""
    target = models("qwen3")[1]
    text = example(target)
    anchor, arm = text[0][:, START : START + 1], Arm("mixed", 10, 3, 4)
    drafters = pair(target, text)
    worthless = Calibration((1.0, 1.0), (-60.0, -60.0))
    with torch.no_grad():
        wide = ddtree.propose(drafters["dflash"], anchor, 10, 99)
        deep = eagle3_tree.propose(drafters["eagle3"], anchor, 10, 3, 4)
        wide = Proposal(wide.tokens[0], *wide[1:3], wide.scores)
        expected = [path for path, _ in union([wide, deep], 10)]
        assert paths(draft(drafters, anchor, arm, 99))[1:] == expected
        assert set(expected) - set(paths(wide)) and set(expected) - set(paths(deep)), "both must have a share"
        drafters["dflash"].calibration = worthless
        assert sorted(paths(draft(drafters, anchor, arm, 99))) == sorted(paths(deep))
        drafters["dflash"].calibration, drafters["eagle3"].calibration = None, worthless
        assert sorted(paths(draft(drafters, anchor, arm, 99))) == sorted(paths(wide))
        assert sorted(paths(draft(drafters, anchor, Arm("eagle3-tree", 10, 3, 4), 99))) == sorted(paths(deep)), (
            "its own arm is as it was"
        )
