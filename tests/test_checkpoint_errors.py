"""Every checkpoint that is damaged, unsupported or made for another target raises an error that names what is wrong."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests import checkpoint_flavours as make
from tests.checkpoint_flavours import VD, H, V, write
from whiflash_triton.checkpoints import CheckpointError, load_dflash, load_eagle3

Change = Callable[[dict, dict], object]


def put(**keys) -> Change:
    return lambda config, state: config.update(keys)


def nested(place: str, **keys) -> Change:
    return lambda config, state: config[place].update(keys)


def drop(key: str) -> Change:
    return lambda config, state: config.pop(key)


def lose(name: str) -> Change:
    return lambda config, state: state.pop(name)


def tensor(name: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Change:
    return lambda config, state: state.update({name: torch.zeros(shape, dtype=dtype)})


def values(name: str, value: list) -> Change:
    return lambda config, state: state.update({name: torch.tensor(value)})


def rename(old: str, new: str) -> Change:
    return lambda config, state: state.update({n.replace(old, new): state.pop(n) for n in list(state) if old in n})


Q = "layers.0.self_attn.q_proj.weight"
BOTH = [  # configs and tensors that neither kind of drafter may have
    (put(hidden_act="gelu"), "hidden_act='gelu' means another MLP activation"),
    (put(bias=True), "bias=True means a bias on the fusion layer"),
    (put(mlp_bias=True), "mlp_bias"),
    (put(quantization_config={"quant_method": "awq"}), "means a quantised file"),
    (put(mystery=True), "unknown key mystery=True"),
    (put(mystery=0), "unknown key mystery=0"),
    (put(mystery={"a": 1}), "unknown key mystery"),
    (put(hidden_size=64), "hidden_size is 64 but the target has 32"),
    (put(hidden_size=0), "hidden_size is 0, expected a positive integer"),
    (put(hidden_size="32"), "hidden_size is '32', expected int"),
    (put(num_attention_heads=True), "num_attention_heads is True, expected int"),
    (drop("hidden_size"), "hidden_size is missing"),
    (drop("vocab_size"), "vocab_size is missing"),
    (drop("num_attention_heads"), "num_attention_heads is missing"),
    (put(vocab_size=V + 1), "vocab_size is 65 but the target has 64"),
    (put(intermediate_size=40), "mlp.down_proj.weight [32, 48] instead of [32, 40]"),
    (put(head_dim=8), "q_proj.weight has 64 rows, which is not 4 heads x head_dim 8"),
    (put(num_attention_heads=3), "3 heads are not a multiple of 2"),
    (put(num_key_value_heads=4), "k_proj.weight"),
    (put(layer_types=["sliding_attention"]), "sliding-window layers are not supported"),
    (lambda c, s: c.update(layer_types=None, use_sliding_window=True), "sliding-window layers"),
    (lambda c, s: c.update(layer_types=None, use_sliding_window=None, sliding_window=2048), "sliding-window layers"),
    (put(sliding_window_size=512), "sliding_window_size=512 means sliding-window"),
    (put(rope_scaling={"rope_type": "longrope"}), "RoPE longrope"),
    (put(rope_scaling={"type": "mrope", "mrope_section": [1]}), "RoPE mrope"),
    (put(rope_scaling={"rope_type": "default", "partial_rotary_factor": 0.5}), "is not supported; use one of"),
    (put(partial_rotary_factor=0.5), "partial rotary embedding"),
    (put(rope_theta=-1), "rope_theta is -1.0, expected a positive number"),
    (put(rope_theta=1e4, rope_parameters={"rope_theta": 1e6}), "rope_theta is 10000.0 and 1000000.0"),
    (
        put(rope_parameters={"rope_type": "yarn", "factor": 2.0}, rope_scaling={"rope_type": "yarn", "factor": 4.0}),
        "rope_parameters and rope_scaling are both given and differ",
    ),
    (put(rope_theta=None, rope_parameters={"full_attention": 3}), "full_attention is 3, expected dict"),
    (lambda c, s: s.update({Q: torch.zeros(())}), "q_proj.weight [] instead of [64"),
    (put(model_type="gemma2"), "model_type 'gemma2' is not supported"),
    (put(architectures=["Qwen3ForCausalLM"]), "architecture Qwen3ForCausalLM is not that of a"),
    (put(speculators_model_type="medusa"), "speculators_model_type is 'medusa'"),
    (put(transformer_layer_config=[1]), "expected a JSON object, found [1]"),
    (lose("fc.weight"), "missing tensors: fc.weight"),
    (lose("norm.weight"), "missing tensors: norm.weight"),
    (tensor("extra.weight", 3), "unknown tensors: extra.weight"),
    (tensor("fc.bias", H), "unknown tensors: fc.bias"),
    (tensor("fc.weight", H, 4 * H), "fc.weight [32, 128] instead of"),
    (tensor("norm.weight", H, dtype=torch.int32), "not floating point (quantised?) tensors: norm.weight"),
    (tensor("fc.weight", H, 5 * H, dtype=torch.int8), "fc.weight is int8 and needs fc.weight.scale"),
    (tensor("fc.weight_scale", H), "belongs to a quantised file"),
    (tensor("model.norm.weight", H), "both mean norm.weight"),
    (tensor("layers.3.input_layernorm.weight", H), "are not 0, 1, ..."),
    (tensor("layers.0.self_attn.q_proj.bias", 64), "unknown tensors: layers.0.self_attn.q_proj.bias"),
    (tensor("layers.0.self_attn.sinks", 4), "belongs to attention sinks"),
    (tensor("layers.0.mlp.experts.0.weight", 4), "belongs to a mixture of experts"),
    (put(attention_bias=True), "missing tensors: layers.0.self_attn.k_proj.bias"),
]
DFLASH = [
    (drop("block_size"), "block_size is missing"),
    (nested("dflash_config", block_size=8), "block_size is given twice and differs"),
    (put(block_size=1), "it counts the anchor, so at least 2"),
    (nested("dflash_config", mask_token_id=None), "mask_token_id is missing"),
    (nested("dflash_config", mask_token_id=V), "mask_token_id 64 is outside the target's 64 embedding rows"),
    (nested("dflash_config", mask_token_id=-1), "mask_token_id -1 is outside"),
    (nested("dflash_config", mask_token_id=7.5), "mask_token_id is 7.5, expected int"),
    (put(num_target_layers=32), "num_target_layers is 32 but the target has 36"),
    (put(num_hidden_layers=3), "num_hidden_layers is 3 but the file holds 2"),
    (put(target_hidden_size=64), "target_hidden_size is 64 but the drafter needs 32"),
    (nested("dflash_config", target_layer_ids=[1, 9, 17, 25, 36]), "hidden_states [2, 10, 18, 26, 37], but the target"),
    (nested("dflash_config", target_layer_ids=[-2, 9, 17, 25, 33]), "layer ids must be integers from 0"),
    (nested("dflash_config", target_layer_ids=[1, 9, 17, 25, "x"]), "layer ids must be integers"),
    (nested("dflash_config", target_layer_ids=[]), "taps target_layer_ids=[] are hidden_states []"),
    (nested("dflash_config", target_layer_ids=[1, 9, 17]), "fc.weight [32, 160] instead of [32, 96]"),
    (put(aux_hidden_state_layer_ids=[1, 9, 17, 25, 33]), "name different hidden states"),
    (nested("dflash_config", surprise=3), "dflash_config: unknown key surprise=3"),
    (nested("dflash_config", causal=True), "causal attention inside the block"),
    (put(is_causal=True), "causal attention inside the block"),
    (nested("dflash_config", use_swa=True), "use_swa=True means sliding-window"),
    (nested("dflash_config", sample_from_anchor=True), "DSpark's shifted slots"),
    (nested("dflash_config", shift_label=True), "Domino's shifted slots"),
    (nested("dflash_config", projector_type="domino"), "Domino or DSpark projector"),
    (put(markov_rank=256), "DSpark's Markov head"),
    (put(enable_confidence_head=True), "DSpark's confidence head"),
    (nested("dflash_config", conv_kernel_size=2), "DFlash 2's convolutions"),
    (nested("dflash_config", selector_rank=64), "DFlash 2's candidate selector"),
    (nested("dflash_config", input_embedding_scale=2.0), "scaled embeddings"),
    (nested("dflash_config", output_multiplier=0.5), "scaled logits"),
    (nested("dflash_config", final_logit_softcapping=30.0), "capped logits"),
    (put(attention_sink_bias=True), "attention sinks"),
    (put(architectures=["DFlash2DraftModel"]), "DFlash2DraftModel is DFlash 2"),
    (put(architectures=["Qwen3DSparkModel"]), "is DSpark"),
    (put(architectures=["DominoDraftModel"]), "is Domino"),
    (put(architectures=["LlamaForCausalLMEagle3"]), "is not that of a DFlash drafter"),
    (put(speculators_model_type="eagle3"), "speculators_model_type is 'eagle3', expected 'dflash'"),
    (tensor("prefix_gru.weight_ih_l0", 3), "belongs to Domino"),
    (tensor("candidate_selector.successor_codebook", 3), "belongs to DFlash 2"),
    (tensor("layers.0.attention_conv.base_kernel", 3), "belongs to DFlash 2"),
    (tensor("markov_head.w1.weight", 3), "belongs to DSpark"),
    (tensor("layers.0.self_attn.g_proj.weight", 3), "belongs to Laguna"),
    (tensor("embed_tokens.weight", V - 1, H), "embed_tokens.weight [63, 32] instead of [64, 32]"),
    (put(draft_vocab_size=VD), "draft vocabulary 16 of 64 but no d2t map"),
    (tensor("lm_head.weight", VD, H), "draft vocabulary 16 of 64 but no d2t map"),
    (tensor("layers.0.self_attn.qkv_proj.weight", 100, H), "qkv_proj.weight has 100 rows"),
    (tensor("layers.0.self_attn.qkv_proj.weight"), "qkv_proj.weight has 0 rows"),
    (lose("layers.1.self_attn.k_norm.weight"), "missing tensors: layers.1.self_attn.k_norm.weight"),
]
EAGLE3 = [
    (rename("layers.0.", "layers.1."), "decoder layers [1] are not 0, 1"),
    (tensor("layers.1.input_layernorm.weight", H), "2 decoder layers; only one-layer EAGLE-3"),
    (put(architectures=["PEagleDraftModel"]), "is P-EAGLE"),
    (put(architectures=["DFlashDraftModel"]), "is not that of an EAGLE-3 drafter"),
    (tensor("mask_hidden", H), "belongs to P-EAGLE"),
    (put(parallel_drafting=True), "P-EAGLE's parallel drafting"),
    (nested("eagle_config", use_aux_hidden_state=False), "a head without feature fusion"),
    (nested("eagle_config", surprise=True), "eagle_config: unknown key surprise"),
    (nested("eagle_config", eagle_aux_hidden_state_layer_ids=[1, 17, 36]), "hidden_states [2, 18, 37], but the target"),
    (put(eagle_aux_hidden_state_layer_ids=[1, 17, 32]), "name different hidden states"),
    (put(num_aux_hidden_states=4), "num_aux_hidden_states is 4 but the taps are 3"),
    (put(target_hidden_size=64), "target_hidden_size is 64 but the target has 32"),
    (put(norm_before_fc=True), "missing tensors: input_norm.weight"),
    (tensor("input_norm.weight", 3 * H), "unknown tensors: input_norm.weight"),
    (put(fc_norm=True), "missing tensors: fc_norm.0.weight, fc_norm.1.weight, fc_norm.2.weight"),
    (tensor("fc_norm.0.weight", H), "unknown tensors: fc_norm.0.weight"),
    (put(fc_norm=True, norm_before_fc=True), "exclude each other"),
    (put(norm_output="yes"), "norm_output is 'yes', expected bool"),
    (tensor("layers.0.self_attn.q_norm.weight", 16), "missing tensors: layers.0.self_attn.k_norm.weight"),
    (lose("lm_head.weight"), "missing tensors: lm_head.weight"),
    (
        lambda c, s: (c.pop("draft_vocab_size"), s.update({"lm_head.weight": torch.zeros(())})),
        "draft_vocab_size is 0, expected a positive integer",
    ),
    (tensor("lm_head.weight", V, H), "lm_head.weight [64, 32] instead of [16, 32]"),
    (lose("d2t"), "draft vocabulary 16 of 64 but no d2t map"),
    (tensor("d2t", VD, dtype=torch.int64), "d2t is all zero"),
    (tensor("d2t", VD - 1, dtype=torch.int64), "d2t is torch.int64 [15], expected integers [16]"),
    (tensor("d2t", VD), "expected integers"),
    (values("d2t", [0] * 15 + [49]), "must name ascending target ids in 0..63"),
    (values("d2t", [5, 3] + [30] * 14), "must name ascending target ids"),
    (values("d2t", [1] * 16), "t2d [64] and d2t name different tokens"),
    (tensor("t2d", V - 1, dtype=torch.bool), "t2d [63] and d2t name different tokens"),
    (put(draft_vocab_size=VD - 1), "expected integers [15]"),
    (put(draft_vocab_size=V + 1), "draft vocabulary 65 is larger than the target's 64"),
    (put(draft_vocab_size=V), "d2t is torch.int64 [16], expected integers [64]"),
    (tensor("embed_tokens.weight", V, H - 1), "embed_tokens.weight [64, 31] instead of [64, 32]"),
    (lambda c, s: (s.pop("t2d"), values("d2t", [V] * 16)(c, s)), "must name ascending target ids"),
]


def _check(load, flavour, change, message, tmp_path):
    config, state = flavour()
    change(config, state)
    folder = write(tmp_path / "drafter", config, state)
    with pytest.raises(CheckpointError) as caught:
        load(folder, target=make.target())
    assert message in str(caught.value) and str(folder) in str(caught.value)


@pytest.mark.parametrize("change, message", BOTH + DFLASH, ids=[message for _, message in BOTH + DFLASH])
def test_dflash_rejects(tmp_path, change, message):
    _check(load_dflash, make.zlab, change, message, tmp_path)


@pytest.mark.parametrize("change, message", BOTH + EAGLE3, ids=[message for _, message in BOTH + EAGLE3])
def test_eagle3_rejects(tmp_path, change, message):
    def flavour():
        config, state = make.specforge()
        return config, {name.replace("midlayer.", "layers.0."): value for name, value in state.items()}

    _check(load_eagle3, flavour, change, message, tmp_path)


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "block_size"])
def test_speculators_rejects_what_class_defaults_fill_in_wrongly(tmp_path, key):
    config, state = make.dflash_speculators()
    config["transformer_layer_config"].pop(key, config.pop(key, None))
    with pytest.raises(CheckpointError, match=key):
        load_dflash(write(tmp_path, config, state), target=make.target())


def test_speculators_layer_config_is_checked_too(tmp_path):
    config, state = make.eagle3_speculators()
    config["transformer_layer_config"]["hc_mult"] = 4
    with pytest.raises(CheckpointError, match="transformer_layer_config: unknown key hc_mult=4"):
        load_eagle3(write(tmp_path, config, state), target=make.target())


def test_narrow_eagle3_needs_its_own_embeddings(tmp_path):
    config, _ = make.specforge()
    folder = write(tmp_path, config | {"target_hidden_size": 96}, make.eagle3_state(target_hidden=96))
    with pytest.raises(CheckpointError, match="missing tensors: embed_tokens.weight"):
        load_eagle3(folder, target=replace(make.target(), hidden_size=96))


def test_tiny_target_has_no_default_taps(tmp_path):
    with pytest.raises(CheckpointError, match=r"the usual default are hidden_states \[2, 1, -1\]"):
        load_eagle3(write(tmp_path, *make.angelslim()), target=make.target(2))


def test_mask_embedding_file(tmp_path):
    folder = write(tmp_path, *make.zlab())
    torch.save(torch.zeros(H), folder / "mask_embedding.pt")
    with pytest.raises(CheckpointError, match="separate mask embedding"):
        load_dflash(folder, target=make.target())


# ---- the sidecar ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ids, message",
    [
        ({"draft_ids": torch.tensor([3, 2], dtype=torch.int32)}, "ascending target ids in 0..63"),
        ({"draft_ids": torch.tensor([3, 3], dtype=torch.int32)}, "ascending target ids in 0..63"),
        ({"draft_ids": torch.tensor([3, V], dtype=torch.int32)}, "ascending target ids in 0..63"),
        ({"draft_ids": torch.tensor([], dtype=torch.int32)}, "ascending target ids in 0..63"),
        ({"draft_ids": torch.tensor([1.0, 2.0])}, "expected one integer tensor draft_ids"),
        ({"other": torch.tensor([1, 2])}, "expected one integer tensor draft_ids, found ['other']"),
    ],
)
def test_bad_sidecar(tmp_path, ids, message):
    folder = write(tmp_path, *make.zlab())
    make.save_file(ids, folder / "draft_vocab.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load_dflash(folder, target=make.target())
    assert message in str(caught.value) and "draft_vocab.safetensors" in str(caught.value)


def test_sidecar_beside_an_own_head(tmp_path):
    folder = write(tmp_path, *make.dflash_speculators())
    make.save_file({"draft_ids": torch.arange(4, dtype=torch.int32)}, folder / "draft_vocab.safetensors")
    with pytest.raises(CheckpointError, match="already hold a head or a map of their own"):
        load_dflash(folder, target=make.target())


def test_sidecar_of_another_size(tmp_path):
    config, state = make.zlab()
    folder = write(tmp_path, config | {"draft_vocab_size": 5}, state)
    make.save_file({"draft_ids": torch.arange(4, dtype=torch.int32)}, folder / "draft_vocab.safetensors")
    with pytest.raises(CheckpointError, match="draft_vocab_size is 5 but draft_ids has 4"):
        load_dflash(folder, target=make.target())


FLAVOURS = [
    make.zlab,
    make.deepspec,
    make.dflash_speculators,
    make.eagle_original,
    make.specforge,
    make.eagle3_speculators,
]
ODD = [None, True, False, 0, -1, 2.5, float("nan"), 10**12, "x", [], [None], {}, {"a": 1}, {"full_attention": 1}]


def _paths(config: dict, prefix: tuple = ()):
    for key, value in config.items():
        yield (*prefix, key)
        if isinstance(value, dict) and key != "speculators_config":
            yield from _paths(value, (*prefix, key))


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_any_odd_value_loads_or_is_a_named_error(tmp_path, flavour):
    config, state = flavour()
    folder = write(tmp_path, config, state)
    load = load_dflash if "mask_token_id" in json.dumps(config) else load_eagle3
    rejected = 0
    for path in _paths(config):
        for value in ODD:
            changed = copy.deepcopy(config)
            place = changed
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = value
            (folder / "config.json").write_text(json.dumps(changed))
            try:
                load(folder, target=make.target())
            except CheckpointError as error:
                rejected += 1
                assert str(folder) in str(error)
    assert rejected > 100
