"""Everything worth knowing about a GPU in a few minutes: `python benchmarks/gpu_day.py --minutes 9`.

Every step runs in a process of its own, within its share of the time, and may fail alone. After each, and while one runs, DIR holds
results.json, report.md and log.txt; a run cut off keeps what it has. Exit code 1 if a step failed or had to be killed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # `python benchmarks/gpu_day.py` finds only its own folder

from benchmarks.day_report import markdown  # noqa: E402

# (step, share of the time), what tells most first. What a step leaves of its time goes to those after it.
SHARES = {
    "environment": 0.4,
    "correctness": 2.0,
    "rounds-4b": 2.4,
    "kernels": 1.7,
    "tiny": 0.5,
    "smollm2": 0.7,
    "tune": 1.4,
    "rounds-8b": 1.2,
    "sanitizer": 0.7,
}
START = 15.0  # seconds that a step gets beside its share: the interpreter, PyTorch and the driver have to start
TAIL = 60  # lines of a failed step's output that the report keeps


@dataclass(frozen=True)
class Step:
    """command: (seconds it has, file for its results) -> what to run."""

    name: str
    share: float
    command: Callable[[float, Path], list[str]]


def run(steps: list[Step], out: Path, minutes: float, about: dict) -> int:
    """All steps, one after the other. Returns 0, or 1 if one failed."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "log.txt").write_text("")
    end = time.monotonic() + 60 * minutes
    results: dict = about | {"minutes": minutes, "started": time.strftime("%Y-%m-%d %H:%M:%S"), "steps": []}
    with tempfile.TemporaryDirectory() as work:
        for i, step in enumerate(steps):
            box = box_of(end - time.monotonic(), [later.share for later in steps[i:]])
            record = {"name": step.name, "status": "running", "seconds": 0.0, "box": round(box, 1), "data": {}}
            results["steps"].append(record)
            print(f"{step.name}: at most {box:.0f} s", flush=True)
            supervise(step, record, Path(work), out / "log.txt", lambda: write(results, out))
            write(results, out)
            print(f"{step.name}: {record['status']} after {record['seconds']:.0f} s", flush=True)
    bad = [record["name"] for record in results["steps"] if record["status"] != "ok"]
    print(f"{out / 'report.md'}" + (f"; not ok: {', '.join(bad)}" if bad else ""))
    return 1 if bad else 0


def box_of(left: float, shares: list[float]) -> float:
    """Seconds of `left` for the first of the steps that share it."""
    start = min(START, left / len(shares))
    return max(1.0, start + (left - start * len(shares)) * shares[0] / sum(shares))


def supervise(step: Step, record: dict, work: Path, log: Path, save: Callable[[], None]) -> None:
    """Run one step, kill it and what it started when its time is over; fills the record, saving whatever the step has saved."""
    result, output = work / f"{step.name}.json", work / f"{step.name}.log"
    begin = time.monotonic()
    stamp = None
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
    with output.open("w") as sink:
        process = subprocess.Popen(
            step.command(0.9 * record["box"], result),
            cwd=ROOT,
            env=environment | {"PYTHONUNBUFFERED": "1"},
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while process.poll() is None and time.monotonic() - begin < record["box"]:
                time.sleep(0.2)
                stamp = take(result, stamp, record, save)
            record["status"] = {None: "timed out", 0: "ok"}.get(process.poll(), "failed")
        finally:
            kill_session(process.pid)
            process.wait()
    take(result, stamp, record, save)
    record["seconds"] = round(time.monotonic() - begin, 1)
    text = output.read_text(errors="replace")
    with log.open("a") as all_output:
        all_output.write(f"===== {step.name}: {record['status']}, {record['seconds']} s\n{text}\n")
    if record["status"] != "ok":
        record["error"] = "\n".join(text.splitlines()[-TAIL:])


def kill_session(leader: int) -> None:
    """End what is left of a session that `leader` began, whatever process groups it made."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(ProcessLookupError):
            if entry.name.isdigit() and os.getsid(int(entry.name)) == leader:
                os.kill(int(entry.name), signal.SIGKILL)


def take(result: Path, stamp: float | None, record: dict, save: Callable[[], None]) -> float | None:
    """Copy the step's results into the record if they changed since `stamp`; the new stamp."""
    if not result.exists() or (now := result.stat().st_mtime_ns) == stamp:
        return stamp
    record["data"] = json.loads(result.read_text())
    save()
    return now


def write(results: dict, out: Path) -> None:
    for name, text in (("results.json", json.dumps(results, indent=1) + "\n"), ("report.md", markdown(results))):
        partial = out / f".{name}"
        partial.write_text(text)
        os.replace(partial, out / name)


def step_of(name: str, args: argparse.Namespace) -> Step:
    def command(seconds: float, result: Path) -> list[str]:
        options = ["--seconds", f"{seconds:.1f}", "--result", str(result), "--out", str(args.out.resolve())]
        options += ["--cpu-rehearsal"] if args.cpu_rehearsal else []
        options += ["--smollm2", str(args.smollm2.resolve())] if args.smollm2 else []
        return [sys.executable, "-m", "benchmarks.day_steps", name, *options]

    return Step(name, SHARES[name], command)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=9.0, help="for all steps together")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_day"), help="where results.json, report.md and log.txt go")
    parser.add_argument("--steps", help=f"comma-separated, in this order, instead of all: {','.join(SHARES)}")
    parser.add_argument(
        "--smollm2", type=Path, help="folder of the converted SmolLM2-135M, or of the pieces part-* of its tar archive"
    )
    parser.add_argument("--cpu-rehearsal", action="store_true", help="on a machine without CUDA: the same steps at tiny sizes")
    args = parser.parse_args(argv)
    names = args.steps.split(",") if args.steps else [name for name in SHARES if name != "smollm2" or args.smollm2]
    if unknown := set(names) - set(SHARES):
        parser.error(f"unknown steps {', '.join(sorted(unknown))}: choose from {', '.join(SHARES)}")
    if "smollm2" in names and not args.smollm2:
        parser.error("the step smollm2 needs --smollm2 DIR: nothing is downloaded")
    if not args.cpu_rehearsal:
        import torch

        if not torch.cuda.is_available():
            parser.error("no CUDA device: run this where there is one, or try the script itself with --cpu-rehearsal")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a step is not left behind
    return run([step_of(name, args) for name in names], args.out, args.minutes, {"rehearsal": args.cpu_rehearsal})


if __name__ == "__main__":
    sys.exit(main())
