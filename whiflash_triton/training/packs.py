"""Packs of fixed length from feature shards: fixed shapes keep the CPU backend from compiling a primitive a batch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import torch

from .data import Shard
from .models import Pack


def list_shards(folder: Path) -> list[Path]:
    shards = sorted(Path(folder).glob("shard-*.safetensors"))
    if len(shards) < 2:
        raise FileNotFoundError(
            f"{folder} holds {len(shards)} feature shards, at least 2 are needed: run `whiflash train features`"
        )
    return shards


def packs(folder: Path, taps: tuple[int, ...], tokens: int, seed: int, start: int = 0) -> Iterator[tuple[int, Pack]]:
    """Endless (pack index, pack) over all shards but the first, which is held out.

    Every epoch has an order of its own that depends on seed and epoch alone, so `start` resumes exactly; an epoch takes in the
    shards that are there when it begins.
    """
    index = epoch = 0
    while True:
        order = random.Random(f"{seed}-{epoch}")
        files = list_shards(folder)[1:]
        order.shuffle(files)
        before = index
        filling: list[tuple[Shard, int, int]] = []
        used = 0
        for file in files:
            shard = Shard(file)
            rows = list(range(len(shard.spans)))
            order.shuffle(rows)
            for row in rows:
                length = shard.spans[row][1] - shard.spans[row][0]
                take = min(length, tokens - used)
                filling.append((shard, row, take))
                used += take
                if tokens - used < 96:  # a shorter piece teaches little and still costs a row
                    if index >= start:
                        yield index, _pack(filling, taps, tokens)
                    index += 1
                    filling, used = [], 0
        if index == before:
            raise ValueError(f"{folder} holds less than one pack of {tokens} tokens beside the held-out shard: give more text")
        epoch += 1


def _pack(pieces: list[tuple[Shard, int, int]], taps: tuple[int, ...], tokens: int) -> Pack:
    hidden = pieces[0][0].features(pieces[0][1], taps).shape[-1]
    final_tap = pieces[0][0].taps[-1]
    ids, choices = torch.zeros(tokens, dtype=torch.int64), torch.zeros(tokens, dtype=torch.int64)
    segment, position = torch.full((tokens,), -1), torch.zeros(tokens, dtype=torch.int64)
    learn = torch.zeros(tokens, dtype=torch.bool)
    features = torch.zeros(len(taps) + 1, tokens, hidden)
    at = 0
    for number, (shard, row, take) in enumerate(pieces):
        first = shard.spans[row][0]
        here = slice(at, at + take)
        ids[here], choices[here] = shard.tokens[first : first + take], shard.choices[first : first + take]
        segment[here], position[here] = number, torch.arange(take)
        learn[at + min(shard.prompt_lens[row], take) : at + take] = True
        features[:, here] = shard.features(row, (*taps, final_tap))[:, :take].float()
        at += take
    return Pack(ids, choices, segment, position, learn, features[:-1], features[-1])
