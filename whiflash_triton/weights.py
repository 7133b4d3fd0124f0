"""Load a target: hub id or folder of safetensors, a live PreTrainedModel (weights shared), or a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch

from .layers import Linear
from .target import Layer, Target, TargetConfig, target_config

PACK_BYTES = 2 << 30
Getter = Callable[[str], torch.Tensor]


def load_target(source, device: torch.device, dtype: torch.dtype, revision: str | None = None) -> tuple[Target, object]:
    """source: hub id, folder, `.gguf` file or live PreTrainedModel -> (Target, transformers config).

    A live model keeps its own dtype and device and lends its weights; files are read once and their q, k, v and gate, up are
    laid side by side. Errors: FileNotFoundError, ValueError (unsupported model, missing or unknown tensors).
    """
    if hasattr(source, "state_dict") and hasattr(source, "config"):
        return _from_live(source), source.config
    path = Path(source)
    if path.suffix == ".gguf":
        from .gguf_format import read_gguf

        config, tensors = read_gguf(path)
        return _packed(_from_tensors(config, tensors.keys(), tensors.__getitem__, device, dtype)), config
    folder = resolve_folder(str(source), revision)
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    names, get = open_safetensors(folder)
    return _packed(_from_tensors(config, names, get, device, dtype)), config


def _packed(target: Target) -> Target:
    """Pack the weights of a small target for verification on CPU; a large one would not fit twice."""
    if target.weight_bytes() <= PACK_BYTES:
        target.pack()
    return target


def resolve_folder(source: str, revision: str | None = None) -> Path:
    """Folder as it is, or the snapshot of a hub id; FileNotFoundError says what to do when neither is there."""
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise FileNotFoundError(f"{path} is a file: give the folder that holds config.json, a .gguf file, or a hub id")
    from huggingface_hub import snapshot_download

    try:
        patterns = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.txt"]
        return Path(snapshot_download(source, revision=revision, allow_patterns=patterns))
    except Exception as error:
        raise FileNotFoundError(
            f"{source!r} is neither a local folder nor a hub id that could be fetched ({type(error).__name__}): "
            "check the name and the network, or download it and give the folder"
        ) from error


def open_safetensors(folder: Path) -> tuple[set[str], Getter]:
    """Names and a reader over `model.safetensors` or the shards of `model.safetensors.index.json`."""
    from safetensors import SafetensorError, safe_open

    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.exists():
        where = json.loads(index.read_text())["weight_map"]
        files = {name: folder / file for name, file in where.items()}
    elif single.exists():
        files = None
    else:
        raise FileNotFoundError(f"{folder} holds no model.safetensors and no index: save the target with safetensors")
    handles: dict[Path, object] = {}

    def handle(file: Path):
        if file not in handles:
            try:
                handles[file] = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{file} is corrupt, truncated or missing ({error}): download it again") from error
        return handles[file]

    if files is None:
        files = dict.fromkeys(handle(single).keys(), single)
    return set(files), lambda name: handle(files[name]).get_tensor(name)


def _layer_names(c: TargetConfig, i: int) -> dict[str, list[str]]:
    """Our names -> the tensor names of layer i, side by side ones in order."""
    p = f"model.layers.{i}."
    names = {
        "input_norm": [p + "input_layernorm.weight"],
        "qkv": [p + f"self_attn.{x}_proj.weight" for x in "qkv"],
        "o": [p + "self_attn.o_proj.weight"],
        "post_norm": [p + "post_attention_layernorm.weight"],
        "gate_up": [p + "mlp.gate_proj.weight", p + "mlp.up_proj.weight"],
        "down": [p + "mlp.down_proj.weight"],
    }
    if c.qk_norm:
        names["q_norm"], names["k_norm"] = [p + "self_attn.q_norm.weight"], [p + "self_attn.k_norm.weight"]
    for flag, keys in ((c.qkv_bias, ["qkv"]), (c.o_bias, ["o"]), (c.mlp_bias, ["gate_up", "down"])):
        for key in keys if flag else []:
            names[key + "_bias"] = [n.removesuffix("weight") + "bias" for n in names[key]]
    return names


def _build(c: TargetConfig, take: Callable[[list[str]], list[torch.Tensor]]) -> Target:
    """take(names) -> one fused tensor or the tensors themselves."""

    def one(names: dict, key: str) -> torch.Tensor | None:
        return take(names[key])[0] if key in names else None

    def linear(names: dict, key: str) -> Linear:
        weights = take(names[key])
        return Linear(weights, take(names[key + "_bias"]) if key + "_bias" in names else None)

    layers = []
    for i in range(c.num_layers):
        n = _layer_names(c, i)
        layers.append(
            Layer(
                input_norm=one(n, "input_norm"),
                qkv=linear(n, "qkv"),
                q_norm=one(n, "q_norm"),
                k_norm=one(n, "k_norm"),
                o=linear(n, "o"),
                post_norm=one(n, "post_norm"),
                gate_up=linear(n, "gate_up"),
                down=linear(n, "down"),
            )
        )
    embed = take(["model.embed_tokens.weight"])[0]
    head = embed if c.tied else take(["lm_head.weight"])[0]
    return Target(c, embed, layers, take(["model.norm.weight"])[0], head)


def _expected(c: TargetConfig) -> set[str]:
    names = {"model.embed_tokens.weight", "model.norm.weight"} | (set() if c.tied else {"lm_head.weight"})
    for i in range(c.num_layers):
        names.update(n for group in _layer_names(c, i).values() for n in group)
    return names


def _check_names(c: TargetConfig, names: set[str]) -> None:
    expected = _expected(c)
    ignorable = {n for n in names if n.endswith("rotary_emb.inv_freq")} | ({"lm_head.weight"} if c.tied else set())
    missing, unknown = sorted(expected - names), sorted(names - expected - ignorable)
    if missing or unknown:
        raise ValueError(
            f"the checkpoint does not fit a {c.family} decoder of {c.num_layers} layers: "
            f"missing {missing[:5]}{'...' if len(missing) > 5 else ''}, unknown {unknown[:5]}{'...' if len(unknown) > 5 else ''}"
        )


def _from_tensors(config, names, get: Getter, device: torch.device, dtype: torch.dtype) -> Target:
    c = target_config(config)
    _check_names(c, set(names))

    def take(group: list[str]) -> list[torch.Tensor]:
        parts = [get(name) for name in group]
        if len(parts) == 1:
            return [parts[0].to(device=device, dtype=dtype, copy=False).contiguous()]
        fused = torch.empty(sum(p.shape[0] for p in parts), *parts[0].shape[1:], dtype=dtype, device=device)
        for piece, part in zip(fused.split([p.shape[0] for p in parts]), parts, strict=True):
            piece.copy_(part)
        return [fused]

    return _check_shapes(_build(c, take))


def _from_live(model) -> Target:
    c = target_config(model.config)
    tensors = dict(model.named_parameters())
    if c.tied:
        tensors.setdefault("lm_head.weight", tensors.get("model.embed_tokens.weight"))
    _check_names(c, set(tensors))
    with torch.no_grad():
        return _check_shapes(_build(c, lambda group: [tensors[name].detach() for name in group]))


def _check_shapes(target: Target) -> Target:
    c = target.config
    if tuple(target.embed.shape) != (c.vocab_size, c.hidden_size):
        raise ValueError(f"embedding is {tuple(target.embed.shape)}, the config says {(c.vocab_size, c.hidden_size)}")
    rows = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
    for i, layer in enumerate(target.layers):
        got = sum(w.shape[0] for w in layer.qkv.weights)
        if got != rows:
            raise ValueError(f"layer {i}: q, k and v have {got} rows, heads times head_dim need {rows}")
    return target
