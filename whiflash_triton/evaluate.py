"""`whiflash bench`: many prompts under several routers in one run; tau, tokens per second, exactness against transformers."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

from .arms import Arm
from .decoder import WhiFlashDecoder
from .demo import read_prompts, transformers_side
from .loading import default_lengths
from .routers.base import RoundState
from .training.data import encode_chat

TIE = 1e-4  # two best logits closer than this are a tie: either token is the target's choice


class RandomRouter:
    """Switches arm and draft length at random every round: any routing must give the same text."""

    def __init__(self, arms: tuple[Arm, ...], seed: int = 0):
        self.arms, self.rng = arms, random.Random(seed)

    def choose(self, state: RoundState) -> Arm:
        return self.rng.choice(self.arms)


@dataclass
class Result:
    """One router over all prompts; tau is pooled: tokens after each prompt's first over target forwards."""

    router: str
    tokens: int = 0
    drafted_tokens: int = 0
    forwards: int = 0
    seconds: float = 0.0
    different: list[str] = field(default_factory=list)
    ties: list[str] = field(default_factory=list)
    rounds: Counter = field(default_factory=Counter)

    @property
    def tau(self) -> float:
        return self.drafted_tokens / self.forwards if self.forwards else 1.0

    def row(self) -> dict:
        return {
            "router": self.router,
            "tau": round(self.tau, 4),
            "tokens_per_second": round(self.tokens / self.seconds, 2),
            "tokens": self.tokens,
            "forwards": self.forwards,
            "different": self.different,
            "ties": self.ties,
            "rounds": dict(self.rounds),
        }


@torch.inference_mode()
def top_two_gap(decoder: WhiFlashDecoder, ids: list[int]) -> float:
    """Distance of the two best logits after ids."""
    cache = decoder.target.new_cache(len(ids), 1)
    hidden, _ = decoder.target.prefill(torch.tensor([ids], device=decoder.target.device), cache)
    best = decoder.target.logits(hidden)[0, -1].topk(2).values
    return float(best[0] - best[1])


def evaluate(
    decoder: WhiFlashDecoder, prompts: list[list[int]], routers: list[str], new: int, expected: list[list[int]] | None, progress
) -> list[Result]:
    """All routers prompt by prompt, their order reversed on every other prompt, so that drift hits all alike."""
    results = {name: Result(name) for name in routers}
    made = {name: _random(decoder) if name == "random" else name for name in routers}
    for number, ids in enumerate(prompts):
        for name in routers if number % 2 == 0 else routers[::-1]:
            decoder.use_router(made[name])
            out, r = decoder.generate(ids, max_new_tokens=new), results[name]
            r.tokens += out.stats.new_tokens
            r.drafted_tokens += out.stats.new_tokens - 1
            r.forwards += out.stats.target_forwards
            r.seconds += out.stats.seconds
            r.rounds.update(str(x.arm) for x in out.rounds)
            if expected is not None:
                _compare(decoder, r, number, ids, out.sequences[0, len(ids) :].tolist(), expected[number])
            progress()
    return list(results.values())


def _random(decoder: WhiFlashDecoder) -> RandomRouter:
    lengths = [1, 2, 3, 5, 7]
    arms = [Arm("ar")] + [Arm(kind, n) for kind, d in decoder.drafters.items() for n in lengths if n <= d.max_draft]
    return RandomRouter(tuple(arms))


def _compare(decoder: WhiFlashDecoder, r: Result, number: int, ids: list[int], got: list[int], expected: list[int]) -> None:
    if got == expected:
        return
    at = next((i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), min(len(got), len(expected)))
    gap = top_two_gap(decoder, ids + got[:at])
    (r.ties if gap < TIE else r.different).append(f"prompt {number}, token {at}, gap of the two best logits {gap:.2e}")


