"""A tiny random target with a tokenizer and both drafters, saved as the folders a user would have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from tests.tiny import dflash, eagle3, hf_model
from whiflash_triton.checkpoints import save_dflash, save_eagle3
from whiflash_triton.weights import load_target


@dataclass(frozen=True)
class Folders:
    target: Path
    dflash: Path
    eagle3: Path

    @property
    def options(self) -> list[str]:
        return ["--target", str(self.target), "--dflash", str(self.dflash), "--eagle3", str(self.eagle3)]


def character_tokenizer(size: int):
    """One token a printable character; the ids above them are fillers, written <n>."""
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    characters = ["\n", *map(chr, range(32, 127))]
    words = characters + [f"<{i}>" for i in range(len(characters), size)]
    tokenizer = Tokenizer(BPE({word: i for i, word in enumerate(words)}, [], unk_token=words[-1]))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def save_folders(folder: Path, **changes) -> Folders:
    """float32 throughout; changes as in hf_model."""
    model = hf_model("llama", torch.float32, **changes)
    folders = Folders(folder / "target", folder / "dflash", folder / "eagle3")
    model.save_pretrained(folders.target)
    character_tokenizer(model.config.vocab_size).save_pretrained(folders.target)
    target, _ = load_target(model, torch.device("cpu"), torch.float32)
    save_dflash(folders.dflash, *dflash(target), dtype=torch.float32)
    save_eagle3(folders.eagle3, *eagle3(target), dtype=torch.float32)
    return folders
