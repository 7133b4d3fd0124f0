"""The steps of gpu_day.py; each runs as `python -m benchmarks.day_steps NAME` in a process of its own.

A step saves what it has as soon as it has it, and raises where something is wrong: the parent keeps both.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SMALL = ("tests/test_ops.py", "tests/test_router_scoring.py")  # what a rehearsal collects of the correctness tests


class Day:
    """What a step is given: its time, where its results go, whether this is a rehearsal."""

    def __init__(self, seconds: float, result: Path, out: Path, rehearsal: bool, smollm2: Path | None):
        self.end, self.result, self.out = time.monotonic() + seconds, result, out
        self.rehearsal, self.smollm2 = rehearsal, smollm2
        self.device = "cpu" if rehearsal else "cuda"
        self.data: dict = {}

    def left(self) -> float:
        return self.end - time.monotonic()

    def save(self, **data) -> None:
        self.data |= data
        partial = self.result.with_suffix(".partial")
        partial.write_text(json.dumps(self.data))
        os.replace(partial, self.result)


def environment(day: Day) -> None:
    from importlib.metadata import distributions

    import torch

    from benchmarks.roofline import DATASHEET, measured_peaks
    from whiflash_triton.autotune.lookup import device_name
    from whiflash_triton.machine import describe_machine

    wanted = ("flashinfer-python", "gguf", "numpy", "pytest", "pytest-benchmark", "pytest-xdist")
    packages = {d.name: d.version for d in distributions() if d.name in wanted}
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    day.save(
        machine=describe_machine(), packages=packages, commit=commit or None, kernel=platform.release(), cuda=torch.version.cuda
    )
    if day.device == "cuda":
        p = torch.cuda.get_device_properties(0)
        gpu = {"name": p.name, "memory_gib": round(p.total_memory / 2**30, 1), "multiprocessors": p.multi_processor_count}
        gpu |= {"l2_mib": p.L2_cache_size >> 20, "capability": f"{p.major}.{p.minor}", "folder": device_name(0)}
        query = "driver_version,clocks.sm,clocks.mem,power.draw,temperature.gpu,utilization.gpu"
        if shutil.which("nvidia-smi"):
            smi = subprocess.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True, text=True)
            gpu |= dict(zip(query.split(","), smi.stdout.strip().split(", "), strict=False))
        day.save(gpu=gpu)
    peaks = measured_peaks(day.device)
    measured = {
        "copy_gb_per_s": round(peaks.bandwidth / 1e9, 1),
        "matmul_tflop_per_s": round(peaks.matmul / 1e12, 3),
        "launch_us": round(peaks.launch * 1e6, 3),
    }
    day.save(measured=measured)
    if day.device == "cuda" and device_name(0) in DATASHEET:
        sheet = DATASHEET[device_name(0)]
        day.save(share_of_datasheet={"copy": peaks.bandwidth / sheet.bandwidth, "matmul": peaks.matmul / sheet.matmul})


def correctness(day: Day) -> None:
    """`pytest -m gpu`, counted line by line, so that a run cut off tells how far it came."""
    files = [str(p.relative_to(ROOT)) for p in sorted(ROOT.glob("tests/test_*.py")) if "mark.gpu" in p.read_text()]
    workers = ["-n", "4"] if importlib.util.find_spec("xdist") else []
    command = [*(SMALL if day.rehearsal else files), "-m", "gpu", "-v", "-p", "no:cacheprovider", "--color=no", *workers]
    counts: Counter = Counter()
    failed: list[str] = []

    def count(line: str) -> None:
        found = re.search(r"\b(PASSED|FAILED|ERROR|SKIPPED)\b", line)
        test = re.search(r"tests/\S+::\S.*?(?= (?:PASSED|FAILED|ERROR|SKIPPED|<-)|\s*$)", line)
        if found and test and re.search(r"\[ *\d+%\]", line):  # the summary at the end repeats failures without it
            counts[found[1].lower()] += 1
            if found[1] in ("FAILED", "ERROR"):
                failed.append(test[0])
            day.save(counts=dict(counts), failed=failed)

    code = pytest(day, command, count)
    day.save(finished=code is not None)
    if code not in (0, None):
        raise RuntimeError(f"pytest -m gpu exited with {code}: {len(failed)} tests failed")


def kernels(day: Day) -> None:
    rows: list[dict] = []
    with tempfile.TemporaryDirectory() as work:
        file = Path(work) / "rows.jsonl"

        def collect(line: str) -> None:
            if file.exists():
                rows[:] = map(json.loads, file.read_text().splitlines())
                day.save(rows=rows)

        command = ["benchmarks/", "-v", "--rows", str(file), "--seconds", f"{max(1.0, day.left() - 15):.0f}"]
        code = pytest(day, [*command, "-k", "cpu-small" if day.rehearsal else "cuda"], collect)
        collect("")
    if code not in (0, None):
        raise RuntimeError(f"the kernel suites exited with {code}")


def pytest(day: Day, arguments: list[str], each_line: Callable[[str], None]) -> int | None:
    """Exit code, or None where the time was over first."""
    return watched([sys.executable, "-m", "pytest", *arguments], day.left(), each_line)


def watched(command: list[str], seconds: float, each_line: Callable[[str], None], **environment: str) -> int | None:
    """Run a command, its output passed on line by line; None where it had to be stopped."""
    process = subprocess.Popen(
        ["timeout", "--kill-after=2", f"{max(seconds, 1):.1f}", *command],
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    for line in process.stdout:
        print(line, end="", flush=True)
        each_line(line.rstrip("\n"))
    code = process.wait()
    return None if code in (124, 137) else code


def tune(day: Day) -> None:
    """The tuner, within the time; what it wrote for this device comes back as one archive."""
    command = [sys.executable, "-m", "whiflash_triton.autotune.generate"]
    command += ["--dry-run"] if day.rehearsal else ["--minutes", f"{max(0.2, (day.left() - 10) / 60):.2f}"]
    lines: list[str] = []
    code = watched(command, day.left(), lines.append)
    day.save(finished=code is not None, lines=len(lines), last_lines=lines[-40:])
    if not day.rehearsal:
        from whiflash_triton.autotune.lookup import device_name

        folder = ROOT / "autotune/configs" / device_name(0)
        files = sorted(folder.glob("*.json"))
        with tarfile.open(day.out / "configs.tar.gz", "w:gz") as archive:
            for file in files:
                archive.add(file, arcname=f"{folder.name}/{file.name}")
        day.save(configs=[file.name for file in files])
    if code not in (0, None):
        raise RuntimeError(f"whiflash_triton.autotune.generate exited with {code}: {' | '.join(lines[-3:])}")


def rounds(day: Day, name: str) -> None:
    import torch

    from benchmarks.roofline import measured_peaks
    from benchmarks.rounds import Setup, measure, qwen_arms
    from benchmarks.shapes import MODELS, REHEARSAL
    from whiflash_triton.arms import parse_arm

    peaks = measured_peaks(day.device)

    def save(tables: dict[str, list]) -> None:
        day.save(**tables)

    if day.rehearsal:
        arms = tuple(map(parse_arm, ("ar", "dflash:7", "ddtree:12", "eagle3:3", "mixed:12")))
        setup = (f"rehearsal of {name}", REHEARSAL, torch.device("cpu"), torch.float32, (64,), arms)
    else:
        setup = (name, MODELS[name], torch.device("cuda"), torch.bfloat16, (2048, 8192, 512, 32768), qwen_arms())
    measure(Setup(*setup, peaks, day.left, save))


MODES = ((None, ""), (1, ", graphs, a round ahead"))
ROUTERS = {
    "tiny": ["static:dflash:7", "static:ddtree:16", "static:eagle3:5", "static:eagle3-tree:16", "static:mixed:16", "entropy"]
}
ROUTERS["smollm2"] = [
    *("static:dflash:7", "static:ddtree:32", "static:eagle3:5", "static:eagle3-tree:16", "static:mixed:32", "static:lookup:8"),
    *("entropy", "throughput"),
]


def tiny(day: Day) -> None:
    """Float32, where every text must be the plain one, then bfloat16; each as it comes, then in graphs."""
    import random

    from benchmarks.end_to_end import compare
    from whiflash_triton import WhiFlashDecoder
    from whiflash_triton.loading import ASSETS
    from whiflash_triton.training.tiny import sentence

    rng, folder = random.Random(7), ASSETS / "tiny"
    prompts = [sentence(rng)[0] for _ in range(2 if day.rehearsal else 8)]
    for dtype in ["float32"] if day.rehearsal else ["float32", "bfloat16"]:
        options = dict(dflash=folder / "dflash", eagle3=folder / "eagle3", device=day.device, dtype=dtype, max_cache_len=256)
        decoder = WhiFlashDecoder.from_pretrained(str(folder / "target"), **options)
        for ahead, name in MODES:
            rows = compare(
                *(decoder, prompts, ROUTERS["tiny"], 16 if day.rehearsal else 64, day.left),
                lambda rows, name=f"{dtype}{name}": day.save(**{name: rows}),
                ahead,
            )
            if dtype == "float32" and (bad := [row["router"] for row in rows if row["same_texts"] < row["texts"]]):
                raise RuntimeError(f"float32 texts differ from plain decoding's under {', '.join(bad)}{name}")


def smollm2(day: Day) -> None:
    from benchmarks.end_to_end import assemble, compare
    from whiflash_triton import WhiFlashDecoder
    from whiflash_triton.demo import PROMPTS
    from whiflash_triton.loading import ASSETS

    with tempfile.TemporaryDirectory() as work:
        model = assemble(day.smollm2, Path(work))
        folder = ASSETS / "smollm2-135m"
        decoder = WhiFlashDecoder.from_pretrained(
            str(model), dflash=folder / "dflash", eagle3=folder / "eagle3", device=day.device, max_cache_len=1024
        )
        prompts = [[{"role": "user", "content": text}] for _, text in PROMPTS[: 1 if day.rehearsal else None]]
        specs = ROUTERS["smollm2"][:1] if day.rehearsal else ROUTERS["smollm2"]
        dtype = str(decoder.target.dtype).removeprefix("torch.")
        for ahead, name in MODES:
            save = lambda rows, name=f"{dtype}{name}": day.save(**{name: rows})  # noqa: E731
            compare(decoder, prompts, specs, 8 if day.rehearsal else 128, day.left, save, ahead)


def sanitizer(day: Day) -> None:
    """compute-sanitizer over the small cases: out-of-bounds and misaligned accesses, then races on shared memory."""
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if tool is None or day.rehearsal:
        day.save(skipped="a rehearsal has no device to check" if tool else "compute-sanitizer is not on the PATH")
        return
    test = [sys.executable, "-m", "pytest", "benchmarks/", "-q", "-m", "gpu", "-k", "small and whiflash", "--benchmark-disable"]
    for check in ("memcheck", "racecheck"):
        lines: list[str] = []
        command = [tool, "--tool", check, "--error-exitcode", "9", "--target-processes", "all", *test]
        # Without the caching allocator every tensor has bounds of its own.
        code = watched(command, day.left() / (2 if check == "memcheck" else 1), lines.append, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
        if any("Device not supported" in line for line in lines):
            day.save(skipped="compute-sanitizer does not support this machine's device")
            return
        findings = [
            line for line in lines if line.startswith("=========") and ("ERROR SUMMARY" in line or " error" in line.lower())
        ]
        day.save(**{check: {"finished": code is not None, "exit_code": code, "findings": findings[:40], "tests": lines[-1:]}})
        if code not in (0, None):
            raise RuntimeError(f"compute-sanitizer --tool {check} exited with {code}")


STEPS: dict[str, Callable[[Day], None]] = {
    "environment": environment,
    "correctness": correctness,
    "rounds-4b": lambda day: rounds(day, "qwen3-4b"),
    "kernels": kernels,
    "tiny": tiny,
    "smollm2": smollm2,
    "tune": tune,
    "rounds-8b": lambda day: rounds(day, "qwen3-8b"),
    "sanitizer": sanitizer,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="One step of gpu_day.py.")
    parser.add_argument("name", choices=STEPS)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--smollm2", type=Path)
    parser.add_argument("--cpu-rehearsal", action="store_true")
    args = parser.parse_args()
    STEPS[args.name](Day(args.seconds, args.result, args.out, args.cpu_rehearsal, args.smollm2))


if __name__ == "__main__":
    main()
