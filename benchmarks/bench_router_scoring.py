"""The router's MLP against the same in torch.nn.functional, in float32 as the decoder runs it, and the entropy rule."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from whiflash_triton import ops

from . import roofline
from .harness import OURS, Case, build_cases, cells
from .shapes import distinct

MODELS = distinct(lambda m: m.target.hidden_size)
SIZES = [{"rows": rows, "width": width} for rows, width in ((1, 256), (1, 1024), (16, 256))]
CASES = build_cases(MODELS, SIZES, [{"rows": 1, "width": 256}, {"rows": 3, "width": 33}])
ENTROPY_CASES = build_cases(MODELS[:1], [{"rows": 1}, {"rows": 257}], [{"rows": 3}])


def make(case: Case, index: int) -> dict:
    g, hidden, width = case.generator(index), case.model.target.hidden_size, case.sizes["width"]
    shapes = {"hidden": (case.sizes["rows"], hidden), "w1": (width, hidden), "b1": (width,), "w2": (width,), "b2": (1,)}
    tensors = {name: case.randn(g, *shape, dtype=torch.float32) for name, shape in shapes.items()}
    tensors["w1"] /= hidden**0.5
    return tensors | {"threshold": 0.0}


def ours(x: dict):
    return lambda: ops.router_mlp(**x)


def linear(x: dict):
    hidden, w1, b1, w2, b2, threshold = x.values()

    def call():
        score = F.linear(F.gelu(F.linear(hidden, w1, b1)), w2[None], b2)[:, 0]
        return score, (score > threshold).int()

    return call


def agree(inputs: dict, a: tuple, b: tuple) -> None:
    torch.testing.assert_close(a[0], b[0], rtol=1e-3, atol=1e-3)
    clear = b[0].abs() > 2e-3
    assert torch.equal(a[1][clear], b[1][clear])


SIDES = {OURS: ours, "torch": linear}


@pytest.mark.parametrize("case, side", cells(CASES, SIDES))
def test_router_mlp(bench, case, side):
    cost = roofline.router_mlp(case.sizes["rows"], case.model.target.hidden_size, case.sizes["width"])
    bench("router_mlp", case, SIDES, side, make, cost, agree)


def make_entropy(case: Case, index: int) -> dict:
    return {"entropy": case.randn(case.generator(index), case.sizes["rows"], dtype=torch.float32).abs(), "threshold": 0.5}


ENTROPY_SIDES = {
    OURS: lambda x: lambda: (ops.entropy_rule(x["entropy"], x["threshold"], False),),
    "torch": lambda x: lambda: ((x["entropy"] < x["threshold"]).int(),),
}


def agree_exactly(inputs: dict, a: tuple, b: tuple) -> None:
    assert torch.equal(a[0], b[0])


@pytest.mark.parametrize("case, side", cells(ENTROPY_CASES, ENTROPY_SIDES))
def test_entropy_rule(bench, case, side):
    cost = roofline.entropy_rule(case.sizes["rows"])
    bench("entropy_rule", case, ENTROPY_SIDES, side, make_entropy, cost, agree_exactly)
