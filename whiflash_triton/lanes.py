"""Orders of work on one device: CUDA streams there, nothing but names elsewhere.

What is given to one lane runs in order. What runs on two lanes may overlap or trade places, unless one waits for a mark of the
other; `reads` and `writes` name the buffers a piece of work touches, so that a test can check that every read has waited for its
write (tests/lanes.py). HOST is Python itself: it may read what a copy has brought once it has waited for the copy's mark.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeVar

import torch

EAGER, MAIN, SIDE, HOST = "eager", "main", "side", "host"
T = TypeVar("T")


class Lanes:
    """EAGER is the stream that is current now; MAIN and SIDE are its own."""

    def __init__(self, device: torch.device):
        on_gpu = device.type == "cuda"
        self.streams = {lane: torch.cuda.Stream(device) for lane in (MAIN, SIDE)} if on_gpu else {}
        if on_gpu:
            self.streams[EAGER] = torch.cuda.current_stream(device)

    def run(self, lane: str, work: Callable[[], T], reads: tuple[str, ...] = (), writes: tuple[str, ...] = ()) -> T:
        """Give `work` to a lane: after what the lane has been given before, and after what it has waited for."""
        with torch.cuda.stream(self.streams[lane]) if self.streams else nullcontext():
            return work()

    def mark(self, lane: str) -> torch.cuda.Event | None:
        """The point where all that the lane has been given so far is done."""
        if not self.streams:
            return None
        event = torch.cuda.Event()
        event.record(self.streams[lane])
        return event

    def wait(self, lane: str, mark: torch.cuda.Event | None) -> None:
        """What the lane is given from now on comes after the mark."""
        if mark is None:
            return
        if lane == HOST:
            mark.synchronize()
        else:
            self.streams[lane].wait_event(mark)
