"""`pytest benchmarks/`: kernels against what PyTorch offers. Without a CUDA device the references are timed on small sizes, and the
rest is skipped by name."""

from __future__ import annotations

import time
from collections import Counter

import pytest
import torch

from benchmarks.harness import PEAKS, ROWS, Bench


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rows", default=None, help="append every result to this file, one JSON object a line")
    parser.addoption("--seconds", type=float, default=None, help="skip what has not begun after this many seconds")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[ROWS] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One item of every kernel in turn, so that a run cut short has seen them all."""
    seen: Counter = Counter()
    turns = []
    for item in items:
        turns.append(seen[item.path])
        seen[item.path] += 1
    items[:] = [item for _, item in sorted(zip(turns, items, strict=True), key=lambda pair: pair[0])]


BEGIN = time.monotonic()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, none here")
    seconds = item.config.getoption("--seconds")
    if seconds is not None and time.monotonic() - BEGIN > seconds:
        pytest.skip(f"the {seconds:g} seconds that --seconds gave are over")


@pytest.fixture
def bench(benchmark, request: pytest.FixtureRequest) -> Bench:
    return Bench(benchmark, request.config)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rows = config.stash[ROWS]
    if PEAKS in config.stash:
        peaks = config.stash[PEAKS]
        terminalreporter.section("kernels against the floor")
        rates = f"copy {peaks.bandwidth / 1e9:.0f} GB/s, bf16 product {peaks.matmul / 1e12:.0f} TFLOP/s"
        terminalreporter.write_line(f"measured: {rates}, launch {peaks.launch * 1e6:.2f} us")
        for row in (row for row in rows if "gb_per_s" in row):
            name = f"{row['kernel']} {row['case']} {row['side']}{'' if row['cold'] else ' (in L2)'}"
            rates = f"{row['gb_per_s']:9.1f} GB/s {row['tflop_per_s']:9.3f} TFLOP/s {row['share_of_floor']:6.2f} of floor"
            terminalreporter.write_line(f"{row['us']:10.2f} us {rates}  {name}")
    elif rows:
        terminalreporter.write_line("no CUDA device: times of the PyTorch references on this CPU, no bandwidth is reported")
