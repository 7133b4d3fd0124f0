"""Runs the kernel lanes, each in a process of its own: a process either interprets kernels or compiles them."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LANES = [
    pytest.param("interpreter and not slow", id="interpreter"),
    pytest.param("compile and not slow", id="compile"),
    pytest.param("interpreter and slow", id="interpreter-slow", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("markers", LANES)
def test_lane(markers: str, lane_report: list[str]) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1" if markers.startswith("interpreter") else "0"}
    command = [sys.executable, "-m", "pytest", "tests", "-q", "-m", markers, "-p", "no:cacheprovider", "--color=no"]
    start = time.perf_counter()
    lane = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    tail = lane.stdout[-6000:] + lane.stderr[-2000:]
    assert lane.returncode == 0, f"lane '{markers}' exited with {lane.returncode}\n{tail}"
    passed = re.search(r"(\d+) passed", tail)
    assert passed, f"lane '{markers}' ran no test\n{tail}"
    table = re.search(r"^=+ compiled kernels.*?(?=^\d+ passed|^=+ )", lane.stdout, re.MULTILINE | re.DOTALL)
    lane_report += table[0].rstrip().splitlines() if table else []
    lane_report.append(f"lane '{markers}': {passed[1]} passed in {time.perf_counter() - start:.0f} s")
