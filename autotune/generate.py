"""Tuning, as ``python -m whiflash_triton.autotune.generate`` or ``whiflash tune``.

On a GPU: for every kernel and bucket of shapes, compile the configurations in parallel, drop those that `verdict` refuses, time
the rest inside CUDA graphs, and write the fastest to configs/<device>/<kernel>.json, bucket by bucket: what an interrupted run
has written stays, and the next run goes on after it. Without a GPU: list the space, check it ahead of time, or write defaults.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures import TimeoutError as OutOfTime
from pathlib import Path
from typing import Any, NamedTuple

SHORTLIST = 3  # the fastest are timed again, longer


def add_tune_parser(commands: Any) -> None:
    """The command ``tune`` of `whiflash`."""
    p = commands.add_parser("tune", help="time the kernels' launch options on this GPU, or check them without one")
    _add_arguments(p)
    p.set_defaults(run=run)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m whiflash_triton.autotune.generate", description=__doc__.splitlines()[0])
    _add_arguments(parser)
    try:
        return run(parser.parse_args(argv))
    except (OSError, ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _add_arguments(p: argparse.ArgumentParser) -> None:
    mode = p.add_mutually_exclusive_group()
    mode.add_argument("--dry-run", action="store_true", help="list every configuration, in the cost model's order; needs no GPU")
    mode.add_argument("--compile-only", action="store_true", help="compile every configuration for --arch; needs no GPU")
    mode.add_argument(
        "--write-defaults", action="store_true", help="write the cost model's choice to configs/default; needs no GPU"
    )
    p.add_argument("--arch", choices=("sm80", "sm90", "sm100"), default="sm90", help="for --dry-run and --compile-only")
    p.add_argument("--kernels", help="names, by commas (default: all)")
    p.add_argument("--limit", type=int, metavar="N", help="only the N configurations of a bucket that the cost model likes best")
    p.add_argument("--minutes", type=float, default=math.inf, help="stop after this long; finished buckets are kept")
    p.add_argument("--force", action="store_true", help="measure again what the files hold already")
    p.add_argument("--jobs", type=int, default=os.cpu_count(), help="compiling processes (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    from whiflash_triton.autotune.cases import KERNELS

    kernels = args.kernels.split(",") if args.kernels else list(KERNELS)
    if unknown := set(kernels) - set(KERNELS):
        raise ValueError(f"--kernels: no kernel named {', '.join(sorted(unknown))}; there are {', '.join(KERNELS)}")
    if min(args.jobs, args.minutes, 1 if args.limit is None else args.limit) <= 0:
        raise ValueError("--jobs, --minutes and --limit must be positive")
    if not (args.dry_run or args.compile_only or args.write_defaults):
        return _tune(args, kernels)
    action = _dry_run if args.dry_run else _compile_only if args.compile_only else _write_defaults
    return action(args, find_buckets(kernels))


class Bucket(NamedTuple):
    kernel: str
    key: dict[str, int | str]
    cases: list

    @property
    def text(self) -> str:
        from whiflash_triton.autotune.lookup import key_text

        return key_text(self.key)


class Row(NamedTuple):
    """One configuration of a bucket, compiled: a report for each of its kernels; ``refused`` says why it is not timed."""

    config: dict[str, Any]
    reports: list
    refused: str


def find_buckets(kernels: Iterable[str]) -> list[Bucket]:
    """The buckets of these kernels: each case's call is recorded to see the key it asks for."""
    import torch

    from whiflash_triton.autotune.cases import all_cases, build
    from whiflash_triton.autotune.launches import record
    from whiflash_triton.autotune.lookup import key_text

    buckets: dict[tuple[str, str], Bucket] = {}
    for case in all_cases():
        if case.kernel in kernels:
            asked = record(build(case, torch.device("cpu")).run)
            buckets.setdefault((asked.kernel, key_text(asked.key)), Bucket(asked.kernel, asked.key, [])).cases.append(case)
    return list(buckets.values())


def ranked(bucket: Bucket, arch: int, limit: int | None = None) -> list[dict[str, Any]]:
    """The bucket's configurations, best first by the cost model, before anything is compiled."""
    from whiflash_triton.autotune.cost_model import assumed, score
    from whiflash_triton.autotune.spaces import configurations

    found = configurations(bucket.kernel, bucket.key)
    return sorted(found, key=lambda config: score(bucket.cases, config, assumed(arch)))[:limit]


