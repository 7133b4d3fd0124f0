"""kv_injection against the same in PyTorch: norm, rotation, and two copies into the draft cache. `rows` are context rows: those
of a round, of a catch-up, and of a prompt's chunk."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from whiflash_triton import ops
from whiflash_triton.rope import rope_tables

from . import roofline
from .harness import OURS, Case, assert_close, build_cases, cells
from .shapes import distinct


def dims(model) -> tuple[int, int, int]:
    d = model.dflash
    return d.num_layers, d.num_kv_heads, d.head_dim


MODELS = distinct(dims)
SIZES = [
    {"context": context, "rows": rows} for context, rows in ((2048, 7), (2048, 64), (2048, 1024), (2048, 1), (512, 16), (32768, 16))
]
CASES = build_cases(MODELS, SIZES, [{"context": 64, "rows": 5}, {"context": 500, "rows": 64}])


def make(case: Case, index: int) -> dict:
    g, rows, context, d = case.generator(index), case.sizes["rows"], case.sizes["context"], case.model.dflash
    layers, heads, dim = dims(case.model)
    half = rope_tables({"rope_type": "default", "rope_theta": 1e6}, dim, context + rows, 1 << 20, case.device)
    cos, sin = (table[context:].repeat(1, 2) for table in half)
    return {
        "projected": case.randn(g, 1, rows, layers, 2, heads, dim),
        "k_norm": case.randn(g, layers, dim),
        "cos": cos,
        "sin": sin,
        "cache_kv": torch.empty(layers, 2, 1, heads, context + rows, dim, dtype=case.dtype, device=case.device),
        "start": torch.tensor([context], dtype=torch.int32, device=case.device),
        "eps": d.rms_norm_eps,
    }


def written(x: dict, start: int) -> tuple[torch.Tensor]:
    return (x["cache_kv"][:, :, :, :, start:],)


def ours(x: dict):
    start = int(x["start"])
    return lambda: (ops.kv_injection(**x), *written(x, start))[1:]


def steps(x: dict):
    start, cos, sin, norm = int(x["start"]), x["cos"], x["sin"], x["k_norm"]

    def call():
        k, v = x["projected"].permute(3, 0, 2, 4, 1, 5)  # [1, L, heads, rows, D]
        k = F.rms_norm(k.float(), k.shape[-1:], eps=x["eps"]) * norm[:, None, None]
        low, high = k.chunk(2, -1)
        (out,) = written(x, start)
        out[:, 0] = (k * cos + torch.cat((-high, low), -1) * sin).transpose(0, 1)
        out[:, 1] = v.transpose(0, 1)
        return (out,)

    return call


SIDES = {OURS: ours, "torch": steps}


def agree(inputs: dict, a: tuple, b: tuple) -> None:
    assert_close(a[0][:, 0], b[0][:, 0])
    assert torch.equal(a[0][:, 1], b[0][:, 1])


@pytest.mark.parametrize("case, side", cells(CASES, SIDES))
def test_kv_injection(bench, case, side):
    bench(
        "kv_injection",
        case,
        SIDES,
        side,
        make,
        roofline.kv_injection(case.sizes["rows"], *dims(case.model), case.dtype.itemsize),
        agree,
    )
