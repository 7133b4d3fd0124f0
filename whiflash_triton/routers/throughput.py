"""Throughput router: of all arms, plain decoding among them, the one with the most expected tokens per expected millisecond.

Tokens: the chance that a drafted token is right, given that those before it are, starts from a prior and is corrected by what this
stream's own rounds accepted, recent ones most; of a copy it depends on how much of the text matched. Milliseconds: a table
measured on this device when the router is built, then frozen, so that no decision reads a clock; it can be saved and loaded.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ..arms import Arm
from ..drafters.base import Drafter
from ..drafters.draft import draft
from ..drafters.lookup import COPY, TRUST
from ..target import Target
from ..tree import chain
from .base import RoundState

MEMORY = 0.97  # weight of a round against the next one of its kind; what has left the history is forgotten, and tried again
PRIOR_TRIALS = 4.0  # how many observations the prior is worth
PRIOR = {"dflash": (0.45, 0.35), "eagle3": (0.45, 0.45)}  # first slot, later slots
TREE_TRIES = 1.3  # a small tree's level is right as often as so many independent tries of a chain's slot


Observed = dict[object, tuple[list[float], list[float]]]


@dataclass(frozen=True)
class Costs:
    """Milliseconds by context length: verify[rows][i] and draft[arm][i] at contexts[i], catch_up[drafter] a pending row."""

    contexts: list[int]
    verify: dict[str, list[float]]
    draft: dict[str, list[float]]
    catch_up: dict[str, float]

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Costs:
        """ValueError for a file that holds no such table."""
        try:
            return cls(**json.loads(Path(path).read_text()))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} is no table of costs ({error}): save one with router.costs.save(path)") from error

    def at(self, series: list[float], context: int) -> float:
        """Linear between the two contexts measured."""
        if len(series) == 1 or self.contexts[0] == self.contexts[1]:
            return series[0]
        share = min(max((context - self.contexts[0]) / (self.contexts[1] - self.contexts[0]), 0.0), 1.5)
        return series[0] + share * (series[1] - series[0])


class ThroughputRouter:
    """arms: what it may choose, `ar` among them. costs: `measure_costs` of the same arms; ValueError where one is missing."""

    def __init__(self, arms: tuple[Arm, ...], costs: Costs):
        if Arm("ar") not in arms:
            raise ValueError("the throughput router must be able to fall back: put Arm('ar') among its arms")
        rows = {str(n) for arm in arms for n in _row_counts(arm)}
        missing = [str(a) for a in arms if str(a) not in costs.draft] + sorted(rows - set(costs.verify))
        if missing:
            raise ValueError(f"the table of costs has nothing on {', '.join(missing)}: measure it again with these arms")
        self.arms, self.costs = arms, costs

    def choose(self, state: RoundState) -> Arm:
        seen = _observed(state)
        return max(self.arms, key=lambda arm: self.expected_tokens(arm, state, seen) / self.expected_ms(arm, state))

    def expected_tokens(self, arm: Arm, state: RoundState, seen: Observed | None = None) -> float:
        """Committed by one round, the target's own token included."""
        size = _drafted(arm, state.match)
        hits, trials = (_observed(state) if seen is None else seen).get(_key(arm, size), ((), ()))
        total = reached = 1.0
        for slot in range(min(size, arm.depth) if arm.depth else size):
            tried = trials[slot] if slot < len(trials) else 0.0
            right = hits[slot] if tried else 0.0
            reached *= (_prior(arm, slot, state.match) * PRIOR_TRIALS + right) / (PRIOR_TRIALS + tried)
            total += reached
        return total

    def expected_ms(self, arm: Arm, state: RoundState) -> float:
        """Draft, verification, and catch-up of the rows pending beyond the last round's."""
        c = self.costs
        rows = _drafted(arm, state.match) + 1
        late = sum(c.catch_up[name] * max(state.pending.get(name, 0) - 2, 0) for name in arm.needs)
        return c.at(c.verify[str(rows)], state.position) + c.at(c.draft[str(arm)], state.position) + late


