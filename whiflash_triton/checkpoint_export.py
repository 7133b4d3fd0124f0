"""Writers of the published formats: z-lab's DFlash, SpecForge's EAGLE-3, and our router folder."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from whiflash_triton.checkpoint_files import CheckpointError, write_checkpoint, write_safetensors
from whiflash_triton.checkpoint_schema import (
    FLAGS,
    DFlashConfig,
    Eagle3Config,
    RouterConfig,
    check_ids,
    check_tensors,
    dflash_shapes,
    draft_ids,
    eagle3_shapes,
)

SIDECAR = "draft_vocab.safetensors"  # one tensor, draft_ids int32: the rows of the target's head that a DFlash uses
AUX = "eagle_aux_hidden_state_layer_ids"
Path_ = str | os.PathLike


def save_dflash(
    folder: Path_, cfg: DFlashConfig, state: dict[str, Tensor], int8: bool = False, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write z-lab's DFlash layout: flat config.json, model.safetensors (58 tensors for 5 layers) and, when `state`
    holds `draft_ids`, the sidecar draft_vocab.safetensors.

    Floating tensors are written as `dtype`; `int8` stores matrices as int8 rows with a float32 `<name>.scale` [rows],
    which only this package reads. Raises CheckpointError if `state` does not fit `cfg`.
    """
    state = dict(state)
    ids = state.pop("draft_ids", None)
    if cfg.num_target_layers is None or min(cfg.taps) < 1:
        raise CheckpointError(f"{folder}: this layout needs num_target_layers and taps of at least 1, found {cfg}")
    if cfg.draft_vocab_size != (None if ids is None else len(ids)):
        raise CheckpointError(f"{folder}: draft_vocab_size {cfg.draft_vocab_size} but draft_ids {ids}")
    if ids is not None:
        check_ids(ids, cfg.vocab_size, f"{folder}: draft_ids")
    check_tensors(state, dflash_shapes(cfg), str(folder))
    config = _common_config(cfg, dtype, "DFlashDraftModel", "qwen3", cfg.num_layers) | {
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": cfg.block_size,
        "dflash_config": {"mask_token_id": cfg.mask_token_id, "target_layer_ids": [tap - 1 for tap in cfg.taps]},
        "layer_types": ["full_attention"] * cfg.num_layers,
        "max_window_layers": cfg.num_layers,
        "num_target_layers": cfg.num_target_layers,
    }
    write_checkpoint(folder, config, state, int8=int8, dtype=dtype)
    (Path(folder) / SIDECAR).unlink(missing_ok=True)
    if ids is not None:
        write_safetensors(Path(folder) / SIDECAR, {"draft_ids": ids.to(torch.int32)})


def save_eagle3(
    folder: Path_, cfg: Eagle3Config, state: dict[str, Tensor], int8: bool = False, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write SpecForge's EAGLE-3 layout: `midlayer.` names, d2t offsets, t2d mask, eagle_config's taps as layer outputs.

    Embeddings are written only if `state` holds them (a drafter narrower than its target). `int8`, `dtype` and errors
    as in `save_dflash`.
    """
    state = dict(state)
    ids = state.pop("draft_ids", torch.arange(cfg.vocab_size))
    check_ids(ids, cfg.vocab_size, f"{folder}: draft_ids")
    shapes = eagle3_shapes(cfg)
    if cfg.hidden_size != cfg.target_hidden_size or "embed_tokens.weight" in state:
        shapes["embed_tokens.weight"] = (cfg.vocab_size, cfg.hidden_size)
    check_tensors(state, shapes, str(folder))
    if min(cfg.taps) < 1:
        raise CheckpointError(f"{folder}: this layout cannot name the embedding output; taps {cfg.taps} must be >= 1")
    t2d = torch.zeros(cfg.vocab_size, dtype=torch.bool)
    t2d[ids] = True
    d2t = ids - torch.arange(len(ids))
    draft_ids(d2t, t2d, cfg.draft_vocab_size, cfg.vocab_size, str(folder))  # what we write, we can read
    model_type = "qwen3" if cfg.qk_norm else "llama"
    config = _common_config(cfg, dtype, "LlamaForCausalLMEagle3", model_type, 1) | {
        "draft_vocab_size": cfg.draft_vocab_size,
        "eagle_config": {AUX: [tap - 1 for tap in cfg.taps], "use_aux_hidden_state": True},
        "target_hidden_size": cfg.target_hidden_size,
        **{flag: getattr(cfg, flag) for flag in FLAGS},
    }
    renamed = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in state.items()}
    write_checkpoint(folder, config, renamed | {"d2t": d2t, "t2d": t2d}, int8=int8, dtype=dtype)


def save_router(
    folder: Path_, cfg: RouterConfig, state: dict[str, Tensor], int8: bool = False, dtype: torch.dtype = torch.float32
) -> None:
    """Write a router folder: config.json and model.safetensors with fc1 [M, H] and fc2 [1, M], weights and biases."""
    shapes = {"w1": (cfg.width, cfg.hidden_size), "b1": (cfg.width,), "w2": (cfg.width,), "b2": (1,)}
    check_tensors(state, shapes, str(folder))
    config = {
        "hidden_size": cfg.hidden_size,
        "width": cfg.width,
        "activation": "gelu",
        "threshold": cfg.threshold,
        "positive": cfg.positive,
        "hidden_is_normed": cfg.hidden_is_normed,
    }
    tensors = {
        "fc1.weight": state["w1"],
        "fc1.bias": state["b1"],
        "fc2.weight": state["w2"][None],
        "fc2.bias": state["b2"],
    }
    write_checkpoint(folder, config, tensors, int8=int8, dtype=dtype)


def _common_config(cfg: DFlashConfig | Eagle3Config, dtype: torch.dtype, name: str, model_type: str, layers: int) -> dict:
    theta, kind = cfg.rope["rope_theta"], cfg.rope["rope_type"]
    scaling = {key: value for key, value in cfg.rope.items() if key != "rope_theta"}
    return {
        "architectures": [name],
        "model_type": model_type,
        "attention_bias": cfg.attention_bias,
        "attention_dropout": 0.0,
        "dtype": str(dtype).removeprefix("torch."),
        "head_dim": cfg.head_dim,
        "hidden_act": "silu",
        "hidden_size": cfg.hidden_size,
        "intermediate_size": cfg.intermediate_size,
        "max_position_embeddings": cfg.max_position_embeddings,
        "num_attention_heads": cfg.num_heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": cfg.num_kv_heads,
        "rms_norm_eps": cfg.rms_norm_eps,
        "rope_scaling": None if kind == "default" else scaling,
        "rope_theta": theta,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": cfg.vocab_size,
    }
