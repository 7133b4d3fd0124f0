"""The configurations that tuning tries of every kernel, and what a configuration makes of a case: the cost model's input."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from whiflash_triton.autotune.cases import KEPT, ROUTER_WIDTH, Case
from whiflash_triton.autotune.launches import OPTIONS

ITEM = {"bf16": 2, "fp16": 2, "fp32": 4}
REDUCTION = 5 * 25  # cycles of five shuffles
EXCHANGE = 100  # cycles of a trip through shared memory, where a reduction crosses warps


class Work(NamedTuple):
    """What one configuration does for one case."""

    programs: int
    traffic: float  # bytes from and to memory
    in_flight: float  # bytes that one program has asked for and still waits for
    flops: float  # on tensor cores, padding included
    steps: int  # of one program, each of which needs the one before
    latency: float  # cycles that a step takes at least
    issued: float  # instructions that a program issues in a step, all its warps together


def configurations(kernel: str, key: dict[str, int | str]) -> list[dict[str, Any]]:
    """Every configuration of one bucket, in no particular order."""
    axes = _AXES[kernel](key)
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def work(case: Case, config: dict[str, Any]) -> Work:
    return _WORK[case.kernel](case, config, config.get("num_warps", OPTIONS["num_warps"]), **case.sizes)


def _pick(values: tuple[int, ...], low: float = 0, high: float = math.inf) -> Iterator[int]:
    return (value for value in values if low <= value <= high)


def _tree_attention_axes(key: dict[str, int | str]) -> dict[str, Iterator[int] | tuple[int, ...]]:
    """More than 16 tiles of rows would read the cache too often; dots in float32 spill in tiles of more than 16 rows."""
    half = key["dtype"] != "fp32"
    return {
        "BLOCK_M": _pick((16, 32, 64, 128), key["M"] / 16, key["M"]),
        "BLOCK_N": (32, 64, 128) if half else (16, 32),
        "num_warps": (4, 8),
        "num_stages": (2, 3, 4) if half else (2, 3),
    }


_AXES = {
    "tree_attention": _tree_attention_axes,
    "block_sampling": lambda key: {
        "BLOCK": (1024, 2048, 4096, 8192) if key["k"] == 1 else (1024, 2048, 4096),
        "num_warps": (4, 8, 16),
        "MERGE_WARPS": (1, 2, 4) if key["k"] == 1 else (4, 8) if key["k"] <= 8 else (8, 16),
    },
    "kv_compaction": lambda key: {
        "BLOCK_R": tuple(elements // key["D"] for elements in (512, 1024, 2048, 4096)),
        "BLOCK_H": (512, 1024, 2048),
        "num_warps": (2, 4, 8),
    },
    "kv_injection": lambda key: {"BLOCK_R": (1, 2, 4, 8, 16), "num_warps": (1, 2, 4)},
    "router_scoring": lambda key: {
        "BLOCK_M": (1, 2, 4, 8),
        "BLOCK_H": _pick((256, 512, 1024), high=key["H"]),
        "num_warps": (2, 4, 8),
        "num_stages": (2, 3, 4),
    },
    "tree_walk": lambda key: {"num_warps": _pick((1, 2, 4, 8, 16), high=max(1, key["N"] // 32))},
    "tree_build": lambda key: {"num_warps": _pick((1, 2, 4, 8, 16), high=max(1, key["N"] // 32))},
}


def _reduction(warps: int) -> float:
    return REDUCTION + (EXCHANGE if warps > 1 else 0)


def _tree_attention(case: Case, config: dict[str, Any], warps: int, nodes: int, rows: int) -> Work:
    """A step is a tile of keys: two products and a softmax. Tiles of rows after the first find the cache in L2, which counts
    a third; partial results are written in fp32 and read once. Dots in float32 are plain multiplications and additions."""
    from whiflash_triton.kernels.tree_attention import split_count

    m, item = case.model, ITEM[case.dtype]
    block_m, block_n, dim = config["BLOCK_M"], config["BLOCK_N"], case.model.head_dim
    keys = rows * 3 // 4
    tiles = -(-nodes * m.heads // m.kv_heads // block_m)
    splits = split_count(tiles * m.kv_heads, rows)
    cache = keys * m.kv_heads * dim * 2 * item
    partials = (splits + 1) * nodes * m.heads * dim * 4 * 2
    scores, outputs = block_m * block_n / 32, block_m * dim / 32
    products = 2 * scores * dim if case.dtype == "fp32" else 0
    return Work(
        programs=tiles * m.kv_heads * (splits + 1),
        traffic=cache * (1 + (tiles - 1) / 3) + partials,
        in_flight=(config["num_stages"] - 1) * block_n * dim * 2 * item,
        flops=0 if products else 4 * tiles * block_m * keys * m.kv_heads * dim,
        steps=math.ceil(keys / splits / block_n),
        latency=2 * _reduction(warps) + 16 * (dim + block_n) / 16,
        issued=products + 10 * scores + 3 * outputs + 4 * block_n * dim * item / 512,
    )


def _block_sampling(case: Case, config: dict[str, Any], warps: int, rows: int, top_k: int, drawn: int) -> Work:
    """A split is one step: the exponentials, four reductions, the noise of drawn tokens, and the sorting network of runs of k."""
    from whiflash_triton.kernels.block_sampling import MAX_SPLITS

    vocab = case.model.draft_vocab if top_k == 4 else case.model.vocab
    block = max(config["BLOCK"], 2 ** (math.ceil(vocab / MAX_SPLITS) - 1).bit_length())
    levels = max(top_k - 1, 0).bit_length()
    exchanges = levels * (levels + 1) / 2 + 2 * levels  # of the sort, and of the merges, which halve their work every time
    splits = math.ceil(vocab / block)
    return Work(
        programs=splits * rows,
        traffic=rows * (vocab * ITEM[case.dtype] + splits * (16 * max(top_k, 1) + 16)),
        in_flight=block * ITEM[case.dtype],
        flops=0,
        steps=1,
        latency=4 * _reduction(warps) + exchanges * 40,
        issued=block / 32 * (25 + 60 * drawn + 12 * exchanges),
    )


def _kv_compaction(case: Case, config: dict[str, Any], warps: int, nodes: int) -> Work:
    m, item = case.model, ITEM[case.dtype]
    kv_rows = m.layers * 2 * m.kv_heads
    tiles = math.ceil(kv_rows / config["BLOCK_R"]) + m.features * math.ceil(m.hidden / config["BLOCK_H"])
    moved = KEPT * (kv_rows * m.head_dim + m.features * m.hidden) * item
    return Work(
        programs=tiles * (nodes + 1),
        traffic=2 * moved,
        in_flight=moved / (tiles * (nodes + 1)),  # programs past the accepted rows end at once
        flops=0,
        steps=3,  # length, path entry and start, rows: each load needs the one before
        latency=600,
        issued=40 * warps + config["BLOCK_R"] * m.head_dim / 32,
    )


def _kv_injection(case: Case, config: dict[str, Any], warps: int, rows: int) -> Work:
    m, item = case.model, ITEM[case.dtype]
    tiles = math.ceil(m.draft_layers * m.kv_heads / config["BLOCK_R"])
    moved = rows * m.draft_layers * 2 * m.kv_heads * m.head_dim * item
    return Work(
        programs=tiles * rows,
        traffic=2 * moved + 8 * rows * m.head_dim,  # the tables of the rotation are fp32
        in_flight=config["BLOCK_R"] * m.head_dim * item,
        flops=0,
        steps=2,  # start, rows
        latency=600 + 2 * REDUCTION,
        issued=60 * warps + config["BLOCK_R"] * m.head_dim / 32 * 20,
    )


def _router_scoring(case: Case, config: dict[str, Any], warps: int) -> Work:
    block_m, block_h, hidden = config["BLOCK_M"], config["BLOCK_H"], case.model.hidden
    tile = block_m * block_h * ITEM[case.dtype]
    return Work(
        programs=math.ceil(ROUTER_WIDTH / block_m),
        traffic=ROUTER_WIDTH * hidden * ITEM[case.dtype],
        in_flight=(config["num_stages"] - 1) * tile,
        flops=0,
        steps=math.ceil(hidden / block_h),
        latency=600 / (config["num_stages"] - 1),
        issued=20 * warps + block_m * block_h / 32 * 4,
    )


def _one_program(steps: int, reductions: int, nodes: int, warps: int, instructions: int) -> Work:
    """A tree held in the registers of one program."""
    issued = instructions * max(1, (nodes + 1) / 32 / warps) * warps
    return Work(1, 40 * nodes, 40 * nodes, 0, steps, reductions * _reduction(warps), issued)


def _tree_walk(case: Case, config: dict[str, Any], warps: int, nodes: int) -> Work:
    return _one_program(nodes.bit_length(), 1, nodes, warps, 6)


def _tree_build(case: Case, config: dict[str, Any], warps: int, nodes: int) -> Work:
    return _one_program(nodes, 4, nodes, warps, 30)


_WORK = {
    "tree_attention": _tree_attention,
    "block_sampling": _block_sampling,
    "kv_compaction": _kv_compaction,
    "kv_injection": _kv_injection,
    "router_scoring": _router_scoring,
    "tree_walk": _tree_walk,
    "tree_build": _tree_build,
}
