"""Sampling with the default model in float32: every arm against plain decoding, every difference explained.

Matrix products round differently for one row than for several, so a choice may differ where two perturbed scores, or a score and a
filter's cut, all but coincide. Every difference must be such a one; decoding then goes on from the plain text, since noise is
keyed by position. Slow: the default model is fetched, and 20 seeds at two temperatures run under every arm.
"""

from __future__ import annotations

import os

import pytest
import torch

from whiflash_triton import WhiFlashDecoder
from whiflash_triton.evaluate import _random
from whiflash_triton.kernels.keyed_noise import keyed_noise_torch
from whiflash_triton.sampling import Sampling, warped

pytestmark = pytest.mark.slow
PROMPTS = ["Write one sentence about rain.", "Translate to French: the cat sleeps.", "What is 17 + 25?", "Name three fruits."]
ROUTERS = [
    *("static:dflash:7", "static:ddtree:15", "static:eagle3:5", "static:eagle3-tree:15:4:4", "static:mixed:15:4:4"),
    *("static:lookup:8", "entropy", "random"),
]
NEW, TOP_P = int(os.environ.get("WHIFLASH_SAMPLING_TOKENS", "16")), 0.95


@pytest.fixture(scope="module")
def decoder():
    return WhiFlashDecoder.from_pretrained("smollm2-135m", dtype="float32", max_cache_len=256)


def explained(decoder, ids: list[int], seed: int, temperature: float) -> bool:
    """Whether the next token after ids hangs by a hair: two best perturbed scores within 1e-4, or top-p's cut within 1e-5."""
    cache = decoder.target.new_cache(len(ids), 1)
    with torch.inference_mode():
        hidden, _ = decoder.target.prefill(torch.tensor([ids]), cache)
        logits = decoder.target.logits(hidden)[0]
        noise = keyed_noise_torch(seed, torch.tensor([len(ids)]), torch.arange(logits.shape[1], dtype=torch.int32))
        kept = warped(logits, Sampling(temperature, top_p=TOP_P))
        best = (kept + noise)[0].topk(2).values
        mass = (logits / temperature)[0].sort(descending=True).values.softmax(-1).cumsum(-1)
    return bool(best[0] - best[1] < 1e-4) or bool((mass - TOP_P).abs().min() < 1e-5)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("router", ROUTERS)
def test_every_difference_is_explained(decoder, router, temperature, lane_report):
    differences = accepted = 0
    for seed in range(20):
        options = dict(do_sample=True, temperature=temperature, top_p=TOP_P, top_k=0, seed=seed, eos_token_id=[])
        ids = decoder._encode(PROMPTS[seed % len(PROMPTS)], {})
        decoder.use_router("static:ar")
        end = len(ids) + NEW
        expected = decoder.generate(ids, max_new_tokens=NEW, **options).sequences[0].tolist()
        decoder.use_router(_random(decoder) if router == "random" else router)
        while len(ids) < end:
            out = decoder.generate(ids, max_new_tokens=end - len(ids), reuse_prefix=False, **options)
            accepted += sum(r.accepted for r in out.rounds)
            got = out.sequences[0].tolist()
            at = next((i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b), None)
            if at is None:
                break
            assert explained(decoder, expected[:at], seed, temperature), (seed, at)
            differences += 1
            ids = expected[: at + 1]
    lane_report.append(
        f"{router} at temperature {temperature}: {differences} near ties in {20 * NEW} tokens, {accepted} drafts accepted"
    )
    assert accepted > 0
