"""The law of sampled text: 2,000 short sequences an arm are, token for token, what transformers' scores and the keyed noise give,
and their first two tokens follow the exact probabilities."""

from __future__ import annotations

import functools
import itertools
from types import SimpleNamespace

import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from tests.small import MINIMAL, make, small
from whiflash_triton.arms import Arm, parse_arm
from whiflash_triton.kernels.keyed_noise import keyed_noise_torch
from whiflash_triton.routers.static import StaticRouter
from whiflash_triton.sampling import Sampling
from whiflash_triton.scheduler import Stream, Workspace

V, DEPTH, COUNT = 12, 4, 2000  # start and one round give 2 to 4 tokens: 1, then up to 2 drafts and the bonus
PROMPT = [3, 1, 4, 1, 5]
TEMPERATURE, TOP_K, TOP_P = 0.9, 9, 0.95
ARMS = ["ar", "dflash:2", "eagle3:2", "ddtree:6", "eagle3-tree:6:3:2", "mixed:6:3:2"]


@functools.cache
def law() -> SimpleNamespace:
    """Processed scores after the prompt and every continuation of fewer than DEPTH tokens, from transformers alone."""
    model, target = small("qwen3", V, seed=9, **MINIMAL)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(TEMPERATURE), TopKLogitsWarper(TOP_K), TopPLogitsWarper(TOP_P)])
    scores = {}
    for length in range(DEPTH):
        texts = list(itertools.product(range(V), repeat=length))
        with torch.no_grad():
            logits = model(torch.tensor([PROMPT + list(t) for t in texts])).logits[:, -1]
        scores |= dict(zip(texts, warpers(None, logits), strict=True))
    return SimpleNamespace(target=target, scores=scores)


@functools.cache
def drawn(seed: int) -> tuple[int, ...]:
    """One token after another: the best of score plus noise."""
    positions = torch.arange(len(PROMPT), len(PROMPT) + DEPTH)
    noise = keyed_noise_torch(seed, positions, torch.arange(V, dtype=torch.int32), torch.float64)
    text = ()
    for i in range(DEPTH):
        text += (int((law().scores[text] + noise[i]).argmax()),)
    return text


@pytest.mark.parametrize("name", ARMS)
def test_two_thousand_sequences(name):
    target, arm = law().target, parse_arm(name)
    drafters = {kind: make(kind, target, 24) for kind in ("dflash", "eagle3")} if arm != Arm("ar") else {}
    work, first_two, accepted = Workspace(target, drafters, target.new_cache(24, 17)), torch.zeros(V, V), 0
    with torch.inference_mode():
        for seed in range(COUNT):
            stream = Stream(work, StaticRouter(arm), Sampling(TEMPERATURE, TOP_K, TOP_P, seed=seed))
            step, more = stream.start(PROMPT), stream.round(DEPTH - 2)
            text = (*step.tokens, *more.tokens)
            assert text == drawn(seed)[: len(text)], seed
            first_two[text[:2]] += 1
            accepted += more.round.accepted
    assert accepted > COUNT // 50 or arm == Arm("ar")
    scores = law().scores
    exact = scores[()].softmax(-1)[:, None] * torch.stack([scores[(a,)] for a in range(V)]).softmax(-1)
    assert (first_two[exact == 0] == 0).all() and (exact > 0).sum() > 30
    assert p_value(first_two[exact > 0], exact[exact > 0] * COUNT) > 1e-3
    assert p_value(first_two[exact > 0], exact[exact > 0].sqrt() / exact.sqrt().sum() * COUNT) < 1e-9  # it can tell another law


def p_value(seen: torch.Tensor, expected: torch.Tensor) -> float:
    """Pearson's chi-square; cells that expect fewer than 5 are taken together."""
    common = expected >= 5
    seen, expected = ([*x[common].tolist(), *x[~common].sum().reshape(-1).tolist()] for x in (seen, expected))
    statistic = sum((a - b) ** 2 / b for a, b in zip(seen, expected, strict=True) if b)
    return float(torch.special.gammaincc(*torch.tensor([(len(seen) - 1) / 2, statistic / 2], dtype=torch.float64)))
