"""Small random models for tests: a target of each family through transformers, and drafters over them."""

from __future__ import annotations

import torch

from whiflash_triton.checkpoints import (
    DFlashConfig,
    Eagle3Config,
    TargetShape,  # noqa: F401  (re-exported for tests)
)

ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}


def hf_model(family: str, dtype=torch.float64, rope: str = "default", seed: int = 0, **changes):
    """A random transformers model: 4 layers, hidden 48, vocabulary 211; weights large enough that argmax is not a coin toss."""
    import transformers

    torch.manual_seed(seed)
    kwargs = dict(
        vocab_size=211,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64 if rope == "dynamic" else 256,
        rope_parameters=dict(ROPES[rope]),
        tie_word_embeddings=False,
        initializer_range=0.2,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    name = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
    if family in ("mistral",):
        kwargs["sliding_window"] = None
    config = getattr(transformers, f"{name}Config")(**(kwargs | changes))
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases away from 1 and 0, or a test cannot see them
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.generation_config.eos_token_id = None
    return model


def dflash(target, block_size: int = 6, layers: int = 2, draft_vocab: int | None = None, seed: int = 1):
    """(DFlashConfig, tensors): random, over the target's sizes."""
    t, g = target.config, torch.Generator().manual_seed(seed)
    c = DFlashConfig(
        t.hidden_size, 64, layers, 4, 2, 16, 1e-6, dict(ROPES["default"]), t.vocab_size, block_size, 7,
        (1, 2, t.num_layers - 1), False, 256, draft_vocab, t.num_layers,
    )  # fmt: skip

    def w(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64) * 0.2

    h = t.hidden_size
    s = {"fc.weight": w(h, 3 * h), "hidden_norm.weight": w(h) + 1, "norm.weight": w(h) + 1}
    for i in range(layers):
        p = f"layers.{i}."
        s |= {p + "input_layernorm.weight": w(h) + 1, p + "post_attention_layernorm.weight": w(h) + 1}
        s |= {p + "self_attn.q_proj.weight": w(64, h), p + "self_attn.o_proj.weight": w(h, 64)}
        s |= {p + "self_attn.k_proj.weight": w(32, h), p + "self_attn.v_proj.weight": w(32, h)}
        s |= {p + "self_attn.q_norm.weight": w(16) + 1, p + "self_attn.k_norm.weight": w(16) + 1}
        s |= {p + "mlp.gate_proj.weight": w(64, h), p + "mlp.up_proj.weight": w(64, h), p + "mlp.down_proj.weight": w(h, 64)}
    if draft_vocab is not None:
        s["draft_ids"] = torch.randperm(t.vocab_size, generator=g)[:draft_vocab].sort().values
    return c, s


def eagle3(target, draft_vocab: int = 150, seed: int = 2, **flags):
    """(Eagle3Config, tensors): random, over the target's sizes; flags as in Eagle3Config."""
    t, g = target.config, torch.Generator().manual_seed(seed)
    on = dict(norm_before_residual=False, norm_before_fc=False, fc_norm=False, norm_output=False, qk_norm=False) | flags
    h, heads, kv, d = t.hidden_size, 4, 2, 10  # head_dim differs from hidden / heads
    c = Eagle3Config(
        h, h, 64, heads, kv, d, 1e-6, dict(ROPES["default"]), t.vocab_size, draft_vocab,
        (1, 2, t.num_layers - 1), False, max_position_embeddings=256, **on,
    )  # fmt: skip

    def w(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64) * 0.2

    p = "layers.0."
    s = {"fc.weight": w(h, 3 * h), "norm.weight": w(h) + 1, "lm_head.weight": w(draft_vocab, h)}
    s |= {p + f"{n}.weight": w(h) + 1 for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
    s |= {p + "self_attn.q_proj.weight": w(heads * d, 2 * h), p + "self_attn.o_proj.weight": w(h, heads * d)}
    s |= {p + "self_attn.k_proj.weight": w(kv * d, 2 * h), p + "self_attn.v_proj.weight": w(kv * d, 2 * h)}
    s |= {p + "mlp.gate_proj.weight": w(64, h), p + "mlp.up_proj.weight": w(64, h), p + "mlp.down_proj.weight": w(h, 64)}
    if on["qk_norm"]:
        s |= {p + "self_attn.q_norm.weight": w(d) + 1, p + "self_attn.k_norm.weight": w(d) + 1}
    if on["norm_before_fc"]:
        s["input_norm.weight"] = w(3 * h) + 1
    if on["fc_norm"]:
        s |= {f"fc_norm.{i}.weight": w(h) + 1 for i in range(3)}
    s["draft_ids"] = torch.randperm(t.vocab_size, generator=g)[:draft_vocab].sort().values
    return c, s
