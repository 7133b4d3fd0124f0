"""Our target against transformers: hidden states of every layer and logits, row by row; token-for-token generation."""

from __future__ import annotations

import pytest
import torch

from tests.tiny import ROPES, hf_model
from whiflash_triton.target import target_config
from whiflash_triton.tree import chain, from_parents
from whiflash_triton.weights import load_target

CASES = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"tie_word_embeddings": True}),
    ("mistral", {}),
    ("mistral", {"sliding_window": 5}),
    ("qwen2", {}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}),
    ("qwen3", {}),
    ("qwen3", {"attention_bias": True}),
    ("qwen3", {"head_dim": 20, "num_key_value_heads": 6}),
]


def load(model):
    return load_target(model, torch.device("cpu"), model.dtype)[0]


def states_match(target, model, ids: torch.Tensor, chunk: int = 512) -> None:
    taps = tuple(range(target.config.num_layers + 1))
    cache = target.new_cache(ids.shape[1] + 8, 8)
    with torch.no_grad():
        expected = model(ids, output_hidden_states=True)
        hidden, features = target.prefill(ids, cache, taps, chunk=chunk)
    features = torch.cat(features, 2)
    for k, state in enumerate(expected.hidden_states):
        torch.testing.assert_close(features[k], state, rtol=0, atol=1e-9, msg=lambda m, k=k: f"hidden_states[{k}]: {m}")
    torch.testing.assert_close(target.logits(hidden), expected.logits[:, -1:], rtol=0, atol=1e-9)


@pytest.mark.parametrize(("family", "changes"), CASES, ids=lambda x: x if isinstance(x, str) else "-".join(x) or "plain")
def test_states_equal_transformers(family, changes):
    model = hf_model(family, **changes)
    ids = torch.randint(0, 211, (1, 23), generator=torch.Generator().manual_seed(3))
    states_match(load(model), model, ids)


@pytest.mark.parametrize("rope", list(ROPES))
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_every_rope_type(family, rope):
    model = hf_model(family, rope=rope)
    ids = torch.randint(0, 211, (1, 50), generator=torch.Generator().manual_seed(4))
    states_match(load(model), model, ids)


def test_dynamic_rope_follows_one_token_decoding():
    """Past the original length a row's frequencies come from its own position, however many rows are verified with it."""
    model = hf_model("llama", rope="dynamic")  # original length 64
    target = load(model)
    ids = torch.randint(0, 211, (1, 74), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        step = model(ids[:, :64], use_cache=True)
        rows = []
        for i in range(64, 74):
            step = model(ids[:, i : i + 1], past_key_values=step.past_key_values, use_cache=True)
            rows.append(step.logits[0, -1])
        cache = target.new_cache(80, 16)
        target.prefill(ids[:, :64], cache)
        hidden, _ = target.forward(chain(ids[:, 64:74]), cache)
    torch.testing.assert_close(target.logits(hidden)[0], torch.stack(rows), rtol=0, atol=1e-9)


@pytest.mark.parametrize("chunk", [1, 4, 7])
@pytest.mark.parametrize("window", [None, 5])
def test_chunked_prefill(chunk, window):
    model = hf_model("mistral", sliding_window=window)
    ids = torch.randint(0, 211, (1, 19), generator=torch.Generator().manual_seed(6))
    states_match(load(model), model, ids, chunk=chunk)


@pytest.mark.parametrize("scratch", [False, True], ids=["tail", "scratch"])
@pytest.mark.parametrize(
    ("family", "changes"), [CASES[0], CASES[4], CASES[6], CASES[7]], ids=["llama", "mistral-w5", "qwen2-w6", "qwen3"]
)
def test_tree_rows_equal_their_own_paths(family, changes, scratch):
    """Every node of a tree gets what transformers computes for the plain sequence that ends at it."""
    model = hf_model(family, **changes)
    target = load(model)
    g = torch.Generator().manual_seed(7)
    prompt, tokens = torch.randint(0, 211, (1, 9), generator=g), torch.randint(0, 211, (1, 7), generator=g)
    parents = [-1, 0, 0, 1, 1, 3, 2]
    cache = target.new_cache(32, 8, scratch=scratch)
    taps = (1, 3)
    with torch.no_grad():
        target.prefill(prompt, cache)
        hidden, features = target.forward(from_parents(tokens, parents), cache, taps)
        for node in range(7):
            path, at = [], node
            while at >= 0:
                path.insert(0, at)
                at = parents[at]
            out = model(torch.cat((prompt, tokens[:, path]), 1), output_hidden_states=True)
            torch.testing.assert_close(target.logits(hidden)[0, node], out.logits[0, -1], rtol=0, atol=1e-9)
            for row, tap in enumerate(taps):
                torch.testing.assert_close(features[row, 0, node], out.hidden_states[tap][0, -1], rtol=0, atol=1e-9)


def test_live_model_lends_its_weights():
    model = hf_model("qwen2", tie_word_embeddings=True)
    target = load(model)
    storages = {p.untyped_storage().data_ptr() for p in model.parameters()}
    for layer in target.layers:
        for weight in (*layer.qkv.weights, *layer.gate_up.weights, *layer.o.weights, *layer.down.weights):
            assert weight.untyped_storage().data_ptr() in storages
    assert target.head.data_ptr() == model.model.embed_tokens.weight.data_ptr()


@pytest.mark.parametrize("tied", [False, True])
def test_folder_sharded_and_single(tmp_path, tied):
    model = hf_model("qwen3", dtype=torch.float32, tie_word_embeddings=tied)
    ids = torch.randint(0, 211, (1, 11), generator=torch.Generator().manual_seed(8))
    with torch.no_grad():
        expected = model(ids).logits[:, -1:]
    for name, size in (("single", "5GB"), ("sharded", "60KB")):
        folder = tmp_path / name
        model.save_pretrained(folder, max_shard_size=size)
        assert (folder / "model.safetensors.index.json").exists() == (name == "sharded")
        target, _ = load_target(str(folder), torch.device("cpu"), torch.float64)
        hidden, _ = target.prefill(ids, target.new_cache(16, 1))
        torch.testing.assert_close(target.logits(hidden).float(), expected, rtol=1e-5, atol=1e-5)


def test_bad_targets_are_named(tmp_path):
    import transformers

    with pytest.raises(ValueError, match="qwen3_moe"):
        target_config(transformers.Qwen3MoeConfig())
    with pytest.raises(ValueError, match="mamba"):
        target_config(transformers.MambaConfig())
    quantised = transformers.LlamaConfig()
    quantised.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(ValueError, match="quantised"):
        target_config(quantised)
    with pytest.raises(ValueError, match="hidden_act"):
        target_config(transformers.LlamaConfig(hidden_act="gelu"))
    with pytest.raises(FileNotFoundError, match="neither a local folder nor a hub id"):
        load_target(str(tmp_path / "nowhere" / "at-all"), torch.device("cpu"), torch.float32)
    longrope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [1.0] * 8, "factor": 2.0}
    model = hf_model("llama", dtype=torch.float32)
    target = load(model)
    with pytest.raises(ValueError, match="longrope"):
        from whiflash_triton.rope import rope_tables

        rope_tables(longrope, 16, 8, 64)
    with pytest.raises(ValueError, match="max_cache_len"):
        target.prefill(torch.zeros(1, 9, dtype=torch.int64), target.new_cache(8, 1))
    with pytest.raises(ValueError, match="empty"):
        target.prefill(torch.zeros(1, 0, dtype=torch.int64), target.new_cache(8, 1))


