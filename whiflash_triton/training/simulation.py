"""What policies would have reached on traces: tokens per second from a table of costs, without decoding.

A policy is a choice of arm at every place. It walks a text as decoding would, from the place where one round ends to the next
recorded one. A round costs its draft, the verification of its rows and the catch-up of the rows that are late, prompt included.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import torch

from ..arms import Arm, parse_arm
from ..routers.throughput import Costs
from .traces import Trace, cost_arms

Choices = list[Arm]
Policy = Callable[["Walk"], Choices]


class Walk:
    """One trace with its rounds: committed[arm] and ms[arm], lists over the places."""

    def __init__(self, trace: Trace, arms: list[str], costs: Costs):
        self.trace, self.costs = trace, costs
        self.places = trace.place.tolist()
        self.committed: dict[Arm, list[int]] = {}
        self.ms: dict[Arm, list[float]] = {}
        traced = [parse_arm(text) for text in arms]
        for arm in cost_arms(traced):
            column = next((i for i, other in enumerate(traced) if other.kind == arm.kind), None)
            drafted = torch.zeros_like(trace.place) if column is None else trace.drafted[:, column].clamp(max=arm.size)
            accepted = drafted if column is None else torch.minimum(trace.accepted[:, column], drafted)
            self.committed[arm] = (accepted + 1).tolist()
            self.ms[arm] = [
                costs.at(costs.verify[str(n + 1)], place) + costs.at(costs.draft[str(arm)], place)
                for n, place in zip(drafted.tolist(), self.places, strict=True)
            ]

    def run(self, choices: Choices) -> tuple[int, float]:
        """Tokens and milliseconds of one text."""
        known = dict.fromkeys(self.costs.catch_up, 0)
        i, tokens, ms = 0, 0, 0.0
        while i < len(self.places):
            arm, place = choices[i], self.places[i]
            for name in arm.needs:
                ms += self.costs.catch_up[name] * max(place - known[name] - 2, 0)
                known[name] = place
            tokens, ms = tokens + self.committed[arm][i], ms + self.ms[arm][i]
            i = bisect_left(self.places, place + self.committed[arm][i], i + 1)
        return tokens, ms


def make_walks(traces: list[Trace], settings: dict, costs: Costs) -> list[Walk]:
    """ValueError where the table lacks an arm or a row count of these traces."""
    try:
        return [Walk(trace, settings["arms"], costs) for trace in traces]
    except KeyError as error:
        raise ValueError(f"the table of costs has nothing on {error}: measure it with the arms of these traces") from error


def static(arm: Arm) -> Policy:
    return lambda walk: [arm] * len(walk.places)


def oracle(arms: list[Arm]) -> Policy:
    """Knows what every arm would get: most tokens a millisecond, round by round."""
    return lambda walk: [max(arms, key=lambda arm: walk.committed[arm][i] / walk.ms[arm][i]) for i in range(len(walk.places))]


def split_by(scores: list[torch.Tensor], threshold: float, above: Arm, below: Arm) -> list[Choices]:
    """One list a trace: `above` where the score [n] passes the threshold."""
    return [[above if s > threshold else below for s in score.tolist()] for score in scores]


def most_expected(walk: Walk, reach: dict[str, torch.Tensor]) -> Choices:
    """The arm of most expected tokens a millisecond, of plain decoding and every length of the chains in `reach`.

    reach: by kind, P(at least j drafts are accepted) [n, slots].
    """
    gains = {kind: (1 + p.cumsum(-1)).tolist() for kind, p in reach.items()}
    arms = [arm for arm in walk.ms if arm.kind == "ar" or arm.size <= len(gains.get(arm.kind, [()])[0])]

    def worth(arm: Arm, i: int) -> float:
        return (gains[arm.kind][i][arm.size - 1] if arm.kind != "ar" else 1.0) / walk.ms[arm][i]

    return [max(arms, key=lambda arm: worth(arm, i)) for i in range(len(walk.places))]


def speeds(walks: list[Walk], choices: list[Choices]) -> torch.Tensor:
    """float64 [texts, 2]: tokens and milliseconds."""
    return torch.tensor([walk.run(c) for walk, c in zip(walks, choices, strict=True)], dtype=torch.float64)


def per_second(runs: torch.Tensor) -> float:
    return float(1000 * runs[:, 0].sum() / runs[:, 1].sum())


def ratio_interval(runs: torch.Tensor, others: torch.Tensor, seed: int = 0, draws: int = 1000) -> tuple[float, float]:
    """95% bootstrap interval, over texts, of the ratio of the two speeds."""
    g = torch.Generator().manual_seed(seed)
    picks = torch.randint(len(runs), (draws, len(runs)), generator=g)
    a, b = runs[picks].sum(1), others[picks].sum(1)
    low, high = ((a[:, 0] / a[:, 1]) / (b[:, 0] / b[:, 1])).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high
