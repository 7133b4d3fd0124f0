"""Read a GGUF file into transformers names: config and tensors (through the `gguf` library, which dequantises)."""

from __future__ import annotations

from pathlib import Path

import torch

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def read_gguf(path: Path) -> tuple[object, dict[str, torch.Tensor]]:
    """path -> (transformers config, {name: float32 tensor}).

    Errors: ImportError when `gguf` is missing, FileNotFoundError, ValueError for an architecture or a tensor that is unknown.
    """
    try:
        import gguf
    except ImportError as error:
        raise ImportError("reading GGUF needs the gguf package: pip install gguf") from error
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError) as error:
        raise ValueError(f"{path} is corrupt or truncated ({error}): download it again") from error
    fields = {name: field.contents() for name, field in reader.fields.items() if name != "tokenizer.ggml.merges"}
    config = _config(fields, {t.name for t in reader.tensors})
    tensors = {}
    for t in reader.tensors:
        name = _name(t.name)
        weight = torch.from_numpy(gguf.dequantize(t.data, t.tensor_type).copy()).float()
        weight = weight.reshape(tuple(int(n) for n in reversed(t.shape)))
        if config.model_type == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if ".q_proj" in name else config.num_key_value_heads
            weight = _unpermute(weight, heads)
        tensors[name] = weight
    return config, tensors


def _config(fields: dict, names: set[str]):
    from transformers import LlamaConfig, Qwen2Config, Qwen3Config

    arch = fields.get("general.architecture")
    classes = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
    if arch not in classes:
        raise ValueError(f"GGUF architecture {arch!r} is not supported; supported: {sorted(classes)}")
    if "rope_freqs.weight" in names or f"{arch}.rope.scaling.type" in fields:
        raise ValueError("this GGUF scales its rotary embedding: load the safetensors checkpoint instead")
    if f"{arch}.expert_count" in fields:
        raise ValueError("mixture-of-experts GGUF files are not supported")

    def get(key: str, default=None):
        value = fields.get(f"{arch}.{key}", default)
        if value is None:
            raise ValueError(f"the GGUF file lacks {arch}.{key}")
        return value

    heads, hidden = int(get("attention.head_count")), int(get("embedding_length"))
    return classes[arch](
        vocab_size=int(get("vocab_size", len(fields.get("tokenizer.ggml.tokens", [])) or None)),
        hidden_size=hidden,
        intermediate_size=int(get("feed_forward_length")),
        num_hidden_layers=int(get("block_count")),
        num_attention_heads=heads,
        num_key_value_heads=int(get("attention.head_count_kv", heads)),
        head_dim=int(get("attention.key_length", hidden // heads)),
        max_position_embeddings=int(get("context_length")),
        rms_norm_eps=round(float(get("attention.layer_norm_rms_epsilon")), 12),  # stored as float32: 1e-5 reads 9.99e-6
        rope_parameters={"rope_type": "default", "rope_theta": float(get("rope.freq_base", 10000.0))},
        tie_word_embeddings="output.weight" not in names,
        bos_token_id=fields.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=fields.get("tokenizer.ggml.eos_token_id"),
        pad_token_id=fields.get("tokenizer.ggml.padding_token_id"),
    )


def _name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    parts = stem.split(".", 2)
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in _LAYER:
        return f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.{kind}"
    raise ValueError(f"GGUF tensor {name!r} is unknown: this architecture is not supported")


def _unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp stores q and k with each head's rotary pairs interleaved; transformers wants the two halves apart."""
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)
