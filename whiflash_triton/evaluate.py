"""`whiflash bench`: many prompts under several routers in one run; tau, tokens per second, exactness against transformers."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

from .arms import Arm, parse_arm
from .decoder import WhiFlashDecoder
from .demo import read_prompts, transformers_side
from .loading import build_router, default_lengths
from .machine import describe_machine
from .options import add_sampling, sampling_options
from .replay import replay
from .routers.base import RoundState, Router
from .stats import Output, Stats
from .training.data import encode_chat

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
RANDOM_MORE = ("lookup:7", "ddtree:3", "ddtree:12", "eagle3-tree:5:2:3", "eagle3-tree:12:4:3", "mixed:4:2:2", "mixed:12:4:3")
TIE = 1e-4  # two best logits closer than this are a tie: either token is the target's choice


class RandomRouter:
    """Switches arm and draft length at random every round: any routing must give the same text."""

    def __init__(self, arms: tuple[Arm, ...], seed: int = 0):
        self.arms, self.rng = arms, random.Random(seed)

    def choose(self, state: RoundState) -> Arm:
        return self.rng.choice(self.arms)


@dataclass
class Tally:
    """tau is pooled: tokens after each prompt's first over target forwards; seconds include prompts and the drafters' ingestion."""

    tokens: int = 0
    drafted_tokens: int = 0
    forwards: int = 0
    seconds: float = 0.0

    def add(self, stats: Stats) -> None:
        self.tokens += stats.new_tokens
        self.drafted_tokens += stats.new_tokens - 1
        self.forwards += stats.target_forwards
        self.seconds += stats.seconds

    def row(self) -> dict:
        return {
            "tau": round(self.drafted_tokens / self.forwards, 4) if self.forwards else 1.0,
            "tokens_per_second": round(self.tokens / self.seconds, 2) if self.seconds else None,  # None: replayed
            "tokens": self.tokens,
            "forwards": self.forwards,
        }


@dataclass
class Result:
    """One router over all prompts, and by group of prompts. Texts that differ from the reference are told, ties apart."""

    router: str
    total: Tally = field(default_factory=Tally)
    groups: dict[str, Tally] = field(default_factory=dict)
    different: list[str] = field(default_factory=list)
    ties: list[str] = field(default_factory=list)
    rounds: Counter = field(default_factory=Counter)

    def add(self, group: str, out: Output) -> None:
        self.total.add(out.stats)
        self.groups.setdefault(group, Tally()).add(out.stats)
        self.rounds.update(str(x.arm) for x in out.rounds)

    def row(self) -> dict:
        return {"router": self.router} | self.total.row() | {
            "groups": {group: tally.row() for group, tally in sorted(self.groups.items())},
            "different": self.different,
            "ties": self.ties,
            "rounds": dict(self.rounds),
        }  # fmt: skip


@torch.inference_mode()
def top_two_gap(decoder: WhiFlashDecoder, ids: list[int]) -> float:
    """Distance of the two best logits after ids."""
    cache = decoder.target.new_cache(len(ids), 1)
    hidden, _ = decoder.target.prefill(torch.tensor([ids], device=decoder.target.device), cache)
    best = decoder.target.logits(hidden)[0, -1].topk(2).values
    return float(best[0] - best[1])


def evaluate(
    decoder: WhiFlashDecoder,
    prompts: list[tuple[str, list[int]]],
    routers: dict[str, Router],
    options: dict,
    expected: list[list[int]] | None,
    progress,
) -> list[Result]:
    """All routers prompt by prompt, their order reversed on every other prompt, so that drift hits all alike.

    prompts: (group, ids). expected: the text every router must give; None compares with what the first router gave.
    """
    results = {name: Result(name) for name in routers}
    for number, (group, ids) in enumerate(prompts):
        texts = {}
        for name in routers if number % 2 == 0 else reversed(routers):
            decoder.use_router(routers[name])
            out = decoder.generate(ids, reuse_prefix=False, **options)
            results[name].add(group, out)
            texts[name] = out.sequences[0, len(ids) :].tolist()
            progress()
        right = texts[next(iter(routers))] if expected is None else expected[number]
        for name, got in texts.items():
            _compare(decoder, results[name], number, ids, got, right, "do_sample" in options)
    return list(results.values())


def replayed(
    decoder: WhiFlashDecoder, prompts: list[tuple[str, list[int]]], arms: list[Arm], options: dict, progress
) -> list[Result]:
    """Forwards of every arm along the plain target's text; no seconds."""
    results = {str(arm): Result(f"replay:{arm}") for arm in arms}
    decoder.use_router("static:ar")
    for group, ids in prompts:
        text = decoder.generate(ids, reuse_prefix=False, **options).sequences[0].tolist()
        for name, forwards in replay(decoder, text, len(ids), arms, progress).items():
            result, new = results[name], len(text) - len(ids)
            for tally in (result.total, result.groups.setdefault(group, Tally())):
                tally.tokens, tally.drafted_tokens = tally.tokens + new, tally.drafted_tokens + new - 1
                tally.forwards += forwards
    return list(results.values())


