"""What a checkpoint is once it is loaded: configs, tensor names and shapes, the map of a reduced vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whiflash_triton.checkpoint_files import CheckpointError

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class TargetShape:
    """What a drafter must fit: decoder layers, hidden size, rows of the target's embedding table."""

    num_layers: int
    hidden_size: int
    vocab_size: int


@dataclass(frozen=True)
class DFlashConfig:
    """A DFlash drafter: Qwen3-style layers over a block of `block_size` slots, fed by the target's `taps`."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: dict  # {"rope_type", "rope_theta", ...}
    vocab_size: int  # rows of the target's embedding
    block_size: int  # anchor included
    mask_token_id: int
    taps: tuple[int, ...]  # hidden_states indices, in the file's concatenation order
    attention_bias: bool
    max_position_embeddings: int
    draft_vocab_size: int | None  # rows of an own or reduced head; None: the target's head
    num_target_layers: int | None = None  # written into the file: other engines derive defaults from it


@dataclass(frozen=True)
class Eagle3Config:
    """An EAGLE-3 drafter: one Llama-style layer over [embedding, feature], fed by the target's `taps`."""

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: dict
    vocab_size: int
    draft_vocab_size: int
    taps: tuple[int, ...]
    attention_bias: bool
    norm_before_residual: bool  # the residual is hidden_norm(h), not h
    norm_before_fc: bool  # input_norm over the concatenated features
    fc_norm: bool  # fc_norm.i over each feature
    norm_output: bool  # norm(h), not h, goes into the next draft step
    qk_norm: bool
    max_position_embeddings: int


@dataclass(frozen=True)
class RouterConfig:
    """A two-layer MLP, hidden -> GELU -> gain in acceptance length; the arm named `positive` runs above `threshold`."""

    hidden_size: int
    width: int
    threshold: float
    positive: str  # "diffusion": gain = diffusion minus autoregressive acceptance length; "autoregressive": the reverse
    hidden_is_normed: bool  # reads the hidden state after the target's final norm


def dflash_shapes(cfg: DFlashConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of z-lab's DFlash file (no embedding, no head)."""
    hidden = cfg.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(cfg.taps) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for n in range(cfg.num_layers):
        shapes |= layer_shapes(f"layers.{n}.", hidden, cfg, qk_norm=True)
    return shapes


def eagle3_shapes(cfg: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """Names and shapes of an EAGLE-3 head (no embedding)."""
    hidden, features = cfg.hidden_size, len(cfg.taps) * cfg.target_hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, features),
        "layers.0.hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        "lm_head.weight": (cfg.draft_vocab_size, hidden),
    }
    if cfg.norm_before_fc:
        shapes["input_norm.weight"] = (features,)
    if cfg.fc_norm:
        shapes |= {f"fc_norm.{i}.weight": (cfg.target_hidden_size,) for i in range(len(cfg.taps))}
    return shapes | layer_shapes("layers.0.", 2 * hidden, cfg, qk_norm=cfg.qk_norm)


def layer_shapes(prefix: str, width: int, cfg: Any, qk_norm: bool) -> dict[str, tuple[int, ...]]:
    """Names and shapes of one decoder layer whose q, k and v projections read `width` columns."""
    hidden, q, kv = cfg.hidden_size, cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q, width),
        "self_attn.k_proj.weight": (kv, width),
        "self_attn.v_proj.weight": (kv, width),
        "self_attn.o_proj.weight": (hidden, q),
        "mlp.gate_proj.weight": (cfg.intermediate_size, hidden),
        "mlp.up_proj.weight": (cfg.intermediate_size, hidden),
        "mlp.down_proj.weight": (hidden, cfg.intermediate_size),
    }
    if cfg.attention_bias:
        shapes |= {f"self_attn.{p}_proj.bias": (n,) for p, n in (("q", q), ("k", kv), ("v", kv), ("o", hidden))}
    if qk_norm:
        shapes |= {f"self_attn.{p}_norm.weight": (cfg.head_dim,) for p in "qk"}
    return {prefix + name: shape for name, shape in shapes.items()}


def check_tensors(state: dict[str, Tensor], shapes: dict[str, tuple[int, ...]], where: str) -> None:
    """Names, shapes and floating dtypes of `state` must be exactly `shapes`."""
    problems = {
        "unknown": [name for name in state if name not in shapes],
        "missing": [name for name in shapes if name not in state],
        "misshapen": [
            f"{name} {list(state[name].shape)} instead of {list(shape)}"
            for name, shape in shapes.items()
            if name in state and state[name].shape != shape
        ],
        "not floating point (quantised?)": [
            name for name in shapes if name in state and state[name].dtype not in FLOATS
        ],
    }  # fmt: skip
    if text := "; ".join(f"{kind} tensors: {', '.join(sorted(names))}" for kind, names in problems.items() if names):
        raise CheckpointError(
            f"{where}: {text}. Unknown tensors would be ignored by a lenient loader and change the drafts: "
            "check that config.json and weights belong together and that the drafter is of a supported kind"
        )


def draft_ids(d2t: Tensor | None, t2d: Tensor | None, size: int, vocab: int, where: str) -> Tensor:  # int64 [size], ascending
    """Absolute target ids of the `size` draft ids, from offsets `d2t` (id = i + d2t[i]); checked against mask `t2d`."""
    if size > vocab:
        raise CheckpointError(f"{where}: draft vocabulary {size} is larger than the target's {vocab}")
    ids = torch.arange(size)
    if d2t is None and size < vocab:
        raise CheckpointError(f"{where}: draft vocabulary {size} of {vocab} but no d2t map; export the file with its map")
    if d2t is not None:
        if d2t.shape != (size,) or d2t.is_floating_point() or d2t.dtype == torch.bool:
            raise CheckpointError(f"{where}: d2t is {d2t.dtype} {list(d2t.shape)}, expected integers [{size}]")
        if size < vocab and not d2t.any():
            raise CheckpointError(f"{where}: d2t is all zero though only {size} of {vocab} ids are drafted; broken file")
        ids = ids + d2t.long()
    check_ids(ids, vocab, f"{where}: d2t")
    if t2d is not None:
        if t2d.shape != (vocab,) or t2d.is_floating_point() or not torch.equal(t2d.bool().nonzero()[:, 0], ids):
            raise CheckpointError(
                f"{where}: t2d {list(t2d.shape)} and d2t name different tokens (vocabulary {vocab}); "
                "the head's rows do not match its map, export the file again"
            )
    return ids


def check_ids(ids: Tensor, vocab: int, where: str) -> None:
    """Draft ids must ascend strictly inside the target's vocabulary."""
    if not len(ids) or ids[0] < 0 or ids[-1] >= vocab or not (ids.diff() > 0).all():
        raise CheckpointError(f"{where} must name ascending target ids in 0..{vocab - 1}; the map is broken")
