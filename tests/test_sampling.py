"""Sampling: every arm draws the tokens of plain decoding; filters are transformers'; seeds."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.oracle import OracleDrafter, RandomRouter, prompt_ids
from tests.small import ARMS, small, small_decoder
from whiflash_triton.arms import Arm
from whiflash_triton.routers.static import StaticRouter
from whiflash_triton.sampling import TOP_P_CANDIDATES, Sampling, choose, penalised, warped

V, ROWS, NEW = 24, 40, 8
FAMILIES = {"llama": {}, "mistral": {"sliding_window": 5}, "qwen2": {"seed": 1}, "qwen3": {"seed": 2}}
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_arm_draws_the_same_tokens(family, temperature):
    """20 seeds; each arm alone, and another one every round, two oracles among them."""
    _, target = small(family, V, **FAMILIES[family])
    rng = random.Random(0)
    oracles = {
        name: OracleDrafter([], (rng.randrange(6) for _ in itertools.count()), ROWS, name == "tree", vocab=V)
        for name in ("chain", "tree")
    }
    decoder = small_decoder(target, ROWS, **oracles)
    switch = RandomRouter([Arm("ar"), *ARMS, Arm("chain", 5), Arm("tree", 9)])
    accepted: Counter = Counter()
    for seed in range(20):
        prompt = prompt_ids(4 + seed % 3, seed, V)
        options = dict(do_sample=True, temperature=temperature, top_p=0.95, seed=seed)
        decoder.use_router(StaticRouter(Arm("ar")))
        expected = decoder.generate(prompt, max_new_tokens=NEW + 6, **options).sequences[0].tolist()
        for oracle in oracles.values():
            oracle.text = expected
        for router in (*map(StaticRouter, ARMS), switch):
            decoder.use_router(router)
            out = decoder.generate(prompt, max_new_tokens=NEW, **options)
            assert out.sequences[0].tolist() == expected[: len(prompt) + NEW], (seed, router.arms)
            accepted.update(arm.kind if router is not switch else "switch" for arm in out.arms if arm.kind != "ar")
    assert min(accepted[kind] for kind in ("ddtree", "eagle3-tree", "mixed", "switch")) >= 15, accepted
    assert min(accepted[kind] for kind in ("dflash", "eagle3", "lookup")) >= 2, accepted


def test_a_text_that_is_sampled_is_not_the_greedy_one():
    _, target = small("qwen3", V, seed=2)
    decoder = small_decoder(target, ROWS)
    greedy = decoder.generate([1, 2, 3], max_new_tokens=20).sequences
    sampled = [decoder.generate([1, 2, 3], max_new_tokens=20, do_sample=True, seed=s).sequences for s in range(5)]
    assert not any(torch.equal(greedy, x) for x in sampled)
    cold = decoder.generate([1, 2, 3], max_new_tokens=20, do_sample=True, temperature=1e-6, seed=3)
    assert torch.equal(cold.sequences, greedy) and cold.stats.seed == 3
    assert torch.equal(decoder.generate([1, 2, 3], max_new_tokens=20, do_sample=True, top_k=1).sequences, greedy)


# Filters


def rows(dtype: torch.dtype, ties: bool, n: int = 60, vocab: int = 300, seed: int = 0) -> torch.Tensor:
    """Random logits, from flat rows to peaked ones, some entries ruled out; with ties, multiples of 0.5."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, vocab, generator=g, dtype=torch.float64) * torch.linspace(0.5, 8, n, dtype=torch.float64)[:, None]
    if ties:
        x = (x * 2).round() / 2
    x[::3] = x[::3].masked_fill(torch.rand(len(x[::3]), vocab, generator=g) < 0.3, -INF)
    return x.to(dtype)


def theirs(s: Sampling) -> LogitsProcessorList:
    """transformers' warpers in the order in which it applies them."""
    made = [TemperatureLogitsWarper(s.temperature)]
    if s.top_k:
        made.append(TopKLogitsWarper(s.top_k))
    if s.top_p < 1:
        made.append(TopPLogitsWarper(s.top_p))
    if s.min_p:
        made.append(MinPLogitsWarper(s.min_p))
    return LogitsProcessorList(made)


