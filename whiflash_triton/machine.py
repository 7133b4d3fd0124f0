"""What a report must name: hardware, versions, threads; and what a loaded decoder weighs."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from . import ops
from .cache import KVCache
from .layers import Linear

_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "avx512_fp16", "amx_fp16")
_PACKAGES = ("whiflash-triton", "torch", "triton", "transformers")


def describe_machine() -> dict:
    """CPU, cores, threads, the CPU features that decide the default dtype, GPUs, versions, and what runs the kernels."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    fields = dict(line.split(":", 1) for line in reversed(info.splitlines()) if ":" in line)
    fields = {name.strip(): value.strip() for name, value in fields.items()}
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "cpu": fields.get("model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_features": [name for name in _FEATURES if name in flags],
        "gpus": gpus,
        "kernels": "triton" if gpus or ops._forced else "torch references (no CUDA device)",
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def tensor_bytes(*objects, packed: bool = False) -> int:
    """Bytes of every tensor reachable through attributes, lists, tuples and dictionaries; shared storages once, caches not.

    packed: instead, of the copies laid out for verification on a CPU, taken at the size of their weights.
    """
    storages: dict[int, int] = {}
    seen: set[int] = set()
    todo = list(objects)
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, (KVCache, str, bytes, int, float)):
            continue
        seen.add(id(item))
        if isinstance(item, Linear):
            todo += [item.weights, item.biases]
            if packed and item.packs:
                storages[id(item)] = item.weights[0].nbytes
        elif isinstance(item, torch.Tensor):
            if not packed:
                storages[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
        elif isinstance(item, dict):
            todo += item.values()
        elif isinstance(item, (list, tuple)):
            todo += item
        elif type(item).__module__.startswith("whiflash_triton"):
            todo += vars(item).values()
    return sum(storages.values())


def describe_decoder(decoder) -> dict:
    """Target, drafters (taps are hidden_states indices), router, and memory in bytes. A drafter's weights exclude shared ones."""
    from .loading import default_lengths

    c, lengths = decoder.target.config, default_lengths(decoder.drafters, decoder.target.device)
    shared = tensor_bytes(decoder.target)
    drafters = {
        name: {
            "taps": list(d.taps),
            "draft_length": {"default": lengths[name], "max": d.max_draft},
            "weight_bytes": tensor_bytes(decoder.target, d) - shared,
            "packed_bytes": tensor_bytes(decoder.target, d, packed=True) - tensor_bytes(decoder.target, packed=True),
            "cache_bytes": cache_bytes(d.cache),
        }
        for name, d in decoder.drafters.items()
    }
    target = {
        "family": c.family,
        "layers": c.num_layers,
        "hidden_size": c.hidden_size,
        "vocab_size": c.vocab_size,
        "dtype": str(decoder.target.dtype).removeprefix("torch."),
        "device": str(decoder.target.device),
        "weight_bytes": shared,
        "packed_bytes": tensor_bytes(decoder.target, packed=True),
        "cache_bytes": cache_bytes(decoder.work.cache),
        "max_cache_len": decoder.max_cache_len,
    }
    router = {"kind": type(decoder.router).__name__, "arms": [str(arm) for arm in decoder.router.arms]}
    if hasattr(decoder.router, "threshold"):
        router["threshold"] = decoder.router.threshold
    return {"target": target, "drafters": drafters, "router": router}


def cache_bytes(cache: KVCache) -> int:
    """The committed rows' buffer and the scratch."""
    return cache.kv.nbytes + (0 if cache.scratch is None else cache.scratch.nbytes)
