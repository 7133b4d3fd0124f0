"""The round on one screen: route, draft, verify, accept, commit.

Invariants after every round: one committed token (the anchor) has no KV row yet; target cache length == start; a drafter's cache
length + its pending rows == start, for every drafter, whichever arm ran.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from . import ops
from .arms import Arm
from .cache import KVCache
from .drafters.base import Drafter
from .routers.base import RoundState, Router
from .stats import Round
from .target import Target
from .tree import DraftTree, chain


class NaNLogits(FloatingPointError):
    """The target produced NaN: the text cannot go on."""


@dataclass
class Step:
    """One round's committed tokens, oldest first, and who drafted them (the last one is the target's own)."""

    tokens: list[int]
    arms: list[Arm]
    round: Round | None


class Stream:
    """Decoding state of one text: the target's cache, the drafters' caches, the anchor and what the router may see."""

    def __init__(self, target: Target, drafters: dict[str, Drafter], router: Router, cache: KVCache):
        self.target, self.drafters, self.router, self.cache = target, drafters, router, cache
        self.taps = tuple(sorted({t for d in drafters.values() for t in d.taps}))
        self.tap_rows = {name: [self.taps.index(t) for t in d.taps] for name, d in drafters.items()}
        self.anchor: torch.Tensor | None = None  # int64 [1, 1]
        self.state: RoundState | None = None
        self.forwards = 0

    def start(self, tokens: torch.Tensor) -> Step:
        """Prefill tokens int64 [1, P]; the drafters get the prompt's features, and ingest them when they are first chosen."""
        self.cache.set_length(0)
        for drafter in self.drafters.values():
            drafter.reset()
        hidden, features = self.target.prefill(tokens, self.cache, self.taps)
        for part, tapped in zip(tokens.split([f.shape[2] for f in features], 1), features, strict=True):
            self._ingest(tapped, part)
        sample = ops.block_sampling(self.target.logits(hidden)[0])
        self.anchor = sample.token.view(1, 1)
        self.state = RoundState(hidden[0, -1], sample.entropy[0], tokens.shape[1], {})
        return Step([*self._not_nan(sample.token.tolist())], [Arm("ar")], None)

    def round(self, max_draft: int) -> Step:
        """max_draft: drafts that still fit the cache beside the anchor."""
        times, begin = {}, time.perf_counter()

        def lap(phase: str) -> None:
            nonlocal begin
            now = time.perf_counter()
            times[phase], begin = (now - begin) * 1e3, now

        self.state.pending = {name: d.pending for name, d in self.drafters.items()}
        arm = self._arm(max_draft)
        lap("route")
        caught_up = self.state.pending.get(arm.kind, 0)
        tree = self._draft(arm, max_draft)
        lap("draft")
        hidden, features = self.target.forward(tree, self.cache, self.taps)
        logits = self.target.logits(hidden)[0]  # [N, V]
        self.forwards += 1
        lap("verify")
        sample = ops.block_sampling(logits)
        path, path_len, bonus = ops.tree_walk(tree.tokens, tree.parents.view(1, -1), sample.token.view(1, -1))
        # One transfer holds all that the host needs; on CUDA it waits for the round, so `accept` carries the device's time.
        kept, end, *rest = torch.cat((path_len.long(), bonus, path[0].long(), tree.tokens[0])).tolist()
        nodes, drafted = rest[:kept], rest[path.shape[1] :]
        new = self._not_nan([*(drafted[node] for node in nodes[1:]), end])
        lap("accept")
        kept_features = self.cache.commit(path, path_len, kept, tree.is_chain, features)
        self._ingest(kept_features, tree.tokens[:, :kept] if tree.is_chain else tree.tokens[:, path[0, :kept].long()])
        last = nodes[-1]
        self.anchor = bonus.view(1, 1)
        self.state.hidden, self.state.entropy = hidden[0, last], sample.entropy[last]
        self.state.position = self.cache.length
        self.state.history.append((arm, tree.size - 1, kept - 1))
        lap("commit")
        return Step(new, [arm] * (kept - 1) + [Arm("ar")], Round(arm, tree.size - 1, kept - 1, kept, caught_up, times))

    def _arm(self, max_draft: int) -> Arm:
        """The router's choice, or `ar` where no draft fits."""
        arm = self.router.choose(self.state)
        if arm not in self.router.arms:
            listed = ", ".join(map(str, self.router.arms))
            raise ValueError(f"{type(self.router).__name__} chose {arm}, which its arms do not list: {listed}")
        return arm if max_draft >= 1 else Arm("ar")

    def _draft(self, arm: Arm, max_draft: int) -> DraftTree:
        if arm.kind == "ar":
            return chain(self.anchor)
        return self.drafters[arm.kind].draft(self.anchor, min(arm.size, max_draft))

    def _ingest(self, features: torch.Tensor, tokens: torch.Tensor) -> None:
        for name, drafter in self.drafters.items():
            drafter.ingest(features[self.tap_rows[name]], tokens)

    @staticmethod
    def _not_nan(tokens: list[int]) -> list[int]:
        if -1 in tokens:
            raise NaNLogits("the target's logits hold NaN: try float32, or check the weights")
        return tokens
