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

# Ways to run rounds: as they come, or what WhiFlashDecoder.warmup prepares with so many rounds ahead of the host's reading.
MODES: dict[str, int | None] = {"eager": None, "graphs": 0, "graphs, a round ahead": 1}
TABLES = ("rounds", "switches", "prefill", "captures", "routed", "profile", "not_reached")
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
    """Tables of rows by name, saved whenever one has grown; stops when time runs out."""
    target = random_target(setup.model.target, setup.device, setup.dtype)
    tables: dict[str, list] = {name: [] for name in TABLES}
    spent = 0.0
    for context in setup.contexts:
        if setup.left() < 1.5 * spent:  # a longer context takes longer than the last one did
            tables["not_reached"].append(str(context))
            continue
        begin = time.perf_counter()
        _one_context(setup, target, context, tables)
        spent = time.perf_counter() - begin
    setup.save(tables)
    return tables


@torch.inference_mode()
def _one_context(setup: Setup, target: Target, context: int, tables: dict[str, list]) -> None:
    """Every mode over one decoder, plain rounds first: what `warmup` prepares stays."""
    warm_up = [arm for arm in setup.arms for _ in range(WARM_UP)]
    script = warm_up + [arm for arm in setup.arms for _ in range(1 + MEASURED)]
    decoder = random_decoder(setup.model, target, context + ROOM, Script(script))
    ids = torch.randint(setup.model.target.vocab_size, (context,), generator=torch.Generator().manual_seed(context)).tolist()
    pair = [next((arm for arm in setup.arms if arm.kind == kind), None) for kind in ("dflash", "eagle3")]
    for mode, ahead in MODES.items():
        if setup.left() <= 0:
            tables["not_reached"].append(f"{context}, {mode}")
            continue
        where = {"model": setup.name, "mode": mode, "context": context}
        if ahead is not None:
            captured = decoder.warmup(ahead)
            tables["captures"].append(where | captured | {"seconds": round(captured["seconds"], 2)})
        play(decoder, Script(warm_up), ids[:16], len(warm_up))  # compiles
        free = play(decoder, Script(script), ids, len(script))
        phased = free
        if ahead is None:  # one piece on the device otherwise: its phases cannot be told apart
            with waiting_clock(setup.device):
                phased = play(decoder, Script(script), ids, len(script))
            tables["prefill"].append(where | {"ms": _ms(free.prompt)})
        _read(setup, where, free, phased, ahead, tables)
        if all(pair):
            routed = play(decoder, EntropyRouter(*pair), ids, 2 + MEASURED)
            ms = statistics.median(routed.ms[2:])
            tables["routed"].append(where | {"router": "entropy", "arms": routed.arms(), "ms": round(ms, 3)})
        setup.save(tables)
        if context == setup.contexts[0]:
            rows = device_profile(decoder, pair[0] or setup.arms[-1], ids, setup.device)
            tables["profile"] += [{"mode": mode} | row for row in rows]
            setup.save(tables)


def _read(setup: Setup, where: dict, free: Played, phased: Played, ahead: int | None, tables: dict[str, list]) -> None:
    """The rows of one script, arm by arm: its first round is the switch, the others are measured."""
    before = setup.arms[-1]
    for i, arm in enumerate(setup.arms):
        at = WARM_UP * len(setup.arms) + i * (1 + MEASURED)
        block = slice(at + 1, at + 1 + MEASURED)
        steady, first = statistics.median(free.ms[block]), free.ms[at]
        phases = {p: round(statistics.median(r.ms.get(p, 0.0) for r in phased.rounds[block]), 3) for p in PHASES}
        tables["rounds"].append(where | _row(setup, arm, where["context"], steady, free.rounds[block]) | {"phases": phases})
        if not ahead:  # a round ahead, the time of a switch falls to the round before
            switch = {"from": str(before), "to": str(arm), "caught_up": free.rounds[at].caught_up, "first_ms": round(first, 3)}
            cost = {"cost_ms": round(first - steady, 3), "share_of_round": round(first / steady - 1, 3)}
            tables["switches"].append(where | switch | {"steady_ms": round(steady, 3)} | cost)
        before = arm


def _row(setup: Setup, arm: Arm, context: int, ms: float, rounds: list[Round]) -> dict:
    costs = round_costs(setup.model, arm, context, itemsize=setup.dtype.itemsize)
    floors = {phase: _ms(cost.bytes / setup.peaks.bandwidth) for phase, cost in costs.items()}
    floor = sum(floors.values())
    return {
        "arm": str(arm),
        "rounds": len(rounds),
        "ms": round(ms, 3),
        "floor_ms": round(floor, 4),
        "times_floor": round(ms / floor, 2),
        "floor_phases": floors,
        "committed": round(statistics.mean(r.committed for r in rounds), 2),
    }


@dataclass(frozen=True)
class Played:
    """prompt: seconds until its first token; ms: of each round, from one's tokens to the next one's."""

    prompt: float
    rounds: list[Round]
    ms: list[float]

    def arms(self) -> list[str]:
        return sorted({str(r.arm) for r in self.rounds})


def play(decoder: WhiFlashDecoder, router: Router, ids: list[int], count: int) -> Played:
    """The prompt and the first `count` rounds after it."""
    decoder.use_router(router)
    played = Played(0.0, [], [])
    pieces = decoder.stream(ids, max_new_tokens=decoder.max_cache_len - len(ids), reuse_prefix=False)
    last = time.perf_counter()
    for piece in pieces:
        now = time.perf_counter()
        if piece.round is None:
            played = Played(now - last, [], [])
        else:
            played.rounds.append(piece.round)
            played.ms.append((now - last) * 1e3)
        last = now
        if len(played.rounds) == count:
            break
    pieces.close()
    if len(played.rounds) < count:
        raise RuntimeError(f"only {len(played.rounds)} of {count} rounds fitted {decoder.max_cache_len} rows: raise ROOM")
    return played


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
    rows = [(e.key, e.count, getattr(e, field)) for e in events]
    rows = [*rows[:top], (f"all of a round of {arm}", sum(row[1] for row in rows), sum(row[2] for row in rows))]
    rows.append(("the round by the clock", count, seconds * 1e6))
    return [{"name": name, "calls": round(calls / count, 1), "us": round(us / count, 2)} for name, calls, us in rows]


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 4)


def qwen_arms() -> tuple[Arm, ...]:
    return tuple(map(parse_arm, ("ar", "dflash:15", "ddtree:64", "eagle3:7", "eagle3-tree:32", "mixed:64")))
