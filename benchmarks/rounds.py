"""Whole rounds over random weights: milliseconds of every arm and phase at several contexts, against the bytes they must read.

Random drafts are hardly ever right, so a round commits about one token; what it reads and launches is that of any round.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import torch

from whiflash_triton import scheduler
from whiflash_triton.arms import Arm, parse_arm
from whiflash_triton.decoder import WhiFlashDecoder
from whiflash_triton.routers.base import RoundState, Router
from whiflash_triton.routers.entropy import EntropyRouter
from whiflash_triton.routers.static import StaticRouter
from whiflash_triton.stats import PHASES, Round
from whiflash_triton.target import Target

from .random_model import random_decoder, random_target
from .roofline import Peaks, round_costs
from .shapes import Model

# A way to run rounds, and the options of WhiFlashDecoder that ask for it.
MODES: dict[str, dict] = {"eager": {}}
WARM_UP, MEASURED = 3, 8  # rounds of an arm
ROOM = 1024  # rows beyond the context, for what the rounds commit and draft


class Script:
    """Arms in a given order, the last one for ever."""

    def __init__(self, script: list[Arm]):
        self.script, self.arms, self.at = script, tuple(dict.fromkeys(script)), 0

    def choose(self, state: RoundState) -> Arm:
        arm = self.script[min(self.at, len(self.script) - 1)]
        self.at += 1
        return arm


@dataclass(frozen=True)
class Setup:
    """What is measured. left: seconds that remain; save: takes the tables measured so far."""

    name: str
    model: Model
    device: torch.device
    dtype: torch.dtype
    contexts: tuple[int, ...]
    arms: tuple[Arm, ...]
    peaks: Peaks
    left: Callable[[], float]
    save: Callable[[dict[str, list]], None]


def measure(setup: Setup) -> dict[str, list]:
    """Tables `rounds`, `switches`, `prefill`, `routed` and `profile`, saved after every context; stops when time runs out."""
    target = random_target(setup.model.target, setup.device, setup.dtype)
    tables: dict[str, list] = {name: [] for name in ("rounds", "switches", "prefill", "routed", "profile", "not_reached")}
    spent = 0.0
    for context in setup.contexts:
        if setup.left() < 1.5 * spent:  # a longer context takes longer than the last one did
            tables["not_reached"].append(context)
            continue
        begin = time.perf_counter()
        for mode, options in MODES.items():
            _one_context(setup, target, context, mode, options, tables)
            setup.save(tables)
        spent = time.perf_counter() - begin
    setup.save(tables)
    return tables


@torch.inference_mode()
def _one_context(setup: Setup, target: Target, context: int, mode: str, options: dict, tables: dict[str, list]) -> None:
    decoder = random_decoder(setup.model, target, context + ROOM, StaticRouter(Arm("ar")), **options)
    ids = torch.randint(setup.model.target.vocab_size, (context,), generator=torch.Generator().manual_seed(context)).tolist()
    warm_up = [arm for arm in setup.arms for _ in range(WARM_UP)]
    script = warm_up + [arm for arm in setup.arms for _ in range(1 + MEASURED)]
    where = {"model": setup.name, "mode": mode, "context": context}
    play(decoder, Script(warm_up), ids[:16], len(warm_up))  # compiles
    prefill, free = play(decoder, Script(script), ids, len(script))
    with waiting_clock(setup.device):
        _, waited = play(decoder, Script(script), ids, len(script))
    tables["prefill"].append(where | {"ms": _ms(prefill)})
    before = setup.arms[-1]
    for i, arm in enumerate(setup.arms):
        at = len(warm_up) + i * (1 + MEASURED)
        steady = statistics.median(_total(r) for r in free[at + 1 : at + 1 + MEASURED])
        tables["rounds"].append(where | _row(setup, arm, context, steady, free[at + 1 :][:MEASURED], waited[at + 1 :][:MEASURED]))
        first = _total(free[at])
        switch = {"from": str(before), "to": str(arm), "caught_up": free[at].caught_up, "first_ms": round(first, 3)}
        cost = {"steady_ms": round(steady, 3), "cost_ms": round(first - steady, 3), "share_of_round": round(first / steady - 1, 3)}
        tables["switches"].append(where | switch | cost)
        before = arm
    pair = [next((arm for arm in setup.arms if arm.kind == kind), None) for kind in ("dflash", "eagle3")]
    if all(pair):
        _, rounds = play(decoder, EntropyRouter(*pair), ids, 2 + MEASURED)
        ms = statistics.median(map(_total, rounds[2:]))
        tables["routed"].append(where | {"router": "entropy", "arms": sorted({str(r.arm) for r in rounds}), "ms": round(ms, 3)})
    if not tables["profile"]:
        tables["profile"] = device_profile(decoder, pair[0] or setup.arms[-1], ids, setup.device)


def _row(setup: Setup, arm: Arm, context: int, ms: float, free: list[Round], waited: list[Round]) -> dict:
    """ms: of a round left alone; phases: of rounds that wait for the device after each, which sum to more."""
    costs = round_costs(setup.model, arm, context, itemsize=setup.dtype.itemsize)
    floors = {phase: _ms(cost.bytes / setup.peaks.bandwidth) for phase, cost in costs.items()}
    floor = sum(floors.values())
    return {
        "arm": str(arm),
        "rounds": len(free),
        "ms": round(ms, 3),
        "floor_ms": round(floor, 4),
        "times_floor": round(ms / floor, 2),
        "phases": {phase: round(statistics.median(r.ms[phase] for r in waited), 3) for phase in PHASES},
        "floor_phases": floors,
        "committed": round(statistics.mean(r.committed for r in free), 2),
    }


def play(decoder: WhiFlashDecoder, router: Router, ids: list[int], count: int) -> tuple[float, list[Round]]:
    """(seconds of the prompt, the first `count` rounds after it)."""
    decoder.use_router(router)
    rounds: list[Round] = []
    begin = time.perf_counter()
    prompt = 0.0
    pieces = decoder.stream(ids, max_new_tokens=decoder.max_cache_len - len(ids), reuse_prefix=False)
    for piece in pieces:
        if piece.round is None:
            prompt = time.perf_counter() - begin
        else:
            rounds.append(piece.round)
        if len(rounds) == count:
            break
    pieces.close()
    if len(rounds) < count:
        raise RuntimeError(f"only {len(rounds)} of {count} rounds fitted {decoder.max_cache_len} rows: raise ROOM")
    return prompt, rounds


@contextlib.contextmanager
def waiting_clock(device: torch.device) -> Iterator[None]:
    """Rounds within wait for the device at the end of every phase, so that each phase shows its own time."""

    def clock() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    with mock.patch.object(scheduler, "time", SimpleNamespace(perf_counter=clock)):
        yield


def device_profile(
    decoder: WhiFlashDecoder, arm: Arm, ids: list[int], device: torch.device, count: int = 5, top: int = 15
) -> list[dict]:
    """Kernels (on a CPU, operators) that take most of a round of `arm`, then all of them, then the round by the clock."""
    from torch.profiler import ProfilerActivity, profile

    decoder.use_router(StaticRouter(arm))
    pieces = decoder.stream(ids, max_new_tokens=decoder.max_cache_len - len(ids), reuse_prefix=False)
    for _ in range(3):
        next(pieces)
    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as trace:
        begin = time.perf_counter()
        for _ in range(count):
            next(pieces)
        seconds = time.perf_counter() - begin
    pieces.close()
    field = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    events = [event for event in trace.key_averages() if getattr(event, field) > 0]  # launches take no time of the device
    events.sort(key=lambda event: getattr(event, field), reverse=True)
    rows = [
        {"name": e.key, "calls": round(e.count / count, 1), "us": round(getattr(e, field) / count, 2)} for e in events[:top]
    ]  # fmt: skip
    busy = sum(getattr(e, field) for e in events) / count
    launches = sum(e.count for e in events) / count
    return [
        *rows,
        {"name": f"all of a round of {arm}", "calls": round(launches, 1), "us": round(busy, 2)},
        {"name": "the round by the clock", "calls": 1, "us": round(seconds / count * 1e6, 2)},
    ]


def _total(round_: Round) -> float:
    return sum(round_.ms.values())


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 4)


def qwen_arms() -> tuple[Arm, ...]:
    return tuple(map(parse_arm, ("ar", "dflash:15", "ddtree:64", "eagle3:7", "eagle3-tree:32", "mixed:64")))
