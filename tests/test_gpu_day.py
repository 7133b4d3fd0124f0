"""The script for a day with a GPU, without one: what becomes of steps that fail, hang or end early, and what it measures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
import torch

from benchmarks import day_report, day_steps, end_to_end, gpu_day, rounds, timing
from benchmarks.roofline import Peaks
from benchmarks.shapes import REHEARSAL
from whiflash_triton.arms import parse_arm
from whiflash_triton.stats import PHASES


def step(name: str, code: str, share: float = 1.0, result: dict | None = None) -> gpu_day.Step:
    """result: what the step has saved by the time it starts."""

    def command(seconds: float, file: Path) -> list[str]:
        if result is not None:
            file.write_text(json.dumps(result))
        return [sys.executable, "-c", code]

    return gpu_day.Step(name, share, command)


def test_steps_fail_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_day, "START", 0.0)
    steps = [
        step("broken", "print('begun'); raise ValueError('of all things')", 100, {"half": 1}),
        step("hangs", "import time; time.sleep(600)", 0.01, {"seen": [2]}),
        step("good", "print('fine')", 100, {"all": 3}),
    ]
    assert gpu_day.run(steps, tmp_path, 2, {"rehearsal": True}) == 1
    results = json.loads((tmp_path / "results.json").read_text())
    broken, hangs, good = results["steps"]
    assert [s["status"] for s in results["steps"]] == ["failed", "timed out", "ok"]
    assert [s["data"] for s in results["steps"]] == [{"half": 1}, {"seen": [2]}, {"all": 3}]
    assert "Traceback" in broken["error"] and "ValueError: of all things" in broken["error"] and "error" not in good
    assert hangs["seconds"] < 60
    report, log = (tmp_path / "report.md").read_text(), (tmp_path / "log.txt").read_text()
    assert "ValueError: of all things" in report and "| hangs | timed out |" in report
    assert log.index("begun") < log.index("===== hangs") < log.index("fine")
    assert gpu_day.run(steps[2:], tmp_path, 1, {"rehearsal": True}) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log.txt", "report.md", "results.json"]


def members(session: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            found += [int(entry.name)] if entry.name.isdigit() and os.getsid(int(entry.name)) == session else []
        except ProcessLookupError:
            continue
    return found


def test_nothing_of_a_step_outlives_it():
    process = subprocess.Popen(["timeout", "300", "sleep", "300"], start_new_session=True)  # timeout makes a group of its own
    while len(members(process.pid)) < 2:
        time.sleep(0.02)
    gpu_day.kill_session(process.pid)
    assert process.wait(timeout=30) == -9
    while members(process.pid):
        time.sleep(0.02)


def test_boxes():
    shares = [0.4, 2.4, 1.6]
    left = 300.0
    for i in range(3):  # whoever uses all of a box leaves the others theirs
        box = gpu_day.box_of(left, shares[i:])
        assert box == pytest.approx(gpu_day.START + (300 - 3 * gpu_day.START) * shares[i] / sum(shares))
        left -= box
    assert left == pytest.approx(0)
    assert gpu_day.box_of(300, shares[1:]) > gpu_day.box_of(200, shares[1:])
    assert gpu_day.box_of(9, [1.0, 5.0, 3.0]) == 3 and gpu_day.box_of(-20, [1.0]) == 1


def test_arguments(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for argv, text in (
        ([], "no CUDA device"),
        (["--steps", "tiny,tinier", "--cpu-rehearsal"], "unknown steps tinier"),
        (["--steps", "smollm2", "--cpu-rehearsal"], "needs --smollm2 DIR"),
    ):
        with pytest.raises(SystemExit) as stop:
            gpu_day.main([*argv, "--out", str(tmp_path)])
        assert stop.value.code == 2 and text in capsys.readouterr().err
    assert set(gpu_day.SHARES) == set(day_steps.STEPS)


@pytest.fixture
def day(tmp_path) -> day_steps.Day:
    return day_steps.Day(60, tmp_path / "result.json", tmp_path, True, None)


LINES = [
    "tests/test_a.py::test_one[bf16-3] PASSED                          [  5%]",
    "tests/test_a.py::test_two SKIPPED (needs a CUDA device, none here) [ 10%]",
    "[gw2] [ 15%] FAILED tests/test_b.py::test_three[a b] ",
    "tests/test_b.py::test_three[a b] ",
    "[gw0] [ 20%] PASSED tests/test_b.py::test_four",
    "tests/test_c.py::test_five ERROR   [100%]",
    "FAILED tests/test_b.py::test_three[a b] - AssertionError: 100%] of it",
]


@pytest.mark.parametrize("code, lines", [(1, LINES), (0, LINES[:2]), (None, LINES[:1])])
def test_correctness_is_counted(day, monkeypatch, code, lines):
    def pytest_run(day, arguments, each_line):
        assert arguments[arguments.index("-m") + 1] == "gpu"
        for line in lines:
            each_line(line)
        return code

    monkeypatch.setattr(day_steps, "pytest", pytest_run)
    if code == 1:
        with pytest.raises(RuntimeError, match="2 tests failed"):
            day_steps.correctness(day)
    else:
        day_steps.correctness(day)
    data = json.loads(day.result.read_text())
    assert data["finished"] is (code is not None)
    if code == 1:
        assert data["counts"] == {"passed": 2, "skipped": 1, "failed": 1, "error": 1}
        assert data["failed"] == ["tests/test_b.py::test_three[a b]", "tests/test_c.py::test_five"]


def test_watched_commands():
    lines: list[str] = []
    code = "import os; print('one'); print(os.environ['X']); raise SystemExit(3)"
    assert day_steps.watched([sys.executable, "-c", code], 60, lines.append, X="two") == 3
    assert lines == ["one", "two"]
    assert day_steps.watched(["sleep", "60"], 0.1, lines.append) is None


def test_model_in_pieces(tmp_path):
    model, pieces, work = (tmp_path / name for name in ("model", "pieces", "work"))
    for folder in (model, pieces, work):
        folder.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(os.urandom(100_000))
    assert end_to_end.assemble(model, work) == model
    with tarfile.open(tmp_path / "all", "w:xz") as archive:
        archive.add(model, arcname="inner")
    content = (tmp_path / "all").read_bytes()
    for i, name in enumerate(("part-aa", "part-ab", "part-ac")):
        (pieces / name).write_bytes(content[i * 40_000 : (i + 1) * 40_000])
    found = end_to_end.assemble(pieces, work)
    assert (found / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    with pytest.raises(FileNotFoundError, match="neither config.json nor part-"):
        end_to_end.assemble(work, work)
    (pieces / "part-ab").unlink()
    with pytest.raises(ValueError, match="a piece is missing or damaged"):
        end_to_end.assemble(pieces, work)


def test_a_replay_counts_as_all_its_launches(monkeypatch):
    class Graph:
        replays = 0

        def __init__(self, calls):
            self.calls = len(calls)

        def replay(self):
            Graph.replays += 1

    waits = []
    monkeypatch.setattr(timing, "_capture", Graph)
    monkeypatch.setattr(timing, "_elapsed", lambda graph: graph.calls * 1e-5)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(Graph.replays))
    replay = timing.Replay([lambda: None] * 7)
    assert replay.launches == replay.graph.calls == 7 * round(timing.GRAPH_SECONDS / 7e-5)
    for _ in range(3 * replay.launches):
        replay()
    assert Graph.replays == 3 and waits == [1, 2, 3]
    assert timing.Replay([lambda: None] * 300).launches == 300  # long enough as it is


def test_rounds_on_random_weights():
    saved: list[dict] = []
    arms = tuple(map(parse_arm, ("ar", "dflash:3", "eagle3:2")))

    def left() -> float:
        return 0.0 if saved and len(saved[-1]["rounds"]) == 9 else 100.0  # three arms in three modes

    peaks = Peaks(1e9, 1e10)
    setup = rounds.Setup("toy", REHEARSAL, torch.device("cpu"), torch.float32, (20, 40), arms, peaks, left, saved.append)
    tables = rounds.measure(setup)
    assert [row["arm"] for row in tables["rounds"]] == 3 * ["ar", "dflash:3", "eagle3:2"] and tables["not_reached"] == ["40"]
    assert [row["mode"] for row in tables["rounds"]] == [mode for mode in rounds.MODES for _ in arms]
    for row in tables["rounds"]:
        assert set(row["phases"]) == set(PHASES) and row["rounds"] == rounds.MEASURED and row["committed"] >= 1
        assert row["floor_ms"] == pytest.approx(sum(row["floor_phases"].values()), abs=1e-3)
        assert row["times_floor"] == pytest.approx(row["ms"] / row["floor_ms"], rel=0.01)
    assert [row["mode"] for row in tables["switches"]] == 3 * ["eager"] + 3 * ["graphs"]
    caught = {row["to"]: row["caught_up"] for row in tables["switches"][:3]}
    assert caught["ar"] == 0 and caught["dflash:3"] > rounds.MEASURED and caught["eagle3:2"] > rounds.MEASURED
    assert all(row["arms"] in (["dflash:3"], ["eagle3:2"], ["dflash:3", "eagle3:2"]) for row in tables["routed"])
    assert [row["graphs"] for row in tables["captures"]] == [0, 0]  # a CPU runs the same rounds without
    assert tables["profile"][-2]["us"] > 0 and saved and saved[-1] is tables
    record = {"name": "rounds-4b", "status": "ok", "seconds": 1.0, "box": 2.0, "data": tables}
    report = day_report.markdown({"rehearsal": False, "started": "now", "minutes": 9, "steps": [record]})
    assert (
        report.count("| eager | 20 |") == 3 + 3 + 1 + 1
        and report.count("| graphs | 20 |") == 3 + 3 + 1 + 1
        and "in time: context 40." in report
    )


def test_kernel_rows_in_the_report():
    common = {"kernel": "tree_walk", "case": "cuda-any-tree16", "device": "cuda"}
    ours = common | {"side": "whiflash", "us": 2.0, "gb_per_s": 0.4, "tflop_per_s": 0.0, "share_of_floor": 0.75, "cold": False}
    rows = [ours, common | {"side": "torch", "us": 30.0}, common | {"case": "cuda-any-tree8", "side": "torch", "us": 9.0}]
    record = {"name": "kernels", "status": "ok", "seconds": 1.0, "box": 2.0, "data": {"rows": rows}}
    report = day_report.markdown({"rehearsal": False, "started": "now", "minutes": 9, "steps": [record]})
    assert "| tree_walk | cuda-any-tree16 | 2.0 | 0.4 | 0.0 | 0.75 | L2 | torch 30 (15.00x) |" in report
    assert "| tree_walk | cuda-any-tree8 |  |  |  |  |  |  |" in report


@pytest.mark.slow
def test_rehearsal(tmp_path):
    command = [sys.executable, "benchmarks/gpu_day.py", "--cpu-rehearsal", "--minutes", "30", "--out", str(tmp_path)]
    result = subprocess.run(command, cwd=gpu_day.ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + (tmp_path / "report.md").read_text()
    results = json.loads((tmp_path / "results.json").read_text())
    data = {s["name"]: s["data"] for s in results["steps"]}
    assert list(data) == [name for name in gpu_day.SHARES if name != "smollm2"]
    assert {row["kernel"] for row in data["kernels"]["rows"]} >= {"tree_attention", "block_sampling", "kv_compaction", "tree_walk"}
    assert data["correctness"]["counts"].keys() == {"skipped"} and data["rounds-4b"]["rounds"] and data["tiny"]["float32"]
