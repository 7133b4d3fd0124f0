"""What a fresh prefill and freshly fed drafters would hold, against what a workspace holds."""

from __future__ import annotations

from collections.abc import Callable

import torch

from whiflash_triton.cache import KVCache
from whiflash_triton.drafters.base import Drafter
from whiflash_triton.scheduler import Workspace


@torch.inference_mode()
def check_rows(work: Workspace, make: Callable[[str], Drafter], rows: list[int], anchor: int, tolerance: float = 1e-9) -> None:
    """The target's cache holds the rows of `rows`; every real drafter's, once caught up, what one made by `make` would hold.

    anchor: the token after the last row, which EAGLE-3's last row embeds.
    """
    assert work.rows == rows
    tokens, after = torch.tensor([rows]), torch.tensor([[anchor]])
    fresh = work.target.new_cache(work.cache.rows, 1, False)
    _, features = work.target.prefill(tokens, fresh, work.taps)
    close(work.cache, fresh, len(rows), tolerance)
    for kind in ("dflash", "eagle3"):
        if kind not in work.drafters:
            continue
        drafter, rebuilt = work.drafters[kind], make(kind)
        assert drafter.cache.length + drafter.pending == len(rows)
        rebuilt.ingest(torch.cat(features, 2)[work.tap_rows[kind]], tokens)
        for each in (drafter, rebuilt):
            each.catch_up(*([after] if kind == "eagle3" else []))
        assert drafter.tokens == rebuilt.tokens == ((rows + [anchor])[1:] if kind == "eagle3" else rows)
        close(drafter.cache, rebuilt.cache, len(rows), tolerance)
        if kind == "eagle3":
            (state, token), (want, expected) = drafter.newest, rebuilt.newest
            assert int(token) == int(expected) == anchor
            assert (state - want).abs().max() <= tolerance * want.abs().max()


def close(cache: KVCache, fresh: KVCache, length: int, tolerance: float) -> None:
    """Rows of equal value, by the largest of each row."""
    assert cache.length == fresh.length == length == int(cache.lengths)
    got, want = (c.kv[..., :length, :] for c in (cache, fresh))
    error = (got - want).abs().amax(-1) / want.abs().amax(-1)
    assert error.max() <= tolerance