class Compiler:
    """Compiles configurations in processes of their own; what two of them share is compiled once."""

    def __init__(self, jobs: int):
        from multiprocessing import get_context

        self.pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"))
        self.jobs: dict[tuple, Future] = {}

    def __enter__(self) -> Compiler:
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)

    def submit(self, bucket: Bucket, configs: list[dict[str, Any]], arch: int, every_case: bool) -> list[list[tuple]]:
        """Keys of the compilations that each configuration waits for, those of the first case (or of all)."""
        import torch

        from whiflash_triton.autotune.cases import build
        from whiflash_triton.autotune.launches import compile_launch, record

        calls = [build(case, torch.device("cpu")).run for case in bucket.cases[: None if every_case else 1]]
        waiting = []
        for config in configs:
            keys = [(launch, arch) for call in calls for launch in record(call, config).launches]
            waiting.append(list(dict.fromkeys(keys)))
            for key in keys:
                if key not in self.jobs:
                    self.jobs[key] = self.pool.submit(compile_launch, *key)
        return waiting

    def rows(self, configs: list[dict[str, Any]], waiting: list[list[tuple]], deadline: float = math.inf) -> list[Row]:
        """The reports, once they are there. Raises OutOfTime at the deadline (time.monotonic)."""
        from whiflash_triton.autotune.cost_model import verdict

        rows = []
        for config, keys in zip(configs, waiting, strict=True):
            left = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
            reports = [self.jobs[key].result(left) for key in keys]
            reasons = [verdict(report, key[0].num_warps) for report, key in zip(reports, keys, strict=True)]
            rows.append(Row(config, reports, next(filter(None, reasons), "")))
        return rows


def show(config: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in config.items())


def _dry_run(args: argparse.Namespace, buckets: list[Bucket]) -> int:
    from whiflash_triton.autotune.cost_model import MACHINES, assumed, score

    arch, total = int(args.arch[2:]), 0
    print(f"Every bucket's configurations in the order of the cost model for {MACHINES[arch].name}; nothing here is measured.")
    for bucket in buckets:
        configs = ranked(bucket, arch, args.limit)
        total += len(configs)
        print(f"\n{bucket.kernel}  {bucket.text}  {len(configs)} configurations, {len(bucket.cases)} shapes:")
        print(*(f"  {case.name}" for case in bucket.cases), sep="\n")
        for config in configs:
            print(f"  {score(bucket.cases, config, assumed(arch)):9.1f} us predicted  {show(config)}")
    print(f"\n{total} configurations in {len(buckets)} buckets")
    return 0


def _compile_only(args: argparse.Namespace, buckets: list[Bucket]) -> int:
    from whiflash_triton.autotune.cost_model import resident

    arch, begin, kept, total = int(args.arch[2:]), time.monotonic(), 0, 0
    with Compiler(args.jobs) as compiler:
        plans = [(bucket, ranked(bucket, arch, args.limit)) for bucket in buckets]
        plans = [(bucket, configs, compiler.submit(bucket, configs, arch, every_case=False)) for bucket, configs in plans]
        print("registers  stack spills  shared  warps an SM; largest over a configuration's kernels")
        for bucket, configs, waiting in plans:
            print(f"\n{bucket.kernel}  {bucket.text}")
            for row, keys in zip(compiler.rows(configs, waiting), waiting, strict=True):
                warps = min(resident(r, key[0].num_warps) * key[0].num_warps for r, key in zip(row.reports, keys, strict=True))
                registers, stack, spills, shared = (
                    max(getattr(r, x) for r in row.reports) for x in ("registers", "stack", "spills", "shared")
                )
                print(
                    f"  {registers:7} {stack:6} {spills:6} {shared:7} {warps:6}  {'pruned' if row.refused else 'kept  '}  "
                    f"{show(row.config)}{'  ' + row.refused if row.refused else ''}",
                    flush=True,
                )
                kept, total = kept + (not row.refused), total + 1
        seconds = time.monotonic() - begin
        print(f"\nsm_{arch}: {kept} of {total} configurations kept; {len(compiler.jobs)} kernels compiled in {seconds:.0f} s")
    return 0


def _write_defaults(args: argparse.Namespace, buckets: list[Bucket]) -> int:
    """One choice for all architectures: the best geometric mean of predicted times of those that none of them refuses."""
    from whiflash_triton.autotune.cost_model import MACHINES, score
    from whiflash_triton.autotune.lookup import CONFIGS, find

    with Compiler(args.jobs) as compiler:
        for bucket in buckets:
            present = find(bucket.kernel, bucket.key, "default")
            configs = ranked(bucket, 90, args.limit)
            configs += [] if present in configs else [present]
            waiting = {arch: compiler.submit(bucket, configs, arch, every_case=False) for arch in MACHINES}
            rows = {arch: compiler.rows(configs, keys) for arch, keys in waiting.items()}
            scores = {}
            for index, config in enumerate(configs):
                if not any(rows[arch][index].refused for arch in MACHINES):
                    logs = (math.log(score(bucket.cases, config, rows[arch][index].reports[0])) for arch in MACHINES)
                    scores[index] = math.exp(sum(logs) / len(MACHINES))
            if not scores:
                raise RuntimeError(f"{bucket.kernel} {bucket.text}: every configuration is refused on some architecture")
            best = min(scores, key=scores.get)
            old = scores.get(configs.index(present), math.nan)
            print(f"{bucket.kernel} {bucket.text}: {show(configs[best])}, predicted {scores[best]:.1f} us (now {old:.1f} us)")
            path = CONFIGS / "default" / f"{bucket.kernel}.json"
            content = json.loads(path.read_text())
            content["entries"][bucket.text] = configs[best]
            write(path, content)
    return 0


