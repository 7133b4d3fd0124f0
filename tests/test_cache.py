"""KVCache in both modes: what a commit keeps, bit for bit, and attention against SDPA with an explicit mask."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

from whiflash_triton.cache import KVCache
from whiflash_triton.tree import chain, from_parents

LAYERS, HKV, D, ROWS, DRAFT, TAPS, H = 3, 2, 8, 40, 9, 2, 5
MODES = pytest.mark.parametrize("scratch", [False, True], ids=["tail", "scratch"])
PARENTS = [-1, 0, 0, 1, 2, 2, 5, 3, 6]
PATHS = {"prefix": [0, 1], "whole": [0, 1, 3, 7], "second child": [0, 2, 5, 6, 8], "anchor": [0]}


def new_cache(scratch: bool, rows: int = ROWS, dtype=torch.float32, kv_heads: int = HKV) -> KVCache:
    return KVCache(LAYERS, kv_heads, D, rows, DRAFT, dtype, torch.device("cpu"), scratch)


def noise(*shape, seed: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def draft(cache: KVCache, tree, seed: int, rows: int | None = None, heads: int = 2 * HKV, prefill: bool = False):
    """Run every layer once; returns K and V [L, 2, 1, Hkv, T, D] as given to the cache."""
    t, dtype, kv_heads = rows or tree.size, cache.kv.dtype, cache.kv.shape[3]
    given = noise(LAYERS, 2, 1, kv_heads, t, D, seed=seed, dtype=dtype)
    block = cache.block(tree, t, prefill=prefill)
    for layer in range(LAYERS):
        q = noise(1, t, heads, D, seed=seed + 1, dtype=dtype)
        cache.attend(layer, q, given[layer, 0].transpose(1, 2), given[layer, 1].transpose(1, 2), block, D**-0.5)
    return given


def prefill(cache: KVCache, n: int, seed: int = 0) -> torch.Tensor:
    given = draft(cache, chain(torch.zeros(1, n, dtype=torch.int64)), seed, prefill=True)
    cache.set_length(n)
    return given


def path_of(nodes: list[int], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    path = torch.tensor([nodes + [-1] * (pad - len(nodes))], dtype=torch.int32)
    return path, torch.tensor([len(nodes)], dtype=torch.int32)


@MODES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nodes", PATHS.values(), ids=PATHS)
def test_tree_commit_moves_rows_bit_for_bit(scratch, dtype, nodes):
    cache = new_cache(scratch, dtype=dtype)
    before = prefill(cache, 11)
    tree = from_parents(torch.zeros(1, 9, dtype=torch.int64), PARENTS)
    given = draft(cache, tree, seed=3)
    features = noise(TAPS, 1, 9, H, seed=4, dtype=dtype)
    kept = cache.commit(*path_of(nodes, 9), len(nodes), False, features)
    end = 11 + len(nodes)
    assert cache.length == end and cache.lengths.tolist() == [end] and cache.lengths.dtype == torch.int32
    assert torch.equal(cache.kv[..., :11, :], before)
    assert torch.equal(cache.kv[..., 11:end, :], given[..., nodes, :])
    assert torch.equal(kept, features[:, :, nodes])


@MODES
@pytest.mark.parametrize("accepted", [1, 2, 6])
def test_chain_commit(scratch, accepted):
    cache = new_cache(scratch)
    prefill(cache, 4)
    given = draft(cache, chain(torch.zeros(1, 6, dtype=torch.int64)), seed=3)
    features = noise(TAPS, 1, 6, H, seed=4)
    kept = cache.commit(*path_of(list(range(accepted)), 6), accepted, True, features)
    assert torch.equal(cache.kv[..., 4 : 4 + accepted, :], given[..., :accepted, :])
    assert torch.equal(kept, features[:, :, :accepted])
    assert cache.length == int(cache.lengths) == 4 + accepted


@MODES
def test_commit_without_taps(scratch):
    cache = new_cache(scratch)
    given = draft(cache, chain(torch.zeros(1, 3, dtype=torch.int64)), seed=3)
    kept = cache.commit(*path_of([0, 1], 3), 2, True, torch.empty(0, 1, 3, H))
    assert kept.shape == (0, 1, 2, H) and torch.equal(cache.kv[..., :2, :], given[..., :2, :])


@MODES
def test_many_rounds_keep_exactly_the_accepted_rows(scratch):
    """Random trees and paths, everything uncommitted poisoned after each round: the cache is the accepted rows in order."""
    cache, rng = new_cache(scratch), random.Random(1)
    rows = [prefill(cache, 3)]
    for seed in range(12):
        n = rng.randint(1, DRAFT)
        parents = [-1] + [rng.randrange(node) for node in range(1, n)]
        given = draft(cache, from_parents(torch.zeros(1, n, dtype=torch.int64), parents), seed)
        leaf, nodes = rng.randrange(n), []
        while leaf != -1:
            nodes.insert(0, leaf)
            leaf = parents[leaf]
        if cache.length + len(nodes) > ROWS:
            break
        cache.commit(*path_of(nodes, n), len(nodes), False, torch.empty(0, 1, n, H))
        rows.append(given[..., nodes, :])
        cache.poison()
        assert torch.equal(cache.kv[..., : cache.length, :], torch.cat(rows, -2))
        assert cache.kv[..., cache.length :, :].isnan().all()
        assert cache.scratch is None or cache.scratch.isnan().all()
    assert len(rows) > 8


@MODES
def test_limits(scratch):
    cache = new_cache(scratch, rows=10)
    prefill(cache, 8)
    with pytest.raises(ValueError, match="10 draft rows exceed the 9"):
        cache.block(chain(torch.zeros(1, 10, dtype=torch.int64)), 10)
    with pytest.raises(ValueError, match="10 draft rows exceed the 9"):
        cache.block(chain(torch.zeros(1, 9, dtype=torch.int64)), 2, q0=8)
    given = draft(cache, chain(torch.zeros(1, 9, dtype=torch.int64)), seed=2)  # 8 + 9 drafted rows fit beside 10
    features = torch.empty(0, 1, 9, H)
    with pytest.raises(ValueError, match="11 rows do not fit a KV cache of 10: raise max_cache_len"):
        cache.commit(*path_of([0, 1, 2], 9), 3, True, features)
    assert cache.length == int(cache.lengths) == 8
    cache.commit(*path_of([0, 1], 9), 2, True, features)  # exactly full
    assert torch.equal(cache.kv[..., 8:10, :], given[..., :2, :]) and cache.length == 10
    for length in (-1, 11):
        with pytest.raises(ValueError, match="max_cache_len"):
            cache.set_length(length)
    assert cache.length == int(cache.lengths) == 10
    cache.set_length(0)
    assert cache.length == int(cache.lengths) == 0


def expected_attention(q, k, v, visible, scale):
    """float64 SDPA: q [1, T, Hq, D], k and v [1, Hkv, S, D], visible [T, S]."""
    group = q.shape[2] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    return F.scaled_dot_product_attention(q.double().transpose(1, 2), k, v, attn_mask=visible, scale=scale).transpose(1, 2)


@MODES
@pytest.mark.parametrize("start", [0, 1, 13])
@pytest.mark.parametrize(("kind", "window"), [("block", 0), *((k, w) for k in ("tree", "chain", "one") for w in (0, 4, 100))])
@pytest.mark.parametrize("heads", [2, 6])
def test_attend_equals_sdpa(scratch, window, start, kind, heads):
    cache = new_cache(scratch, dtype=torch.float64)
    committed = prefill(cache, start) if start else cache.kv[..., :0, :].clone()
    cache.poison()
    trees = {"tree": from_parents(torch.zeros(1, 9, dtype=torch.int64), PARENTS)}
    trees |= {"chain": chain(torch.zeros(1, 7, dtype=torch.int64)), "one": chain(torch.zeros(1, 1, dtype=torch.int64))}
    tree, t = trees.get(kind), trees[kind].size if kind in trees else 6
    block = cache.block(tree, t)
    depths = [0] * t if tree is None else tree.depths.tolist()
    visible = torch.zeros(t, start + t, dtype=torch.bool)
    for i in range(t):
        for j in range(start + t):
            gap = start + depths[i] - (j if j < start else start + depths[j - start])
            inside = True if j < start or tree is None else bool(tree.visible()[i, j - start])
            visible[i, j] = inside and (not window or 0 <= gap < window)
    for layer in range(LAYERS):  # every layer its own rows; the plan is shared
        q, k, v = (noise(1, t, n, D, seed=layer + s, dtype=torch.float64) for s, n in ((5, heads), (6, HKV), (7, HKV)))
        out = cache.attend(layer, q, k, v, block, 0.3, window)
        keys, values = (torch.cat((committed[layer, i], x.transpose(1, 2)), 2) for i, x in ((0, k), (1, v)))
        torch.testing.assert_close(out, expected_attention(q, keys, values, visible, 0.3), rtol=1e-12, atol=1e-12)
    assert cache.length == int(cache.lengths) == start


@MODES
def test_rows_of_one_tree_may_come_one_at_a_time(scratch):
    """q0: a chain run row by row (an autoregressive drafter) equals the chain run at once."""
    n, start = 6, 5
    tree = chain(torch.zeros(1, n, dtype=torch.int64))
    q, k, v = (noise(1, n, heads, D, seed=heads + s, dtype=torch.float64) for s, heads in ((0, 4), (1, 2), (2, 2)))
    whole, single = new_cache(scratch, dtype=torch.float64), new_cache(scratch, dtype=torch.float64)
    for cache in (whole, single):
        prefill(cache, start)
        cache.poison()
    expected = whole.attend(1, q, k, v, whole.block(tree, n), 0.3)
    for i in range(n):
        row = slice(i, i + 1)
        out = single.attend(1, q[:, row], k[:, row], v[:, row], single.block(tree, 1, q0=i), 0.3)
        torch.testing.assert_close(out, expected[:, row], rtol=1e-12, atol=1e-12)
