"""Every published checkpoint flavour loads to the same configs and names, with the taps its own convention means."""

import logging
from dataclasses import replace

import pytest
import torch

from tests import checkpoint_flavours as make
from tests.checkpoint_flavours import DRAFTED, HD, HEADS, KV, VD, H, V, write
from whiflash_triton import checkpoints
from whiflash_triton.checkpoint_formats import CLASS_DEFAULTS
from whiflash_triton.checkpoints import load_dflash, load_eagle3, load_router


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


# ---- DFlash ----------------------------------------------------------------------------------------------------------


def test_zlab_flat(tmp_path):
    config, state = make.zlab()
    cfg, loaded = load_dflash(write(tmp_path, config, state), target=make.target())
    assert cfg == checkpoints.DFlashConfig(
        hidden_size=H, intermediate_size=make.INNER, num_layers=2, num_heads=HEADS, num_kv_heads=KV, head_dim=HD,
        rms_norm_eps=1e-6, rope={"rope_type": "default", "rope_theta": 1e6}, vocab_size=V, block_size=16,
        mask_token_id=7, taps=(2, 10, 18, 26, 34), attention_bias=False, max_position_embeddings=40960,
        draft_vocab_size=None, num_target_layers=36,
    )  # fmt: skip
    assert same(loaded, state)


def test_block_size_inside_dflash_config(tmp_path):
    config, state = make.zlab()
    config["dflash_config"]["block_size"] = config.pop("block_size") // 2
    assert load_dflash(write(tmp_path, config, state), target=make.target())[0].block_size == 8


def test_deepspec_keys_at_the_top_level(tmp_path):
    cfg, _ = load_dflash(write(tmp_path, *make.deepspec()), target=make.target())
    assert (cfg.taps, cfg.mask_token_id, cfg.block_size) == ((2, 10, 18, 26, 34), 7, 16)


def test_dflash_speculators(tmp_path):
    config, state = make.dflash_speculators()
    cfg, loaded = load_dflash(write(tmp_path, config, state), target=make.target())
    assert (cfg.taps, cfg.block_size, cfg.draft_vocab_size) == ((2, 10, 18, 26, 34), 8, VD)
    assert (cfg.rms_norm_eps, cfg.max_position_embeddings) == (1e-6, 32768)  # Qwen3Config's defaults
    assert loaded.pop("draft_ids").tolist() == DRAFTED
    assert same(loaded, {n: t for n, t in state.items() if n not in ("d2t", "t2d", "verifier_norm.weight")})


def test_dflash_reduced_head_without_own_rows(tmp_path):
    config, state = make.dflash_speculators()
    del state["lm_head.weight"]
    cfg, loaded = load_dflash(write(tmp_path, config, state), target=make.target())
    assert cfg.draft_vocab_size == VD and "lm_head.weight" not in loaded and loaded["draft_ids"].tolist() == DRAFTED


@pytest.mark.parametrize(
    "layers, points, taps",
    [
        (36, 5, (2, 10, 18, 26, 34)),
        (36, 3, (2, 18, 34)),
        (32, 5, (2, 9, 16, 23, 30)),
        (48, 5, (2, 13, 24, 35, 46)),
        (40, 5, (2, 11, 20, 29, 38)),
        (64, 5, (2, 17, 32, 47, 62)),
        (28, 5, (2, 8, 14, 20, 26)),
        (30, 5, (2, 9, 15, 21, 28)),
        (36, 1, (19,)),
        (4, 5, (2, 2, 2, 2, 2)),
    ],
)
def test_dflash_default_taps(tmp_path, caplog, layers, points, taps):
    config, _ = make.zlab(points, layers)
    del config["dflash_config"]["target_layer_ids"]
    folder = write(tmp_path, config, make.dflash_state(points, points))
    with caplog.at_level(logging.WARNING):
        assert load_dflash(folder, target=make.target(layers))[0].taps == taps
    assert f"falling back to hidden_states {list(taps)}" in caplog.text


def test_listed_order_and_last_layer(tmp_path, caplog):
    config, state = make.zlab()
    config["dflash_config"]["target_layer_ids"] = [35, 3, 17, 3, 0]
    with caplog.at_level(logging.INFO):
        cfg, _ = load_dflash(write(tmp_path, config, state), target=make.target())
    assert cfg.taps == (36, 4, 18, 4, 1)  # the file's order; 36 of 36 is the post-norm state
    assert "hidden_states [36, 4, 18, 4, 1] (target_layer_ids=[35, 3, 17, 3, 0])" in caplog.text


