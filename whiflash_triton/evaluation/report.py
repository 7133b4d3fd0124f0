"""From runs to numbers: speeds with intervals, ratios, the best static arms, the oracle of each prompt, and which texts agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np

from ..arms import Arm
from ..demo_report import divergence, first_difference
from .intervals import interval, resamples, speeds
from .prompts import PARTS, Prompt, grouped
from .runs import Run, Runs

SINGLE = ("ar", "dflash", "eagle3", "lookup")  # kinds with one source of drafts and no branches
PLAIN = "ar"
TIE = 1e-4  # two best logits closer than this are a tie: either token is the target's choice


@dataclass
class Data:
    """What each side made of each prompt, all its turns together: arrays [prompts].

    gain over cost is the side's speed: tokens over seconds; if replayed, tokens after the first over target forwards, which is tau.
    """

    prompts: list[Prompt]
    gain: dict[str, np.ndarray]
    cost: dict[str, np.ndarray]
    tokens: dict[str, np.ndarray]
    forwards: dict[str, np.ndarray]
    spread: dict[str, float | None]  # of a prompt's seconds over repeats, (max - min) / median; median over prompts
    turns: np.ndarray
    rounds: dict[str, Counter]
    repeats: int

    def only(self, keep: Callable[[Prompt], bool]) -> Data:
        """The prompts that pass; `spread` and `rounds` stay those of all."""
        rows = np.array([keep(p) for p in self.prompts], dtype=bool)

        def part(arrays):
            return {name: array[rows] for name, array in arrays.items()}

        parts = (part(arrays) for arrays in (self.gain, self.cost, self.tokens, self.forwards))
        prompts = [p for p, kept in zip(self.prompts, rows, strict=True) if kept]
        return Data(prompts, *parts, self.spread, self.turns[rows], self.rounds, self.repeats)

    def speed(self, side: str) -> float:
        return float(self.gain[side].sum() / self.cost[side].sum()) if self.cost[side].sum() else 1.0

    def tau(self, side: str) -> float:
        forwards = self.forwards[side].sum()
        return float((self.tokens[side] - self.turns).sum() / forwards) if forwards else 1.0

    def best(self, sides: list[str]) -> str | None:
        return max(sides, key=self.speed, default=None)


def collect(prompts: list[Prompt], sides: list[str], runs: Runs, repeats: int, replayed: bool) -> Data:
    """Only what is complete counts: a prompt enters with the repeats in which every side has answered every turn."""
    done = runs.done
    complete: dict[str, list[int]] = {}
    for p in prompts:
        passes = [r for r in range(repeats) if all((p.id, t, s, r) in done for t in range(len(p.turns)) for s in sides)]
        if passes:
            complete[p.id] = passes
    kept = [p for p in prompts if p.id in complete]
    data = Data(kept, {}, {}, {}, {}, {}, np.array([len(p.turns) for p in kept]), {}, max(map(len, complete.values()), default=0))
    for side in sides:

        def answers(p: Prompt, repeat: int, side: str = side) -> list[Run]:
            return [done[p.id, turn, side, repeat] for turn in range(len(p.turns))]

        first = [answers(p, complete[p.id][0]) for p in kept]
        data.tokens[side] = np.array([sum(len(run.tokens) for run in texts) for texts in first])
        data.forwards[side] = np.array([sum(run.forwards for run in texts) for texts in first])
        data.rounds[side] = Counter(row[0] for texts in first for run in texts for row in run.rounds or [])
        if replayed:
            data.gain[side], data.cost[side], data.spread[side] = data.tokens[side] - data.turns, data.forwards[side], None
            continue
        times = [[sum(run.seconds for run in answers(p, r)) for r in complete[p.id]] for p in kept]
        data.gain[side], data.cost[side] = data.tokens[side], np.array([median(seconds) for seconds in times])
        spreads = [(max(seconds) - min(seconds)) / median(seconds) for seconds in times if len(seconds) > 1]
        data.spread[side] = median(spreads) if spreads else None
    return data


def summarise(data: Data, arms: dict[str, Arm], sides: list[str]) -> dict:
    """arms: the static sides'. Scopes: all prompts, the parts if both are there, and the groups if there are several.

    The best static arms are chosen on the tuning prompts where there are any, else on all: that favours them.
    """
    tuning = data.only(lambda p: p.part == PARTS[0])
    chosen_on, chooser = ("the tuning prompts", tuning) if tuning.prompts else ("all prompts of this run", data)
    single = [name for name, arm in arms.items() if arm.kind in SINGLE]
    branched = [name for name in arms if name not in single]
    bases = {"plain": PLAIN if PLAIN in arms else None, "best_single": chooser.best(single), "best_tree": chooser.best(branched)}
    bases |= {side: side for side in sides if side.startswith("peer:")}
    bases = {role: side for role, side in bases.items() if side is not None}
    parts = grouped(data.prompts, lambda p: p.part)
    groups = sorted(grouped(data.prompts, lambda p: p.group))
    scopes = {"all": scope(data, arms, sides, single, bases)}
    if len(parts) > 1:
        scopes |= {part: scope(data.only(lambda p, part=part: p.part == part), arms, sides, single, bases) for part in PARTS}
    sizes = {}
    for kind in dict.fromkeys(arm.kind for arm in arms.values()):
        speed = {name: chooser.speed(name) for name, arm in arms.items() if arm.kind == kind}
        sizes[kind] = {"best": chooser.best(list(speed)), "speeds": speed}
    return {
        "prompts": len(data.prompts),
        "texts": int(data.turns.sum()),
        "repeats": data.repeats,
        "bases": bases,
        "chosen_on": chosen_on,
        "sizes": sizes,
        "scopes": scopes,
        "groups": {
            group: scope(data.only(lambda p, group=group: p.group == group), arms, sides, single, bases) for group in groups
        },
        "sides": {
            side: {"rounds": dict(data.rounds[side].most_common()), "spread_over_repeats": data.spread[side]} for side in sides
        },
    }


def scope(data: Data, arms: dict[str, Arm], sides: list[str], single: list[str], bases: dict[str, str]) -> dict:
    """Every side on these prompts; `scope_best_single` is the best single-source arm of these prompts, chosen on them."""
    weights = resamples(len(data.prompts))
    certain = len(data.prompts) > 1  # one prompt says nothing of others
    drawn = {side: speeds(weights, data.gain[side], data.cost[side]) for side in sides}
    here = data.best(single)
    bases = bases | ({} if here is None else {"scope_best_single": here})
    oracle = per_prompt_oracle(data, list(arms))
    rows = {}
    for side in sides:
        each = data.gain[side] / np.maximum(data.cost[side], 1e-12)
        rows[side] = {
            "tokens": int(data.tokens[side].sum()),
            "cost": float(data.cost[side].sum()),
            "speed": data.speed(side),
            "interval": interval(drawn[side]) if certain else None,
            "median": float(np.median(each)),
            "quartiles": np.quantile(each, [0.25, 0.75]).tolist(),
            "tau": data.tau(side),
            "forwards": int(data.forwards[side].sum()),
            "ratios": {
                role: {
                    "ratio": data.speed(side) / data.speed(base),
                    "interval": interval(drawn[side] / drawn[base]) if certain else None,
                }
                for role, base in bases.items()
            },
            "oracle_share": None,
        }
        if oracle is not None and oracle["speed"] > oracle["best_speed"]:
            rows[side]["oracle_share"] = (rows[side]["speed"] - oracle["best_speed"]) / (oracle["speed"] - oracle["best_speed"])
    return {"prompts": len(data.prompts), "best_single": here, "oracle": oracle, "sides": rows}


def per_prompt_oracle(data: Data, arms: list[str]) -> dict | None:
    """The static arm that was fastest on each prompt, against the one that was fastest on all. Noise of the clock flatters it."""
    if not arms:
        return None
    each = np.stack([data.gain[arm] / np.maximum(data.cost[arm], 1e-12) for arm in arms])
    chosen = [arms[i] for i in each.argmax(0)]
    gain, cost = (sum(float(values[arm][i]) for i, arm in enumerate(chosen)) for values in (data.gain, data.cost))
    best = data.best(arms)
    return {
        "speed": gain / cost if cost else 1.0,
        "best_arm": best,
        "best_speed": data.speed(best),
        "chosen": dict(Counter(chosen).most_common()),
    }


def agreement(runs: Runs, sides: list[str], reference: str, sampled: bool, gap: Callable[[Run, int], float] | None) -> dict:
    """Every side's texts against the reference's first ones: those that differ, and how often.

    gap: of a run, the distance of the target's two best logits before token i; below TIE the difference is a tie. None: not asked.
    Peers sample texts of their own, which are not compared.
    """
    told = {}
    for side in sides:
        pairs = [(run, runs.done.get((run.prompt, run.turn, reference, 0))) for run in runs.done.values() if run.side == side]
        pairs = [(run, right) for run, right in pairs if right is not None]
        if side == reference or not pairs or (sampled and side.startswith("peer:")):
            continue
        different, ties = [], []
        for run, right in pairs:
            at = first_difference(run.tokens, right.tokens)
            if at is None:
                continue
            where = f"prompt {run.prompt}, turn {run.turn + 1}, token {at}"
            if gap is None:
                different.append(where)
            else:
                distance = gap(run, at)
                (ties if distance < TIE else different).append(f"{where}, gap of the two best logits {distance:.2e}")
        told[side] = {"different": different, "ties": ties} | divergence(*map(list, zip(*pairs, strict=True)))
    return told
