"""The smallest decoders that still have both drafters: a vocabulary so small that random drafts are right now and then."""

from __future__ import annotations

import dataclasses
import functools

import torch

from tests.oracle import CPU
from tests.tiny import dflash, eagle3, hf_model
from whiflash_triton.arms import Arm, parse_arm
from whiflash_triton.decoder import WhiFlashDecoder
from whiflash_triton.drafters.base import Drafter
from whiflash_triton.drafters.dflash import DFlashDrafter
from whiflash_triton.drafters.eagle3 import Eagle3Drafter
from whiflash_triton.routers.static import StaticRouter
from whiflash_triton.target import Target
from whiflash_triton.weights import load_target

ARMS = [parse_arm(text) for text in ("dflash:4", "eagle3:3", "ddtree:12", "eagle3-tree:12:4:3", "mixed:12:4:3", "lookup:5")]
COMMON = 8  # of the vocabulary, what target and drafters mostly write
MINIMAL = dict(
    hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8
)  # fmt: skip


@functools.cache
def small(family: str, vocab: int, **changes):
    """(transformers model, target) in float64, two layers of hidden size 48 unless told otherwise; common tokens are likelier."""
    model = hf_model(family, torch.float64, **({"vocab_size": vocab, "num_hidden_layers": 2} | changes))
    with torch.no_grad():
        model.lm_head.weight[COMMON:] *= 0.4
    return model, load_target(model, CPU, torch.float64)[0]


def make(kind: str, target: Target, rows: int, scratch: bool | None = None, pending_limit: int = 10**6) -> Drafter:
    """A random drafter of one layer that reads what the target has: its embedding and its two last outputs."""
    n, vocab = target.config.num_layers, target.config.vocab_size
    if kind == "dflash":
        config, tensors = dflash(target, layers=1)
        cls = DFlashDrafter
    else:
        config, tensors = eagle3(target, draft_vocab=vocab - 1, qk_norm=True)
        tensors["lm_head.weight"][tensors["draft_ids"] >= COMMON] *= 0.4
        cls = Eagle3Drafter
    config = dataclasses.replace(config, taps=(0, n - 1, n) if n > 1 else (0, 1, 1))
    return cls(config, tensors, target, rows, pending_limit, scratch)


def small_decoder(target: Target, rows: int, scratch: bool | None = None, **others: Drafter) -> WhiFlashDecoder:
    drafters = {kind: make(kind, target, rows, scratch) for kind in ("dflash", "eagle3")} | others
    return WhiFlashDecoder(target, None, drafters, StaticRouter(Arm("ar")), rows, [])
