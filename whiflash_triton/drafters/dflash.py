"""DFlash (arXiv 2602.06036): one bidirectional pass over a block of masks drafts every slot at once.

Slot 0 holds the anchor, slot j predicts the token at its own position. Target features enter as K and V of every draft layer;
the block's own rows are never kept. Ingestion is one GEMM for all layers and `kv_injection`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .. import ops
from ..arms import Arm
from ..cache import KVCache
from ..checkpoints import DFlashConfig
from ..layers import Linear, fused, rms_norm, swiglu
from ..rope import apply_rope, full_tables, rope_tables
from ..target import Target
from ..tree import DraftTree, chain
from .base import PENDING_LIMIT, Pending, keep_rows
from .calibration import Calibration


@dataclass
class _Layer:
    input_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor
    k_norm: torch.Tensor
    o: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class DFlashDrafter:
    """config and canonical tensors (see checkpoints.py) over a target whose embedding and head it borrows."""

    def __init__(
        self,
        config: DFlashConfig,
        tensors: dict[str, torch.Tensor],
        target: Target,
        rows: int,
        pending_limit: int = PENDING_LIMIT,
        scratch: bool | None = None,
    ):
        c, w = config, {k: _cast(v, target) for k, v in tensors.items()}
        self.config, self.taps, self.max_draft = c, c.taps, c.block_size - 1
        self.pending_limit = pending_limit
        self.calibration: Calibration | None = None  # None: its probabilities are taken as they are
        self.window = 0  # a block sees so many of the newest rows; 0: all
        self.embed = w.get("embed_tokens.weight", target.embed)
        self.fc, self.hidden_norm, self.norm = Linear([w["fc.weight"]]), w["hidden_norm.weight"], w["norm.weight"]
        self.layers = [_layer(w, f"layers.{i}.") for i in range(c.num_layers)]
        self.context_kv, self.context_k_norm = _context(w, c)
        self.draft_ids = w.get("draft_ids")
        if "lm_head.weight" in w:
            self.head = Linear([w["lm_head.weight"]])
        elif self.draft_ids is not None:
            self.head = Linear([target.head[self.draft_ids]])
        else:
            self.head = target.lm_head
        for linear in (self.context_kv, *(m for la in self.layers for m in (la.qkv, la.o, la.gate_up, la.down))):
            linear.pack()
        if self.head is not target.lm_head:
            self.head.pack()
        self.cache = KVCache(c.num_layers, c.num_kv_heads, c.head_dim, rows, c.block_size, target.dtype, target.device, scratch)
        half = rope_tables(c.rope, c.head_dim, rows + c.block_size, c.max_position_embeddings, target.device)
        self.tables = full_tables(*half, target.dtype)
        self.context_tables = tuple(table.repeat(1, 2) for table in half)  # [rows, D], the form kv_injection takes
        self.queue = Pending()
        self.ingested: list[torch.Tensor] = []  # the committed tokens of the cache's rows, int64 [B, T] pieces

    @property
    def pending(self) -> int:
        return self.queue.rows

    @property
    def tokens(self) -> list[int]:
        """The committed token of every row in the cache."""
        return [t for piece in self.ingested for t in piece[0].tolist()]

    def reset(self) -> None:
        self.cache.set_length(0)
        self.queue.clear()
        self.ingested.clear()

    def crop(self, length: int) -> None:
        """Forget the rows of tokens `length` and later, cached or pending; a row depends on its own token and those before."""
        known = self.cache.length
        self.queue.keep(max(length - known, 0))
        if length < known:
            self.cache.set_length(length)
            self.ingested = keep_rows(self.ingested, length)

    def ingest(self, features: torch.Tensor, tokens: torch.Tensor) -> None:
        """features [taps, B, T, H] in this drafter's tap order, tokens int64 [B, T]: the rows after the last ingested one."""
        self.queue.add(features, tokens)
        if self.queue.rows > self.pending_limit:
            self.catch_up()

    def catch_up(self) -> None:
        """K and V of all pending rows, every layer, in one pass; nothing else is computed."""
        if not self.queue.rows:
            return
        features, tokens = self.queue.take()
        self.ingest_at(features, self.cache.positions(0, features.shape[1]))
        self.cache.set_length(self.cache.length + features.shape[1])
        self.ingested.append(tokens)

    def ingest_at(self, features: torch.Tensor, where: slice | torch.Tensor) -> None:
        """features [B, C, taps * H] of the rows after the cache's, at positions `where`: their K and V, not yet counted in."""
        c = self.config
        context = rms_norm(self.fc(features), self.hidden_norm, c.rms_norm_eps)  # [B, C, H]
        projected = self.context_kv(context).view(1, features.shape[1], c.num_layers, 2, c.num_kv_heads, c.head_dim)
        cos, sin = (table[where] for table in self.context_tables)
        ops.kv_injection(projected, self.context_k_norm, cos, sin, self.cache.kv, self.cache.lengths, c.rms_norm_eps)

    def block_hidden(self, anchor: torch.Tensor) -> torch.Tensor:
        """anchor int64 [B, 1] -> the block's states after the final norm [B, block_size, H]."""
        c, n = self.config, self.config.block_size
        self.catch_up()
        block = self.cache.block(None, n)
        where = self.cache.positions(0, n)
        cos, sin = (table[where] for table in self.tables)
        masks = anchor.new_full((1, n - 1), c.mask_token_id)
        x = F.embedding(torch.cat((anchor, masks), 1), self.embed)
        heads, kv_heads, d = c.num_heads, c.num_kv_heads, c.head_dim
        for i, layer in enumerate(self.layers):
            qkv = layer.qkv(rms_norm(x, layer.input_norm, c.rms_norm_eps)).view(1, n, -1, d)
            q = apply_rope(rms_norm(qkv[:, :, :heads], layer.q_norm, c.rms_norm_eps), cos, sin)
            k = apply_rope(rms_norm(qkv[:, :, heads : heads + kv_heads], layer.k_norm, c.rms_norm_eps), cos, sin)
            out = self.cache.attend(i, q, k, qkv[:, :, heads + kv_heads :], block, d**-0.5, self.window + (self.window > 0))
            x = x + layer.o(out.reshape(1, n, heads * d))
            x = x + swiglu(rms_norm(x, layer.post_norm, c.rms_norm_eps), layer.gate_up, layer.down)
        return rms_norm(x, self.norm, c.rms_norm_eps)

    def draft(self, anchor: torch.Tensor, arm: Arm, max_depth: int) -> DraftTree:
        """anchor int64 [B, 1]; the trained block is drafted, the head applied to the first slots. A chain of at most max_depth."""
        size = min(arm.size, max_depth)
        if not 1 <= size <= self.max_draft:
            raise ValueError(f"dflash:{size} is out of range: this drafter's block holds 1 to {self.max_draft} drafts")
        hidden = self.block_hidden(anchor)[:, 1 : size + 1]
        tokens = self.head(hidden).argmax(-1)
        if self.draft_ids is not None:
            tokens = self.draft_ids[tokens]
        return chain(torch.cat((anchor, tokens), 1))


