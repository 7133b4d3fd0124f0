"""Byte and operation counts of every kernel and of whole rounds, and what a device makes of them.

A count is the least the work needs: inputs read once, results written once, weights once a forward; what stays on the chip
(activations, partial sums) is free. Operations are those of the arithmetic, a multiply-add as two. `python -m
benchmarks.roofline` prints the floors of whole rounds for a device of the table below; where there is a device, what is
measured on it takes the table's place.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from whiflash_triton.arms import Arm, parse_arm
from whiflash_triton.checkpoint_schema import DFlashConfig, Eagle3Config
from whiflash_triton.target import TargetConfig

from .shapes import MODELS, Model


@dataclass(frozen=True)
class Peaks:
    """Copied bytes a second (read and written both count), bf16 matrix operations a second, seconds an empty launch takes."""

    bandwidth: float
    matmul: float
    launch: float = 0.0


# Vendors' datasheets: memory bandwidth and dense bf16 tensor-core rate, without launches; both are more than anything reaches.
DATASHEET = {
    "nvidia_a100_sxm4_80gb": Peaks(2.039e12, 312e12),
    "nvidia_h100_80gb_hbm3": Peaks(3.35e12, 989e12),
    "nvidia_h200": Peaks(4.8e12, 989e12),
    "nvidia_b200": Peaks(8.0e12, 2250e12),
    "nvidia_l40s": Peaks(0.864e12, 362e12),
    "nvidia_l4": Peaks(0.3e12, 121e12),
    "nvidia_geforce_rtx_4090": Peaks(1.008e12, 165e12),
}


@dataclass(frozen=True)
class Cost:
    bytes: int
    flops: int
    launches: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.bytes + other.bytes, self.flops + other.flops, self.launches + other.launches)

    def seconds(self, peaks: Peaks) -> float:
        """The floor: memory, arithmetic or launches, whichever takes longest."""
        return max(self.bytes / peaks.bandwidth, self.flops / peaks.matmul, self.launches * peaks.launch)


NOTHING = Cost(0, 0)

# --- kernels ---------------------------------------------------------------------------------------------------------------


def tree_attention(rows: int, nodes: int, context: int, heads: int, kv_heads: int, dim: int, itemsize: int = 2) -> Cost:
    """`rows` queries over `context` cache rows and `nodes` tree keys, one layer."""
    moved = itemsize * (2 * rows * heads * dim + 2 * kv_heads * dim * (context + nodes))
    return Cost(moved + 8 * rows * _words(nodes) + 4, 4 * rows * heads * dim * (context + nodes), 2)


def block_sampling(rows: int, vocab: int, top_k: int = 0, itemsize: int = 2, drawn: bool = False) -> Cost:
    """Six operations a logit (compare, subtract, exp, add, multiply-add); those of the noise are not counted."""
    outputs = rows * (8 + 4 + 4 + 12 * top_k)
    return Cost(rows * vocab * itemsize + outputs + (8 * rows + 8 if drawn else 0), 6 * rows * vocab, 2)


def router_mlp(rows: int, hidden: int, width: int, itemsize: int = 4) -> Cost:
    moved = itemsize * (rows * hidden + width * (hidden + 2) + 1) + rows * (4 + 4)
    return Cost(moved, 2 * rows * width * (hidden + 1), 2)


def entropy_rule(rows: int) -> Cost:
    return Cost(8 * rows, rows, 1)


def kv_compaction(moved: int, layers: int, kv_heads: int, dim: int, taps: int = 0, hidden: int = 0, itemsize: int = 2) -> Cost:
    """`moved` accepted rows, all layers, K, V and features: read, and written somewhere else."""
    row = itemsize * (layers * 2 * kv_heads * dim + taps * hidden)
    return Cost(2 * moved * row + 4 * moved + (12 if taps else 8), 0, 1)


def kv_injection(rows: int, layers: int, kv_heads: int, dim: int, itemsize: int = 2, normed: bool = True) -> Cost:
    """Per element of K four operations of the norm and three of the rotation."""
    moved = itemsize * (4 * rows * layers * kv_heads * dim + normed * layers * dim) + 8 * rows * dim + 4
    return Cost(moved, (7 if normed else 3) * rows * layers * kv_heads * dim, 1)


def tree_walk(nodes: int) -> Cost:
    """Tokens, parents and choices read, path, length and bonus written; a comparison a node."""
    return Cost(nodes * (8 + 4 + 8) + nodes * 4 + 4 + 8, nodes, 1)


def tree_build(budget: int) -> Cost:
    """The candidates that the tree is made of, its nodes and their words; an addition and a comparison a node."""
    nodes = budget + 1
    return Cost(12 * budget + 8 + nodes * (8 + 4 + 4 + 8 + 8 * _words(nodes)), 2 * budget, 2)


def _words(nodes: int) -> int:
    return (nodes + 63) // 64


# --- parameters ------------------------------------------------------------------------------------------------------------


def _attention(c: TargetConfig | DFlashConfig | Eagle3Config, width: int) -> tuple[int, int]:
    """(q and o, k and v) of one layer whose projections read `width` columns."""
    return c.num_heads * c.head_dim * (width + c.hidden_size), 2 * c.num_kv_heads * c.head_dim * width


def _mlp(c: TargetConfig | DFlashConfig | Eagle3Config) -> int:
    return 3 * c.hidden_size * c.intermediate_size


def target_matrices(t: TargetConfig) -> int:
    """Weights that every row is multiplied with, the head apart."""
    return t.num_layers * (sum(_attention(t, t.hidden_size)) + _mlp(t))


def target_vectors(t: TargetConfig) -> int:
    """Norms and biases."""
    kv, heads = t.num_kv_heads * t.head_dim, t.num_heads * t.head_dim
    layer = 2 * t.hidden_size + 2 * t.head_dim * t.qk_norm
    layer += (heads + 2 * kv) * t.qkv_bias + t.hidden_size * t.o_bias + (2 * t.intermediate_size + t.hidden_size) * t.mlp_bias
    return t.num_layers * layer + t.hidden_size


def target_parameters(t: TargetConfig) -> int:
    return target_matrices(t) + target_vectors(t) + (1 if t.tied else 2) * t.vocab_size * t.hidden_size


def dflash_parameters(d: DFlashConfig) -> int:
    """Without the embedding and the head, which are the target's."""
    layer = sum(_attention(d, d.hidden_size)) + _mlp(d) + 2 * d.hidden_size + 2 * d.head_dim
    return d.num_layers * layer + len(d.taps) * d.hidden_size**2 + 2 * d.hidden_size