def _random(decoder: WhiFlashDecoder) -> RandomRouter:
    lengths = [1, 2, 3, 5, 7]
    arms = [Arm("ar")] + [Arm(kind, n) for kind, d in decoder.drafters.items() for n in lengths if n <= d.max_draft]
    arms += [arm for arm in map(parse_arm, RANDOM_MORE) if set(arm.needs) <= set(decoder.drafters)]
    return RandomRouter(tuple(arms))


def _compare(
    decoder: WhiFlashDecoder, r: Result, number: int, ids: list[int], got: list[int], expected: list[int], sampled: bool
) -> None:
    if got == expected:
        return
    at = next((i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), min(len(got), len(expected)))
    if sampled:
        r.different.append(f"prompt {number}, token {at}")
        return
    gap = top_two_gap(decoder, ids + got[:at])
    (r.ties if gap < TIE else r.different).append(f"prompt {number}, token {at}, gap of the two best logits {gap:.2e}")


def group_of(category: str) -> str:
    """Spec-Bench's six groups: its eight MT-bench categories are one."""
    return "mt_bench" if category in MT_BENCH else category


def add_bench_parser(subparsers) -> None:
    p = subparsers.add_parser("bench", help="prompts of a file under several routers: tau, tokens per second, exactness")
    p.add_argument("--prompts", type=Path, required=True, help="JSON lines with `turns` (first turn is used) or `prompt`")
    p.add_argument("--every", type=int, default=1, help="take every n-th line, from the first")
    p.add_argument("--skip", type=int, default=0, help="leave out the first of the lines taken")
    p.add_argument("--limit", type=int)
    p.add_argument(
        "--arms", default="ar,dflash,eagle3", help="arms that run alone, as in ar,dflash:7,ddtree:16 (default: %(default)s)"
    )
    p.add_argument(
        "--routers", default="entropy", help="comma separated, `random` too; `none` for arms alone (default: %(default)s)"
    )
    p.add_argument("--max-new-tokens", type=int, default=96)
    p.add_argument("--target", default="smollm2-135m")
    p.add_argument("--dflash", default="auto")
    p.add_argument("--eagle3", default="auto")
    p.add_argument("--dtype")
    p.add_argument("--device")
    p.add_argument("--threads", type=int)
    add_sampling(p)
    p.add_argument(
        "--replay", action="store_true", help="decode plainly, then only draft along that text: tau of the arms, no speed"
    )
    p.add_argument("--peer", action="store_true", help="run transformers generate too: its speed, and token for token equality")
    p.add_argument("--json", action="store_true")
    p.set_defaults(run=run_bench)


