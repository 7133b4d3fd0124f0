"""A small target that mostly writes letters, and decoders over it whose drafts are really accepted."""

from __future__ import annotations

import functools
import itertools
import random
import string
from collections.abc import Iterator
from types import SimpleNamespace

import torch

from tests.oracle import CPU, OracleDrafter, byte_tokenizer, prompt_ids, static
from tests.tiny import hf_model
from whiflash_triton.arms import Arm
from whiflash_triton.decoder import WhiFlashDecoder
from whiflash_triton.options import parse_options
from whiflash_triton.routers.static import StaticRouter
from whiflash_triton.scheduler import Stream, Workspace
from whiflash_triton.weights import load_target

V, ROWS, NEW = 260, 80, 14
TOKENIZER = byte_tokenizer(None)
PROMPTS = [prompt_ids(4 + n, n, 250) for n in range(10)]
LETTERS = TOKENIZER(string.ascii_letters)["input_ids"]
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.95, "seed": 11}


@functools.cache
def setting() -> SimpleNamespace:
    """transformers model and target in float64; their text has words to stop at and pairs that repeat."""
    model = hf_model("qwen3", torch.float64, seed=3, vocab_size=V, num_hidden_layers=2)
    with torch.no_grad():
        model.lm_head.weight[[i for i in range(V) if i not in LETTERS]] *= 0.3
    return SimpleNamespace(model=model, target=load_target(model, CPU, torch.float64)[0])


def plain_decoder() -> WhiFlashDecoder:
    return WhiFlashDecoder(setting().target, TOKENIZER, {}, StaticRouter(Arm("ar")), ROWS, [])


def oracle_decoder(text: list[int], branching: bool = False, rights: Iterator[int] | None = None, seed: int = 0) -> WhiFlashDecoder:
    """5 drafts a round over `text`, `rights` of them right; 0 to 5 by chance if that is not given."""
    rng, target = random.Random(seed), setting().target
    oracle = OracleDrafter(text, rights or (rng.randrange(6) for _ in itertools.count()), ROWS, branching, seed, V)
    return WhiFlashDecoder(target, TOKENIZER, {"oracle": oracle}, static("oracle", 5), ROWS, [])


def unstopped(prompt: list[int], options: dict, new: int = NEW + 8) -> list[int]:
    """Prompt and text as plain decoding goes on past any stop: what an oracle drafts from."""
    given = {k: v for k, v in options.items() if k not in ("max_new_tokens", "max_length", "output_scores")}
    request, target = parse_options(prompt, given, {}, ROWS, V, CPU, TOKENIZER), setting().target
    stream = Stream(Workspace(target, {}, target.new_cache(ROWS, 1)), StaticRouter(Arm("ar")), request.sampling)
    with torch.inference_mode():
        text = prompt + stream.start(prompt).tokens
        while len(text) < len(prompt) + new:
            text += stream.round(0).tokens
    return text


@functools.cache
def free_text(n: int, sampled: bool = False) -> list[int]:
    """New tokens after PROMPTS[n] without any other option."""
    return unstopped(PROMPTS[n], SAMPLED if sampled else {}, NEW + 12)[len(PROMPTS[n]) :]
