"""Preallocated KV cache [layers, 2, B, kv_heads, rows, head_dim] and attention over it.

A draft block's rows live in one of two places until they are committed:
  tail     the cache's own rows from `length` on (CPU, and prefill everywhere): a chain commits by length alone, a tree
           through a temporary
  scratch  a buffer of its own, committed out of place by `kv_compaction` (CUDA), so that no kernel can race with itself
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import torch
import torch.nn.functional as F

from . import ops
from .tree import DraftTree


@dataclass
class Block:
    """What every layer of one forward shares: T new rows at tree rows q0.. over `start` committed rows."""

    words: torch.Tensor  # int64 [T, W]
    depths: torch.Tensor | None  # int32 [N]; None where no layer has a window
    visible: torch.Tensor | None  # bool [T, q0 + T], read for rows in the tail; None: everything sees everything
    start: int
    q0: int
    rows: int  # T
    tail: bool
    masks: dict[int, torch.Tensor | None] = field(default_factory=dict)  # window -> additive [T, start + q0 + T]


class KVCache:
    """kv [L, 2, B, Hkv, rows, D]; `length` committed rows, known to the host and (int32 [B]) to the device."""

    def __init__(
        self,
        num_layers: int,
        kv_heads: int,
        head_dim: int,
        rows: int,
        draft_rows: int,
        dtype: torch.dtype,
        device: torch.device,
        scratch: bool | None = None,
    ):
        shape = (num_layers, 2, 1, kv_heads)
        self.rows, self.draft_rows = rows, draft_rows
        self.uses_scratch = device.type == "cuda" if scratch is None else scratch
        tail_rows = 0 if self.uses_scratch else draft_rows
        self.kv = torch.empty(*shape, rows + tail_rows, head_dim, dtype=dtype, device=device)
        self.scratch = torch.empty(*shape, draft_rows, head_dim, dtype=dtype, device=device) if self.uses_scratch else None
        self.bucket: int | None = None  # attention looks at so many rows only; at least `length`
        self.length = 0
        self.lengths = torch.zeros(1, dtype=torch.int32, device=device)

    def set_length(self, length: int) -> None:
        if not 0 <= length <= self.rows:
            raise ValueError(f"{length} rows do not fit a KV cache of {self.rows}: raise max_cache_len")
        self.length = length
        self.lengths.fill_(length)

    def shift(self, by: int) -> None:
        """Count `by` rows more, or fewer; the device counts for itself, so that a captured graph may hold it."""
        self.length += by
        self.lengths += by

    def positions(self, first: int, rows: int) -> slice | torch.Tensor:
        """Index of the positions length + first and on: from the device's own length where rows wait in scratch."""
        if not self.uses_scratch:
            return slice(self.length + first, self.length + first + rows)
        return (self.lengths + torch.arange(first, first + rows, dtype=torch.int32, device=self.lengths.device)).long()

    def block(self, tree: DraftTree | None, rows: int, q0: int = 0, prefill: bool = False) -> Block:
        """The attention plan of one forward. tree None: `rows` queries that all see each other (a diffusion block)."""
        tail = prefill or not self.uses_scratch
        if not prefill and q0 + rows > self.draft_rows:
            raise ValueError(f"{q0 + rows} draft rows exceed the {self.draft_rows} this cache was made for")
        if tree is None:
            words, depths = _full_words(rows, self.kv.device)
            return Block(words, depths, None, self.length, q0, rows, tail)
        return Block(
            tree.words[q0 : q0 + rows],
            tree.depths,
            tree.visible()[q0 : q0 + rows, : q0 + rows] if tail else None,
            self.length,
            q0,
            rows,
            tail,
        )

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block, scale: float, window: int = 0
    ) -> torch.Tensor:
        """Keep this block's K and V, attend over committed rows and the block. q [B,T,Hq,D], k, v [B,T,Hkv,D] -> [B,T,Hq,D]."""
        first, last = block.q0, block.q0 + block.rows
        if block.tail:
            store, first, last = self.kv[layer], block.start + first, block.start + last
        else:
            store = self.scratch[layer]
        store[0, :, :, first:last] = k.transpose(1, 2)
        store[1, :, :, first:last] = v.transpose(1, 2)
        if q.is_cuda or not block.tail:
            tree = store[:, :, :, last - block.q0 - block.rows : last]
            cache = self.kv[layer, :, :, :, : self.bucket]  # so that no more programs than the length may need share it
            return ops.tree_attention(
                q, cache[0], cache[1], self.lengths, tree[0], tree[1], block.words,
                scale=scale, depths=block.depths, window=window, q0=block.q0,
            )  # fmt: skip
        return self._attend_tail(q, store[0, :, :, :last], store[1, :, :, :last], block, scale, window)

    def _attend_tail(self, q, k, v, block: Block, scale: float, window: int) -> torch.Tensor:
        b, t, heads, d = q.shape
        kv_heads = k.shape[1]
        group = heads // kv_heads
        if window not in block.masks:
            block.masks[window] = _additive_mask(block, window, group, q.dtype)
        q = q.view(b, t, kv_heads, group, d).permute(0, 2, 3, 1, 4).reshape(b, kv_heads, group * t, d)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=block.masks[window], scale=scale)
        return out.view(b, kv_heads, group, t, d).permute(0, 3, 1, 2, 4).reshape(b, t, heads, d)

    def commit(
        self,
        path: torch.Tensor,
        path_len: torch.Tensor,
        accepted: int,
        is_prefix: bool,
        features: torch.Tensor,
    ) -> torch.Tensor:
        """Append the path's draft rows; return their features [taps, B, accepted, H].

        path int32 [B, P] tree rows, -1 beyond path_len int32 [B]; accepted = path_len on the host; is_prefix: path = 0, 1, 2...
        """
        start = self.length
        if start + accepted > self.rows:
            raise ValueError(f"{start + accepted} rows do not fit a KV cache of {self.rows}: raise max_cache_len")
        if self.uses_scratch:
            drafted = self.scratch[:, :, :, :, : features.shape[2]]
            kept = features.new_empty(features.shape[0], 1, accepted, features.shape[-1])
            tapped = (features, kept, torch.zeros_like(self.lengths)) if features.numel() else ()
            ops.kv_compaction(drafted, self.kv, path, path_len, self.lengths, *tapped)
        else:
            rows = path[0, :accepted].long()
            if not is_prefix:
                gathered = self.kv[:, :, :, :, start + rows]  # a temporary: source and destination overlap
                self.kv[:, :, :, :, start : start + accepted] = gathered
            kept = features[:, :, :accepted] if is_prefix else features[:, :, rows]
        self.set_length(start + accepted)
        return kept

    def poison(self) -> None:
        """Overwrite every row that is not committed with NaN (tests call it after each round)."""
        self.kv[..., self.length :, :] = float("nan")
        if self.scratch is not None:
            self.scratch.fill_(float("nan"))