def eagle3_parameters(e: Eagle3Config) -> int:
    """Without the embedding; of the kind that has no optional norms."""
    return _eagle3_fc(e) + _eagle3_step_matrices(e) + 4 * e.hidden_size


def _eagle3_fc(e: Eagle3Config) -> int:
    return e.hidden_size * len(e.taps) * e.target_hidden_size


def _eagle3_step_matrices(e: Eagle3Config) -> int:
    return sum(_attention(e, 2 * e.hidden_size)) + _mlp(e) + e.draft_vocab_size * e.hidden_size


# --- whole rounds ----------------------------------------------------------------------------------------------------------


def verification(t: TargetConfig, rows: int, context: int, itemsize: int = 2) -> Cost:
    """One target forward over `rows` tree rows on `context` committed ones, logits of every row."""
    head, kv = t.vocab_size * t.hidden_size, 2 * t.num_layers * t.num_kv_heads * t.head_dim
    weights = target_matrices(t) + target_vectors(t) + head + rows * t.hidden_size
    attention = t.num_layers * 4 * rows * t.num_heads * t.head_dim * (context + rows)
    return Cost(itemsize * (weights + kv * (context + rows)), 2 * rows * (target_matrices(t) + head) + attention)


def dflash_draft(d: DFlashConfig, slots: int, context: int, pending: int = 1, itemsize: int = 2) -> Cost:
    """Ingestion of `pending` of the `context` rows, the block, and the head on `slots` of its rows."""
    head = (d.draft_vocab_size or d.vocab_size) * d.hidden_size
    queries, keys = _attention(d, d.hidden_size)
    layers, fc = d.num_layers * (queries + keys + _mlp(d)), len(d.taps) * d.hidden_size**2
    kv = 2 * d.num_layers * d.num_kv_heads * d.head_dim
    read = dflash_parameters(d) + head + 2 * d.hidden_size + pending * len(d.taps) * d.hidden_size
    flops = 2 * pending * (fc + d.num_layers * keys) + 2 * d.block_size * layers + 2 * slots * head
    attention = d.num_layers * 4 * d.block_size * d.num_heads * d.head_dim * (context + d.block_size)
    return Cost(itemsize * (read + kv * (context + pending)), flops + attention)


def eagle3_step(e: Eagle3Config, rows: int, context: int, itemsize: int = 2) -> Cost:
    """One forward of the head over `rows` draft rows, without `fc`."""
    weights, kv = _eagle3_step_matrices(e), 2 * e.num_kv_heads * e.head_dim
    attention = 4 * rows * e.num_heads * e.head_dim * (context + rows)
    moved = weights + 4 * e.hidden_size + rows * e.hidden_size + kv * (context + rows)
    return Cost(itemsize * moved, 2 * rows * weights + attention)