def add_bench_parser(subparsers) -> None:
    p = subparsers.add_parser("bench", help="prompts of a file under several routers: tau, tokens per second, exactness")
    p.add_argument("--prompts", type=Path, required=True, help="JSON lines with `turns` (first turn is used) or `prompt`")
    p.add_argument("--every", type=int, default=1, help="take every n-th line, from the first")
    p.add_argument("--skip", type=int, default=0, help="leave out the first of the lines taken")
    p.add_argument("--limit", type=int)
    p.add_argument("--routers", default="static:ar,static:dflash,static:eagle3,entropy", help="comma separated; `random` too")
    p.add_argument("--max-new-tokens", type=int, default=96)
    p.add_argument("--target", default="smollm2-135m")
    p.add_argument("--dflash", default="auto")
    p.add_argument("--eagle3", default="auto")
    p.add_argument("--dtype")
    p.add_argument("--device")
    p.add_argument("--threads", type=int)
    p.add_argument("--peer", action="store_true", help="run transformers generate too: its speed, and token for token equality")
    p.add_argument("--json", action="store_true")
    p.set_defaults(run=run_bench)


def run_bench(args) -> int:
    """Exit code 1 if, in float32 or float64, some token differs from transformers' and it is no tie."""
    from tqdm import tqdm

    if args.threads:
        torch.set_num_threads(args.threads)
    paths = {k: None if v == "none" else v for k, v in (("dflash", args.dflash), ("eagle3", args.eagle3))}
    decoder = WhiFlashDecoder.from_pretrained(args.target, **paths, device=args.device, dtype=args.dtype, max_cache_len=4096)
    texts = [text for _, text in read_prompts(args.prompts)][:: args.every][args.skip :][: args.limit]
    prompts = [encode_chat(decoder.tokenizer, text) for text in texts]
    if not prompts:
        raise ValueError(f"{args.prompts}: no prompt is left after --every, --skip and --limit")
    routers, new = args.routers.split(","), args.max_new_tokens
    evaluate(decoder, prompts[:1], routers, 8, None, lambda: None)  # warm-up
    expected, peer_seconds = None, None
    with tqdm(total=len(prompts) * (len(routers) + args.peer), unit="text", file=sys.stderr) as bar:
        if args.peer:
            peer = transformers_side(decoder, args.target)
            peer(prompts[0], 8)
            runs = []
            for ids in prompts:
                runs.append(peer(ids, new))
                bar.update()
            expected, peer_seconds = [run.tokens for run in runs], sum(run.seconds for run in runs)
        results = evaluate(decoder, prompts, routers, new, expected, bar.update)
    target = decoder.target
    peer_tokens = sum(map(len, expected)) if expected else 0
    report = {
        "prompts": len(prompts), "max_new_tokens": new, "dtype": str(decoder.target.dtype), "threads": torch.get_num_threads(),
        "torch": torch.__version__, "default_lengths": default_lengths(decoder.drafters, target.device, target.dtype),
        "transformers_tokens_per_second": round(peer_tokens / peer_seconds, 2) if peer_seconds else None,
        "results": [r.row() for r in results],
    }  # fmt: skip
    print(json.dumps(report, indent=2) if args.json else _table(report))
    exact = decoder.target.dtype in (torch.float32, torch.float64)
    return 1 if exact and any(r.different for r in results) else 0


def _table(report: dict) -> str:
    plain = next((r["tokens_per_second"] for r in report["results"] if r["router"] == "static:ar"), None)
    peer = report["transformers_tokens_per_second"]
    lines = [
        f"{report['prompts']} prompts, {report['max_new_tokens']} new tokens, {report['dtype']}, {report['threads']} threads",
        f"{'router':<20}{'tau':>7}{'tok/s':>9}{'x plain':>9}{'x hf':>7}{'different':>11}{'ties':>6}",
    ]
    if peer:
        lines.append(f"{'transformers':<20}{'':>7}{peer:>9.2f}{peer / plain if plain else float('nan'):>9.2f}{1:>7.2f}")
    for r in report["results"]:
        speed = r["tokens_per_second"]
        lines.append(
            f"{r['router']:<20}{r['tau']:>7.3f}{speed:>9.2f}{speed / plain if plain else float('nan'):>9.2f}"
            f"{speed / peer if peer else float('nan'):>7.2f}"
            f"{len(r['different']) if peer else '-':>11}{len(r['ties']) if peer else '-':>6}"
        )
    lines += [f"  {r['router']}: {text}" for r in report["results"] for text in r["different"] + r["ties"]]
    return "\n".join(lines)