@lru_cache(maxsize=64)
def _full_words(rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    from .tree import mask_to_words

    mask = torch.ones(rows, rows, dtype=torch.bool)
    # For a window the whole block stands where its first row does: all of it sees the same context, and itself.
    return mask_to_words(mask).to(device), torch.zeros(rows, dtype=torch.int32, device=device)


def _additive_mask(block: Block, window: int, group: int, dtype: torch.dtype) -> torch.Tensor | None:
    """[group * T, start + q0 + T], 0 where visible and -inf elsewhere; None where every key is visible."""
    if block.visible is None or (block.rows == 1 and bool(block.visible.all())):
        if not window:
            return None
    start, total = block.start, block.start + block.q0 + block.rows
    mask = torch.zeros(block.rows, total, dtype=dtype, device=block.words.device)
    if block.visible is not None:
        mask[:, start:].masked_fill_(~block.visible, float("-inf"))
    if window:
        q_pos = start + block.depths[block.q0 : block.q0 + block.rows]
        k_pos = torch.cat((torch.arange(start, device=q_pos.device), start + block.depths[: total - start]))
        gap = q_pos[:, None] - k_pos[None, :]
        mask.masked_fill_((gap < 0) | (gap >= window), float("-inf"))
    return mask.repeat(group, 1) if group > 1 else mask