def eagle3_draft(e: Eagle3Config, frontiers: list[int], context: int, pending: int = 1, itemsize: int = 2) -> Cost:
    """Ingestion of `pending` of the `context` rows, then one step for each frontier, on the rows of those before it."""
    kv, keys = 2 * e.num_kv_heads * e.head_dim, _attention(e, 2 * e.hidden_size)[1]
    read = _eagle3_fc(e) + pending * (len(e.taps) * e.target_hidden_size + e.hidden_size + kv)
    cost = Cost(itemsize * read, 2 * pending * _eagle3_fc(e) + 2 * (pending - 1) * keys)
    for i, rows in enumerate(frontiers):  # the newest committed row runs again as the first draft row
        cost += eagle3_step(e, rows, context - 1 + sum(frontiers[:i]), itemsize)
    return cost


def draft(model: Model, arm: Arm, context: int, pending: int = 1, itemsize: int = 2) -> Cost:
    """The drafters that an arm runs; a copy out of the text costs nothing that counts."""
    cost = NOTHING
    if "dflash" in arm.needs:
        slots = arm.size if arm.kind == "dflash" else model.dflash.block_size - 1
        cost += dflash_draft(model.dflash, slots, context, pending, itemsize)
    if "eagle3" in arm.needs:
        frontiers = [1] * arm.size if arm.kind == "eagle3" else [1] + [arm.top_k] * (arm.depth - 1)
        cost += eagle3_draft(model.eagle3, frontiers, context, pending, itemsize)
    return cost


def round_costs(model: Model, arm: Arm, context: int, pending: int = 1, kept: int = 1, itemsize: int = 2) -> dict[str, Cost]:
    """By phase: `context` rows committed, `pending` of them new to the drafter, `kept` rows of the draft committed."""
    t, rows = model.target, arm.size + 1
    taps = len({*model.dflash.taps, *model.eagle3.taps})
    return {
        "draft": draft(model, arm, context, pending, itemsize),
        "verify": verification(t, rows, context, itemsize),
        "accept": block_sampling(rows, t.vocab_size, itemsize=itemsize) + tree_walk(rows),
        "commit": kv_compaction(kept, t.num_layers, t.num_kv_heads, t.head_dim, taps, t.hidden_size, itemsize),
    }


# --- devices ---------------------------------------------------------------------------------------------------------------


def copy_bandwidth(device: str = "cuda", nbytes: int = 1 << 30, repeats: int = 10) -> float:
    """Bytes a second that a copy between two buffers of `nbytes` moves, read and written both counted."""
    source, destination = (torch.full((nbytes // 4,), i + 1.0, device=device) for i in range(2))
    return 2 * source.nbytes / _median(lambda: destination.copy_(source), device, repeats)


def matmul_rate(device: str = "cuda", size: int = 8192, repeats: int = 10, dtype: torch.dtype = torch.bfloat16) -> float:
    """Operations a second of a square product of random numbers."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / _median(lambda: a @ b, device, repeats)


def launch_seconds(launches: int = 500) -> float:
    """Seconds that one launch of a kernel with nothing to do takes within a replayed graph."""
    x = torch.zeros(1, device="cuda")
    x.add_(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            x.add_(1)
    return _median(graph.replay, "cuda", 5) / launches


def measured_peaks(device: str = "cuda") -> Peaks:
    if device == "cuda":
        return Peaks(copy_bandwidth(), matmul_rate(), launch_seconds())
    return Peaks(copy_bandwidth(device, 1 << 26, 3), matmul_rate(device, 512, 3, torch.float32))


def _median(call: Callable[[], object], device: str, repeats: int) -> float:
    """Seconds, after a call that does not count; by events on CUDA."""
    call()
    times = []
    for _ in range(repeats):
        if device == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        else:
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description="Floors of whole rounds, in milliseconds, from byte and operation counts alone.")
    parser.add_argument("--device", choices=DATASHEET, default="nvidia_h200")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--arms", nargs="+", default=["ar", "dflash:15", "ddtree:64", "eagle3:7", "eagle3-tree:32", "mixed:64"])
    args = parser.parse_args()
    peaks = DATASHEET[args.device]
    rates = f"{peaks.bandwidth / 1e12:g} TB/s and {peaks.matmul / 1e12:g} TFLOP/s by datasheet"
    print(f"{args.device}: {rates}; bf16, context {args.context}")
    for name, model in MODELS.items():
        for arm in map(parse_arm, args.arms):
            if arm.kind == "dflash" and arm.size >= model.dflash.block_size:
                continue  # more than the block holds
            phases = {phase: cost.seconds(peaks) * 1e3 for phase, cost in round_costs(model, arm, args.context).items()}
            cells = "  ".join(f"{phase} {ms:.3f}" for phase, ms in phases.items())
            print(f"{name:14} {arm!s:16} {cells}  round {sum(phases.values()):.3f} ms")


if __name__ == "__main__":
    main()