@pytest.mark.parametrize("fused", [False, True])
def test_dflash_name_variants(tmp_path, fused):
    config, state = make.zlab(1)
    variants = {f"model.{n}".replace("layers.0", "midlayer").replace("model.fc", "encoder.fc"): t for n, t in state.items()}
    variants["encoder.output_norm_enc.weight"] = variants.pop("model.hidden_norm.weight")
    if fused:
        parts = [variants.pop(f"model.midlayer.self_attn.{p}_proj.weight") for p in "qkv"]
        variants["model.midlayer.self_attn.qkv_proj.weight"] = torch.cat(parts)
        del config["head_dim"]
    cfg, loaded = load_dflash(write(tmp_path, config, variants), target=make.target())
    assert cfg.head_dim == HD and same(loaded, state)


def test_dflash_biases(tmp_path):
    config, _ = make.zlab()
    folder = write(tmp_path, config | {"attention_bias": True}, make.dflash_state(bias=True))
    cfg, loaded = load_dflash(folder, target=make.target())
    assert cfg.attention_bias and loaded["layers.1.self_attn.o_proj.bias"].shape == (H,)


# ---- EAGLE-3 ---------------------------------------------------------------------------------------------------------


def test_eagle_original(tmp_path, caplog):
    config, state = make.eagle_original()
    cfg, loaded = load_eagle3(write(tmp_path, config, state, "bin"), target=make.target(32))
    assert cfg == checkpoints.Eagle3Config(
        hidden_size=H, target_hidden_size=H, intermediate_size=make.INNER, num_heads=HEADS, num_kv_heads=KV, head_dim=8,
        rms_norm_eps=1e-5, rope={"rope_type": "default", "rope_theta": 10000.0}, vocab_size=V, draft_vocab_size=VD,
        taps=(2, 16, 29), attention_bias=False, norm_before_residual=False, norm_before_fc=False, fc_norm=False,
        norm_output=False, qk_norm=False, max_position_embeddings=2048,
    )  # fmt: skip
    assert loaded.pop("draft_ids").tolist() == DRAFTED
    expected = {n.replace("midlayer.", "layers.0."): t for n, t in state.items() if n not in ("d2t", "t2d")}
    assert same(loaded, expected)
    assert "falling back to hidden_states [2, 16, 29]" in caplog.text


@pytest.mark.parametrize(
    "layers, taps", [(32, (2, 16, 29)), (36, (2, 18, 33)), (64, (2, 32, 61)), (80, (2, 40, 77)), (30, (2, 15, 27))]
)
def test_eagle3_default_taps(tmp_path, layers, taps):
    assert load_eagle3(write(tmp_path, *make.angelslim()), target=make.target(layers))[0].taps == taps


def _speculators_ids():
    return make.eagle3_speculators(eagle_aux_hidden_state_layer_ids=[2, 18, 33])


def _vllm_ids():
    config, state = make.angelslim()
    return config | {"eagle_aux_hidden_state_layer_ids": [2, 18, 33]}, state


def _angelslim_ids():
    config, state = make.angelslim()
    return config | {"aux_hidden_states_layer_ids": [1, 17, 32]}, state


@pytest.mark.parametrize("flavour", [make.specforge, _speculators_ids, _vllm_ids, _angelslim_ids])
def test_eagle3_explicit_taps_agree(tmp_path, caplog, flavour):
    with caplog.at_level(logging.INFO):
        assert load_eagle3(write(tmp_path, *flavour()), target=make.target())[0].taps == (2, 18, 33)
    assert "reads hidden_states [2, 18, 33] (" in caplog.text


def test_eagle3_taps_copied_unshifted_are_suspected(tmp_path, caplog):
    config, state = make.eagle3_speculators(eagle_aux_hidden_state_layer_ids=[1, 46, 90])
    assert load_eagle3(write(tmp_path, config, state), target=make.target(94))[0].taps == (1, 46, 90)
    assert "pass taps=[2, 47, 91]" in caplog.text


