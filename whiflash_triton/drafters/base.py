"""What both drafters share: features that wait for ingestion, and the decoder layer's two halves.

Lazy Catch-up (WhiFlash, arXiv 2606.07710): `ingest` only keeps the rows. They are computed in one batched pass when the drafter
is chosen, or when more than `pending_limit` rows wait. KV-only Prefill: that pass makes K and V and nothing else.
"""

from __future__ import annotations

from typing import Protocol

import torch

from .. import ops
from ..arms import Arm
from ..cache import KVCache
from ..tree import DraftTree

PENDING_LIMIT = 1024


class Drafter(Protocol):
    """One drafting paradigm over one stream."""

    taps: tuple[int, ...]
    cache: KVCache
    max_draft: int

    @property
    def pending(self) -> int: ...
    def reset(self) -> None: ...
    def crop(self, length: int) -> None: ...
    def ingest(self, features: torch.Tensor, tokens: torch.Tensor) -> None: ...
    def draft(self, anchor: torch.Tensor, arm: Arm, max_depth: int) -> DraftTree: ...


class Pending:
    """Committed rows whose features a drafter has not ingested: features [taps, B, T, H], tokens int64 [B, T], in order."""

    def __init__(self) -> None:
        self.features: list[torch.Tensor] = []
        self.tokens: list[torch.Tensor] = []
        self.rows = 0

    def add(self, features: torch.Tensor, tokens: torch.Tensor) -> None:
        if features.shape[2] != tokens.shape[1]:
            raise ValueError(f"{features.shape[2]} feature rows for {tokens.shape[1]} tokens")
        self.features.append(features)
        self.tokens.append(tokens)
        self.rows += tokens.shape[1]

    def take(self, keep: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """All but the newest `keep` rows, oldest first: features [B, T, taps * H] (taps concatenated), tokens [B, T]."""
        features, tokens = torch.cat(self.features, 2), torch.cat(self.tokens, 1)
        count = self.rows - keep
        self.features = [features[:, :, count:]] if keep else []
        self.tokens = [tokens[:, count:]] if keep else []
        self.rows = keep
        taps, b, _, h = features.shape
        return features[:, :, :count].permute(1, 2, 0, 3).reshape(b, count, taps * h), tokens[:, :count]

    def keep(self, rows: int) -> None:
        """Drop all but the oldest `rows` rows."""
        self.tokens = keep_rows(self.tokens, rows)
        self.features = [f[:, :, : t.shape[1]] for f, t in zip(self.features, self.tokens, strict=False)]
        self.rows = min(self.rows, rows)

    def clear(self) -> None:
        self.features, self.tokens, self.rows = [], [], 0


def likeliest(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k likeliest entries of every row of logits [R, V] (all where V < k): log-probabilities fp32 [R, k], indices int64 [R, k].

    Ordered by probability, equals by index; the softmax runs over the whole row. A row with a NaN gives -inf and -1.
    """
    k = min(k, logits.shape[1])
    if logits.is_cuda and k <= 64:  # what the kernel keeps; elsewhere its argmax and entropy would be computed for nothing
        sample = ops.block_sampling(logits, k)
        values, found, total = sample.topk_logits, sample.topk_tokens, sample.logsumexp
    else:
        from ..kernels.block_sampling import ordered_topk

        values, found = ordered_topk(logits, k)
        total = logits.float().logsumexp(-1)
    return (values - total[:, None]).clamp_(max=0).nan_to_num_(nan=float("-inf"), neginf=float("-inf")), found


def keep_rows(pieces: list[torch.Tensor], rows: int) -> list[torch.Tensor]:
    """The oldest `rows` tokens of int64 [B, T] pieces."""
    kept = []
    for piece in pieces:
        if rows > 0:
            kept.append(piece[:, :rows])
        rows -= piece.shape[1]
    return kept
