"""kv_compaction against gather plus copy: an index_select over all layers into a temporary, copied to the cache's end, and the
same for the features. The baseline is told the accepted length on the host; the kernel reads it on the device."""

from __future__ import annotations

import random

import pytest
import torch

from whiflash_triton import ops

from . import roofline
from .harness import OURS, Case, build_cases, cells
from .shapes import distinct


def taps(model) -> int:
    return len({*model.dflash.taps, *model.eagle3.taps})


def dims(model) -> tuple[int, ...]:
    t = model.target
    return t.num_layers, t.num_kv_heads, t.head_dim, taps(model), t.hidden_size


MODELS = distinct(dims)
SHAPES = [(2048, 16, 6), (2048, 64, 8), (2048, 8, 3), (2048, 256, 12), (2048, 16, 1), (512, 16, 6), (8192, 64, 8), (32768, 64, 8)]
SIZES = [{"context": context, "tree": tree, "kept": kept} for context, tree, kept in SHAPES]
CASES = build_cases(MODELS, SIZES, [{"context": 64, "tree": 8, "kept": 3}, {"context": 64, "tree": 64, "kept": 9}])


def make(case: Case, index: int) -> dict:
    g, rows, kept, context = case.generator(index), case.sizes["tree"] + 1, case.sizes["kept"], case.sizes["context"]
    layers, heads, dim, features, hidden = dims(case.model)
    path = torch.full((1, rows), -1, dtype=torch.int32)
    path[0, :kept] = torch.tensor([0, *sorted(random.Random(index).sample(range(1, rows), kept - 1))])
    lengths = {"path_len": kept, "start": context, "feature_start": 0}
    return {
        "scratch_kv": case.randn(g, layers, 2, 1, heads, rows, dim),
        "cache_kv": torch.empty(layers, 2, 1, heads, context + rows, dim, dtype=case.dtype, device=case.device),
        "path": path.to(case.device),
        "scratch_features": case.randn(g, features, 1, rows, hidden),
        "features": torch.empty(features, 1, kept, hidden, dtype=case.dtype, device=case.device),
        **{name: torch.tensor([n], dtype=torch.int32, device=case.device) for name, n in lengths.items()},
    }


def written(x: dict, start: int, kept: int) -> tuple[torch.Tensor, torch.Tensor]:
    return x["cache_kv"][:, :, :, :, start : start + kept], x["features"]


def ours(x: dict):
    start, kept = int(x["start"]), int(x["path_len"])
    return lambda: (ops.kv_compaction(**x), *written(x, start, kept))[1:]


def gather(x: dict):
    start, kept = int(x["start"]), int(x["path_len"])
    rows = x["path"][0, :kept].long()

    def call():
        kv, features = written(x, start, kept)
        kv.copy_(x["scratch_kv"].index_select(4, rows))
        features.copy_(x["scratch_features"].index_select(2, rows))
        return kv, features

    return call


SIDES = {OURS: ours, "gather-copy": gather}


def agree(inputs: dict, a: tuple, b: tuple) -> None:
    assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


@pytest.mark.parametrize("case, side", cells(CASES, SIDES))
def test_kv_compaction(bench, case, side):
    cost = roofline.kv_compaction(case.sizes["kept"], *dims(case.model), case.dtype.itemsize)
    bench("kv_compaction", case, SIDES, side, make, cost, agree)
