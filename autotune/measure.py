"""Microseconds of a call on the GPU alone: captured in a CUDA graph, inputs rotated through more than the L2 cache."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from whiflash_triton.autotune import lookup
from whiflash_triton.autotune.cases import Call, Case, build
from whiflash_triton.autotune.spaces import work

CALLS = 64  # in a graph, at least: the start of a replay weighs nothing
MOST_SETS = 32


def input_sets(case: Case, config: dict[str, Any]) -> list[Call]:
    """As many copies of the case, inputs of their own, as push each other out of the L2 cache and fit into memory."""
    device = torch.device("cuda")
    first = build(case, device)
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    fit = torch.cuda.mem_get_info()[0] // 4 // first.nbytes
    wanted = -(-5 * cache // (2 * max(1, int(work(case, config).traffic))))
    return [first] + [build(case, device) for _ in range(min(wanted, fit, MOST_SETS) - 1)]


def microseconds(sets: list[Call], config: dict[str, Any], replays: int = 5) -> float:
    """Median over replays of the mean time of one call under ``config``."""
    with lookup.answered_by(lambda kernel, key: config):
        for call in sets:
            call.run()  # compiles before the capture
        torch.cuda.synchronize()
        graph, repeats = torch.cuda.CUDAGraph(), max(1, CALLS // len(sets))
        with torch.cuda.graph(graph):
            for _ in range(repeats):
                for call in sets:
                    call.run()
    return median(_elapsed(graph.replay) for _ in range(replays + 1)) * 1e3 / (repeats * len(sets))


def _elapsed(run: Callable[[], None]) -> float:
    """Milliseconds."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)