def test_overrides(tmp_path):
    config, state = make.specforge()
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [1, 17, -1]  # as named by the file: an error
    folder = write(tmp_path, config, state)
    cfg, _ = load_eagle3(folder, target=make.target(), taps=[0, 18, 36], rope_theta=1e4)
    assert cfg.taps == (0, 18, 36) and cfg.rope["rope_theta"] == 1e4


def test_angelslim_head_is_never_tied(tmp_path):
    config, state = make.angelslim()
    cfg, loaded = load_eagle3(write(tmp_path, config, state), target=make.target())
    assert cfg.head_dim == 10 and torch.equal(loaded["lm_head.weight"], state["lm_head.weight"])


@pytest.mark.parametrize("kind", ["single", "sharded", "bin"])
@pytest.mark.parametrize("prefix", ["", "model.", "draft_model."])
def test_eagle3_files_and_prefixes(tmp_path, kind, prefix):
    config, state = make.specforge()
    folder = write(tmp_path, config, {prefix + name: tensor for name, tensor in state.items()}, kind)
    _, loaded = load_eagle3(folder, target=make.target())
    assert torch.equal(loaded["layers.0.mlp.down_proj.weight"], state["midlayer.mlp.down_proj.weight"])
    assert loaded["draft_ids"].tolist() == DRAFTED


@pytest.mark.parametrize("flag", ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"])
@pytest.mark.parametrize("value", [True, False])
def test_eagle3_flags(tmp_path, flag, value):
    config, state = make.eagle3_speculators(**{"norm_before_residual": False, flag: value})
    cfg, loaded = load_eagle3(write(tmp_path, config, state), target=make.target())
    flags = ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"]
    assert {name: getattr(cfg, name) for name in flags} == {name: value and name == flag for name in flags}
    assert ("input_norm.weight" in loaded) == cfg.norm_before_fc and ("fc_norm.2.weight" in loaded) == cfg.fc_norm
    assert "embed_tokens.weight" in loaded


def test_eagle3_flag_inside_eagle_config(tmp_path):
    config, state = make.specforge()
    config["eagle_config"]["norm_before_fc"] = True
    state["input_norm.weight"] = torch.ones(3 * H)
    assert load_eagle3(write(tmp_path, config, state), target=make.target())[0].norm_before_fc


def test_eagle3_older_fc_norm_spelling(tmp_path):
    config, state = make.specforge()
    state |= {f"aux_norm_{name}.weight": torch.full((H,), i) * 1.0 for i, name in enumerate(("low", "mid", "high"))}
    cfg, loaded = load_eagle3(write(tmp_path, config | {"use_aux_norm": True}, state), target=make.target())
    assert cfg.fc_norm and [loaded[f"fc_norm.{i}.weight"][0].item() for i in range(3)] == [0, 1, 2]


def test_eagle3_ambiguous_norm_output_is_warned_of(tmp_path, caplog):
    config, state = make.specforge()
    assert load_eagle3(write(tmp_path, config | {"norm_output": True}, state), target=make.target())[0].norm_output
    assert "older SpecForge exports" in caplog.text


def test_eagle3_missing_norm_before_residual_is_warned_of(tmp_path, caplog):
    config, state = make.eagle3_speculators()
    del config["norm_before_residual"]
    assert not load_eagle3(write(tmp_path, config, state), target=make.target())[0].norm_before_residual
    assert "norm_before_residual is not given" in caplog.text


def test_eagle3_qwen3_layers_have_qk_norms(tmp_path):
    cfg, loaded = load_eagle3(write(tmp_path, *make.eagle3_speculators("qwen3")), target=make.target())
    assert cfg.qk_norm and loaded["layers.0.self_attn.k_norm.weight"].shape == (HD,)


def test_eagle3_narrower_than_its_target(tmp_path):
    config, _ = make.specforge()
    state = make.eagle3_state(target_hidden=96) | make.fill({"embed_tokens.weight": (V, H)})
    wide = replace(make.target(), hidden_size=96)
    cfg, loaded = load_eagle3(write(tmp_path, config | {"target_hidden_size": 96}, state), target=wide)
    assert (cfg.hidden_size, cfg.target_hidden_size) == (H, 96) and loaded["fc.weight"].shape == (H, 288)


@pytest.mark.parametrize("zeros", [True, False])
def test_eagle3_full_vocabulary_is_identity(tmp_path, zeros):
    config, state = make.eagle_original()
    del state["d2t"], state["t2d"], config["draft_vocab_size"]
    state["lm_head.weight"] = torch.zeros(V, H)
    if zeros:
        state["d2t"] = torch.zeros(V, dtype=torch.int64)
    cfg, loaded = load_eagle3(write(tmp_path, config, state), target=make.target())
    assert cfg.draft_vocab_size == V and torch.equal(loaded["draft_ids"], torch.arange(V))


def test_eagle3_layer_count_comes_from_the_tensors(tmp_path):
    config, state = make.specforge()
    assert load_eagle3(write(tmp_path, config | {"num_hidden_layers": 36}, state), target=make.target())[0].taps


def test_eagle3_vllm_map_name(tmp_path):
    config, state = make.specforge()
    state["draft_id_to_target_id"] = state.pop("d2t")
    assert load_eagle3(write(tmp_path, config, state), target=make.target())[1]["draft_ids"].tolist() == DRAFTED


# ---- both ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spelling, expected",
    [
        ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
        ({"rope_parameters": {"rope_theta": 5e5}}, {"rope_type": "default", "rope_theta": 5e5}),
        ({"rope_parameters": {"full_attention": {"rope_theta": 7}}}, {"rope_type": "default", "rope_theta": 7.0}),
        ({}, {"rope_type": "default", "rope_theta": 10000.0}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0},
        ),
        (
            {
                "rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0},
                "rope_scaling": {"type": "linear", "factor": 2.0},
            },
            {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0},
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}, "rope_theta": 1e6},
            {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0},
        ),
    ],
)
def test_rope_spellings(tmp_path, spelling, expected):
    config, state = make.zlab()
    del config["rope_theta"], config["rope_scaling"]
    assert load_dflash(write(tmp_path, config | spelling, state), target=make.target())[0].rope == expected


