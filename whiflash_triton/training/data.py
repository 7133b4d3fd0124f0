"""Target-written text -> tokens -> cached features, in shards that training reads in place.

A row is the chat template around the prompt, then the response, then the end token if the answer ended with it. Shard files
are written whole or not at all, so an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import json
import os
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ..target import Target
from ..tree import chain

ROWS_PER_SHARD = 64


@dataclass(frozen=True)
class Row:
    tokens: list[int]
    prompt_len: int
    domain: str


def read_rows(path: Path, tokenizer, end_token: int, max_len: int, seed: int = 0) -> list[Row]:
    """JSON lines with `prompt`, `response`, optional `domain` and `finished` -> rows of at most max_len tokens, shuffled.

    ValueError names the line that is not of this form.
    """
    rows = []
    with Path(path).open() as file:
        for number, line in enumerate(file, 1):
            try:
                item = json.loads(line)
                prompt, response = item["prompt"], item["response"]
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number}: expected JSON with `prompt` and `response` ({error})") from error
            head = encode_chat(tokenizer, prompt)
            tail = tokenizer(response, add_special_tokens=False)["input_ids"] + [end_token] * bool(item.get("finished"))
            tokens = (head + tail)[:max_len]
            if len(tokens) > len(head) + 1:  # nothing to learn from an empty answer
                rows.append(Row(tokens, len(head), item.get("domain", "")))
    random.Random(seed).shuffle(rows)
    return rows


def encode_chat(tokenizer, prompt: str) -> list[int]:
    """One user turn through the target's own chat template; plain encoding where there is none."""
    if getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": prompt}]
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
    return list(tokenizer(prompt)["input_ids"])


def shard_path(folder: Path, index: int) -> Path:
    return Path(folder) / f"shard-{index:05d}.safetensors"


@torch.inference_mode()
def write_features(target: Target, rows: list[Row], folder: Path, taps: tuple[int, ...], shards: range, progress=None) -> None:
    """Write the shards of `shards` that are not there yet.

    A shard holds tokens int32 [n], lengths and prompt_lens int32 [rows], features bf16 [taps + 1, n, H] (the last one after the
    final norm) and choices int32 [n], the target's argmax at every row.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    every = (*sorted(set(taps)), target.config.num_layers)
    for index in shards:
        part = rows[index * ROWS_PER_SHARD : (index + 1) * ROWS_PER_SHARD]
        if not part:
            continue
        if shard_path(folder, index).exists():
            check_shard(shard_path(folder, index), part, every)
            continue
        cache = target.new_cache(max(len(r.tokens) for r in part), 1)
        features, choices = [], []
        for row in part:
            cache.set_length(0)
            tokens = torch.tensor([row.tokens], device=target.device)
            hidden, tapped = target.forward(chain(tokens), cache, every, prefill=True)
            features.append(tapped[:, 0].to(torch.bfloat16).cpu())
            choices.append(target.logits(hidden)[0].argmax(-1).int().cpu())
        tensors = {
            "tokens": torch.tensor([t for r in part for t in r.tokens], dtype=torch.int32),
            "lengths": torch.tensor([len(r.tokens) for r in part], dtype=torch.int32),
            "prompt_lens": torch.tensor([r.prompt_len for r in part], dtype=torch.int32),
            "features": torch.cat(features, 1),
            "choices": torch.cat(choices),
        }
        partial = shard_path(folder, index).with_suffix(f".{os.getpid()}.partial")
        save_file(tensors, partial, metadata={"taps": json.dumps(every)})
        os.replace(partial, shard_path(folder, index))
        if progress is not None:
            progress(len(tensors["tokens"]))


def check_shard(path: Path, rows: list[Row], taps: tuple[int, ...]) -> None:
    """ValueError if the shard was cached from other rows or taps."""
    shard = Shard(path)
    same = shard.taps == taps and shard.prompt_lens == [r.prompt_len for r in rows]
    if not same or shard.tokens.tolist() != [t for r in rows for t in r.tokens]:
        raise ValueError(f"{path} holds features of another text, length limit or taps: give another features folder")


class Shard:
    """One shard, features read row by row."""

    def __init__(self, path: Path):
        self.file = safe_open(path, framework="pt")
        self.taps = tuple(json.loads(self.file.metadata()["taps"]))
        self.tokens = self.file.get_tensor("tokens").long()
        self.choices = self.file.get_tensor("choices").long()
        self.prompt_lens = self.file.get_tensor("prompt_lens").tolist()
        ends = self.file.get_tensor("lengths").cumsum(0).tolist()
        self.spans = list(zip([0, *ends[:-1]], ends, strict=True))
        self._features = self.file.get_slice("features")

    def features(self, row: int, taps: tuple[int, ...]) -> torch.Tensor:
        """bf16 [len(taps), n, H] in the order asked for."""
        first, last = self.spans[row]
        every = self._features[:, first:last]
        return every[[self.taps.index(t) for t in taps]]