def run_bench(args) -> int:
    """Exit code 1 if, in float32 or float64, some token differs (from transformers', or the first router's) and it is no tie."""
    from tqdm import tqdm

    if args.threads:
        torch.set_num_threads(args.threads)
    paths = {k: None if v == "none" else v for k, v in (("dflash", args.dflash), ("eagle3", args.eagle3))}
    decoder = WhiFlashDecoder.from_pretrained(args.target, **paths, device=args.device, dtype=args.dtype, max_cache_len=4096)
    chosen = read_prompts(args.prompts)[:: args.every][args.skip :][: args.limit]
    prompts = [(group_of(category), encode_chat(decoder.tokenizer, text)) for category, text in chosen]
    if not prompts:
        raise ValueError(f"{args.prompts}: no prompt is left after --every, --skip and --limit")
    routers = [f"static:{arm}" for arm in args.arms.split(",") if arm] + [
        r for r in args.routers.split(",") if r not in ("", "none")
    ]
    if not routers:
        raise ValueError("give --arms or --routers: there is nothing to run")
    options = sampling_options(args) | {"max_new_tokens": args.max_new_tokens}
    if options.get("do_sample"):
        if args.peer:
            raise ValueError("--peer: transformers samples other texts; compare with it greedily")
        options.setdefault("seed", 0)
    if args.replay and (args.peer or options.get("do_sample") or any(not r.startswith("static:") for r in routers)):
        raise ValueError("--replay: it takes arms alone, greedily and without peers; give --routers none")
    made = {r: _random(decoder) if r == "random" else build_router(r, decoder.drafters, decoder.target) for r in routers}
    if not args.replay:
        evaluate(decoder, prompts[:1], made, options | {"max_new_tokens": 8}, None, lambda: None)  # warm-up
    expected, peer_seconds = None, None
    with tqdm(total=len(prompts) * (len(routers) + args.peer), unit="text", file=sys.stderr) as bar:
        if args.peer:
            peer = transformers_side(decoder, args.target)
            peer(prompts[0][1], 8)
            runs = []
            for _, ids in prompts:
                runs.append(peer(ids, args.max_new_tokens))
                bar.update()
            expected, peer_seconds = [run.tokens for run in runs], sum(run.seconds for run in runs)
        if args.replay:
            results = replayed(decoder, prompts, [router.arms[0] for router in made.values()], options, bar.update)
        else:
            results = evaluate(decoder, prompts, made, options, expected, bar.update)
    target = decoder.target
    peer_tokens = sum(map(len, expected)) if expected else 0
    report = {
        "prompts": len(prompts), "options": options, "dtype": str(target.dtype), "threads": torch.get_num_threads(),
        "machine": describe_machine()["cpu"], "torch": torch.__version__,
        "default_lengths": default_lengths(decoder.drafters, target.device, target.dtype),
        "transformers_tokens_per_second": round(peer_tokens / peer_seconds, 2) if peer_seconds else None,
        "results": [r.row() for r in results],
    }  # fmt: skip
    print(json.dumps(report, indent=2) if args.json else _table(report))
    exact = decoder.target.dtype in (torch.float32, torch.float64)
    return 1 if exact and any(r.different for r in results) else 0


def _table(report: dict) -> str:
    """Totals, then tau and tokens per second by group."""
    results, peer = report["results"], report["transformers_tokens_per_second"]
    plain = next((r["tokens_per_second"] for r in results if r["router"] == "static:ar"), None)
    width = max(14, *(len(r["router"]) for r in results)) + 2
    settings = ", ".join(f"{name} {value}" for name, value in report["options"].items())
    lines = [
        f"{report['prompts']} prompts, {settings}, {report['dtype']}, {report['threads']} threads, {report['machine']}",
        f"{'router':<{width}}{'tau':>7}{'tok/s':>9}{'x plain':>9}{'x hf':>7}{'different':>11}{'ties':>6}",
    ]
    if peer:
        lines.append(f"{'transformers':<{width}}{'':>7}{peer:>9.2f}{peer / plain if plain else float('nan'):>9.2f}{1:>7.2f}")
    for r in results:
        speed = r["tokens_per_second"] or float("nan")
        lines.append(
            f"{r['router']:<{width}}{r['tau']:>7.3f}{speed:>9.2f}{speed / plain if plain else float('nan'):>9.2f}"
            f"{speed / peer if peer else float('nan'):>7.2f}{len(r['different']):>11}{len(r['ties']):>6}"
        )
    groups = sorted({group for r in results for group in r["groups"]})
    if len(groups) > 1:
        lines += ["", f"{'tau (tok/s)':<{width}}" + "".join(f"{group:>16}" for group in groups)]
        for r in results:
            tallies = [r["groups"][group] for group in groups]
            cells = (f"{t['tau']:.2f} ({t['tokens_per_second'] or float('nan'):.1f})" for t in tallies)
            lines.append(f"{r['router']:<{width}}" + "".join(f"{cell:>16}" for cell in cells))
    lines += [f"  {r['router']}: {text}" for r in results for text in r["different"] + r["ties"]]
    return "\n".join(lines)