def agrees(x: torch.Tensor, s: Sampling) -> int:
    """Compare rows that no rounding can decide, and count them: what transformers keeps, and all that ties with its last."""
    want, got = theirs(s)(None, x), warped(x, s)
    exact = x.double() / s.temperature
    if 0 < s.top_k < x.shape[1]:
        exact = exact.masked_fill(exact < exact.topk(s.top_k).values[:, -1:], -INF)
    mass = exact.sort(descending=True).values.softmax(-1).cumsum(-1)
    clear = ((mass - s.top_p).abs() > 1e-5).all(-1) | (s.top_p == 1)
    if s.min_p:
        below = exact - exact.amax(-1, keepdim=True)
        clear &= ((below == 0) | ((below - math.log(s.min_p)).abs() > 1e-5)).all(-1)
    last = want.masked_fill(want == -INF, INF).amin(-1, keepdim=True)
    full = torch.where(x / s.temperature >= last, x / s.temperature, -INF)
    assert torch.equal(got[clear], full[clear])
    return int(clear.sum())


SETTINGS = [
    Sampling(0.7), Sampling(1.9, top_k=1), Sampling(1.0, top_k=5), Sampling(0.6, top_k=299), Sampling(1.0, top_k=300),
    Sampling(1.0, top_k=10**6), Sampling(1.0, top_p=0.95), Sampling(0.7, top_p=0.1), Sampling(1.0, top_p=1e-9),
    Sampling(2.0, top_p=0.999), Sampling(1.0, min_p=0.05), Sampling(0.5, min_p=0.9), Sampling(1.0, min_p=1.0),
    Sampling(0.8, top_k=40, top_p=0.9), Sampling(1.3, top_k=20, top_p=0.7, min_p=0.03), Sampling(0.9, top_p=0.8, min_p=0.1),
]  # fmt: skip


@DTYPES
@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("s", SETTINGS, ids=lambda s: f"T{s.temperature}-k{s.top_k}-p{s.top_p}-m{s.min_p}")
def test_filters_are_those_of_transformers(s, ties, dtype):
    """Where equal logits straddle a cut, top-p in transformers keeps those that its sort put last; here all of them stay."""
    x = rows(dtype, ties)
    assert agrees(x, s) >= (len(x) if s.top_p == 1 and not s.min_p else 40)
    if not ties and s.top_p == 1:
        assert torch.equal(warped(x, s), theirs(s)(None, x))


@DTYPES
def test_all_equals_at_a_cut_stay(dtype):
    x = torch.tensor([[1.0, 3, 3, 3, 0, 3, -1, 1]], dtype=dtype)
    kept = lambda **options: warped(x, Sampling(1.0, **options)).isfinite().nonzero()[:, 1].tolist()  # noqa: E731
    assert kept(top_k=2) == kept(top_p=0.3) == kept(top_p=1e-6) == kept(min_p=1.0) == [1, 2, 3, 5]
    assert kept(top_k=5) == kept(top_k=6) == [0, 1, 2, 3, 5, 7]
    flat = torch.zeros(1, 1000, dtype=dtype)
    assert torch.equal(warped(flat, Sampling(1.0, top_k=3, top_p=0.2, min_p=0.5)), flat)


@DTYPES
def test_top_p_deeper_than_the_candidates(dtype):
    """Flat rows need a full sort, peaked ones in the same call do not, and no row depends on the others."""
    g = torch.Generator().manual_seed(5)
    x = torch.randn(9, 1500, generator=g, dtype=torch.float64).to(dtype)
    x[::2] *= 0.5
    x[1::2] *= 6
    for top_p in (0.5, 0.9, 0.99):
        s = Sampling(1.0, top_p=top_p)
        kept = warped(x, s).isfinite().sum(-1)
        assert kept[0] > TOP_P_CANDIDATES > kept[1]
        assert agrees(x, s) >= 5
        for row, got in zip(x, warped(x, s), strict=True):
            assert torch.equal(warped(row[None], s)[0], got)


@pytest.mark.parametrize("penalty", [0.5, 1.0001, 1.7])
@DTYPES
def test_repetition_penalty_is_that_of_transformers(dtype, penalty):
    """Bit for bit, infinities and zeros included, however often a token was seen."""
    x = rows(dtype, False, n=12)
    x[2, :40], x[3, :40], x[4, :40] = INF, 0.0, NAN
    seen = torch.randint(0, 60, (12, 50), generator=torch.Generator().manual_seed(1))
    want = RepetitionPenaltyLogitsProcessor(penalty)(seen, x)
    assert torch.equal(penalised(x, penalty, seen).nan_to_num(nan=7.0), want.nan_to_num(nan=7.0))


