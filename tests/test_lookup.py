"""Launch options: exact entry, nearest bucket, default."""

import json
import logging

import pytest
import torch

from whiflash_triton.autotune import lookup

DEFAULT = {
    "discrete": ["D"],
    "entries": {
        "dtype=fp16": {"BLOCK": 8},
        "D=64,T=16,dtype=fp16": {"BLOCK": 16},
        "D=64,T=256,dtype=fp16": {"BLOCK": 64},
    },
}
TUNED = {"arch": 90, "discrete": ["D"], "entries": {"D=64,T=64,dtype=fp16": {"BLOCK": 32, "num_warps": 8}}}


@pytest.fixture
def configs(tmp_path, monkeypatch):
    for device, content in {"default": DEFAULT, "nvidia_h200": TUNED}.items():
        (tmp_path / device).mkdir()
        (tmp_path / device / "demo.json").write_text(json.dumps(content))
    monkeypatch.setattr(lookup, "CONFIGS", tmp_path)
    lookup._load.cache_clear()
    lookup._resolve.cache_clear()
    yield tmp_path
    lookup._load.cache_clear()
    lookup._resolve.cache_clear()


@pytest.mark.parametrize(
    ("key", "block"),
    [
        (dict(D=64, T=16, dtype="fp16"), 16),
        (dict(D=64, T=16, dtype=torch.float16), 16),
        (dict(D=64, T=60, dtype="fp16"), 16),  # 1.9 doublings from 16, 2.1 from 256
        (dict(D=64, T=70, dtype="fp16"), 64),
        (dict(D=64, T=0, dtype="fp16"), 16),
        (dict(D=128, T=16, dtype="fp16"), 8),  # discrete field differs: only the entry that leaves it open fits
    ],
)
def test_nearest_entry_of_the_defaults(configs, key, block):
    assert dict(lookup._resolve("demo", "default", _fields(key)))["BLOCK"] == block


def test_device_file_comes_first_then_the_defaults(configs):
    assert lookup._resolve("demo", "nvidia_h200", _fields(dict(D=64, T=1, dtype="fp16")))["num_warps"] == 8
    assert lookup._resolve("demo", "nvidia_h200", _fields(dict(D=80, T=1, dtype="fp16"))) == {"BLOCK": 8}


def test_no_entry_is_a_named_error(configs):
    with pytest.raises(LookupError, match="demo.*fp32.*configs/default/demo.json"):
        lookup.pick("demo", D=64, T=16, dtype="fp32")
    with pytest.raises(LookupError, match="other"):
        lookup.pick("other")


def test_pick_logs_once_and_hands_out_copies(configs, caplog, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with caplog.at_level(logging.INFO, logger=lookup.log.name):
        lookup.pick("demo", D=64, T=16, dtype="fp16")["BLOCK"] = -1
        assert lookup.pick("demo", D=64, T=16, dtype="fp16")["BLOCK"] == 16
    assert len(caplog.records) == 1 and "exact entry D=64,T=16,dtype=fp16" in caplog.text


def test_device_names_are_folder_names(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H100 80GB HBM3")
    assert lookup.device_name.__wrapped__(0) == "nvidia_h100_80gb_hbm3"


def test_shipped_lists_every_entry_with_its_architecture(configs):
    rows = list(lookup.shipped("demo"))
    assert [(row.device, row.arch) for row in rows] == [("default", None)] * 3 + [("nvidia_h200", 90)]
    assert rows[-1].key == {"D": 64, "T": 64, "dtype": "fp16"}


def test_shipped_files_are_sorted_and_round_trip():
    files = [path for folder in lookup.CONFIGS.iterdir() if folder.is_dir() for path in folder.iterdir()]
    assert files
    for path in files:
        content = json.loads(path.read_text())
        assert path.read_text() == json.dumps(content, indent=2, sort_keys=True) + "\n", f"{path}: sort its keys"
        for text in content["entries"]:
            assert text == ",".join(f"{name}={value}" for name, value in sorted(lookup.parse_key(text).items()))


def _fields(key):
    return tuple(sorted((name, lookup.DTYPE_NAMES.get(value, value)) for name, value in key.items()))
