"""CUDA graphs of the rounds on the device: captured once, largest first, in one memory pool, replayed on the stream they were
captured on. A round that has no graph runs as it is, with the same result."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from .arms import Arm
from .device_round import DeviceRounds, _bucket, catch_up, verify_round
from .lanes import EAGER, MAIN, Lanes
from .sampling import Sampling
from .scheduler import Stream, Workspace

CATCH_UP_ROWS = 64  # the largest catch-up that has a graph: more rows cost more than their launches


class Graphs:
    """key -> captured graph; `replay` is what DeviceRounds calls."""

    def __init__(self, lanes: Lanes):
        self.stream, self.pool = lanes.streams[MAIN], torch.cuda.graph_pool_handle()
        self.graphs: dict[object, torch.cuda.CUDAGraph] = {}

    def capture(self, key: object, work: Callable[[], None]) -> None:
        """Run `work` once, so that kernels are compiled and tables made, then capture it. RuntimeError for what cannot be."""
        with torch.cuda.stream(self.stream):
            work()
        self.stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
                work()
        except RuntimeError as error:
            raise RuntimeError(f"{key} cannot be captured in a CUDA graph: {error}") from error
        self.graphs[key] = graph

    def replay(self, key: object, work: Callable[[], None]) -> None:
        graph = self.graphs.get(key)
        if graph is None:
            work()
        else:
            graph.replay()


@torch.inference_mode()
def warm_up(work: Workspace, arms: tuple[Arm, ...], ahead: int) -> dict:
    """Give `work` rounds on the device for these arms, on CUDA as graphs; what the caches held of a text is gone.

    Returns {"graphs": count, "seconds": spent, "bytes": device memory they took}. A graph is made per arm and context bucket
    (attention never looks past the bucket) and per drafter and power of two of pending rows.
    """
    begin, device = time.perf_counter(), work.target.device
    lanes, nodes = Lanes(device), 2 + max(arm.size for arm in arms)
    on_gpu = device.type == "cuda"
    graphs = Graphs(lanes) if on_gpu else None
    rounds = work.device = DeviceRounds(work, lanes, ahead, nodes, graphs.replay if graphs else None)
    before = torch.cuda.memory_reserved(device) if on_gpu else 0
    if graphs:
        Stream(work, None).start([0] * 8)
        rounds.enter([0] * 9)
        for name in sorted({name for arm in arms for name in arm.needs}):
            rows = _bucket(min(CATCH_UP_ROWS, rounds.rows // 2))
            while rows:
                drafter = work.drafters[name]
                rounds.text.before.fill_(8)
                drafter.cache.lengths.fill_(7)  # one row is pending, whatever the bucket
                graphs.capture(
                    (name, rows), lambda name=name, rows=rows: catch_up(work, rounds.text, name, rows, rounds.text.before)
                )
                rows //= 2
        for bucket in reversed(rounds.buckets):
            rounds._look_at(bucket)
            for arm in sorted((arm for arm in arms if arm.kind != "lookup"), key=lambda arm: -arm.size):
                for cache in rounds.caches:
                    cache.lengths.fill_(8)
                graphs.capture((str(arm), bucket), lambda arm=arm: verify_round(work, rounds.text, arm, Sampling()))
        rounds.abandon()
        lanes.wait(EAGER, lanes.mark(MAIN))
        work.owner, work.rows = None, None
    used = torch.cuda.memory_reserved(device) - before if on_gpu else 0
    return {"graphs": len(graphs.graphs) if graphs else 0, "seconds": time.perf_counter() - begin, "bytes": used}
