"""The target: a dense decoder (Llama, Mistral, Qwen2, Qwen3 families) over a tree of tokens, with taps.

Our own module, because a hot path must not follow the cache and forward signatures of a library that changes them. The layer
mathematics is that of the transformers models of the same names; taps are Hugging Face `hidden_states` indices: 0 is the
embedding output, k the residual stream after layer k - 1, and num_layers the output of the final norm.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .cache import Block, KVCache
from .layers import Linear, rms_norm, swiglu
from .rope import apply_rope, full_tables, rope_parameters, rope_tables
from .tree import DraftTree, chain

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
PREFILL_CHUNK = 512


@dataclass(frozen=True)
class TargetConfig:
    family: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope: dict
    max_position_embeddings: int
    windows: tuple[int, ...]  # one a layer; 0 is full attention
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool


def target_config(config) -> TargetConfig:
    """transformers config -> TargetConfig. ValueError for anything but a dense, unquantised decoder of a known family."""
    family = config.model_type
    if getattr(config, "quantization_config", None):
        raise ValueError("quantised targets are not supported: load the float16 or bfloat16 checkpoint")
    if family not in FAMILIES:
        raise ValueError(
            f"target model_type {family!r} is not supported (MoE, hybrid and encoder models are not); supported: {FAMILIES}"
        )
    if config.hidden_act not in ("silu", "swish"):
        raise ValueError(f"hidden_act {config.hidden_act!r} is not supported; supported: silu")
    heads = config.num_attention_heads
    bias = bool(getattr(config, "attention_bias", False))
    return TargetConfig(
        family=family,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocab_size=config.vocab_size,
        rms_norm_eps=config.rms_norm_eps,
        rope=rope_parameters(config),
        max_position_embeddings=config.max_position_embeddings,
        windows=_windows(config, family),
        qkv_bias=family == "qwen2" or (bias and family != "mistral"),
        o_bias=bias and family in ("llama", "qwen3"),
        mlp_bias=family == "llama" and bool(getattr(config, "mlp_bias", False)),
        qk_norm=family == "qwen3",
        tied=bool(getattr(config, "tie_word_embeddings", False)),
    )


def _windows(config, family: str) -> tuple[int, ...]:
    layers, window = config.num_hidden_layers, getattr(config, "sliding_window", None) or 0
    if family == "mistral":
        return (window,) * layers
    types = getattr(config, "layer_types", None) or ["full_attention"] * layers
    unknown = set(types) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ValueError(f"layer types {sorted(unknown)} are not supported: only full_attention and sliding_attention")
    if family == "llama" or "sliding_attention" not in types:
        return (0,) * layers
    if not window:
        raise ValueError("the config has sliding_attention layers but no sliding_window")
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)


@dataclass
class Layer:
    input_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class Target:
    """Weights and forward. `embed` [V, H], `head` [V, H], `norm` [H]; layers as above."""

    def __init__(self, config: TargetConfig, embed: torch.Tensor, layers: list[Layer], norm: torch.Tensor, head: torch.Tensor):
        self.config, self.embed, self.layers, self.norm, self.head = config, embed, layers, norm, head
        self.lm_head = Linear([head])
        self._tables: tuple[torch.Tensor, torch.Tensor] | None = None

    def weight_bytes(self) -> int:
        """Bytes that one forward reads: every weight once, the embedding table only if it is the head too."""
        layers = [w for la in self.layers for li in (la.qkv, la.o, la.gate_up, la.down) for w in li.weights]
        return sum(w.numel() * w.element_size() for w in (*layers, self.head))

    def pack(self) -> None:
        """Lay the weights out for verification on a CPU (`Linear.pack`); they are kept twice."""
        for layer in self.layers:
            for linear in (layer.qkv, layer.o, layer.gate_up, layer.down):
                linear.pack()
        self.lm_head.pack()

    @property
    def device(self) -> torch.device:
        return self.embed.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.dtype

    def new_cache(self, rows: int, draft_rows: int, scratch: bool | None = None) -> KVCache:
        c = self.config
        return KVCache(c.num_layers, c.num_kv_heads, c.head_dim, rows, draft_rows, self.dtype, self.device, scratch)

    def rope(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos, sin [>= rows, D] in the model's dtype; grown on demand."""
        if self._tables is None or self._tables[0].shape[0] < rows:
            c = self.config
            half = rope_tables(c.rope, c.head_dim, rows, c.max_position_embeddings, self.device)
            self._tables = full_tables(*half, self.dtype)
        return self._tables

    def forward(
        self, tree: DraftTree, cache: KVCache, taps: tuple[int, ...] = (), prefill: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Verify a tree on top of `cache.length` committed rows.

        Returns hidden [B, T, H] after the final norm and features [len(taps), B, T, H], taps ascending. The rows' K and V wait
        in the cache's draft rows: `cache.commit` keeps them, the next forward overwrites them.
        """
        block = cache.block(tree, tree.size, prefill=prefill)
        cos, sin = self.rope(cache.rows + cache.draft_rows)
        where = cache.positions(0, tree.size) if tree.is_chain else (tree.depths + cache.lengths).long()
        return self._run(tree.tokens, cos[where], sin[where], cache, block, taps)

    def _run(self, tokens, cos, sin, cache: KVCache, block: Block, taps: tuple[int, ...]):
        c, features = self.config, []
        heads, kv_heads, d = c.num_heads, c.num_kv_heads, c.head_dim
        scale = d**-0.5
        x = F.embedding(tokens, self.embed)  # [B, T, H]
        b, t, _ = x.shape
        for i, layer in enumerate(self.layers):
            if i in taps:
                features.append(x)
            qkv = layer.qkv(rms_norm(x, layer.input_norm, c.rms_norm_eps)).view(b, t, -1, d)
            if layer.q_norm is None:
                qk = apply_rope(qkv[:, :, : heads + kv_heads], cos, sin)
                q, k = qk[:, :, :heads], qk[:, :, heads:]
            else:
                q = apply_rope(rms_norm(qkv[:, :, :heads], layer.q_norm, c.rms_norm_eps), cos, sin)
                k = apply_rope(rms_norm(qkv[:, :, heads : heads + kv_heads], layer.k_norm, c.rms_norm_eps), cos, sin)
            out = cache.attend(i, q, k, qkv[:, :, heads + kv_heads :], block, scale, c.windows[i])
            x = x + layer.o(out.reshape(b, t, heads * d))
            x = x + swiglu(rms_norm(x, layer.post_norm, c.rms_norm_eps), layer.gate_up, layer.down)
        x = rms_norm(x, self.norm, c.rms_norm_eps)
        if c.num_layers in taps:
            features.append(x)
        return x, torch.stack(features) if features else x.new_empty(0, b, t, c.hidden_size)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [..., H] after the final norm -> [..., V]."""
        return self.lm_head(hidden)

    def prefill(
        self, tokens: torch.Tensor, cache: KVCache, taps: tuple[int, ...] = (), chunk: int = PREFILL_CHUNK
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Commit tokens int64 [B, P] chunk by chunk; returns hidden [B, 1, H] of the last row and each chunk's features."""
        if tokens.shape[1] == 0:
            raise ValueError("the prompt is empty: give at least one token")
        if cache.length + tokens.shape[1] > cache.rows:
            raise ValueError(
                f"a prompt of {tokens.shape[1]} tokens does not fit max_cache_len {cache.rows}: shorten it or raise max_cache_len"
            )
        features = []
        for part in tokens.split(chunk, 1):
            hidden, tapped = self.forward(chain(part), cache, taps, prefill=True)
            cache.set_length(cache.length + part.shape[1])
            features.append(tapped)
        return hidden[:, -1:], features
