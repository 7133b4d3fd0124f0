"""Small checkpoints of every published flavour, made out of nothing: real config keys and tensor names, tiny sizes."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from whiflash_triton.checkpoints import TargetShape

H, INNER, V, VD = 32, 48, 64, 16
HEADS, KV, HD = 4, 2, 16  # head_dim differs from H / HEADS on purpose
DRAFTED = [0, 1, 2, 5, 6, 9, 12, 13, 20, 21, 30, 31, 40, 50, 62, 63]  # VD target ids


def target(layers: int = 36) -> TargetShape:
    return TargetShape(num_layers=layers, hidden_size=H, vocab_size=V)


def fill(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def layer(prefix: str, width: int, head_dim: int = HD, qk_norm: bool = False, bias: bool = False) -> dict:
    q, kv = HEADS * head_dim, KV * head_dim
    shapes = {
        "input_layernorm.weight": (H,),
        "post_attention_layernorm.weight": (H,),
        "self_attn.q_proj.weight": (q, width),
        "self_attn.k_proj.weight": (kv, width),
        "self_attn.v_proj.weight": (kv, width),
        "self_attn.o_proj.weight": (H, q),
        "mlp.gate_proj.weight": (INNER, H),
        "mlp.up_proj.weight": (INNER, H),
        "mlp.down_proj.weight": (H, INNER),
    }
    if qk_norm:
        shapes |= {"self_attn.q_norm.weight": (head_dim,), "self_attn.k_norm.weight": (head_dim,)}
    if bias:
        shapes |= {f"self_attn.{p}_proj.bias": (n,) for p, n in (("q", q), ("k", kv), ("v", kv), ("o", H))}
    return {prefix + name: shape for name, shape in shapes.items()}


def maps() -> dict[str, Tensor]:
    ids = torch.tensor(DRAFTED)
    t2d = torch.zeros(V, dtype=torch.bool)
    t2d[ids] = True
    return {"d2t": ids - torch.arange(VD), "t2d": t2d}


def dflash_state(layers: int = 2, taps: int = 5, **kwargs) -> dict[str, Tensor]:
    shapes = {"fc.weight": (H, taps * H), "hidden_norm.weight": (H,), "norm.weight": (H,)}
    for n in range(layers):
        shapes |= layer(f"layers.{n}.", H, qk_norm=True, **kwargs)
    return fill(shapes)


def zlab(layers: int = 2, target_layers: int = 36) -> tuple[dict, dict[str, Tensor]]:
    """z-lab/Qwen3-4B-DFlash-b16's config.json with small sizes."""
    config = {
        "architectures": ["DFlashDraftModel"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": 16,
        "bos_token_id": 1,
        "dflash_config": {"mask_token_id": 7, "target_layer_ids": [1, 9, 17, 25, 33]},
        "dtype": "bfloat16",
        "eos_token_id": 2,
        "head_dim": HD,
        "hidden_act": "silu",
        "hidden_size": H,
        "initializer_range": 0.02,
        "intermediate_size": INNER,
        "layer_types": ["full_attention"] * layers,
        "max_position_embeddings": 40960,
        "max_window_layers": layers,
        "model_type": "qwen3",
        "num_attention_heads": HEADS,
        "num_hidden_layers": layers,
        "num_key_value_heads": KV,
        "num_target_layers": target_layers,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": V,
    }
    return config, dflash_state(layers)


def deepspec() -> tuple[dict, dict[str, Tensor]]:
    """Top-level target_layer_ids and mask_token_id, the DSpark extras switched off."""
    config, state = zlab()
    nested = config.pop("dflash_config")
    return config | nested | {"markov_rank": 0, "markov_head_type": "vanilla", "num_anchors": 64}, state


def dflash_speculators() -> tuple[dict, dict[str, Tensor]]:
    config = {
        "architectures": ["DFlashSpeculator"],
        "aux_hidden_state_layer_ids": [2, 10, 18, 26, 34],
        "block_size": 8,
        "draft_vocab_size": VD,
        "dtype": "bfloat16",
        "emb_dim": 256,
        "gru_hidden_dim": 1024,
        "has_no_defaults_at_init": False,
        "mask_token_id": 7,
        "projector_type": "dflash",
        "pure_draft_prefix_len": 1,
        "sample_from_anchor": False,
        "shift_label": False,
        "sliding_window_non_causal": False,
        "speculators_config": {"algorithm": "dflash", "proposal_methods": [{"speculative_tokens": 7}]},
        "speculators_model_type": "dflash",
        "speculators_version": "0.5.0",
        "target_hidden_size": None,
        "transformer_layer_config": {
            "model_type": "qwen3",
            "head_dim": HD,
            "hidden_size": H,
            "intermediate_size": INNER,
            "num_attention_heads": HEADS,
            "num_hidden_layers": 2,
            "num_key_value_heads": KV,
            "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
            "vocab_size": V,
        },
    }
    own = fill({"lm_head.weight": (VD, H), "embed_tokens.weight": (V, H), "verifier_norm.weight": (H,)})
    return config, dflash_state() | own | maps()


def eagle3_state(prefix: str = "midlayer.", head_dim: int = HD, target_hidden: int = H, **kwargs) -> dict[str, Tensor]:
    shapes = {"fc.weight": (H, 3 * target_hidden), "norm.weight": (H,), "lm_head.weight": (VD, H)}
    shapes |= {f"{prefix}hidden_norm.weight": (H,)} | layer(prefix, 2 * H, head_dim, **kwargs)
    return fill(shapes) | maps()


def eagle_original() -> tuple[dict, dict[str, Tensor]]:
    """yuhuili/EAGLE3-LLaMA3.1-Instruct-8B's config.json: no head_dim, no rope_theta, no layer ids."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 1,
        "draft_vocab_size": VD,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": H,
        "initializer_range": 0.02,
        "intermediate_size": INNER,
        "max_position_embeddings": 2048,
        "model_type": "llama",
        "num_attention_heads": HEADS,
        "num_hidden_layers": 1,
        "num_key_value_heads": KV,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformers_version": "4.28.1",
        "use_cache": True,
        "vocab_size": V,
    }
    return config, eagle3_state(head_dim=H // HEADS)


def specforge() -> tuple[dict, dict[str, Tensor]]:
    """SpecForge's qwen3-4b-eagle3.json: llama layers for a Qwen3 target, layer ids as layer outputs."""
    config, _ = eagle_original()
    config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 17, 32], "use_aux_hidden_state": True},
        "head_dim": HD,
        "max_position_embeddings": 40960,
        "max_window_layers": 36,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "use_sliding_window": False,
    }
    return config, eagle3_state()