def _key(arm: Arm, drafted: int) -> object:
    """Rounds that tell of each other: chains of one drafter, equal trees, copies after about as long a match."""
    return arm.kind if arm.kind in PRIOR else (arm.kind, drafted) if arm.kind == "lookup" else arm


def _observed(state: RoundState) -> Observed:
    """(weighted hits, weighted trials) of every slot, by what the rounds tell of."""
    seen: Observed = {}
    weights: dict[object, float] = {}
    for arm, drafted, accepted in reversed(state.history):
        key = _key(arm, drafted)
        weight = weights.get(key, 1.0)
        weights[key] = weight * MEMORY
        hits, trials = seen.setdefault(key, ([], []))
        for slot in range(min(accepted + 1, drafted, arm.depth or drafted)):
            if slot == len(trials):
                hits.append(0.0)
                trials.append(0.0)
            trials[slot] += weight
            hits[slot] += weight * (slot < accepted)
    return seen


def _drafted(arm: Arm, match: int) -> int:
    """Tokens the arm would draft now."""
    return min(arm.size, TRUST * match) if arm.kind == "lookup" else arm.size


def _row_counts(arm: Arm) -> list[int]:
    """Rows that the target may have to verify under this arm."""
    if arm.kind == "lookup":
        return sorted({1 + min(arm.size, TRUST * match) for match in range(arm.size + 1)})
    return [1 + arm.size]


def _prior(arm: Arm, slot: int, match: int) -> float:
    if arm.kind == "lookup":
        return COPY[min(match, len(COPY)) - 1]
    p = max(PRIOR[name][min(slot, 1)] for name in arm.needs)
    return p if arm.kind in PRIOR else 1 - (1 - p) ** TREE_TRIES


@torch.inference_mode()
def measure_costs(target: Target, drafters: dict[str, Drafter], arms: tuple[Arm, ...], rows: int, repeats: int = 5) -> Costs:
    """Time every arm's draft and every row count's verification at two context lengths within `rows`; medians.

    Uses the drafters' caches: what they hold of a text is gone.
    """
    counts = sorted({n for arm in arms for n in _row_counts(arm)})
    room = rows - max(counts)
    contexts = sorted({max(1, min(64, room)), max(1, min(512, room))})
    taps = tuple(sorted({t for d in drafters.values() for t in d.taps}))
    cache = target.new_cache(rows, max(counts))
    costs = Costs(contexts, {str(n): [] for n in counts}, {str(a): [] for a in arms}, dict.fromkeys(drafters, 0.0))
    anchor = torch.zeros(1, 1, dtype=torch.int64, device=target.device)
    sync = torch.cuda.synchronize if target.device.type == "cuda" else lambda: None
    for context in contexts:
        ids = (torch.arange(context, device=target.device) % target.config.vocab_size)[None]
        cache.set_length(0)
        _, parts = target.prefill(ids, cache, taps)
        features = torch.cat(parts, 2)
        for name, drafter in drafters.items():
            for _ in range(2):  # the first call does not count
                drafter.reset()
                drafter.ingest(features[[taps.index(t) for t in drafter.taps]], ids)
                begin = time.perf_counter()
                draft(drafters, anchor, Arm(name, 1), 1)
                sync()
            costs.catch_up[name] = (time.perf_counter() - begin) * 1e3 / context
        for n in counts:
            tree = chain(anchor.expand(1, n))
            costs.verify[str(n)].append(
                _median(lambda tree=tree: target.logits(target.forward(tree, cache, taps)[0]), repeats, sync)
            )
        for arm in arms:
            call = (lambda: None) if not arm.needs else (lambda arm=arm: draft(drafters, anchor, arm, arm.size))
            costs.draft[str(arm)].append(_median(call, repeats, sync))
    for drafter in drafters.values():
        drafter.reset()
    return costs


def _median(call: Callable[[], object], repeats: int, sync: Callable[[], None]) -> float:
    """Milliseconds, after one call that does not count."""
    call()
    times = []
    for _ in range(repeats):
        sync()
        begin = time.perf_counter()
        call()
        sync()
        times.append((time.perf_counter() - begin) * 1e3)
    return sorted(times)[repeats // 2]
