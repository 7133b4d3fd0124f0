"""What every kernel's benchmark does: build a case, see that both sides agree, time one of them, say what it amounts to.

A side takes a case's inputs and returns a call without arguments; what it prepares before that is not timed. On CUDA a call is
timed in a replayed graph, on a CPU directly. Sides listed as `host` wait for the device by themselves and cannot be captured.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from .roofline import Cost, Peaks, measured_peaks
from .shapes import MODELS, Model
from .timing import Replay, input_sets

OURS = "whiflash"
Side = Callable[[dict], Callable[[], tuple]]
ROWS = pytest.StashKey[list]()
PEAKS = pytest.StashKey[Peaks]()


@dataclass(frozen=True)
class Case:
    """One size of one kernel: on a CPU float32, on CUDA bfloat16. label: the models that have it."""

    device: str
    label: str
    model: Model
    sizes: dict[str, int]
    small: bool = False

    def __str__(self) -> str:
        sizes = "-".join(f"{name}{value}" for name, value in self.sizes.items())
        return f"{self.device}{'-small' if self.small else ''}-{self.label}{'-' if sizes else ''}{sizes}"

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.device == "cpu" else torch.bfloat16

    def generator(self, index: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(index)

    def randn(self, generator: torch.Generator, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=self.device, dtype=dtype or self.dtype)


def build_cases(models: list[tuple[str, Model]], sizes: Iterable[dict[str, int]], small: Iterable[dict[str, int]]) -> list[Case]:
    """`small` sizes of SmolLM2 on either device, then on CUDA all models at each of `sizes`, which stand in order of interest."""
    smol = MODELS["smollm2-135m"]
    cases = [Case(device, "smollm2-135m", smol, size, small=True) for device in ("cpu", "cuda") for size in small]
    return cases + [Case("cuda", label, model, size) for size in sizes for label, model in models]


def cells(cases: list[Case], sides: dict[str, Side], wanted: Callable[[Case, str], bool] = lambda case, side: True) -> list:
    """(case, side) parameters of a benchmark; those on CUDA carry the marker `gpu`."""
    return [
        pytest.param(case, side, id=f"{case}-{side}", marks=[pytest.mark.gpu] if case.device == "cuda" else [])
        for case in cases
        for side in sides
        if wanted(case, side)
    ]


class Bench:
    """The fixture: benchmark is pytest-benchmark's own."""

    def __init__(self, benchmark, config: pytest.Config):
        self.benchmark, self.config = benchmark, config

    def __call__(
        self,
        kernel: str,
        case: Case,
        sides: dict[str, Side],
        side: str,
        make: Callable[[Case, int], dict],
        cost: Cost,
        agree: Callable[[dict, tuple, tuple], None],
        host: tuple[str, ...] = (),
    ) -> None:
        other = next(name for name in sides if name != OURS) if side == OURS else side
        inputs = make(case, 0)
        theirs = sides[other](make(case, 0))()
        ours = sides[OURS](inputs)()
        agree(inputs, ours, theirs)
        del theirs, ours
        self.benchmark.group = f"{kernel} {case}"
        row = {"kernel": kernel, "case": str(case), "side": side, "device": case.device, "bytes": cost.bytes, "flops": cost.flops}
        if not self.benchmark.enabled:
            self.benchmark.pedantic(sides[side](inputs))
        elif case.device == "cpu":
            self.benchmark.pedantic(sides[side](inputs), rounds=5, iterations=3, warmup_rounds=1)
            self._record(row, row)
        elif side in host:
            call = sides[side](inputs)
            self.benchmark.pedantic(lambda: (call(), torch.cuda.synchronize()), rounds=10, iterations=5, warmup_rounds=1)
            self._record(row, row | {"timed": "host, synchronised"})
        else:
            replay, cold = self._replay(case, sides[side], make, cost)
            self.benchmark.pedantic(replay, rounds=7, iterations=replay.launches, warmup_rounds=1)
            self._record(row | {"timed": "graph", "cold": cold}, self._rates(cost))

    def _replay(self, case: Case, side: Side, make: Callable[[Case, int], dict], cost: Cost) -> tuple[Replay, bool]:
        """The captured launches, and whether their inputs come from memory and not from the L2 cache."""
        before = torch.cuda.memory_allocated()
        calls = [side(make(case, 0))]
        sets = input_sets(cost.bytes, torch.cuda.memory_allocated() - before)
        calls += [side(make(case, index)) for index in range(1, sets)]
        for call in calls:
            call()
        return Replay(calls), sets * cost.bytes > 2 * torch.cuda.get_device_properties(0).L2_cache_size

    def _rates(self, cost: Cost) -> dict:
        stash = self.config.stash
        if PEAKS not in stash:
            stash[PEAKS] = measured_peaks()
        seconds, floor = self._seconds(), cost.seconds(stash[PEAKS])
        return {
            "gb_per_s": round(cost.bytes / seconds / 1e9, 1),
            "tflop_per_s": round(cost.flops / seconds / 1e12, 3),
            "floor_us": round(floor * 1e6, 3),
            "share_of_floor": round(floor / seconds, 3),
        }

    def _seconds(self) -> float:
        return self.benchmark.stats.stats.median

    def _record(self, row: dict, more: dict) -> None:
        row = row | more | {"us": round(self._seconds() * 1e6, 3)}
        self.benchmark.extra_info.update(row)
        self.config.stash[ROWS].append(row)
        if file := self.config.getoption("--rows"):
            with Path(file).open("a") as lines:
                lines.write(json.dumps(row) + "\n")


def assert_close(a: torch.Tensor, b: torch.Tensor) -> None:
    """Relative error of the whole: a rounding of the dtype apart, NaN nowhere."""
    tolerance = 1e-4 if torch.finfo(a.dtype).eps < 1e-6 else 2e-2
    a, b = a.float(), b.float()
    error = float((a - b).norm() / b.norm().clamp(min=1e-6))
    assert error < tolerance, f"the sides differ by {error:.2e} of the whole, more than {tolerance:g}"
