"""What is written is what is read: exact round trips, int8 rows, and z-lab's own loader on our DFlash files."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open

from tests import checkpoint_flavours as make
from tests.checkpoint_flavours import DRAFTED, VD, H, V, write
from whiflash_triton.checkpoints import (
    CheckpointError,
    RouterConfig,
    load_dflash,
    load_eagle3,
    load_router,
    quantise_state,
    save_dflash,
    save_eagle3,
    save_router,
)

YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 10240}


def dflash(tmp_path, reduced: bool = False):
    cfg, state = load_dflash(write(tmp_path / "source", *make.zlab()), target=make.target())
    if reduced:
        return replace(cfg, draft_vocab_size=VD), state | {"draft_ids": torch.tensor(DRAFTED)}
    return cfg, state


def as_dtype(state: dict, dtype: torch.dtype) -> dict:
    return {n: t.to(dtype) if t.is_floating_point() else t for n, t in state.items()}


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


def names_in(file) -> dict[str, str]:
    with safe_open(file, framework="pt") as handle:
        return {name: handle.get_slice(name).get_dtype() for name in handle.keys()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("rope", [None, YARN])
def test_dflash_round_trip(tmp_path, dtype, reduced, rope):
    cfg, state = dflash(tmp_path, reduced)
    cfg, state = replace(cfg, rope=rope or cfg.rope), as_dtype(state, dtype)
    save_dflash(tmp_path / "out", cfg, state, dtype=dtype)
    again, loaded = load_dflash(tmp_path / "out", target=make.target())
    assert again == cfg and same(loaded, state)
    assert (tmp_path / "out" / "draft_vocab.safetensors").exists() == reduced
    assert not list((tmp_path / "out").glob("*.part"))


def test_dflash_file_is_z_labs(tmp_path):
    config, state = make.zlab(5)
    cfg, state = load_dflash(write(tmp_path / "source", config, state), target=make.target())
    save_dflash(tmp_path / "out", cfg, state)
    written = names_in(tmp_path / "out" / "model.safetensors")
    assert len(written) == 58 and written == dict.fromkeys(make.dflash_state(5), "BF16")
    ours = json.loads((tmp_path / "out" / "config.json").read_text())
    unset = {"bos_token_id", "eos_token_id", "initializer_range"}
    assert ours == {k: v for k, v in config.items() if k not in unset} | {"tie_word_embeddings": False}


def test_dflash_overwrites_a_stale_sidecar(tmp_path):
    save_dflash(tmp_path / "out", *dflash(tmp_path, reduced=True))
    save_dflash(tmp_path / "out", *dflash(tmp_path))
    assert load_dflash(tmp_path / "out", target=make.target())[0].draft_vocab_size is None


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda c, s: (replace(c, num_target_layers=None), s), "needs num_target_layers"),
        (lambda c, s: (replace(c, taps=(0, 1, 2, 3, 4)), s), "taps of at least 1"),
        (lambda c, s: (replace(c, num_layers=3), s), "missing tensors: layers.2."),
        (lambda c, s: (c, s | {"lm_head.weight": torch.zeros(V, H)}), "unknown tensors: lm_head.weight"),
        (lambda c, s: (c, s | {"draft_ids": torch.arange(4)}), "draft_vocab_size None but draft_ids"),
        (
            lambda c, s: (replace(c, draft_vocab_size=2), s | {"draft_ids": torch.tensor([4, 3])}),
            "ascending target ids",
        ),
    ],
)
def test_dflash_refuses_to_write(tmp_path, change, message):
    cfg, state = change(*dflash(tmp_path))
    with pytest.raises(CheckpointError, match=message):
        save_dflash(tmp_path / "out", cfg, state)
    assert not (tmp_path / "out").exists()


EAGLE3 = {
    "plain": make.specforge,
    "3.1": lambda: make.eagle3_speculators(fc_norm=True, norm_output=True),
    "gpt-oss": lambda: make.eagle3_speculators(norm_before_fc=True),
    "qk norms": lambda: make.eagle3_speculators("qwen3"),
    "head_dim 10": make.angelslim,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("flavour", EAGLE3)
def test_eagle3_round_trip(tmp_path, flavour, dtype):
    cfg, state = load_eagle3(write(tmp_path / "source", *EAGLE3[flavour]()), target=make.target())
    state = as_dtype(state, dtype)
    save_eagle3(tmp_path / "out", cfg, state, dtype=dtype)
    again, loaded = load_eagle3(tmp_path / "out", target=make.target())
    assert again == cfg and same(loaded, state)


def test_eagle3_file_is_specforges(tmp_path):
    config, state = make.specforge()
    cfg, loaded = load_eagle3(write(tmp_path / "source", config, state), target=make.target())
    save_eagle3(tmp_path / "out", cfg, loaded)
    written = names_in(tmp_path / "out" / "model.safetensors")
    assert written.keys() == state.keys() and (written["d2t"], written["t2d"]) == ("I64", "BOOL")
    ours = json.loads((tmp_path / "out" / "config.json").read_text())
    assert ours["eagle_config"] == config["eagle_config"] and ours["architectures"] == ["LlamaForCausalLMEagle3"]
    assert ours["tie_word_embeddings"] is False and ours["num_hidden_layers"] == 1 and ours["model_type"] == "llama"


def test_eagle3_full_vocabulary_round_trip(tmp_path):
    config, state = make.specforge()
    del state["d2t"], state["t2d"]
    state["lm_head.weight"] = torch.ones(V, H, dtype=torch.bfloat16)
    source = write(tmp_path / "source", config | {"draft_vocab_size": None}, state)
    cfg, loaded = load_eagle3(source, target=make.target())
    del loaded["draft_ids"]  # identity is implied
    save_eagle3(tmp_path / "out", cfg, loaded)
    again, ids = load_eagle3(tmp_path / "out", target=make.target())
    assert again == cfg and torch.equal(ids["draft_ids"], torch.arange(V))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda c, s: (replace(c, taps=(0, 18, 33)), s), "cannot name the embedding output"),
        (lambda c, s: (replace(c, fc_norm=True), s), "missing tensors: fc_norm.0.weight"),
        (lambda c, s: (c, s | {"draft_ids": torch.tensor([V])}), "ascending target ids"),
        (lambda c, s: (c, s | {"draft_ids": torch.arange(VD)}), "d2t is all zero"),
        (lambda c, s: (c, {n: t for n, t in s.items() if n != "draft_ids"}), "expected integers"),
    ],
)
def test_eagle3_refuses_to_write(tmp_path, change, message):
    cfg, state = change(*load_eagle3(write(tmp_path / "source", *make.specforge()), target=make.target()))
    with pytest.raises(CheckpointError, match=message):
        save_eagle3(tmp_path / "out", cfg, state)
    assert not (tmp_path / "out").exists()


# ---- int8 -----------------------------------------------------------------------------------------


def check_int8(original: dict, loaded: dict) -> None:
    assert original.keys() == loaded.keys()
    for name, weight in original.items():
        if weight.ndim == 2:
            bound = weight.float().abs().amax(1, keepdim=True) / 254 * 1.001  # half a step of the row's grid
            assert loaded[name].dtype == torch.float32 and ((loaded[name] - weight.float()).abs() <= bound).all()
        else:
            assert torch.equal(loaded[name], weight)


def test_int8_dflash(tmp_path):
    cfg, state = dflash(tmp_path, reduced=True)
    state["fc.weight"][3] = 0
    save_dflash(tmp_path / "out", cfg, state, int8=True)
    written = names_in(tmp_path / "out" / "model.safetensors")
    assert (written["fc.weight"], written["fc.weight.scale"], written["norm.weight"]) == ("I8", "F32", "BF16")
    again, loaded = load_dflash(tmp_path / "out", target=make.target())
    assert again == cfg and (loaded["fc.weight"][3] == 0).all()
    check_int8(state, loaded)


def test_int8_eagle3_and_router(tmp_path):
    cfg, state = load_eagle3(write(tmp_path / "source", *make.specforge()), target=make.target())
    save_eagle3(tmp_path / "out", cfg, state, int8=True)
    check_int8(state, load_eagle3(tmp_path / "out", target=make.target())[1])
    router = make.fill({"w1": (24, H), "b1": (24,), "w2": (24,), "b2": (1,)}, torch.float32)
    save_router(tmp_path / "router", RouterConfig(H, 24, 1.0, "diffusion", True), router, int8=True)
    loaded = load_router(tmp_path / "router", hidden_size=H)[1]
    assert (loaded["w2"] - router["w2"]).abs().max() <= router["w2"].abs().max() / 254 * 1.001
    check_int8(router | {"w2": loaded["w2"]}, loaded)


def test_int8_is_stable_once_written():
    state = quantise_state(make.fill({"a": (5, 40), "b": (7,)}, torch.float32))
    again = quantise_state({"a": state["a"] * state["a.scale"][:, None], "b": state["b"]})
    assert torch.equal(again["a"], state["a"]) and again.keys() == {"a", "a.scale", "b"}


@pytest.mark.parametrize(
    "scale, message",
    [(torch.ones(H - 1), "needs fc.weight.scale"), (torch.ones(H, dtype=torch.int32), "needs fc.weight.scale")],
)
def test_int8_bad_scale(tmp_path, scale, message):
    config, state = make.zlab()
    quantised = quantise_state(state) | {"fc.weight.scale": scale}
    with pytest.raises(CheckpointError, match=message):
        load_dflash(write(tmp_path, config, quantised), target=make.target())


def test_scale_without_int8(tmp_path):
    config, state = make.zlab()
    with pytest.raises(CheckpointError, match="unknown tensors: fc.weight.scale"):
        load_dflash(write(tmp_path, config, state | {"fc.weight.scale": torch.ones(H)}), target=make.target())


# ---- router, and other people's loaders -----------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_router_round_trip(tmp_path, dtype):
    cfg = RouterConfig(H, 24, threshold=0.25, positive="autoregressive", hidden_is_normed=False)
    state = make.fill({"w1": (24, H), "b1": (24,), "w2": (24,), "b2": (1,)}, dtype)
    save_router(tmp_path, cfg, state, dtype=dtype)
    again, loaded = load_router(tmp_path, hidden_size=H)
    assert again == cfg and same(loaded, state)


def test_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    cfg, state = dflash(tmp_path)
    save_dflash(tmp_path / "out", cfg, state)
    before = (tmp_path / "out" / "model.safetensors").read_bytes()

    def interrupted(tensors, file, metadata):
        file.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr("whiflash_triton.checkpoint_files.save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_dflash(tmp_path / "out", cfg, {n: t + 1 for n, t in state.items()})
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    assert not list((tmp_path / "out").glob("*.part"))


@pytest.mark.parametrize("rope", [None, YARN])
def test_transformers_reads_the_config(tmp_path, rope):
    from transformers import AutoConfig

    cfg, state = dflash(tmp_path)
    cfg = replace(cfg, rope=rope or cfg.rope)
    save_dflash(tmp_path / "out", cfg, state)
    theirs = AutoConfig.from_pretrained(tmp_path / "out")
    assert {key: theirs.rope_parameters[key] for key in cfg.rope} == cfg.rope
    assert (theirs.num_hidden_layers, theirs.head_dim, theirs.block_size) == (2, make.HD, 16)


@pytest.mark.parametrize("rope", [None, YARN])
def test_z_labs_package_loads_our_dflash(tmp_path, rope):
    model = pytest.importorskip("dflash.model", reason="needs z-lab's package: pip install --no-deps dflash==0.1.0")
    cfg, state = dflash(tmp_path, reduced=True)
    save_dflash(tmp_path / "out", replace(cfg, rope=rope or cfg.rope), state)
    theirs, report = model.DFlashDraftModel.from_pretrained(tmp_path / "out", dtype=torch.bfloat16, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    del state["draft_ids"]
    assert same(dict(theirs.state_dict()), state)
    assert (theirs.block_size, theirs.mask_token_id, theirs.target_layer_ids) == (16, 7, [1, 9, 17, 25, 33])
