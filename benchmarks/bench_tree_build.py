"""tree_build against a level-by-level search with torch.topk, which finds the same nodes, and against a heap on the host, which
first has to wait for the logits. Depths and candidates are those of the models' DFlash blocks."""

from __future__ import annotations

import pytest
import torch

from whiflash_triton import ops
from whiflash_triton.kernels.tree_build import tree_build_torch

from . import roofline
from .harness import OURS, Case, build_cases, cells
from .shapes import distinct

MODELS = distinct(lambda m: m.dflash.block_size)
SIZES = [{"tree": n} for n in (64, 16, 256, 8, 128, 32)]
CASES = build_cases(MODELS, SIZES, [{"tree": 8}, {"tree": 64}])


def make(case: Case, index: int) -> dict:
    g, levels, budget = case.generator(index), case.model.dflash.block_size - 1, case.sizes["tree"]
    logits = case.randn(g, levels, 4096, dtype=torch.float32).mul_(2)
    log_probs, tokens = logits.log_softmax(-1).topk(budget)
    return {"log_probs": log_probs, "tokens": tokens, "anchor": torch.tensor([5], device=case.device), "budget": budget}


def ours(x: dict):
    return lambda: tuple(ops.tree_build(**x))


def levels(x: dict):
    log_probs, budget = x["log_probs"], x["budget"]

    def call():
        best = log_probs[0].topk(budget).values
        pool = [best]
        for row in log_probs[1:]:  # the best nodes of a level descend from the best of the level above
            best = (best[:, None] + row).view(-1).topk(budget).values
            pool.append(best)
        return (torch.cat(pool).topk(budget).values,)

    return call


def host(x: dict):
    return lambda: tuple(tree_build_torch(**x))


SIDES = {OURS: ours, "topk": levels, "heap": host}


def wanted(case: Case, side: str) -> bool:
    return side != "heap" or case.device == "cuda"  # on a CPU it is the reference itself


def agree(inputs: dict, a: tuple, b: tuple) -> None:
    scores = a[4][1:]
    other = b[0] if len(b) == 1 else b[4][1:]
    torch.testing.assert_close(scores, other.double(), rtol=1e-4, atol=1e-4)
    if len(b) > 1:
        assert all(torch.equal(x, y) for x, y in zip(a[:4], b[:4], strict=True))


@pytest.mark.parametrize("case, side", cells(CASES, SIDES, wanted))
def test_tree_build(bench, case, side):
    bench("tree_build", case, SIDES, side, make, roofline.tree_build(case.sizes["tree"]), agree, host=("heap",))