def write(path: Path, content: dict[str, Any]) -> None:
    """Sorted, and never half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    part.replace(path)


def load(path: Path, arch: int, versions: dict[str, str], force: bool) -> dict[str, Any]:
    """What a device's file holds, or what a new one begins with. Raises ValueError if other versions measured it."""
    default = json.loads((path.parent.parent / "default" / path.name).read_text())
    begin = {"arch": arch, "versions": versions, "entries": {}, "measured": {}}
    begin |= {"discrete": default["discrete"]} if "discrete" in default else {}
    if force or not path.is_file():
        return begin
    content = json.loads(path.read_text())
    if content.get("versions") != versions:
        raise ValueError(f"{path} was measured with {content.get('versions')}, this is {versions}: --force measures anew")
    return content


def _tune(args: argparse.Namespace, kernels: list[str]) -> int:
    import torch
    import triton

    from whiflash_triton.autotune import lookup
    from whiflash_triton.autotune.cost_model import MACHINES

    if not torch.cuda.is_available():
        raise RuntimeError("no CUDA device to measure on: use --dry-run, --compile-only or --write-defaults")
    major, minor = torch.cuda.get_device_capability()
    arch = 10 * major + minor
    if arch not in MACHINES:
        raise RuntimeError(f"sm_{arch}: tuning knows sm_{', sm_'.join(map(str, MACHINES))}")
    deadline = time.monotonic() + args.minutes * 60
    versions = {"cuda": torch.version.cuda, "torch": torch.__version__, "triton": triton.__version__}
    device = lookup.device_name(torch.cuda.current_device())
    folder = lookup.CONFIGS / device
    paths = {kernel: folder / f"{kernel}.json" for kernel in kernels}
    contents = {kernel: load(path, arch, versions, args.force) for kernel, path in paths.items()}
    todo = [bucket for bucket in find_buckets(kernels) if bucket.text not in contents[bucket.kernel]["entries"]]
    print(f"{device}: {len(todo)} buckets to measure", flush=True)
    done = 0
    with Compiler(args.jobs) as compiler:
        plans = []
        for bucket in todo:
            present = lookup.find(bucket.kernel, bucket.key, "default")
            configs = [present] + [config for config in ranked(bucket, arch, args.limit) if config != present]
            plans.append((bucket, configs, compiler.submit(bucket, configs, arch, every_case=True)))
        try:
            for bucket, configs, waiting in plans:
                rows = compiler.rows(configs, waiting, deadline)
                config, measured = _fastest(bucket, rows, deadline)
                contents[bucket.kernel]["entries"][bucket.text] = config
                contents[bucket.kernel]["measured"][bucket.text] = measured
                write(paths[bucket.kernel], contents[bucket.kernel])
                done += 1
        except OutOfTime:
            print(f"{args.minutes:g} minutes are over: the next run goes on with {bucket.kernel} {bucket.text}")
    lookup.forget()
    print(f"{done} of {len(todo)} buckets measured, in {folder}")
    return 0


def _fastest(bucket: Bucket, rows: list[Row], deadline: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """The configuration with the smallest geometric mean over the bucket's cases, and what a file says of the measurement.

    The first row is the default, the yardstick. Raises OutOfTime at the deadline.
    """
    from triton.runtime.errors import OutOfResources

    from whiflash_triton.autotune.measure import input_sets, microseconds

    sets = {case.name: input_sets(case, rows[0].config) for case in bucket.cases}

    def times(config: dict[str, Any], replays: int) -> dict[str, float]:
        if time.monotonic() > deadline:
            raise OutOfTime
        return {name: round(microseconds(calls, config, replays), 2) for name, calls in sets.items()}

    def mean(index: int) -> float:
        return math.prod(found[index].values()) ** (1 / len(sets))

    found = {}
    for index, row in enumerate(rows):
        if not row.refused:
            try:
                found[index] = times(row.config, 5)
            except OutOfResources:  # of what no compile report counts, such as tensor memory
                continue
    if not found:
        raise RuntimeError(f"{bucket.kernel} {bucket.text}: no configuration runs on this device")
    timed = len(found)
    shortlist = sorted(found, key=mean)[:SHORTLIST] + [0] * (0 in found)
    found = {index: times(rows[index].config, 25) for index in dict.fromkeys(shortlist)}
    best, default = min(found, key=mean), found.get(0)
    measured = {"microseconds": found[best], "default_microseconds": default, "timed": timed, "pruned": len(rows) - timed}
    yardstick = f"default {mean(0):.2f} us" if default else "the default does not run"
    print(
        f"{bucket.kernel} {bucket.text}: {mean(best):.2f} us with {show(rows[best].config)}; {yardstick}; {timed} timed", flush=True
    )
    return rows[best].config, measured


if __name__ == "__main__":
    sys.exit(main())
