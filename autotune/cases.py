"""What is measured: every kernel at the true shapes of four published models, with the inputs a round gives it.

A case is one call of a kernel's launch wrapper. Cases whose calls ask `lookup.pick` for the same key form a bucket; one
configuration must serve them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
KEPT = 6  # rows a round commits
ROUTER_WIDTH = 256


class Model(NamedTuple):
    """Sizes from the published config.json of a target and its drafters; features: taps of both drafters together."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    draft_layers: int
    draft_vocab: int
    features: int


MODELS = {
    "qwen3-4b": Model(36, 2560, 32, 8, 128, 151936, 5, 32000, 6),
    "qwen3-8b": Model(36, 4096, 32, 8, 128, 151936, 5, 32000, 6),
    "llama-3.1-8b": Model(32, 4096, 32, 8, 128, 128256, 5, 32000, 6),
    "smollm2-135m": Model(30, 576, 9, 3, 64, 49152, 3, 12288, 6),
}


@dataclass(frozen=True)
class Case:
    """``name`` lists the models that share this shape, and the sizes."""

    kernel: str
    model: Model
    dtype: str
    sizes: dict[str, int]
    name: str


class Call(NamedTuple):
    """A launch ready to run, and the bytes of its inputs and of what it writes in place."""

    run: Callable[[], Any]
    nbytes: int


def build(case: Case, device: torch.device) -> Call:
    """The case's call with inputs of its own. On a CPU they are left unwritten: only shapes and types are looked at there."""
    arguments = _INPUTS[case.kernel](case.model, DTYPES[case.dtype], device, **case.sizes)
    tensors = [x for x in arguments.values() if isinstance(x, Tensor)]
    return Call(lambda: _wrapper(case.kernel)(**arguments), sum(x.numel() * x.element_size() for x in tensors))


def all_cases() -> Iterator[Case]:
    """Every case, those that a bf16 round spends most time in first."""
    for dtype in ("bf16", "fp16", "fp32"):
        for nodes in (16, 64, 8, 1, 256) if dtype != "fp32" else (1,):
            for rows in (4096, 32768):
                yield from _cases("tree_attention", dtype, "heads kv_heads head_dim", nodes=nodes, rows=rows)
        if dtype != "bf16":  # no other kernel's key names a dtype
            continue
        for rows, drawn in ((16, 0), (1, 0), (64, 0), (16, 1)):
            yield from _cases("block_sampling", dtype, "vocab", rows=rows, top_k=0, drawn=drawn)
        yield from _cases("block_sampling", dtype, "draft_vocab", rows=4, top_k=4, drawn=0)
        for top_k in (16, 64):
            yield from _cases("block_sampling", dtype, "vocab", rows=15, top_k=top_k, drawn=0)
        for nodes in (16, 64):
            yield from _cases("kv_compaction", dtype, "layers kv_heads head_dim hidden", nodes=nodes)
        for rows in (KEPT, 64, 1024):
            yield from _cases("kv_injection", dtype, "draft_layers kv_heads head_dim", rows=rows)
        yield from _cases("router_scoring", "fp32", "hidden")
        for nodes in (16, 64, 256):
            yield from list(_cases("tree_build", "fp32", "", nodes=nodes))
            yield from list(_cases("tree_walk", "fp32", "", nodes=nodes))


def _cases(kernel: str, dtype: str, fields: str, **sizes: int) -> Iterator[Case]:
    """One case for the models that agree in the named fields."""
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, model in MODELS.items():
        groups.setdefault(tuple(getattr(model, field) for field in fields.split()), []).append(name)
    shown = " ".join(f"{name}={value}" for name, value in sizes.items())
    for names in groups.values():
        yield Case(kernel, MODELS[names[0]], dtype, sizes, f"{'+'.join(names)} {shown}".strip())


def _wrapper(kernel: str) -> Callable:
    from importlib import import_module

    return getattr(import_module(f"whiflash_triton.kernels.{kernel}"), "router_mlp" if kernel == "router_scoring" else kernel)


def _random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    x = torch.empty(shape, dtype=dtype, device=device)
    return x.normal_() if x.is_cuda else x


