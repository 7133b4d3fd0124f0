"""tree_walk against a walk in PyTorch operations, one pass over the nodes a level, and against one on the host, which first has to
wait for the tree. Its inputs were written by the launches before it, so the cache is where it finds them."""

from __future__ import annotations

import pytest
import torch

from whiflash_triton import ops
from whiflash_triton.kernels.tree_walk import tree_walk_torch

from . import roofline
from .bench_tree_attention import random_tree
from .harness import OURS, Case, build_cases, cells
from .shapes import MODELS

SIZES = [{"tree": n} for n in (16, 64, 8, 256, 128, 32)]
CASES = build_cases([("any", MODELS["qwen3-4b"])], SIZES, [{"tree": 8}, {"tree": 64}])


def make(case: Case, index: int) -> dict:
    """Distinct tokens; the target chose the way to the last node that is 5 levels deep, or as deep as the tree goes."""
    rows = case.sizes["tree"] + 1
    tree = random_tree(rows, case.device)
    parents, depths = tree.parents.tolist(), tree.depths.tolist()
    tokens, choices = [100 + index + node for node in range(rows)], [0] * rows
    node = max(range(rows), key=lambda i: (min(depths[i], 5), i))
    while node > 0:
        choices[parents[node]] = tokens[node]
        node = parents[node]
    tokens, choices = (torch.tensor([x], device=case.device) for x in (tokens, choices))
    return {"tokens": tokens, "parents": tree.parents[None], "choices": choices, "levels": max(depths)}


def ours(x: dict):
    return lambda: ops.tree_walk(x["tokens"], x["parents"], x["choices"])


def levels(x: dict):
    tokens, parents, choices = (x[name][0] for name in ("tokens", "parents", "choices"))
    nodes = torch.arange(len(tokens), device=tokens.device)

    def call():
        above = parents.clamp(min=0).long()
        match = tokens == choices[above]
        match[0] = True
        alive = match.clone()
        for _ in range(x["levels"]):  # a node is on the path when it matches and its parent is on it
            alive = match & alive[above]
        path = torch.where(alive, nodes, len(nodes)).sort().values
        length = alive.sum().int()
        bonus = choices.index_select(0, (nodes * alive).amax()[None])  # a scalar index would wait for the device
        return torch.where(path < len(nodes), path, -1).int()[None], length[None], bonus

    return call


def host(x: dict):
    return lambda: tree_walk_torch(x["tokens"], x["parents"], x["choices"])


SIDES = {OURS: ours, "torch": levels, "host": host}


def wanted(case: Case, side: str) -> bool:
    return side != "host" or case.device == "cuda"  # on a CPU it is the reference itself


def agree(inputs: dict, a: tuple, b: tuple) -> None:
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True)), (a, b)
    assert int(a[1]) > 1


@pytest.mark.parametrize("case, side", cells(CASES, SIDES, wanted))
def test_tree_walk(bench, case, side):
    bench("tree_walk", case, SIDES, side, make, roofline.tree_walk(case.sizes["tree"] + 1), agree, host=("host",))
