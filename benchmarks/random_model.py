"""Decoders with randomly initialised weights in given shapes, made on the device itself: what they draft and write is noise, what
they read and compute is the real model's."""

from __future__ import annotations

import torch

from whiflash_triton.checkpoint_schema import dflash_shapes, eagle3_shapes
from whiflash_triton.decoder import WhiFlashDecoder
from whiflash_triton.drafters.dflash import DFlashDrafter
from whiflash_triton.drafters.eagle3 import Eagle3Drafter
from whiflash_triton.layers import Linear
from whiflash_triton.routers.base import Router
from whiflash_triton.target import Layer, Target, TargetConfig

from .shapes import Model


def _weight(device: torch.device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A matrix that keeps its input's scale, a norm of ones."""
    out = torch.empty(shape, device=device, dtype=dtype)
    return out.normal_(0, shape[-1] ** -0.5) if len(shape) > 1 else out.fill_(1)


def random_target(c: TargetConfig, device: torch.device, dtype: torch.dtype) -> Target:
    """Of a family without biases."""

    def w(*shape: int) -> torch.Tensor:
        return _weight(device, dtype, *shape)

    h, queries, keys = c.hidden_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    layers = [
        Layer(
            input_norm=w(h),
            qkv=Linear([w(queries + 2 * keys, h)]),
            q_norm=w(c.head_dim) if c.qk_norm else None,
            k_norm=w(c.head_dim) if c.qk_norm else None,
            o=Linear([w(h, queries)]),
            post_norm=w(h),
            gate_up=Linear([w(2 * c.intermediate_size, h)]),
            down=Linear([w(h, c.intermediate_size)]),
        )
        for _ in range(c.num_layers)
    ]
    embed = w(c.vocab_size, h)
    return Target(c, embed, layers, w(h), embed if c.tied else w(c.vocab_size, h))


def random_dflash(model: Model, target: Target, rows: int, scratch: bool | None = None) -> DFlashDrafter:
    """rows: committed rows its cache holds; scratch as in KVCache."""
    c, tensors = model.dflash, _tensors(dflash_shapes(model.dflash), target)
    if c.draft_vocab_size is not None:
        tensors["draft_ids"] = torch.arange(c.draft_vocab_size)
    return DFlashDrafter(c, tensors, target, rows, scratch=scratch)


def random_eagle3(model: Model, target: Target, rows: int, scratch: bool | None = None) -> Eagle3Drafter:
    c, tensors = model.eagle3, _tensors(eagle3_shapes(model.eagle3), target)
    return Eagle3Drafter(c, tensors | {"draft_ids": torch.arange(c.draft_vocab_size)}, target, rows, scratch=scratch)


def _tensors(shapes: dict[str, tuple[int, ...]], target: Target) -> dict[str, torch.Tensor]:
    return {name: _weight(target.device, target.dtype, *shape) for name, shape in shapes.items()}


def random_decoder(model: Model, target: Target, rows: int, router: Router) -> WhiFlashDecoder:
    """Both drafters over `target`, caches of `rows`; on a CPU too their draft rows wait in scratch, as on CUDA."""
    drafters = {"dflash": random_dflash(model, target, rows, True), "eagle3": random_eagle3(model, target, rows, True)}
    decoder = WhiFlashDecoder(target, None, drafters, router, rows, [])
    if not decoder.work.cache.uses_scratch:
        decoder.work.replace_cache(target.new_cache(rows, decoder.work.cache.draft_rows, scratch=True))
    return decoder
