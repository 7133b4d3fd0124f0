"""block_sampling against torch.argmax, logsumexp, an entropy and topk, each a pass of its own; drawn, against the same noise in
PyTorch. `top` is the top-k asked for, `drawn` 1 where the token is sampled."""

from __future__ import annotations

import pytest
import torch

from whiflash_triton import ops
from whiflash_triton.kernels.keyed_noise import keyed_noise_torch

from . import roofline
from .harness import OURS, Case, assert_close, build_cases, cells
from .shapes import distinct

TEMPERATURE = 0.8
MODELS = distinct(lambda m: m.target.vocab_size)
# What verification reads of a chain and of trees, DDTree's block (top 64), an EAGLE-3 level (top 4), and plain decoding.
SHAPES = [(16, 0, 0), (65, 0, 0), (15, 64, 0), (4, 4, 0), (16, 0, 1), (1, 0, 0), (257, 0, 0), (9, 0, 0), (65, 0, 1)]
SIZES = [{"rows": rows, "top": top, "drawn": drawn} for rows, top, drawn in SHAPES]
CASES = build_cases(MODELS, SIZES, [{"rows": 3, "top": 4, "drawn": 0}, {"rows": 3, "top": 0, "drawn": 1}])


def make(case: Case, index: int) -> dict:
    g, rows = case.generator(index), case.sizes["rows"]
    return {
        "logits": case.randn(g, rows, case.model.target.vocab_size).mul_(3),
        "top_k": case.sizes["top"],
        "seed": torch.tensor([index], device=case.device) if case.sizes["drawn"] else None,
        "positions": torch.arange(rows, device=case.device) + 7 if case.sizes["drawn"] else None,
        "temperature": TEMPERATURE,
    }


def ours(x: dict):
    return lambda: tuple(ops.block_sampling(**x))


def scores(x: dict) -> torch.Tensor:
    """What the token is the argmax of, fp32 [R, V]."""
    logits = x["logits"].float()
    if x["seed"] is None:
        return logits
    tokens = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    return logits / x["temperature"] + keyed_noise_torch(x["seed"], x["positions"], tokens)


def passes(x: dict):
    def call():
        token = x["logits"].argmax(-1) if x["seed"] is None else scores(x).argmax(-1)
        logits = x["logits"].float()
        total = logits.logsumexp(-1)
        entropy = total - ((logits - total[:, None]).exp() * logits).sum(-1)
        return token, total, entropy, *logits.topk(x["top_k"])

    return call


SIDES = {OURS: ours, "torch": passes}


def agree(inputs: dict, a: tuple, b: tuple) -> None:
    """Equal logits may go to any index in torch.argmax and topk: their values are compared."""
    rows = scores(inputs)
    for tokens in (a[0], b[0]):
        chosen = rows.gather(1, tokens[:, None])[:, 0]
        torch.testing.assert_close(chosen, rows.amax(-1), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(a[1], b[1], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(a[2], b[2], rtol=1e-3, atol=1e-3)
    assert torch.equal(a[3], b[3])
    if inputs["top_k"]:
        assert_close(inputs["logits"].float().gather(1, a[4]), b[3])


def cost(case: Case) -> roofline.Cost:
    rows, vocab = case.sizes["rows"], case.model.target.vocab_size
    return roofline.block_sampling(rows, vocab, case.sizes["top"], case.dtype.itemsize, bool(case.sizes["drawn"]))


@pytest.mark.parametrize("case, side", cells(CASES, SIDES))
def test_block_sampling(bench, case, side):
    bench("block_sampling", case, SIDES, side, make, cost(case), agree)
