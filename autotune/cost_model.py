"""How long a configuration should take, from what it does and what it compiles to. It orders the search and, where nothing
is measured, chooses defaults; it is no measurement.

An SM holds as many programs as its registers, shared memory and warp slots allow. The programs run in waves. Time is

    launch + the largest of memory, arithmetic and chain + a fifth of the other two, which do not overlap wholly

- memory: bytes over bandwidth; the bandwidth is what the requested bytes of all resident programs sustain over the latency
  of memory (Little's law), never more than the device's.
- arithmetic: tensor-core operations, padding of tiles included, over the device's rate, less where SMs stay idle.
- chain: waves * steps * (latency of a step + instructions that the SM's four schedulers share among its programs).

Spills and occupancy that cannot hide anything are not priced but pruned: see `verdict`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from whiflash_triton.autotune.cases import Case
from whiflash_triton.autotune.compile_report import SHARED_LIMIT, CompileReport
from whiflash_triton.autotune.launches import OPTIONS
from whiflash_triton.autotune.spaces import work

REGISTERS, WARPS, PROGRAMS, SCHEDULERS = 65536, 64, 32, 4  # of an SM
RESERVED = 1024  # bytes of shared memory that a program takes beside its own
MIN_WARPS = 4  # resident on an SM: fewer leave schedulers without work
LAUNCH, MEMORY_LATENCY = 2.5e-6, 0.8e-6  # seconds


class Machine(NamedTuple):
    """Rates of one architecture: bytes, operations and cycles a second."""

    name: str
    sms: int
    bandwidth: float
    tensor_rate: float
    clock: float


MACHINES = {
    80: Machine("A100 80GB", 108, 1.8e12, 312e12, 1.41e9),
    90: Machine("H200", 132, 4.3e12, 600e12, 1.8e9),  # the rate of mma, not of wgmma: tiles of draft rows are small
    100: Machine("B200", 148, 7.2e12, 1100e12, 1.85e9),
}
assert MACHINES.keys() == SHARED_LIMIT.keys()


def resident(report: CompileReport, num_warps: int) -> int:
    """Programs that one SM holds at a time."""
    warp_registers = math.ceil(report.registers * 32 / 256) * 256  # allocated in units of 256
    by_registers = REGISTERS // warp_registers // num_warps
    by_shared = (SHARED_LIMIT[report.arch] + RESERVED) // (report.shared + RESERVED)
    return min(by_registers, by_shared, WARPS // num_warps, PROGRAMS)


def verdict(report: CompileReport, num_warps: int) -> str:
    """Why a compiled kernel is not worth timing, or "" where it is."""
    if report.spills or report.stack:
        return f"local memory: {report.stack} bytes of stack, {report.spills} of spills"
    if report.shared > SHARED_LIMIT[report.arch]:
        return f"shared memory {report.shared} of {SHARED_LIMIT[report.arch]} bytes"
    warps = resident(report, num_warps) * num_warps
    if warps < MIN_WARPS:
        return f"occupancy: {report.registers} registers and {report.shared} bytes leave an SM {warps} warps"
    return ""


def predicted(case: Case, config: dict[str, Any], report: CompileReport) -> float:
    """Microseconds of one call."""
    w, machine = work(case, config), MACHINES[report.arch]
    held = max(1, resident(report, config.get("num_warps", OPTIONS["num_warps"])))
    busy = min(w.programs, machine.sms)
    each = min(held, math.ceil(w.programs / machine.sms))  # programs side by side on an SM
    waves = math.ceil(w.programs / (machine.sms * held))
    bandwidth = min(machine.bandwidth, busy * each * w.in_flight / MEMORY_LATENCY)
    arithmetic = w.flops / (machine.tensor_rate * busy / machine.sms)
    chain = waves * w.steps * (w.latency + w.issued * each / SCHEDULERS) / machine.clock
    parts = (w.traffic / bandwidth, arithmetic, chain)
    return 1e6 * (LAUNCH + 0.8 * max(parts) + 0.2 * sum(parts))


def score(cases: list[Case], config: dict[str, Any], report: CompileReport) -> float:
    """Geometric mean over a bucket's cases, in microseconds."""
    return math.exp(sum(math.log(predicted(case, config, report)) for case in cases) / len(cases))


def assumed(arch: int) -> CompileReport:
    """What to reckon with before anything is compiled: four programs of four warps on an SM."""
    return CompileReport(arch, registers=128, stack=0, spills=0, shared=0)
