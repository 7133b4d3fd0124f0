"""Rotary position embedding tables, frequencies as transformers initialises them (rotate-half layout)."""

from __future__ import annotations

import torch

SUPPORTED = ("default", "linear", "dynamic", "yarn", "llama3")


def rope_parameters(config) -> dict:
    """transformers config -> {"rope_type", "rope_theta", ...}, whichever spelling the config uses."""
    rope = dict(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {})
    rope.setdefault("rope_type", rope.pop("type", "default"))
    rope.setdefault("rope_theta", getattr(config, "rope_theta", None) or 10000.0)
    return rope


def rope_tables(
    rope: dict, head_dim: int, rows: int, max_position_embeddings: int, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos, sin float32 [rows, head_dim // 2], attention scaling included.

    rope: HF `rope_parameters`. Dynamic RoPE follows one-token decoding: row p uses the frequencies of a sequence that ends
    at p, so a row never depends on how many tokens were verified with it. Raises ValueError on a type it does not know.
    """
    kind = rope.get("rope_type", "default")
    if kind not in SUPPORTED:
        raise ValueError(f"rope_type {kind!r} is not supported; supported: {', '.join(SUPPORTED)}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("partial_rotary_factor other than 1 is not supported")
    if head_dim % 2:
        raise ValueError(f"head_dim {head_dim} is odd; rotary embedding needs pairs")
    positions = torch.arange(rows, dtype=torch.float32, device=device)
    if kind == "default":
        exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).to(dtype=torch.float32) / head_dim
        freqs = torch.outer(positions, (1.0 / (rope["rope_theta"] ** exponent)).to(device))
        return freqs.cos(), freqs.sin()
    inv_freq, scale = _initialise(rope, head_dim, max_position_embeddings, device, None)
    freqs = torch.outer(positions, inv_freq)  # [rows, D/2]
    if kind == "dynamic":
        for row in range(max_position_embeddings, rows):
            freqs[row] = row * _initialise(rope, head_dim, max_position_embeddings, device, torch.tensor(row + 1))[0]
    return freqs.cos() * scale, freqs.sin() * scale


def _initialise(rope: dict, head_dim: int, max_positions: int, device, seq_len: torch.Tensor | None) -> tuple[torch.Tensor, float]:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(  # any config class would do: the functions read only these four
        hidden_size=head_dim,
        num_attention_heads=1,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rope_parameters=dict(rope),
    )
    inv_freq, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, device, seq_len=seq_len)
    return inv_freq.float(), float(scale)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [B, T, heads, D]; cos, sin [T, D] in x's dtype, the two halves repeated, the first half of sin negated."""
    half = x.shape[-1] // 2
    rolled = torch.cat((x[..., half:], x[..., :half]), -1)
    return x * cos.unsqueeze(-2) + rolled * sin.unsqueeze(-2)


def full_tables(cos: torch.Tensor, sin: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Half tables [rows, D/2] -> the [rows, D] pair `apply_rope` takes."""
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)
