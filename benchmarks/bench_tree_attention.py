"""tree_attention against scaled_dot_product_attention with a mask, FlexAttention and FlashInfer.

The baselines get prefix and tree side by side in one buffer, which the decoder would first have to copy together; the first also
gets the query group folded into rows, its fastest form. A tree of n drafted nodes has n + 1 rows.
"""

from __future__ import annotations

import functools
import random

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from whiflash_triton import ops
from whiflash_triton.tree import from_parents

from . import roofline
from .harness import OURS, Case, assert_close, build_cases, cells
from .shapes import distinct

MODELS = distinct(lambda m: (m.target.num_heads, m.target.num_kv_heads, m.target.head_dim))
# Sizes that decoding meets most come first.
SIZES = [{"context": c, "tree": n} for c in (2048, 8192, 512, 32768) for n in (16, 64, 8, 256)]
CASES = build_cases(MODELS, SIZES, [{"context": 512, "tree": 8}, {"context": 1000, "tree": 64}])
FEW = [{"context": c, "tree": n} for c in (2048, 32768) for n in (16, 64)]  # compiling FlexAttention takes a while


@functools.lru_cache(maxsize=8)
def random_tree(nodes: int, device: str):
    rng = random.Random(nodes)
    parents = [-1] + [rng.randrange(max(0, i - 8), i) for i in range(1, nodes)]
    return from_parents(torch.zeros(1, nodes, dtype=torch.int64, device=device), parents)


def make(case: Case, index: int) -> dict:
    t, g, rows, context = case.model.target, case.generator(index), case.sizes["tree"] + 1, case.sizes["context"]
    cache = (1, t.num_kv_heads, context, t.head_dim)
    tree = random_tree(rows, case.device)
    k_tree, v_tree = (case.randn(g, 1, t.num_kv_heads, rows, t.head_dim) for _ in range(2))
    return {
        "q": case.randn(g, 1, rows, t.num_heads, t.head_dim),
        "k_cache": case.randn(g, *cache),
        "v_cache": case.randn(g, *cache),
        "cache_len": torch.tensor([context], dtype=torch.int32, device=case.device),
        "k_tree": k_tree,
        "v_tree": v_tree,
        "words": tree.words,
        "scale": t.head_dim**-0.5,
    }


def joined(x: dict) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat((x["k_cache"], x["k_tree"]), 2), torch.cat((x["v_cache"], x["v_tree"]), 2)


def visible(x: dict) -> torch.Tensor:
    """bool [rows, context + rows]"""
    rows, context = x["q"].shape[1], x["k_cache"].shape[2]
    tree = random_tree(rows, x["q"].device.type).visible()
    return torch.cat((tree.new_ones(rows, context), tree), 1)


def ours(x: dict):
    return lambda: (ops.tree_attention(**x),)


def sdpa(x: dict):
    (k, v), q, scale = joined(x), x["q"], x["scale"]
    rows, heads, kv_heads = q.shape[1], q.shape[2], k.shape[1]
    group = heads // kv_heads
    folded = q.view(1, rows, kv_heads, group, -1).permute(0, 2, 1, 3, 4).reshape(1, kv_heads, rows * group, -1)
    mask = visible(x).repeat_interleave(group, 0)

    def call():
        out = scaled_dot_product_attention(folded, k, v, attn_mask=mask, scale=scale)
        return (out.view(1, kv_heads, rows, group, -1).transpose(1, 2).reshape(q.shape),)

    return call


@functools.cache
def compiled_flex_attention():
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


@functools.lru_cache(maxsize=2)
def block_mask(rows: int, context: int):
    from torch.nn.attention.flex_attention import create_block_mask

    tree = random_tree(rows, "cuda").visible()

    def seen(batch, head, query, key):
        return (key < context) | tree[query, (key - context).clamp(min=0)]

    return create_block_mask(seen, None, None, rows, context + rows, device="cuda")


def flex(x: dict):
    (k, v), q, scale = joined(x), x["q"].transpose(1, 2).contiguous(), x["scale"]
    mask, attention = block_mask(q.shape[2], x["k_cache"].shape[2]), compiled_flex_attention()
    return lambda: (attention(q, k, v, block_mask=mask, scale=scale, enable_gqa=True).transpose(1, 2),)


def flashinfer(x: dict):
    package = pytest.importorskip("flashinfer")
    (k, v), mask = joined(x), visible(x)
    options = dict(custom_mask=mask, kv_layout="HND", sm_scale=x["scale"])
    return lambda: (package.single_prefill_with_kv_cache(x["q"][0], k[0], v[0], **options)[None],)


SIDES = {OURS: ours, "sdpa": sdpa, "flex": flex, "flashinfer": flashinfer}
OTHERS = {name: SIDES[name] for name in ("flex", "flashinfer")}
CELLS = cells(CASES, {OURS: ours, "sdpa": sdpa}) + cells([case for case in CASES if not case.small and case.sizes in FEW], OTHERS)


def agree(inputs: dict, a: tuple, b: tuple) -> None:
    assert_close(a[0], b[0])


def cost(case: Case) -> roofline.Cost:
    t, rows = case.model.target, case.sizes["tree"] + 1
    sizes = (rows, rows, case.sizes["context"], t.num_heads, t.num_kv_heads, t.head_dim)
    return roofline.tree_attention(*sizes, case.dtype.itemsize)


@pytest.mark.parametrize("case, side", CELLS)
def test_tree_attention(bench, case, side):
    bench("tree_attention", case, SIDES, side, make, cost(case), agree)
