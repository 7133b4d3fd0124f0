"""Every published drafter and router format -> our configs and tensor names, strictly; writers of those formats too.

Taps are Hugging Face `hidden_states` indices from here on, whatever a file's own convention is. Sources of the formats:
z-lab/dflash, vllm-project/speculators, DeepSpec (DFlash, arXiv 2602.06036); SafeAILab/EAGLE, SpecForge, AngelSlim,
speculators (EAGLE-3, arXiv 2503.01840); WhiFlash's neural router (arXiv 2606.07710).
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whiflash_triton.checkpoint_export import AUX, SIDECAR, Path_, save_dflash, save_eagle3, save_router
from whiflash_triton.checkpoint_files import (
    CheckpointError,
    dequantise,
    quantise_state,
    read_config,
    read_safetensors,
    read_tensors,
    resolve,
)
from whiflash_triton.checkpoint_formats import (
    CLASS_DEFAULTS,
    Fields,
    agreed,
    canonical,
    check_architecture,
    check_full_attention,
    count_layers,
    count_rows,
    head_dim,
    read_rope,
    resolve_taps,
    split_fused_qkv,
)
from whiflash_triton.checkpoint_schema import (
    FLAGS,
    DFlashConfig,
    Eagle3Config,
    RouterConfig,
    TargetShape,
    check_ids,
    check_tensors,
    dflash_shapes,
    draft_ids,
    eagle3_shapes,
)

__all__ = [
    "CheckpointError", "DFlashConfig", "Eagle3Config", "RouterConfig", "TargetShape", "load_dflash", "load_eagle3",
    "load_router", "quantise_state", "save_dflash", "save_eagle3", "save_router",
]  # fmt: skip

log = logging.getLogger(__name__)
_FITS = "the target has"


def load_dflash(
    path: Path_, *, target: TargetShape, taps: list[int] | None = None, rope_theta: float | None = None
) -> tuple[DFlashConfig, dict[str, Tensor]]:
    """A DFlash drafter from a hub id or folder (z-lab, speculators or DeepSpec layout).

    `taps` (hidden_states indices) and `rope_theta` override the file. Tensors keep their dtype (int8 files: float32)
    under z-lab's names, with `draft_ids` int64 [draft_vocab_size] for a head of its own (`lm_head.weight`) or one that
    takes only these rows of the target's. Raises CheckpointError for anything missing, unknown, unsupported or made
    for another target.
    """
    folder = resolve(path)
    raw = read_config(folder)
    where = str(folder)
    outer, layer = _layer_fields(raw, where, "dflash", "qwen3")
    nested = Fields(raw.get("dflash_config") or {}, f"{where}/config.json: dflash_config")
    outer.seen.add("dflash_config")
    check_architecture(outer, "a DFlash", "dflash")
    check_full_attention(outer, layer)
    if (folder / "mask_embedding.pt").exists():
        raise CheckpointError(f"{where}: mask_embedding.pt: a separate mask embedding is not supported")

    file, state = read_tensors(folder)
    where = f"{where}/{file}"
    state = canonical(state, where)
    layers = count_layers(state, where)
    _equal(where, "num_hidden_layers", layer.size("num_hidden_layers"), layers, "the file holds")
    hidden = layer.size("hidden_size")
    _equal(where, "hidden_size", hidden, target.hidden_size, _FITS)
    _equal(where, "target_hidden_size", outer.size("target_hidden_size", hidden), hidden, "the drafter needs")
    _equal(where, "num_target_layers", outer.size("num_target_layers", target.num_layers), target.num_layers, _FITS)
    heads = layer.size("num_attention_heads")
    kv_heads = layer.size("num_key_value_heads", heads)
    dim = head_dim(layer, state, heads, kv_heads, where)
    split_fused_qkv(state, heads * dim, kv_heads * dim, where)
    spelled = [
        ("target_layer_ids", nested.take("target_layer_ids", list, None), 1),
        ("target_layer_ids (top level)", outer.take("target_layer_ids", list, None), 1),
        ("aux_hidden_state_layer_ids", outer.take("aux_hidden_state_layer_ids", list, None), 0),
        ("eagle_aux_hidden_state_layer_ids", outer.take("eagle_aux_hidden_state_layer_ids", list, None), 0),
    ]
    vocab = layer.size("vocab_size")
    _equal(where, "vocab_size", vocab, target.vocab_size, _FITS)
    reduced = outer.size("draft_vocab_size", None)
    ids = _dflash_draft_ids(folder, state, reduced, vocab, where)
    config = DFlashConfig(
        hidden_size=hidden,
        intermediate_size=layer.size("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        rms_norm_eps=layer.take("rms_norm_eps", float, 1e-6),
        rope=read_rope(layer, rope_theta),
        vocab_size=vocab,
        block_size=agreed("block_size", int, outer, nested),
        mask_token_id=agreed("mask_token_id", int, outer, nested),
        taps=resolve_taps(where, spelled, dflash_default_taps(target.num_layers, layers), target, taps),
        attention_bias=layer.take("attention_bias", bool, False),
        max_position_embeddings=layer.size("max_position_embeddings", 2048),
        draft_vocab_size=None if ids is None else len(ids),
        num_target_layers=target.num_layers,
    )
    for fields in (outer, layer, nested):
        fields.finish()
    if config.block_size < 2:
        raise CheckpointError(f"{where}: block_size is {config.block_size}; it counts the anchor, so at least 2")
    if not 0 <= config.mask_token_id < target.vocab_size:
        raise CheckpointError(
            f"{where}: mask_token_id {config.mask_token_id} is outside the target's {vocab} embedding rows; "
            "the drafter belongs to another target, or its mask token was never added"
        )
    shapes = dflash_shapes(config)
    if "embed_tokens.weight" in state:
        shapes["embed_tokens.weight"] = (vocab, hidden)
    if "lm_head.weight" in state and ids is not None:
        shapes["lm_head.weight"] = (len(ids), hidden)
    check_tensors(state, shapes, where)
    return config, state if ids is None else state | {"draft_ids": ids}


def load_eagle3(
    path: Path_, *, target: TargetShape, taps: list[int] | None = None, rope_theta: float | None = None
) -> tuple[Eagle3Config, dict[str, Tensor]]:
    """An EAGLE-3 drafter from a hub id or folder (original EAGLE, SpecForge, AngelSlim or speculators layout).

    `taps` (hidden_states indices) and `rope_theta` override the file. Tensors keep their dtype (int8 files: float32)
    under speculators' names, with `draft_ids` int64 [draft_vocab_size], the absolute target ids of the head's rows. The
    head is never tied to the embedding. Raises CheckpointError as `load_dflash` does.
    """
    folder = resolve(path)
    raw = read_config(folder)
    where = str(folder)
    outer, layer = _layer_fields(raw, where, "eagle3", "llama")
    nested = Fields(raw.get("eagle_config") or {}, f"{where}/config.json: eagle_config")
    outer.seen.add("eagle_config")
    check_architecture(outer, "an EAGLE-3", "eagle-?3|^llamaforcausallm$")
    check_full_attention(outer, layer)

    file, state = read_tensors(folder)
    where = f"{where}/{file}"
    state = canonical(state, where)
    if (layers := count_layers(state, where)) != 1:
        raise CheckpointError(f"{where}: {layers} decoder layers; only one-layer EAGLE-3 heads are supported")
    layer.size("num_hidden_layers", 1)  # some files carry the target's count: the tensors decide
    hidden = layer.size("hidden_size")
    target_hidden = outer.size("target_hidden_size", hidden)
    _equal(where, "target_hidden_size", target_hidden, target.hidden_size, _FITS)
    heads = layer.size("num_attention_heads")
    kv_heads = layer.size("num_key_value_heads", heads)
    dim = head_dim(layer, state, heads, kv_heads, where)
    split_fused_qkv(state, heads * dim, kv_heads * dim, where)
    spelled = [
        ("eagle_config.eagle_aux_hidden_state_layer_ids", nested.take(AUX, list, None), 1),
        ("aux_hidden_states_layer_ids", outer.take("aux_hidden_states_layer_ids", list, None), 1),
        ("eagle_aux_hidden_state_layer_ids", outer.take(AUX, list, None), 0),
    ]
    flags = {flag: agreed(flag, bool, outer, nested, default=False) for flag in FLAGS}
    flags["fc_norm"] |= agreed("use_aux_norm", bool, outer, nested, default=False)  # its older name
    if "speculators_model_type" in raw and raw.get("norm_before_residual") is None:
        log.warning("%s: norm_before_residual is not given; taking false, speculators' default", where)
    if flags["norm_output"] and not flags["fc_norm"]:
        log.warning("%s: norm_output without fc_norm: older SpecForge exports meant plain EAGLE-3 by it", where)
    vocab = layer.size("vocab_size")
    _equal(where, "vocab_size", vocab, target.vocab_size, _FITS)
    if "lm_head.weight" not in state:
        raise CheckpointError(f"{where}: missing tensors: lm_head.weight (an EAGLE-3 head is never tied to embeddings)")
    size = outer.size("draft_vocab_size", count_rows(state["lm_head.weight"]))
    ids = draft_ids(state.pop("d2t", None), state.pop("t2d", None), size, vocab, where)
    usual = [2, target.num_layers // 2, target.num_layers - 3]
    config = Eagle3Config(
        hidden_size=hidden,
        target_hidden_size=target_hidden,
        intermediate_size=layer.size("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        rms_norm_eps=layer.take("rms_norm_eps", float, 1e-6),
        rope=read_rope(layer, rope_theta),
        vocab_size=vocab,
        draft_vocab_size=size,
        taps=resolve_taps(where, spelled, usual, target, taps),
        attention_bias=layer.take("attention_bias", bool, False),
        qk_norm="layers.0.self_attn.q_norm.weight" in state,
        max_position_embeddings=layer.size("max_position_embeddings", 2048),
        **flags,
    )
    stated = agreed("num_aux_hidden_states", int, outer, nested, default=len(config.taps))
    _equal(where, "num_aux_hidden_states", stated, len(config.taps), "the taps are")
    for fields in (outer, layer, nested):
        fields.finish()
    if config.norm_before_fc and config.fc_norm:
        raise CheckpointError(f"{where}: norm_before_fc and fc_norm exclude each other; correct config.json")
    shapes = eagle3_shapes(config)
    if hidden != target_hidden or "embed_tokens.weight" in state:  # a narrower drafter cannot borrow the target's
        shapes["embed_tokens.weight"] = (vocab, hidden)
    check_tensors(state, shapes, where)
    return config, state | {"draft_ids": ids}


def load_router(path: Path_, *, hidden_size: int) -> tuple[RouterConfig, dict[str, Tensor]]:
    """A neural router from a hub id, a folder (config.json optional) or one .safetensors file.

    Weights are found by shape, whatever their names: [M, H], [1, M] (or [M]), biases [M] and [1]. Returns
    w1 [M, H], b1 [M], w2 [M], b2 [1]. Raises CheckpointError when the shapes are missing or ambiguous.
    """
    source = resolve(path)
    raw: dict = {}
    if source.is_dir():
        raw = read_config(source) if (source / "config.json").exists() else {}
        files = sorted(source.glob("*.safetensors"))
        if len(files) != 1:
            raise CheckpointError(f"{source}: {len(files)} .safetensors files; pass the router's file itself")
        source = files[0]
    state = dequantise(read_safetensors(source), source)
    fields = Fields(raw, f"{source.parent}/config.json")
    weights = _router_weights(state, hidden_size, str(source))
    width = len(weights["b1"])
    for key in ("hidden_size", "input_size", "input_dim"):
        _equal(str(source), key, fields.size(key, hidden_size), hidden_size, _FITS)
    for key in ("width", "intermediate_size", "hidden_dim"):
        _equal(str(source), key, fields.size(key, width), width, "the file holds")
    for key in ("activation", "hidden_act"):
        _equal(str(source), key, fields.take(key, str, "gelu"), "gelu", "the router needs")
    config = RouterConfig(
        hidden_size=hidden_size,
        width=width,
        threshold=fields.take("threshold", float, 1.0),
        positive=fields.take("positive", str, "diffusion"),
        hidden_is_normed=fields.take("hidden_is_normed", bool, True),
    )
    fields.finish()
    if config.positive not in ("diffusion", "autoregressive"):
        raise CheckpointError(f"{source}: positive is {config.positive!r}; write 'diffusion' or 'autoregressive'")
    log.info("%s: %s", source, config)
    return config, weights


def dflash_default_taps(num_layers: int, points: int) -> list[int]:
    """z-lab's default taps as hidden_states indices: `points` layers spread evenly from 1 to num_layers - 3."""
    if points == 1:
        return [num_layers // 2 + 1]
    return [round(1 + k * (num_layers - 4) / (points - 1)) + 1 for k in range(points)]  # rounds half to even, as z-lab


def _layer_fields(raw: dict, where: str, kind: str, model_type: str) -> tuple[Fields, Fields]:
    """(outer, layer) fields: the same dictionary in a flat config, the nested one in a speculators config."""
    outer = Fields(raw, f"{where}/config.json")
    speculator = raw.get("speculators_model_type")
    if speculator not in (None, kind):
        raise CheckpointError(f"{outer.where}: speculators_model_type is {speculator!r}, expected {kind!r}")
    nested = "transformer_layer_config" in raw
    outer.seen.add("transformer_layer_config")
    place = f"{outer.where}: transformer_layer_config"
    layer = Fields(raw["transformer_layer_config"], place) if nested else outer
    if (given := layer.take("model_type", str, model_type)) not in CLASS_DEFAULTS:
        raise CheckpointError(f"{layer.where}: model_type {given!r} is not supported; use one of {list(CLASS_DEFAULTS)}")
    if nested:
        layer.defaults = CLASS_DEFAULTS[given]
    return outer, layer


def _equal(where: str, key: str, given: Any, expected: Any, who: str) -> None:
    if given != expected:
        raise CheckpointError(f"{where}: {key} is {given} but {who} {expected}; config, weights and target must belong together")


def _dflash_draft_ids(folder: Path, state: dict[str, Tensor], size: int | None, vocab: int, where: str) -> Tensor | None:
    """Target ids of a reduced or own head (takes d2t and t2d out of `state`), None for the target's whole head."""
    d2t, t2d = state.pop("d2t", None), state.pop("t2d", None)
    sidecar = folder / SIDECAR
    if sidecar.is_file():
        if d2t is not None or "lm_head.weight" in state:
            raise CheckpointError(f"{sidecar}: the weights already hold a head or a map of their own; remove one")
        tensors = read_safetensors(sidecar)
        ids = tensors.get("draft_ids")
        if list(tensors) != ["draft_ids"] or ids.dtype not in (torch.int32, torch.int64) or ids.ndim != 1:
            raise CheckpointError(f"{sidecar}: expected one integer tensor draft_ids, found {sorted(tensors)}")
        check_ids(ids.long(), vocab, f"{sidecar}: draft_ids")
        if size not in (None, vocab):
            _equal(str(sidecar), "draft_vocab_size", size, len(ids), "draft_ids has")
        return ids.long()
    if d2t is None and t2d is None and "lm_head.weight" not in state and size in (None, vocab):
        return None
    sized = state.get("lm_head.weight", d2t)
    return draft_ids(d2t, t2d, size or (vocab if sized is None else count_rows(sized)), vocab, where)


def _router_weights(state: dict[str, Tensor], hidden: int, where: str) -> dict[str, Tensor]:
    """w1 [M, H], b1 [M], w2 [M], b2 [1] out of four tensors of any names."""
    shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in sorted(state.items()))
    wanted = f"expected exactly [M, {hidden}], [M], [1, M] (or a second [M], its bias named so) and [1]; found {shapes}"
    matrices = [name for name, tensor in state.items() if tensor.ndim == 2 and tensor.shape[1] == hidden]
    tall = [name for name in matrices if len(state[name]) > 1]
    if len(state) != 4 or len(tall) != 1:
        raise CheckpointError(f"{where}: {wanted}")
    rest = {name: tensor for name, tensor in state.items() if name != tall[0]}
    width = len(state[tall[0]])
    last = [name for name, tensor in rest.items() if tensor.shape == (1,)]
    out = [name for name, tensor in rest.items() if tensor.shape == (1, width)]
    vectors = [name for name, tensor in rest.items() if tensor.shape == (width,)]
    if not out and len(vectors) == 2:  # both [M]: only the names tell the bias from the second weight
        out = [name for name in vectors if not name.rsplit(".", 1)[-1].startswith("b")]
        vectors = [name for name in vectors if name not in out]
    if len(last) != 1 or len(out) != 1 or len(vectors) != 1:
        raise CheckpointError(f"{where}: {wanted}")
    if not all(tensor.is_floating_point() for tensor in state.values()):
        raise CheckpointError(f"{where}: weights must be floating point; found {[str(t.dtype) for t in state.values()]}")
    return {"w1": state[tall[0]], "b1": state[vectors[0]], "w2": state[out[0]].reshape(-1), "b2": state[last[0]]}