def _ints(values: list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def _tree(nodes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Parents and depths int32 [nodes + 1] of a tree whose inner nodes have two children."""
    parents, depths = [-1], [0]
    for node in range(1, nodes + 1):
        parents.append((node - 1) // 2)
        depths.append(depths[parents[-1]] + 1)
    return _ints(parents, device), _ints(depths, device)


def _tree_attention(m: Model, dtype: torch.dtype, device: torch.device, nodes: int, rows: int) -> dict[str, Any]:
    """A verification over a cache three quarters full: ``nodes`` counts the anchor."""
    from whiflash_triton.kernels.tree_build import ancestor_words_torch

    parents, depths = _tree(nodes - 1, device)
    kv = _random((2, 1, m.kv_heads, rows, m.head_dim), dtype, device)
    tree = _random((2, 1, m.kv_heads, nodes, m.head_dim), dtype, device)
    return {
        "q": _random((1, nodes, m.heads, m.head_dim), dtype, device),
        **{"k_cache": kv[0], "v_cache": kv[1], "cache_len": _ints([rows * 3 // 4], device)},
        **{"k_tree": tree[0], "v_tree": tree[1], "words": ancestor_words_torch(parents.cpu()).to(device)},
        **{"scale": m.head_dim**-0.5, "depths": depths},
    }


def _block_sampling(m: Model, dtype: torch.dtype, device: torch.device, rows: int, top_k: int, drawn: int) -> dict[str, Any]:
    vocab = m.draft_vocab if top_k == 4 else m.vocab  # four candidates a node: an EAGLE-3 tree over its own vocabulary
    keyed = {"seed": torch.tensor([7], device=device), "positions": torch.arange(rows, device=device)} if drawn else {}
    return {"logits": _random((rows, vocab), dtype, device), "top_k": top_k, **keyed}


def _kv_compaction(m: Model, dtype: torch.dtype, device: torch.device, nodes: int) -> dict[str, Any]:
    rows = nodes + 1
    path = [node * (nodes // KEPT) for node in range(KEPT)]
    return {
        "scratch_kv": _random((m.layers, 2, 1, m.kv_heads, rows, m.head_dim), dtype, device),
        "cache_kv": _random((m.layers, 2, 1, m.kv_heads, 2048, m.head_dim), dtype, device),
        "path": _ints(path + [-1] * (rows - KEPT), device).view(1, rows),
        **{"path_len": _ints([KEPT], device), "start": _ints([1024], device)},
        "scratch_features": _random((m.features, 1, rows, m.hidden), dtype, device),
        "features": _random((m.features, 1, rows, m.hidden), dtype, device),
        "feature_start": _ints([0], device),
    }


def _kv_injection(m: Model, dtype: torch.dtype, device: torch.device, rows: int) -> dict[str, Any]:
    return {
        "projected": _random((1, rows, m.draft_layers, 2, m.kv_heads, m.head_dim), dtype, device),
        "k_norm": _random((m.draft_layers, m.head_dim), dtype, device),
        **{name: _random((rows, m.head_dim), torch.float32, device) for name in ("cos", "sin")},
        "cache_kv": _random((m.draft_layers, 2, 1, m.kv_heads, 4096, m.head_dim), dtype, device),
        "start": _ints([2048], device),
        "eps": 1e-6,
    }


def _router_scoring(m: Model, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    shapes = {"hidden": (1, m.hidden), "w1": (ROUTER_WIDTH, m.hidden), "b1": (ROUTER_WIDTH,), "w2": (ROUTER_WIDTH,), "b2": (1,)}
    return {name: _random(shape, dtype, device) for name, shape in shapes.items()} | {"threshold": 0.0}


def _tree_walk(m: Model, dtype: torch.dtype, device: torch.device, nodes: int) -> dict[str, Any]:
    """The target chooses the first child of every node: the walk goes down to a leaf."""
    parents, _ = _tree(nodes, device)
    tokens = torch.arange(nodes + 1, device=device)[None]
    return {"tokens": tokens, "parents": parents[None], "choices": tokens * 2 + 1}


def _tree_build(m: Model, dtype: torch.dtype, device: torch.device, nodes: int) -> dict[str, Any]:
    log_probs = _random((15, nodes), torch.float32, device)
    if log_probs.is_cuda:
        log_probs = (log_probs * 3).log_softmax(-1).sort(-1, descending=True).values
    tokens = torch.zeros(15, nodes, dtype=torch.int64, device=device)
    return {"log_probs": log_probs, "tokens": tokens, "anchor": torch.tensor([1], device=device), "budget": nodes}


_INPUTS = {
    "tree_attention": _tree_attention,
    "block_sampling": _block_sampling,
    "kv_compaction": _kv_compaction,
    "kv_injection": _kv_injection,
    "router_scoring": _router_scoring,
    "tree_walk": _tree_walk,
    "tree_build": _tree_build,
}
KERNELS = tuple(_INPUTS)
