"""Whole rounds and training steps on a CUDA device, over the tiny trio. Kernels have GPU tests of their own."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from whiflash_triton.checkpoints import TargetShape, load_dflash, load_eagle3
from whiflash_triton.decoder import WhiFlashDecoder
from whiflash_triton.evaluate import _random
from whiflash_triton.loading import ASSETS
from whiflash_triton.training import tiny
from whiflash_triton.training.data import Row, write_features
from whiflash_triton.training.drafters import RECIPES, draft_vocabulary, train
from whiflash_triton.training.packs import list_shards
from whiflash_triton.weights import load_target

TINY = ASSETS / "tiny"
pytestmark = pytest.mark.gpu


def load(dtype: str) -> WhiFlashDecoder:
    paths = {"dflash": TINY / "dflash", "eagle3": TINY / "eagle3"}
    return WhiFlashDecoder.from_pretrained(str(TINY / "target"), **paths, device="cuda", dtype=dtype, max_cache_len=256)


def prompts(count: int) -> list[str]:
    rng = random.Random(7)
    return [tiny.sentence(rng)[0] for _ in range(count)]


ROUTERS = [
    *("static:dflash:7", "static:ddtree:16", "static:ddtree:100", "static:eagle3:7", "static:eagle3-tree:16", "static:mixed:24"),
    *("entropy", "random"),
]


@pytest.mark.parametrize("router", ROUTERS)
def test_float32_rounds_equal_the_plain_target(router):
    decoder = load("float32")
    for prompt in prompts(8):
        decoder.use_router("static:ar")
        expected = decoder.generate(prompt, max_new_tokens=64)
        decoder.use_router(_random(decoder) if router == "random" else router)
        assert torch.equal(decoder.generate(prompt, max_new_tokens=64).sequences, expected.sequences)


@pytest.mark.parametrize(
    "options", [{"top_k": 0}, {"top_k": 20, "top_p": 0.9}, {"min_p": 0.02, "repetition_penalty": 1.3}], ids=str
)
@pytest.mark.parametrize("router", ROUTERS)
def test_float32_sampling_equals_the_plain_target(router, options):
    decoder = load("float32")
    for seed, prompt in enumerate(prompts(4)):
        sampling = dict(max_new_tokens=64, do_sample=True, temperature=0.8, seed=seed) | options
        decoder.use_router("static:ar")
        expected = decoder.generate(prompt, **sampling)
        decoder.use_router(_random(decoder) if router == "random" else router)
        assert torch.equal(decoder.generate(prompt, **sampling).sequences, expected.sequences)


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("router", ROUTERS)
def test_graphs_replay_the_same_text(router, ahead):
    decoder = load("float32")
    expected = [decoder.generate(prompt, max_new_tokens=64).sequences for prompt in prompts(6)]
    decoder.use_router(_random(decoder) if router == "random" else router)
    report = decoder.warmup(ahead)
    assert report["graphs"] > len(decoder.router.arms) and report["bytes"] >= 0
    for prompt, text in zip(prompts(6), expected, strict=True):
        assert torch.equal(decoder.generate(prompt, max_new_tokens=64).sequences, text)
        sampling = dict(max_new_tokens=32, do_sample=True, temperature=0.8, seed=3)
        again = decoder.generate(prompt, **sampling).sequences
        assert torch.equal(decoder.generate(prompt, **sampling).sequences, again)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_drafts_are_accepted(dtype):
    decoder = load(dtype)
    decoder.use_router("static:eagle3:5")
    runs = [decoder.generate(p, max_new_tokens=64).stats for p in prompts(8)]
    assert sum(s.new_tokens - 1 for s in runs) / sum(s.target_forwards for s in runs) > 2


@pytest.mark.parametrize("kind", ["dflash", "eagle3"])
def test_training_steps(kind, tmp_path):
    target, _ = load_target(str(TINY / "target"), torch.device("cuda"), torch.float32)
    t, encode, rng = target.config, tiny.tokenizer(), random.Random(3)
    rows = []
    for _ in range(150):
        prompt, response = tiny.sentence(rng)
        head = encode(f"<user> {prompt} <assistant> ")["input_ids"]
        rows.append(Row((head + encode(response)["input_ids"])[:96], len(head), ""))
    shape = TargetShape(t.num_layers, t.hidden_size, t.vocab_size)
    config, _ = (load_eagle3 if kind == "eagle3" else load_dflash)(TINY / kind, target=shape)
    write_features(target, rows, tmp_path / "f", tuple(sorted(set(config.taps))), range(3))
    ids = draft_vocabulary(list_shards(tmp_path / "f")[1:], config.draft_vocab_size, t.vocab_size).to(target.device)
    losses: list[float] = []
    recipe = replace(RECIPES[kind], tokens=256, anchors=8)
    train(
        kind,
        target,
        config,
        ids,
        tmp_path / "f",
        tmp_path / "run",
        8,
        None,
        recipe,
        progress=lambda _, loss, __: losses.append(loss),
    )
    assert losses[-1] < losses[0]
