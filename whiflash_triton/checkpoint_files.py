"""Checkpoint folders on disk: find the files, read tensors strictly, write them atomically, int8 rows with a scale."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

PATTERNS = ["config.json", "*.safetensors", "*.safetensors.index.json", "pytorch_model.bin", "mask_embedding.pt"]


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged, made for another target, or of a kind that is not supported."""


def resolve(path: str | os.PathLike) -> Path:
    """Local folder or file for `path`: itself when it exists, else a Hugging Face hub id, downloaded or cached."""
    local = Path(path).expanduser()
    if local.exists():
        return local
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)):
        raise CheckpointError(f"{path}: no such file or folder, and not a hub id of the form owner/name")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(path), allow_patterns=PATTERNS))
    except (OSError, ValueError) as error:  # every hub error is one of the two
        raise CheckpointError(
            f"{path}: not a local folder, and the hub download failed ({type(error).__name__}: {error}); "
            "check the name and the network, or download the folder and pass its path"
        ) from error


def read_config(folder: Path) -> dict:
    """config.json of `folder` as a dictionary."""
    file = folder / "config.json"
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: is a file; pass the folder that holds config.json and the weights")
    if not file.is_file():
        raise CheckpointError(f"{file}: missing; a drafter folder needs config.json beside its weights")
    return _read_json(file)


def read_tensors(folder: Path) -> tuple[str, dict[str, Tensor]]:
    """(file name, tensors) of a folder: model.safetensors, a sharded index, or pytorch_model.bin, in that order.

    int8 matrices come back as float32, multiplied by their `<name>.scale` [rows]; every other weight keeps its dtype.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    binary = folder / "pytorch_model.bin"
    if single.is_file():
        return single.name, dequantise(read_safetensors(single), single)
    if index.is_file():
        return index.name, dequantise(_read_shards(index), index)
    if binary.is_file():
        return binary.name, dequantise(_read_binary(binary), binary)
    raise CheckpointError(f"{folder}: no {single.name}, {index.name} or {binary.name}; is the download complete?")


def read_safetensors(file: Path) -> dict[str, Tensor]:
    """All tensors of one .safetensors file."""
    try:
        with safe_open(file, framework="pt") as handle:
            return {name: handle.get_tensor(name) for name in handle.keys()}
    except Exception as error:
        raise CheckpointError(f"{file}: truncated or corrupt ({error}); download or export it again") from error


def _read_binary(file: Path) -> dict[str, Tensor]:
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{file}: truncated, corrupt or not plain tensors ({error}); download it again") from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise CheckpointError(f"{file}: is not a dictionary of tensors; export the plain state dict")
    return state


def _read_shards(index: Path) -> dict[str, Tensor]:
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(f, str) for f in weight_map.values()):
        raise CheckpointError(f"{index}: has no weight_map of file names; download it again")
    state: dict[str, Tensor] = {}
    for shard in sorted(set(weight_map.values())):
        if not (index.parent / shard).is_file():
            raise CheckpointError(f"{index.parent / shard}: missing, but {index.name} lists it; complete the download")
        state |= read_safetensors(index.parent / shard)
    if lost := sorted(weight_map.keys() ^ state.keys()):
        raise CheckpointError(f"{index}: the index and its shards disagree about {', '.join(lost)}; download them again")
    return state


def _read_json(file: Path) -> dict:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read as JSON ({error}); download or export it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: holds {type(value).__name__}, expected a JSON object")
    return value


def dequantise(state: dict[str, Tensor], file: Path) -> dict[str, Tensor]:
    """`state` with every int8 matrix [rows, columns] times its float32 `<name>.scale` [rows], as float32."""
    out = dict(state)
    for name, weight in state.items():
        if weight.dtype != torch.int8:
            continue
        scale = out.pop(f"{name}.scale", None)
        if scale is None or weight.ndim != 2 or scale.shape != weight.shape[:1] or not scale.is_floating_point():
            raise CheckpointError(
                f"{file}: {name} is int8 and needs {name}.scale, float32 {list(weight.shape[:1])}; "
                "other quantised formats are not supported, use the bf16 file"
            )
        out[name] = weight.float() * scale.float()[:, None]
    return out


def quantise_state(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """`state` with every floating matrix as int8 plus a float32 `<name>.scale` [rows]; each row's maximum is 127."""
    out = {}
    for name, weight in state.items():
        out[name] = weight
        if weight.ndim == 2 and weight.is_floating_point():
            scale = weight.float().abs().amax(dim=1) / 127
            scale[scale == 0] = 1.0  # a zero row stays zero
            out[name] = (weight.float() / scale[:, None]).round().clamp(-127, 127).to(torch.int8)
            out[f"{name}.scale"] = scale
    return out


def write_checkpoint(folder: str | os.PathLike, config: dict, state: dict[str, Tensor], *, int8: bool, dtype: torch.dtype) -> None:
    """config.json and model.safetensors in `folder`; floating tensors as `dtype`, matrices as int8 rows if `int8`."""
    out = quantise_state(state) if int8 else state
    keep = {name for name in out if name.endswith(".scale")}
    out = {n: t.to(dtype) if t.is_floating_point() and n not in keep else t for n, t in out.items()}
    Path(folder).mkdir(parents=True, exist_ok=True)
    write_safetensors(Path(folder) / "model.safetensors", out)
    _replace(Path(folder) / "config.json", lambda file: file.write_text(json.dumps(config, indent=2) + "\n"))


def write_safetensors(file: Path, state: dict[str, Tensor]) -> None:
    """One .safetensors file, replaced atomically."""
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}
    _replace(file, lambda part: save_file(tensors, part, metadata={"format": "pt"}))


def _replace(file: Path, write) -> None:
    part = file.with_name(file.name + ".part")
    try:
        write(part)
        os.replace(part, file)  # an interrupted write leaves the old file or none
    finally:
        part.unlink(missing_ok=True)