def test_corrupt_and_mismatched_files_are_named(tmp_path):
    model = hf_model("llama", dtype=torch.float32)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="corrupt, truncated"):
        load_target(str(tmp_path), torch.device("cpu"), torch.float32)
    from safetensors.torch import load, save_file

    tensors = load(whole)
    tensors["model.layers.0.self_attn.extra.weight"] = torch.zeros(2)
    del tensors["model.norm.weight"]
    save_file(tensors, file)
    with pytest.raises(ValueError, match=r"missing \['model.norm.weight'\].*unknown \['model.layers.0.self_attn.extra.weight'\]"):
        load_target(str(tmp_path), torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("rows", [0, 1, 3, 8, 9, 33])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_linear_equals_plain(rows, bias, dtype):
    from whiflash_triton.layers import Linear

    g = torch.Generator().manual_seed(rows)
    w, b = torch.randn(40, 24, generator=g).to(dtype), torch.randn(40, generator=g).to(dtype) if bias else None
    linear = Linear([w], [b])
    linear.pack()
    assert linear.packs or dtype == torch.bfloat16  # a CPU with bfloat16 instructions needs no copy
    x = torch.randn(1, rows, 24, generator=g).to(dtype)
    expected = torch.nn.functional.linear(x.double(), w.double(), None if b is None else b.double())
    tolerance = 1e-5 if dtype == torch.float32 else 2**-8
    assert linear(x).dtype == dtype
    torch.testing.assert_close(linear(x).double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("value,packs", [(1.0, True), (2.0**-17, True), (2.0**-18, False), (2.0**-22, False), (1e5, False)])
def test_bfloat16_weights_that_float16_cannot_hold_stay_plain(monkeypatch, value, packs):
    from whiflash_triton import layers

    monkeypatch.setattr(layers, "cpu_computes_bfloat16", lambda: False)
    w = torch.full((4, 4), 1.0078125 * value, dtype=torch.bfloat16)
    linear = layers.Linear([w])
    linear.pack()
    assert linear.packs == packs
    x = torch.full((1, 4), 2.0, dtype=torch.bfloat16)
    torch.testing.assert_close(linear(x), torch.nn.functional.linear(x, w), rtol=2**-8, atol=0)