@DTYPES
@pytest.mark.parametrize("s", SETTINGS, ids=lambda s: f"T{s.temperature}-k{s.top_k}-p{s.top_p}-m{s.min_p}")
def test_rows_that_hold_infinities_or_nan(s, dtype):
    """-inf is never drawn, +inf always, and NaN or a row of nothing but -inf gives -1; the rows beside are not touched."""
    x = rows(dtype, False, n=8)
    whole = choose(warped(x, with_seed(s)), with_seed(s), torch.arange(8))
    x[1], x[2, 17], x[4, 5], x[4, 9], x[5, 3], x[6, 1:] = -INF, NAN, INF, INF, INF, -INF
    x[5, 4] = NAN
    x[6, 0] = -3.0
    tokens = choose(warped(x, with_seed(s)), with_seed(s), torch.arange(8))
    assert tokens[[1, 2, 5]].tolist() == [-1, -1, -1] and tokens[4] in (5, 9) and tokens[6] == 0
    assert torch.equal(tokens[[0, 3, 7]], whole[[0, 3, 7]])
    assert x[[0, 3, 7], tokens[[0, 3, 7]]].isfinite().all()


def with_seed(s: Sampling, seed: int = 4) -> Sampling:
    return Sampling(s.temperature, s.top_k, s.top_p, s.min_p, seed=seed)


@pytest.mark.parametrize("s", SETTINGS, ids=lambda s: f"T{s.temperature}-k{s.top_k}-p{s.top_p}-m{s.min_p}")
def test_no_row_depends_on_the_rows_beside_it(s):
    """One row alone, among many, and in another order: the same bits and the same token."""
    x, positions = rows(torch.float64, False, n=20), torch.arange(100, 120)
    together, s = warped(x, s), with_seed(s)
    tokens = choose(together, s, positions)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(2))
    assert torch.equal(warped(x[order], s), together[order])
    assert torch.equal(choose(together[order], s, positions[order]), tokens[order])
    for i in range(20):
        alone = warped(x[i : i + 1].clone(), s)
        assert torch.equal(alone[0], together[i])
        assert choose(alone, s, positions[i : i + 1])[0] == tokens[i]


@pytest.mark.parametrize("threads", [1, 2])
def test_no_long_row_depends_on_the_rows_beside_it(threads):
    """A whole vocabulary, where PyTorch may split one row among threads but not several."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for scale in (0.1, 3.0):
            x = torch.randn(4, 40_000, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * scale
            s = Sampling(0.8, top_k=35_000, top_p=0.9, min_p=1e-6, seed=9)
            together = warped(x, s)
            tokens = choose(together, s, torch.arange(4))
            for i in range(4):
                alone = warped(x[i : i + 1], s)
                assert torch.equal(alone[0], together[i])
                assert choose(alone, s, torch.arange(i, i + 1))[0] == tokens[i]
    finally:
        torch.set_num_threads(before)


# Seeds


@pytest.fixture(scope="module")
def decoder():
    _, target = small("llama", V)
    decoder = small_decoder(target, ROWS)
    decoder.use_router(RandomRouter(ARMS))
    return decoder


def draw(decoder, **options):
    out = decoder.generate([5, 6, 7], max_new_tokens=16, do_sample=True, **options)
    return out.sequences[0].tolist(), out.stats.seed


def test_a_seed_fixes_the_text(decoder):
    seeds = [0, 1, 2, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1]
    texts = [draw(decoder, seed=seed) for seed in seeds]
    assert [seed for _, seed in texts] == seeds
    assert len({tuple(text) for text, _ in texts}) == len(seeds)
    assert [draw(decoder, seed=seed) for seed in seeds] == texts


def test_no_seed_follows_torchs_generator(decoder):
    torch.manual_seed(3)
    first, second = draw(decoder), draw(decoder)
    torch.manual_seed(3)
    assert [draw(decoder), draw(decoder)] == [first, second]
    assert first[1] != second[1] and first[0] != second[0]
    assert draw(decoder, seed=first[1]) == first and draw(decoder, seed=second[1]) == second


def test_nothing_else_reads_or_moves_torchs_generator(decoder):
    before = torch.get_rng_state()
    expected = draw(decoder, seed=5)
    assert decoder.generate([5, 6, 7], max_new_tokens=5).stats.seed is None
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    assert draw(decoder, seed=5) == expected


def test_noise_belongs_to_positions_not_to_calls(decoder):
    """A text that goes on from a sampled one draws what the longer text would have drawn."""
    whole, _ = draw(decoder, seed=8)
    for cut in (4, 9):
        rest = decoder.generate(whole[:cut], max_new_tokens=19 - cut, do_sample=True, seed=8)
        assert rest.sequences[0].tolist() == whole


def test_a_pass_on_the_host_draws_from_the_same_noise(decoder):
    """A processor that changes nothing changes no token; nor do a penalty's two ways of being computed differ."""
    for options in ({}, {"repetition_penalty": 1.4, "top_p": 0.9}):
        hosted = draw(decoder, seed=6, logits_processor=[lambda ids, scores: scores], **options)
        assert hosted == draw(decoder, seed=6, **options)
