"""Time on the device alone: launches captured in a CUDA graph and replayed, their inputs rotated through more than the L2 cache."""

from __future__ import annotations

from collections.abc import Callable

import torch

GRAPH_SECONDS = 2e-3  # a replay this long hides the host's part in it
MAX_LAUNCHES = 4000
MAX_SETS = 64


def input_sets(bytes_a_call: int, bytes_a_set: int) -> int:
    """Sets of inputs to rotate so that each has left the L2 cache when its turn comes, as far as memory and MAX_SETS allow."""
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    fit = torch.cuda.mem_get_info()[0] // 4 // max(bytes_a_set, 1)
    return max(1, min(-(-5 * cache // (2 * bytes_a_call)), fit, MAX_SETS))


class Replay:
    """Called `launches` times in a row it replays once: a timer that divides by its iterations gives the time of one launch.

    calls: one a set of inputs, taken in turn; each has run before, so that nothing compiles during capture.
    """

    def __init__(self, calls: list[Callable[[], object]]):
        once = _capture(calls)
        seconds = _elapsed(once)
        repeats = max(1, min(round(GRAPH_SECONDS / seconds), MAX_LAUNCHES // len(calls)))
        self.graph = _capture(calls * repeats) if repeats > 1 else once
        self.launches, self.done = len(calls) * repeats, 0

    def __call__(self) -> None:
        if self.done == 0:
            self.graph.replay()
        self.done += 1
        if self.done == self.launches:
            torch.cuda.synchronize()
            self.done = 0


def _capture(calls: list[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def _elapsed(graph: torch.cuda.CUDAGraph) -> float:
    """Seconds of the second of two replays."""
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
