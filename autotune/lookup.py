"""Launch options of a kernel, read from configs/<device>/<kernel>.json; nothing here ever times a kernel.

A file holds ``entries``: a key such as ``"D=64,dtype=fp16"`` (names sorted, a name left out stands for any value) to
the constexprs, ``num_warps`` and ``num_stages`` to launch with. ``discrete`` lists the numeric names that must be equal
(text always must); ``arch``, in one device's file, is its compute capability. ``configs/default`` serves all others.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import resources
from typing import Any, NamedTuple

import torch

log = logging.getLogger(__name__)
CONFIGS = resources.files("whiflash_triton.autotune") / "configs"
DTYPE_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


class Shipped(NamedTuple):
    """One entry of one file; ``arch`` is the compute capability it is meant for, None for all."""

    device: str
    arch: int | None
    key: dict[str, int | str]
    config: dict[str, Any]


def pick(kernel: str, **key: int | str | torch.dtype) -> dict[str, Any]:
    """Launch options for ``kernel`` at ``key``, for example ``pick("tree_attention", D=64, dtype=q.dtype, M=16)``.

    The entry is the exact one for this device, else the nearest one that shares its discrete fields (sum of base-2
    logarithms of the ratios), else the same from the defaults. Raises ``LookupError`` where those have none either.
    """
    return dict(_answer(kernel, {name: DTYPE_NAMES.get(value, value) for name, value in key.items()}))


def find(kernel: str, key: dict[str, int | str], device: str | None = None) -> dict[str, Any]:
    """What the files say for ``key``, dtypes by name, on ``device`` (None: this one); see `pick`."""
    device = device or (device_name(torch.cuda.current_device()) if torch.cuda.is_available() else "default")
    return dict(_resolve(kernel, device, tuple(sorted(key.items()))))


_answer = find


@contextmanager
def answered_by(answer: Callable[[str, dict[str, int | str]], dict[str, Any]]) -> Iterator[None]:
    """Within, ``answer(kernel, key)`` chooses the launch options instead of the files: how tuning tries them."""
    global _answer
    before, _answer = _answer, answer
    try:
        yield
    finally:
        _answer = before


def forget() -> None:
    """Read the files anew at the next look-up."""
    _load.cache_clear()
    _resolve.cache_clear()


@functools.cache
def device_name(index: int) -> str:
    """Folder name of a CUDA device: ``"NVIDIA H200"`` -> ``"nvidia_h200"``."""
    return re.sub(r"[^a-z0-9]+", "_", torch.cuda.get_device_name(index).lower()).strip("_")


def shipped(kernel: str) -> Iterator[Shipped]:
    """Every entry of every file of ``kernel``: what must compile without spills."""
    for device in sorted(folder.name for folder in CONFIGS.iterdir() if folder.is_dir()):
        content = _load(device, kernel)
        for text, config in content.get("entries", {}).items():
            yield Shipped(device, content.get("arch"), parse_key(text), config)


def key_text(key: dict[str, int | str]) -> str:
    """``{"dtype": "fp16", "D": 64}`` -> ``"D=64,dtype=fp16"``, as a file names an entry."""
    return ",".join(f"{name}={value}" for name, value in sorted(key.items()))


def parse_key(text: str) -> dict[str, int | str]:
    """``"D=64,dtype=fp16"`` -> ``{"D": 64, "dtype": "fp16"}``."""
    pairs = (part.split("=") for part in text.split(",") if part)
    return {name: int(value) if value.lstrip("-").isdigit() else value for name, value in pairs}


@functools.cache
def _load(device: str, kernel: str) -> dict[str, Any]:
    path = CONFIGS / device / f"{kernel}.json"
    return json.loads(path.read_text()) if path.is_file() else {}


@functools.cache
def _resolve(kernel: str, device: str, fields: tuple[tuple[str, int | str], ...]) -> dict[str, Any]:
    key = dict(fields)
    for folder in dict.fromkeys((device, "default")):
        content = _load(folder, kernel)
        ranked = []
        for text, config in content.get("entries", {}).items():
            entry = parse_key(text)
            distance = _distance(entry, key, content.get("discrete", ()))
            if distance is not None:
                ranked.append((-len(entry), distance, text, config))
        if ranked:  # the entry that says most, then the nearest
            _, distance, text, config = min(ranked, key=lambda row: row[:3])
            log.info("%s at %s: %s entry %s of %s", kernel, key, "nearest" if distance else "exact", text, folder)
            return config
    raise LookupError(f"no launch options for kernel {kernel!r} at {key}: add an entry to configs/default/{kernel}.json")


def _distance(entry: dict[str, int | str], key: dict[str, int | str], discrete: list[str]) -> float | None:
    """How far an entry is from a key, None where a discrete field differs."""
    total = 0.0
    for name, value in entry.items():
        wanted = key.get(name)
        if wanted == value:
            continue
        if name in discrete or isinstance(value, str) or not isinstance(wanted, int):
            return None
        total += abs(math.log2(max(value, 1) / max(wanted, 1)))
    return total
