"""Lanes that keep a record: every read must have waited for its write, and work on the side happens as late as it may."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from whiflash_triton.lanes import EAGER, HOST, MAIN, SIDE, Lanes


class OrderViolation(AssertionError):
    """A buffer is touched without waiting for whoever touched it before."""


@dataclass(frozen=True)
class Mark:
    clock: dict[str, int]
    side_work: int  # how much of the side lane's work it takes in


class RecordingLanes(Lanes):
    """Vector clocks (Mattern 1988): lane -> how much of every lane's work has happened before what it does next."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.clocks = {lane: {other: 0 for other in (EAGER, MAIN, SIDE, HOST)} for lane in (EAGER, MAIN, SIDE, HOST)}
        self.written: dict[str, tuple[str, int]] = {}
        self.read: dict[str, dict[str, int]] = {}
        self.log: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = []
        self.late: list = []  # the side lane's work, in order; what has been done is None

    def run(self, lane, work, reads=(), writes=()):
        clock = self.clocks[lane]
        self._learn(clock, self.clocks[HOST])  # Python gives out work in its own order
        clock[lane] += 1
        for name in (*reads, *writes):
            self._after(lane, name, *self.written.get(name, (lane, 0)))
        for name in writes:
            for other, when in self.read.pop(name, {}).items():
                self._after(lane, name, other, when)
            self.written[name] = lane, clock[lane]
        for name in reads:
            self.read.setdefault(name, {})[lane] = clock[lane]
        self.log.append((lane, tuple(reads), tuple(writes)))
        if lane == SIDE:
            self.late.append(work)
            return None
        return work()

    def mark(self, lane):
        reached = len(self.late) if lane == SIDE else 0
        return Mark(dict(self.clocks[lane]), reached)

    def wait(self, lane, mark):
        if mark is None:
            return
        self._learn(self.clocks[lane], mark.clock)
        for i in range(mark.side_work):
            work, self.late[i] = self.late[i], None
            if work is not None:
                work()

    def _after(self, lane: str, name: str, other: str, when: int) -> None:
        if self.clocks[lane][other] < when:
            raise OrderViolation(f"{lane} touches {name!r} without waiting for {other}")

    @staticmethod
    def _learn(clock: dict[str, int], other: dict[str, int]) -> None:
        for lane, when in other.items():
            clock[lane] = max(clock[lane], when)
