"""`whiflash`: generate, demo, info, bench, train and tune."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path

START = time.perf_counter()


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0; 1 when the demo finds texts that differ; 2 after an error, one line on stderr."""
    try:
        args = build_parser().parse_args(argv)
        code = args.run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader, `head` say, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        return 130
    except (OSError, ValueError, RuntimeError, ImportError, FloatingPointError) as error:
        print(f"whiflash: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def build_parser() -> argparse.ArgumentParser:
    from . import __version__
    from .autotune.generate import add_tune_parser
    from .evaluate import add_bench_parser
    from .options import add_sampling
    from .training.commands import add_train_parser

    parser = argparse.ArgumentParser(prog="whiflash", description="Lossless decoding routed between two drafters.")
    parser.add_argument("--version", action="version", version=f"whiflash-triton {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    generate = commands.add_parser("generate", help="decode one prompt, printing text as it is accepted")
    generate.add_argument("prompt", nargs="?", help="the prompt; read from standard input when left out")
    _add_models(generate)
    generate.add_argument("--max-new-tokens", type=int, default=256)
    add_sampling(generate)
    generate.add_argument("--stop", action="append", metavar="TEXT", help="end the text where this appears; may be repeated")
    generate.set_defaults(run=run_generate)

    demo = commands.add_parser("demo", help="plain target, each drafter, the router and transformers, side by side")
    _add_models(demo)
    demo.add_argument("--max-new-tokens", type=int, default=64)
    demo.add_argument("--prompts", type=Path, help='JSON lines with "prompt" or "turns"; the first turn is used')
    demo.add_argument("--no-transformers", action="store_true", help="leave out transformers' generate")
    demo.set_defaults(run=run_demo)

    info = commands.add_parser("info", help="devices, versions, the loaded models, taps and memory")
    _add_models(info)
    info.set_defaults(run=run_info)

    add_bench_parser(commands)
    add_train_parser(commands)
    add_tune_parser(commands)
    return parser


def _add_models(p: argparse.ArgumentParser) -> None:
    p.add_argument("--target", default="smollm2-135m", help="hub id, folder or .gguf file (default: %(default)s)")
    p.add_argument("--dflash", default="auto", help="hub id or folder of a DFlash drafter, or none")
    p.add_argument("--eagle3", default="auto", help="hub id or folder of an EAGLE-3 drafter, or none")
    p.add_argument("--router", default="auto", help="static:<arm>, entropy, throughput, or a router checkpoint")
    p.add_argument("--router-threshold", type=float, help="nats for entropy, gain in tokens for a router checkpoint")
    p.add_argument("--dtype", choices=("float32", "bfloat16", "float16", "float64"), help="default: what the device is fast in")
    p.add_argument("--device", help="cpu or cuda (default: cuda where there is one)")
    p.add_argument("--max-cache-len", type=int, default=4096)
    p.add_argument("--draft-window", type=int, help="drafters look at so many of the newest rows only (default: all)")
    p.add_argument("--threads", type=int, help="PyTorch's CPU threads")
    p.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def load_decoder(args: argparse.Namespace):
    import torch
    from transformers.utils import logging

    from .decoder import WhiFlashDecoder

    logging.disable_progress_bar()
    if args.threads is not None:
        if args.threads < 1:
            raise ValueError(f"--threads {args.threads}: give at least 1")
        torch.set_num_threads(args.threads)
    paths = {name: None if getattr(args, name) == "none" else getattr(args, name) for name in ("dflash", "eagle3")}
    return WhiFlashDecoder.from_pretrained(
        args.target,
        router=args.router,
        router_threshold=args.router_threshold,
        device=args.device,
        dtype=args.dtype,
        max_cache_len=args.max_cache_len,
        draft_window=args.draft_window,
        **paths,
    )


def arm_shares(rounds: list) -> dict[str, float]:
    """Share of rounds each arm ran, most used first."""
    counts = Counter(str(r.arm) for r in rounds)
    return {arm: n / len(rounds) for arm, n in counts.most_common()}


def run_generate(args: argparse.Namespace) -> int:
    from .options import sampling_options
    from .stats import Stats

    if args.prompt is None and sys.stdin.isatty():
        raise ValueError("give a prompt, or pipe one in")
    prompt = args.prompt if args.prompt is not None else sys.stdin.read().removesuffix("\n")
    decoder = load_decoder(args)
    options = sampling_options(args) | {"max_new_tokens": args.max_new_tokens, "stop_strings": args.stop}
    if args.json:
        out = decoder.generate(prompt, **options)
        stats, rounds = out.stats, out.rounds
        tokens = out.sequences[0, stats.prompt_tokens :].tolist()
        trace = [vars(r) | {"arm": str(r.arm)} for r in rounds]
        report = {"text": out.text, "tokens": tokens, "drafted_by": [str(a) for a in out.arms], "finish": out.finish}
        print(json.dumps(report | {"stats": _numbers(stats), "share_of_rounds": arm_shares(rounds), "rounds": trace}))
        return 0
    begin, prefill, tokens, rounds = time.perf_counter(), 0.0, 0, []
    for piece in decoder.stream(prompt, **options):
        prefill = prefill or time.perf_counter() - begin
        tokens += len(piece.tokens)
        rounds += [piece.round] if piece.round else []
        print(piece.text, end="", flush=True)
    stats = Stats(0, tokens, len(rounds), time.perf_counter() - begin, prefill)
    shares = ", ".join(f"{arm} {share:.0%}" for arm, share in arm_shares(rounds).items())
    print()
    print(
        f"tau {stats.tau:.2f}, {stats.tokens_per_second:.1f} tokens/s "
        f"({tokens} tokens in {stats.seconds:.2f} s, prompt included), rounds: {shares or 'none'}",
        file=sys.stderr,
    )
    return 0


def _numbers(stats) -> dict:
    return vars(stats) | {"tau": stats.tau, "tokens_per_second": stats.tokens_per_second}


def run_demo(args: argparse.Namespace) -> int:
    from .demo import run

    if args.router == "auto":  # the one that knows this device; it is measured with the warm-up
        args.router = "throughput"
    return run(load_decoder(args), args)


def run_info(args: argparse.Namespace) -> int:
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig  # noqa: F401  (import time, not load time)

    from .machine import describe_decoder, describe_machine

    imported = time.perf_counter()
    decoder = None if args.target == "none" else load_decoder(args)
    seconds = {"import": imported - START, "load": time.perf_counter() - imported}
    machine = describe_machine()
    report = {} if decoder is None else describe_decoder(decoder)
    if args.json:
        print(json.dumps({"machine": machine, "seconds": seconds} | report))
        return 0
    print(f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads; GPU: {', '.join(machine['gpus']) or 'none'}")
    print(f"CPU features: {' '.join(machine['cpu_features']) or 'none of note'}; kernels: {machine['kernels']}")
    print(", ".join(f"{name} {number}" for name, number in machine["versions"].items()))
    for name, part in [("target", report.get("target")), *report.get("drafters", {}).items(), ("router", report.get("router"))]:
        if part:
            print(f"{name}: " + ", ".join(f"{key} {_shown(key, value)}" for key, value in part.items()))
    print(f"import {seconds['import']:.2f} s, load {seconds['load']:.2f} s")
    return 0


def _shown(key: str, value) -> str:
    if key.endswith("_bytes"):
        return f"{value / 2**20:.1f} MiB"
    if isinstance(value, dict):
        return "/".join(f"{k} {v}" for k, v in value.items())
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


if __name__ == "__main__":
    sys.exit(main())
