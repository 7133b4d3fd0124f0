"""Test lanes: plain ``pytest`` runs the reference lane here and starts the other two in processes (test_lanes.py).

``pytest -m interpreter`` or ``pytest -m compile`` runs one lane in this process, ``pytest -m slow`` the full products.
Every launch of an interpreted kernel runs between guard bands (guard_bands.py).
"""

import os
import re
import sys
from collections.abc import Iterator

import pytest

LANES = ("interpreter", "compile")
compile_rows = pytest.StashKey[dict]()
lane_results = pytest.StashKey[list]()


def _asked(config: pytest.Config, marker: str) -> bool:
    """Whether the -m expression names this marker."""
    return re.search(rf"\b{marker}\b", config.option.markexpr or "") is not None


def pytest_configure(config: pytest.Config) -> None:
    config.stash[compile_rows] = {}
    config.stash[lane_results] = []
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if _asked(config, "interpreter") and not interpreted:
        if "triton" in sys.modules:
            raise pytest.UsageError("triton is imported already: set TRITON_INTERPRET=1 to run the interpreter lane")
        os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when a kernel is decorated
    elif _asked(config, "compile") and interpreted:
        raise pytest.UsageError("interpreted kernels cannot be compiled: unset TRITON_INTERPRET")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    hidden = [marker for marker in (*LANES, "slow") if not _asked(config, marker)]
    kept, dropped = [], []
    for item in items:
        (dropped if any(item.get_closest_marker(marker) for marker in hidden) else kept).append(item)
    items[:] = kept
    if dropped:
        config.hook.pytest_deselected(items=dropped)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device, none here")
        if os.environ.get("TRITON_INTERPRET") == "1":
            pytest.skip("needs compiled kernels, TRITON_INTERPRET=1 is set")


@pytest.fixture(autouse=True)
def _poison_in_kernel_lanes(request: pytest.FixtureRequest) -> None:
    if any(request.node.get_closest_marker(marker) for marker in ("interpreter", "gpu")):
        request.getfixturevalue("poisoned_empty")


@pytest.fixture(autouse=True)
def _guard_interpreted_kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    if not request.node.get_closest_marker("interpreter"):
        yield
        return
    from tests.guard_bands import guard_bands

    with guard_bands():
        yield


@pytest.fixture
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill whatever torch.empty hands out with NaN (integers: a third of their range): unwritten values show."""
    import torch

    def poisoned(allocate):
        def fill(*args, **kwargs):
            out = allocate(*args, **kwargs)
            if out.dtype is torch.bool:
                return out.fill_(True)
            if out.is_floating_point() or out.is_complex():
                return out.fill_(float("nan"))
            return out.fill_(torch.iinfo(out.dtype).max // 3)

        return fill

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))


@pytest.fixture
def lane_report(request: pytest.FixtureRequest) -> list[str]:
    """Lines to print at the end of the session."""
    return request.config.stash[lane_results]


@pytest.fixture
def compiles(request: pytest.FixtureRequest):
    """Compile a kernel for one architecture, fail on local or too much shared memory, add to the lane's table."""
    from whiflash_triton.autotune.compile_report import compile_kernel

    def check(fn, signature, constexprs, arch, *, dtype, num_warps=4, num_stages=2):
        report = compile_kernel(fn, signature, constexprs, arch, num_warps, num_stages)
        options = constexprs | {"num_warps": num_warps, "num_stages": num_stages}
        label = " ".join(f"{name}={value}" for name, value in options.items() if value is not None)
        request.config.stash[compile_rows].setdefault((fn.__name__, dtype, label), {})[arch] = report
        return report

    return check


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if rows := config.stash[compile_rows]:
        terminalreporter.section("compiled kernels: registers / stack bytes / shared bytes by architecture")
        for (kernel, dtype, label), reports in sorted(rows.items()):
            cells = (f"sm_{arch} {r.registers}/{r.stack}/{r.shared}" for arch, r in sorted(reports.items()))
            terminalreporter.write_line(f"{kernel} {dtype}  {'  '.join(cells)}  {label}")
    for line in config.stash[lane_results]:
        terminalreporter.write_line(line)
