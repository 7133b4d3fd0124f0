"""Damaged, missing or foreign files, of drafters and routers, raise an error that names the file."""

import json

import pytest
import torch

from tests import checkpoint_flavours as make
from tests.checkpoint_flavours import H, write
from whiflash_triton.checkpoints import CheckpointError, load_dflash, load_eagle3, load_router


@pytest.mark.parametrize("kind, file", [("single", "model.safetensors"), ("bin", "pytorch_model.bin")])
@pytest.mark.parametrize("keep", [0.0, 0.001, 0.9])
def test_truncated(tmp_path, kind, file, keep):
    folder = write(tmp_path, *make.specforge(), kind)
    data = (folder / file).read_bytes()
    (folder / file).write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(CheckpointError, match=rf"{file}: truncated"):
        load_eagle3(folder, target=make.target())


def test_pickled_code_is_not_run(tmp_path):
    folder = write(tmp_path, make.specforge()[0], {})
    (folder / "model.safetensors").unlink()
    torch.save({"fc.weight": print}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pytorch_model.bin: truncated, corrupt or not plain tensors"):
        load_eagle3(folder, target=make.target())


def test_nested_pickle(tmp_path):
    folder = write(tmp_path, make.specforge()[0], {"state_dict": {"fc.weight": torch.zeros(2, 2)}}, "bin")
    with pytest.raises(CheckpointError, match="is not a dictionary of tensors"):
        load_eagle3(folder, target=make.target())


def test_missing_shard_and_false_index(tmp_path):
    folder = write(tmp_path, *make.specforge(), "sharded")
    index = folder / "model.safetensors.index.json"
    false = json.loads(index.read_text())
    false["weight_map"]["ghost.weight"] = "model-1-of-2.safetensors"
    good = index.read_text()
    index.write_text(json.dumps(false))
    with pytest.raises(CheckpointError, match="disagree about ghost.weight"):
        load_eagle3(folder, target=make.target())
    index.write_text('{"weight_map": {"fc.weight": 3}}')
    with pytest.raises(CheckpointError, match="index.json: has no weight_map of file names"):
        load_eagle3(folder, target=make.target())
    index.write_text("{}")
    with pytest.raises(CheckpointError, match="index.json: has no weight_map"):
        load_eagle3(folder, target=make.target())
    index.write_text(good)
    (folder / "model-2-of-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model-2-of-2.safetensors: missing, but model.safetensors.index.json lists"):
        load_eagle3(folder, target=make.target())


@pytest.mark.parametrize("text, message", [("{", "cannot be read as JSON"), ("[]", "holds list, expected a JSON object")])
def test_bad_config_file(tmp_path, text, message):
    folder = write(tmp_path, *make.zlab())
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=f"config.json: {message}"):
        load_dflash(folder, target=make.target())


def test_missing_files(tmp_path):
    config, state = make.zlab()
    with pytest.raises(CheckpointError, match="config.json: missing"):
        load_dflash(write(tmp_path / "a", None, state), target=make.target())
    folder = write(tmp_path / "b", config, state)
    with pytest.raises(CheckpointError, match="is a file; pass the folder"):
        load_dflash(folder / "model.safetensors", target=make.target())
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="is the download complete"):
        load_dflash(folder, target=make.target())
    with pytest.raises(CheckpointError, match="no such file or folder, and not a hub id"):
        load_dflash(tmp_path / "nowhere", target=make.target())


def test_hub_failure(monkeypatch):
    def fail(name, allow_patterns):
        raise FileNotFoundError("no route")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(CheckpointError, match=r"z-lab/x: not a local folder, and the hub download failed.*no route"):
        load_dflash("z-lab/x", target=make.target())


# ---- router ---------------------------------------------------------------------------------------

GOOD = {"w1": (24, H), "b1": (24,), "w2": (1, 24), "b2": (1,)}


@pytest.mark.parametrize(
    "shapes, message",
    [
        (GOOD | {"b3": (24,)}, "expected exactly [M, 32]"),
        ({n: s for n, s in GOOD.items() if n != "b1"}, "expected exactly [M, 32]"),
        (GOOD | {"w1": (24, H + 1)}, "found b1 [24], b2 [1], w1 [24, 33], w2 [1, 24]"),
        (GOOD | {"w2": (24, H)}, "expected exactly"),
        (GOOD | {"w2": (2, 24)}, "expected exactly"),
        (GOOD | {"b1": (23,)}, "expected exactly"),
        (GOOD | {"b2": (2,)}, "expected exactly"),
        ({"x": (24, H), "y": (24,), "z": (24,), "t": (1,)}, "its bias named so"),
        ({"x": (24, H), "b": (24,), "bias": (24,), "t": (1,)}, "its bias named so"),
        ({"w1": (1, H), "b1": (1,), "w2": (1, 1), "b2": (1,)}, "expected exactly"),
    ],
)
def test_router_shapes(tmp_path, shapes, message):
    write(tmp_path, None, make.fill(shapes))
    with pytest.raises(CheckpointError) as caught:
        load_router(tmp_path / "model.safetensors", hidden_size=H)
    assert message in str(caught.value) and "model.safetensors" in str(caught.value)


@pytest.mark.parametrize(
    "config, message",
    [
        ({"hidden_size": 64}, "hidden_size is 64 but the target has 32"),
        ({"width": 25}, "width is 25 but the file holds 24"),
        ({"activation": "relu"}, "activation is relu but the router needs gelu"),
        ({"positive": "eagle3"}, "positive is 'eagle3'; write 'diffusion' or 'autoregressive'"),
        ({"threshold": "high"}, "threshold is 'high', expected float"),
        ({"mystery": 3}, "unknown key mystery=3"),
    ],
)
def test_router_config(tmp_path, config, message):
    write(tmp_path, config, make.fill(GOOD))
    with pytest.raises(CheckpointError) as caught:
        load_router(tmp_path, hidden_size=H)
    assert message in str(caught.value)


def test_router_files(tmp_path):
    write(tmp_path, None, make.fill(GOOD))
    make.save_file(make.fill(GOOD), tmp_path / "two.safetensors")
    with pytest.raises(CheckpointError, match="2 .safetensors files; pass the router's file itself"):
        load_router(tmp_path, hidden_size=H)
    (tmp_path / "two.safetensors").write_bytes(b"x" * 40)
    with pytest.raises(CheckpointError, match="two.safetensors: truncated or corrupt"):
        load_router(tmp_path / "two.safetensors", hidden_size=H)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="0 .safetensors files"):
        load_router(tmp_path / "empty", hidden_size=H)
    bad = make.fill(GOOD) | {"b2": torch.zeros(1, dtype=torch.int64)}
    make.save_file(bad, tmp_path / "int.safetensors")
    with pytest.raises(CheckpointError, match="weights must be floating point"):
        load_router(tmp_path / "int.safetensors", hidden_size=H)
