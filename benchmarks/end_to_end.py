"""Tokens per second of real models under several routers, plain decoding among them, prompt by prompt in turns."""

from __future__ import annotations

import lzma
import shutil
import tarfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from whiflash_triton.decoder import WhiFlashDecoder
from whiflash_triton.loading import build_router

from .rounds import Script

PLAIN = "static:ar"


@dataclass
class Side:
    """Totals of one router; same: texts equal to plain decoding's."""

    tokens: int = 0
    drafted: int = 0
    forwards: int = 0
    seconds: float = 0.0
    same: int = 0
    texts: int = 0

    def row(self, router: str, plain: Side) -> dict:
        speed, plain_speed = self.tokens / self.seconds, plain.tokens / plain.seconds
        return {
            "router": router,
            "tokens": self.tokens,
            "tokens_per_second": round(speed, 1),
            "times_plain": round(speed / plain_speed, 3),
            "tau": round(self.drafted / self.forwards, 3) if self.forwards else 1.0,
            "same_texts": self.same,
            "texts": self.texts,
        }


def compare(
    decoder: WhiFlashDecoder,
    prompts: list,
    specs: list[str],
    new_tokens: int,
    left: Callable[[], float],
    save: Callable[[list[dict]], None],
    ahead: int | None = None,
) -> list[dict]:
    """One row a router, plain first; the order turns round with every prompt. Stops between prompts when time runs out.

    ahead: warm up all the routers' arms for rounds on the device, plain ones too; empty where nothing is captured.
    """
    routers = {spec: build_router(spec, decoder.drafters, decoder.target) for spec in (PLAIN, *specs)}
    if ahead is not None:
        decoder.use_router(Script([arm for router in routers.values() for arm in router.arms]))
        if not decoder.warmup(ahead)["graphs"]:
            return []
    sides = {spec: Side() for spec in routers}
    for router in routers.values():  # compiles, and fills what is made at first use
        decoder.use_router(router)
        decoder.generate(prompts[0], max_new_tokens=min(16, new_tokens), reuse_prefix=False)
    rows: list[dict] = []
    for i, prompt in enumerate(prompts):
        if left() < 0:
            break
        texts = {}
        for spec in routers if i % 2 == 0 else reversed(routers):
            decoder.use_router(routers[spec])
            out = decoder.generate(prompt, max_new_tokens=new_tokens, reuse_prefix=False)
            side, stats, texts[spec] = sides[spec], out.stats, out.sequences
            side.tokens, side.seconds = side.tokens + stats.new_tokens, side.seconds + stats.seconds
            side.drafted, side.forwards = side.drafted + stats.new_tokens - 1, side.forwards + stats.target_forwards
        for spec, side in sides.items():
            side.same, side.texts = side.same + torch.equal(texts[spec], texts[PLAIN]), side.texts + 1
        rows = [side.row(spec, sides[PLAIN]) for spec, side in sides.items()]
        save(rows)
    return rows


def assemble(folder: Path, work: Path) -> Path:
    """The folder of a converted model: `folder` itself, or what the tar archive in its pieces `part-*`, joined in `work`, holds.

    FileNotFoundError and ValueError say what is missing. Pieces: tar -C MODEL -cJf - . | split -b 60M - DIR/part-
    """
    if (folder / "config.json").exists():
        return folder
    parts = sorted(folder.glob("part-*"))
    if not parts:
        raise FileNotFoundError(
            f"{folder} holds neither config.json nor part-*: give a converted model, or the pieces of its archive"
        )
    archive = work / "model.tar"
    with archive.open("wb") as joined:
        for part in parts:
            with part.open("rb") as piece:
                shutil.copyfileobj(piece, joined)
    try:
        with tarfile.open(archive) as tar:
            tar.extractall(work, filter="data")
    except (tarfile.TarError, EOFError, lzma.LZMAError, zlib.error, OSError) as error:
        raise ValueError(
            f"{folder}/part-* do not join to a tar archive ({error}): a piece is missing or damaged, carry all"
        ) from error
    archive.unlink()
    found = sorted(work.rglob("config.json"))
    if not found:
        raise FileNotFoundError(
            f"the archive in {folder}/part-* holds no config.json: a piece is missing, or it is another archive"
        )
    return found[0].parent