def angelslim() -> tuple[dict, dict[str, Tensor]]:
    """AngelSlim/Qwen3-4B_eagle3: its own head_dim, embeddings declared tied though the head is reduced."""
    config, _ = specforge()
    del config["eagle_config"]
    config |= {"architectures": ["Eagle3LlamaForCausalLM"], "target_model_type": "qwen3", "head_dim": 10}
    return config | {"tie_word_embeddings": True}, eagle3_state(head_dim=10)


def eagle3_speculators(flavour: str = "llama", **flags) -> tuple[dict, dict[str, Tensor]]:
    config = {
        "architectures": ["Eagle3Speculator"],
        "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
        "draft_vocab_size": VD,
        "eagle_aux_hidden_state_layer_ids": None,
        "embed_requires_grad": False,
        "fc_norm": False,
        "has_no_defaults_at_init": False,
        "norm_before_fc": False,
        "norm_before_residual": True,
        "norm_output": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}],
            "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "Qwen/Qwen3-8B"},
        },
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "target_hidden_size": None,
        "transformer_layer_config": {
            "model_type": flavour,
            "head_dim": HD,
            "hidden_size": H,
            "intermediate_size": INNER,
            "num_attention_heads": HEADS,
            "num_hidden_layers": 1,
            "num_key_value_heads": KV,
            "rope_theta": 10000.0,
            "vocab_size": V,
        },
    } | flags
    state = eagle3_state("layers.0.", qk_norm=flavour == "qwen3") | fill({"embed_tokens.weight": (V, H)})
    if flags.get("norm_before_fc"):
        state |= fill({"input_norm.weight": (3 * H,)})
    if flags.get("fc_norm"):
        state |= fill({f"fc_norm.{i}.weight": (H,) for i in range(3)})
    return config, state


def write(folder: Path, config: dict | None, state: dict[str, Tensor], kind: str = "single") -> Path:
    """A checkpoint folder: one safetensors file, two shards with an index, or pytorch_model.bin."""
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    if kind == "single":
        save_file(state, folder / "model.safetensors")
    elif kind == "bin":
        torch.save(state, folder / "pytorch_model.bin")
    else:
        names = sorted(state)
        parts = {"model-1-of-2.safetensors": names[::2], "model-2-of-2.safetensors": names[1::2]}
        for file, part in parts.items():
            save_file({name: state[name] for name in part}, folder / file)
        index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