def _cast(tensor: torch.Tensor, target: Target) -> torch.Tensor:
    return tensor.to(device=target.device, dtype=target.dtype if tensor.is_floating_point() else None)


def _layer(w: dict[str, torch.Tensor], p: str) -> _Layer:
    a, m = p + "self_attn.", p + "mlp."
    return _Layer(
        input_norm=w[p + "input_layernorm.weight"],
        qkv=fused([w[a + f"{x}_proj.weight"] for x in "qkv"], [w.get(a + f"{x}_proj.bias") for x in "qkv"]),
        q_norm=w[a + "q_norm.weight"],
        k_norm=w[a + "k_norm.weight"],
        o=Linear([w[a + "o_proj.weight"]], [w.get(a + "o_proj.bias")]),
        post_norm=w[p + "post_attention_layernorm.weight"],
        gate_up=fused([w[m + "gate_proj.weight"], w[m + "up_proj.weight"]]),
        down=Linear([w[m + "down_proj.weight"]]),
    )


def _context(w: dict[str, torch.Tensor], c: DFlashConfig) -> tuple[Linear, torch.Tensor]:
    """The context projection of all layers as one weight [L * 2 * kv, H], and the k norms [L, D]."""
    names = [f"layers.{i}.self_attn.{x}_proj" for i in range(c.num_layers) for x in "kv"]
    linear = fused([w[n + ".weight"] for n in names], [w.get(n + ".bias") for n in names])
    return linear, torch.stack([w[f"layers.{i}.self_attn.k_norm.weight"] for i in range(c.num_layers)])