def test_class_defaults_are_transformers_own():
    from transformers import LlamaConfig, Qwen3Config

    for config in (LlamaConfig(), Qwen3Config()):
        for key, value in CLASS_DEFAULTS[config.model_type].items():
            assert getattr(config, key) == value, key


def test_nested_config_as_transformers_writes_it(tmp_path):
    from transformers import Qwen3Config

    config, state = make.dflash_speculators()
    sizes = {k: v for k, v in config["transformer_layer_config"].items() if k not in ("model_type", "rope_parameters")}
    config["transformer_layer_config"] = Qwen3Config(**sizes, rope_theta=5e5, rms_norm_eps=1e-5).to_diff_dict()
    cfg, _ = load_dflash(write(tmp_path, config, state), target=make.target())
    assert (cfg.rope["rope_theta"], cfg.rms_norm_eps, cfg.head_dim) == (5e5, 1e-5, HD)


def test_hub_id(tmp_path, monkeypatch):
    folder = write(tmp_path, *make.zlab())
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, allow_patterns: {"z-lab/x-b16": folder}[name])
    assert load_dflash("z-lab/x-b16", target=make.target())[0].block_size == 16


# ---- router ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("second", [(1, 24), (24,)])
@pytest.mark.parametrize("names", [("net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"), ("w1", "b1", "w2", "b2")])
def test_router_by_shape(tmp_path, second, names):
    tensors = dict(zip(names, make.fill({"a": (24, H), "b": (24,), "c": second, "d": (1,)}).values(), strict=True))
    write(tmp_path, None, tensors)
    cfg, state = load_router(tmp_path / "model.safetensors", hidden_size=H)
    assert cfg == checkpoints.RouterConfig(H, 24, threshold=1.0, positive="diffusion", hidden_is_normed=True)
    expected = {"w1": tensors[names[0]], "b1": tensors[names[1]], "w2": tensors[names[2]].reshape(24)}
    assert same(state, expected | {"b2": tensors[names[3]]})


def test_router_config(tmp_path):
    tensors = make.fill({"x": (24, H), "y": (24,), "z": (1, 24), "t": (1,)})
    config = {"threshold": 0.5, "positive": "autoregressive", "hidden_is_normed": False, "hidden_size": H, "width": 24}
    cfg, _ = load_router(write(tmp_path, config, tensors), hidden_size=H)
    assert (cfg.threshold, cfg.positive, cfg.hidden_is_normed) == (0.5, "autoregressive", False)
