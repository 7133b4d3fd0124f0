"""EAGLE-3 (arXiv 2503.01840): one decoder layer that feeds on the target's features and then on its own states.

Slot i pairs the feature of token i with the embedding of token i + 1, at RoPE position i, and predicts token i + 2. K and V of a
slot depend on nothing else, so catch-up is exact without attention; only the newest slot also runs query, MLP and head.
Draft rows, built from the drafter's own states, are dropped every round and rebuilt from target features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..arms import Arm
from ..cache import Block, KVCache
from ..checkpoints import Eagle3Config
from ..layers import Linear, fused, rms_norm, swiglu
from ..rope import apply_rope, full_tables, rope_tables
from ..target import Target
from ..tree import DraftTree, chain
from .base import PENDING_LIMIT, Pending, keep_rows
from .calibration import Calibration
from .dflash import _cast

MAX_DRAFT = 16
MAX_TREE_ROWS = 1 + 16 * 7  # the newest committed row and the frontiers of a tree


class Eagle3Drafter:
    """config and canonical tensors (see checkpoints.py) over a target whose embedding it borrows unless it has its own."""

    def __init__(
        self,
        config: Eagle3Config,
        tensors: dict[str, torch.Tensor],
        target: Target,
        rows: int,
        pending_limit: int = PENDING_LIMIT,
        scratch: bool | None = None,
        max_draft: int = MAX_DRAFT,
    ):
        c, w = config, {k: _cast(v, target) for k, v in tensors.items()}
        self.config, self.taps, self.max_draft = c, c.taps, max_draft
        self.pending_limit = pending_limit
        self.calibration: Calibration | None = None  # None: its probabilities are taken as they are
        self.window = 0  # a row sees so many of the newest rows, itself included; 0: all
        self.embed = w.get("embed_tokens.weight", target.embed)
        a, m = "layers.0.self_attn.", "layers.0.mlp."
        self.fc, self.norm = Linear([w["fc.weight"]]), w["norm.weight"]
        self.input_norm, self.fc_norms = (
            w.get("input_norm.weight"),
            [w.get(f"fc_norm.{i}.weight") for i in range(len(c.taps))],
        )
        self.embed_norm, self.hidden_norm = w["layers.0.input_layernorm.weight"], w["layers.0.hidden_norm.weight"]
        self.post_norm = w["layers.0.post_attention_layernorm.weight"]
        self.q_norm, self.k_norm = w.get(a + "q_norm.weight"), w.get(a + "k_norm.weight")
        self.q = Linear([w[a + "q_proj.weight"]], [w.get(a + "q_proj.bias")])
        self.kv = fused([w[a + f"{x}_proj.weight"] for x in "kv"], [w.get(a + f"{x}_proj.bias") for x in "kv"])
        self.o = Linear([w[a + "o_proj.weight"]], [w.get(a + "o_proj.bias")])
        self.gate_up = fused([w[m + "gate_proj.weight"], w[m + "up_proj.weight"]])
        self.down, self.head = Linear([w[m + "down_proj.weight"]]), Linear([w["lm_head.weight"]])
        self.draft_ids = w["draft_ids"]
        for linear in (self.q, self.kv, self.o, self.gate_up, self.down, self.head):
            linear.pack()
        draft_rows = max(max_draft, MAX_TREE_ROWS)
        self.cache = KVCache(1, c.num_kv_heads, c.head_dim, rows, draft_rows, target.dtype, target.device, scratch)
        half = rope_tables(c.rope, c.head_dim, rows + max_draft, c.max_position_embeddings, target.device)
        self.tables = full_tables(*half, target.dtype)
        self.queue = Pending()
        self.newest: tuple[torch.Tensor, torch.Tensor] | None = None  # features and token of the cache's last row
        self.ingested: list[torch.Tensor] = []  # the tokens embedded in the cache's rows, int64 [B, T] pieces

    @property
    def pending(self) -> int:
        return self.queue.rows

    @property
    def tokens(self) -> list[int]:
        """The token embedded in every row of the cache, each the one after its row's own."""
        return [t for piece in self.ingested for t in piece[0].tolist()]

    def reset(self) -> None:
        self.cache.set_length(0)
        self.queue.clear()
        self.newest = None
        self.ingested.clear()

    def crop(self, length: int) -> None:
        """Forget the rows from `length` on, cached or pending.

        A cached row i embeds token i + 1: to keep what two texts share, crop to one row less than their common prefix of tokens.
        """
        known = self.cache.length
        self.queue.keep(max(length - known, 0))
        if length < known:
            self.cache.set_length(length)
            self.ingested = keep_rows(self.ingested, length)
            self.newest = None

    def ingest(self, features: torch.Tensor, tokens: torch.Tensor) -> None:
        """features [taps, B, T, H] in this drafter's tap order, tokens int64 [B, T]: the rows after the last ingested one.

        The newest row waits in any case: its slot embeds the token that follows it.
        """
        self.queue.add(features, tokens)
        if self.queue.rows > self.pending_limit:
            following = torch.cat(self.queue.tokens, 1)[:, 1:]
            features, _ = self.queue.take(keep=1)
            self._append(features, following)
            self.newest = None  # it was the state of a row that is no longer the last

    def _fuse(self, features: torch.Tensor) -> torch.Tensor:
        """[B, T, taps * Ht] -> [B, T, H]."""
        eps = self.config.rms_norm_eps
        if self.input_norm is not None:
            features = rms_norm(features, self.input_norm, eps)
        elif self.fc_norms[0] is not None:
            parts = features.chunk(len(self.fc_norms), -1)
            features = torch.cat([rms_norm(p, w, eps) for p, w in zip(parts, self.fc_norms, strict=True)], -1)
        return self.fc(features)

    def _inputs(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The attention input [B, T, 2H]: normed embedding first, then normed state."""
        eps = self.config.rms_norm_eps
        embedded = rms_norm(F.embedding(tokens, self.embed), self.embed_norm, eps)
        return torch.cat((embedded, rms_norm(hidden, self.hidden_norm, eps)), -1)

    def _keys_values(self, x: torch.Tensor, where: slice | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [B, T, 2H] at positions `where`, T of them or one for all -> K after norm and RoPE, V, both [B, T, Hkv, D]."""
        c = self.config
        k, v = self.kv(x).view(1, x.shape[1], 2, c.num_kv_heads, c.head_dim).unbind(2)
        if self.k_norm is not None:
            k = rms_norm(k, self.k_norm, c.rms_norm_eps)
        return apply_rope(k, *(table[where] for table in self.tables)), v

    def _append(self, features: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """Commit rows built from target features: K and V only; returns their states [B, T, H]."""
        where = self.cache.positions(0, following.shape[1])
        self.cache.set_length(self.cache.length + following.shape[1])  # raises before anything is written past the end
        hidden = self.ingest_at(features, following, where)
        self.ingested.append(following)
        return hidden

    def ingest_at(self, features: torch.Tensor, following: torch.Tensor, where: slice | torch.Tensor) -> torch.Tensor:
        """Rows at positions `where` of the cache from features [B, C, taps * H] and the tokens int64 [B, C] that follow them,
        not counted in here; returns their states [B, C, H]."""
        hidden = self._fuse(features)
        k, v = self._keys_values(self._inputs(hidden, following), where)
        keys, values = self.cache.kv[0]
        keys[:, :, where], values[:, :, where] = k.transpose(1, 2), v.transpose(1, 2)
        return hidden

    def catch_up(self, anchor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Commit every pending row but the newest; returns the newest row's state [B, 1, H] and its token."""
        if self.queue.rows:
            following = torch.cat((*self.queue.tokens, anchor), 1)[:, 1:]
            features, _ = self.queue.take()
            hidden = self._append(features, following)
            self.newest = hidden[:, -1:], following[:, -1:]
        if self.newest is None:
            raise RuntimeError("EAGLE-3 drafts from at least one ingested row: ingest the prompt first")
        return self.newest

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor, depth: int, block: Block) -> tuple[torch.Tensor, torch.Tensor]:
        """T draft rows, all `depth` positions after the cache's rows; their K and V go to the draft rows that `block` names.

        hidden [B, T, H], tokens int64 [B, T] -> the states that feed the next rows and those that the head takes, both [B, T, H].
        """
        c, t = self.config, tokens.shape[1]
        where = self.cache.positions(depth, 1)
        x = self._inputs(hidden, tokens)
        k, v = self._keys_values(x, where)
        q = self.q(x).view(1, t, c.num_heads, c.head_dim)
        if self.q_norm is not None:
            q = rms_norm(q, self.q_norm, c.rms_norm_eps)
        q = apply_rope(q, *(table[where] for table in self.tables))
        out = self.cache.attend(0, q, k, v, block, c.head_dim**-0.5, self.window)
        residual = rms_norm(hidden, self.hidden_norm, c.rms_norm_eps) if c.norm_before_residual else hidden
        hidden = residual + self.o(out.reshape(1, t, c.num_heads * c.head_dim))
        hidden = hidden + swiglu(rms_norm(hidden, self.post_norm, c.rms_norm_eps), self.gate_up, self.down)
        normed = rms_norm(hidden, self.norm, c.rms_norm_eps)
        return (normed if c.norm_output else hidden), normed

    def draft(self, anchor: torch.Tensor, arm: Arm, max_depth: int) -> DraftTree:
        """anchor int64 [B, 1]; one forward a token. A chain of at most max_depth."""
        size = min(arm.size, max_depth)
        if not 1 <= size <= self.max_draft:
            raise ValueError(f"eagle3:{size} is out of range: this drafter was made for 1 to {self.max_draft} drafts")
        hidden, token = self.catch_up(anchor)
        # The newest committed row runs again as draft row 0, now with its query; in the cache's tail it rewrites itself.
        self.cache.shift(-1)
        tree, drafted = chain(anchor.new_zeros(1, size)), [anchor]
        for step in range(size):
            hidden, normed = self.forward(hidden, token, step, self.cache.block(tree, 1, step))
            token = self.draft_ids[self.head(normed).argmax(-1)]
            drafted.append(token)
        self.cache.shift(1)
        return chain(torch.cat(drafted, 1))
