"""Held-out tau of a drafter in training: real decoding loops over the prompts of the shard that training never reads."""

from __future__ import annotations

from pathlib import Path

import torch

from ..arms import Arm
from ..drafters.dflash import DFlashDrafter
from ..drafters.eagle3 import Eagle3Drafter
from ..routers.static import StaticRouter
from ..scheduler import Stream, Workspace
from ..target import Target
from .data import Shard
from .models import Params
from .packs import list_shards


@torch.inference_mode()
def held_out_tau(
    kind: str,
    target: Target,
    config,
    params: Params,
    ids: torch.Tensor,
    features: Path,
    end: int,
    size: int,
    prompts: int,
    new: int,
) -> float:
    """Tokens per target forward, pooled over `prompts` prompts of at most `new` tokens each, drafting `size` tokens a round."""
    shard = Shard(list_shards(features)[0])
    heads = [shard.tokens[first : first + n] for (first, _), n in zip(shard.spans, shard.prompt_lens, strict=True)][:prompts]
    rows = max(len(h) for h in heads) + new + size + 1
    build = Eagle3Drafter if kind == "eagle3" else DFlashDrafter
    tensors = {k: v.detach() for k, v in params.items()} | {"draft_ids": ids}
    drafter = build(config, tensors, target, rows)
    stream = Stream(
        Workspace(target, {kind: drafter}, target.new_cache(rows, drafter.max_draft + 1)), StaticRouter(Arm(kind, size))
    )
    tokens = 0
    for head in heads:
        done = list(stream.start(head.tolist()).tokens)
        first = len(done)
        while len(done) < new and end not in done:
            done += stream.round(size).tokens
        cut = done.index(end) + 1 if end in done else new
        tokens += min(cut, new) - first
    return tokens / stream.forwards if stream.forwards else 1.0
