"""`whiflash demo`: the plain target, each drafter alone, the router and transformers' `generate` on the same prompts, in one run.

Every side is warmed up first; the order of the sides turns round with every prompt (A B C D, D C B A). A side's time is all the
time spent in its call: prefill, the drafters' ingestion and detokenising included, printing excluded.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from .arms import Arm
from .demo_report import build_report, print_report
from .loading import build_router, resolve_source
from .machine import describe_decoder, describe_machine
from .stats import Round

WARM_UP_TOKENS = 8
PROMPTS = [
    ("chat", "Give me three tips for sleeping better, one sentence each."),
    ("code", "Write a Python function that checks whether a string is a palindrome."),
    ("math", "A train travels 60 miles in 1.5 hours. At the same speed, how far does it travel in 4 hours? Explain step by step."),
    (
        "extract",
        "List every name and age in this text: Maria is 34 and works as a nurse. Her brother Tom, 29, is a teacher. "
        "Their neighbour Ahmed is 51.",
    ),
    ("translate", "Translate to French: The weather is nice today, and we are going to the beach with our friends."),
    ("question", "Why is the sky blue?"),
]
COLOURS = {
    "ar": "", "dflash": "\033[32m", "ddtree": "\033[92m", "eagle3": "\033[35m", "eagle3-tree": "\033[95m",
    "mixed": "\033[36m", "lookup": "\033[33m",
}  # fmt: skip
RESET = "\033[0m"


@dataclass
class Run:
    """One side on one prompt."""

    tokens: list[int]
    seconds: float
    rounds: list[Round] = field(default_factory=list)
    arms: list[Arm] = field(default_factory=list)


Side = Callable[[list[int], int], Run]  # (input ids, new tokens) -> Run


def run(decoder, args) -> int:
    """args: the parsed command line. Returns 0, or 1 when texts differ in float32 or float64."""
    if not decoder.drafters:
        raise ValueError("the demo compares drafters and none is loaded: give --dflash, --eagle3 or both")
    prompts = PROMPTS if args.prompts is None else read_prompts(args.prompts)
    encoded = [(kind, text, decoder._encode(text, {})) for kind, text in prompts]
    setup = {"machine": describe_machine()} | describe_decoder(decoder)
    sides, routed = make_sides(decoder, None if args.no_transformers else args.target)
    show = Show(decoder, quiet=args.json)
    show.line("warming up ...")
    for side in sides.values():
        side(encoded[0][2], min(WARM_UP_TOKENS, args.max_new_tokens))
    runs: dict[str, list[Run]] = {name: [] for name in sides}
    show.legend(show.router.arms)
    for i, (kind, text, ids) in enumerate(encoded):
        for j, name in enumerate(list(sides) if i % 2 == 0 else reversed(sides)):
            show.line(f"prompt {i + 1} of {len(encoded)} ({kind}), {j + 1} of {len(sides)}: {name}")
            if name == routed:
                show.heading(kind, text)
                runs[name].append(stream(decoder, ids, args.max_new_tokens, show))
            else:
                runs[name].append(sides[name](ids, args.max_new_tokens))
    show.line("")
    settings = {"target": args.target, "max_new_tokens": args.max_new_tokens, "routed": routed}
    report = build_report(setup, settings, [(kind, text, len(ids)) for kind, text, ids in encoded], runs)
    if args.json:
        print(json.dumps(report))
    else:
        print_report(report)
    return 1 if report["exact_dtype"] and report["differences"] else 0


def make_sides(decoder, target: str | None) -> tuple[dict[str, Side], str]:
    """(sides by name, the routed one's name). target: also transformers' generate from this source."""

    def side(router) -> Side:
        def call(ids: list[int], count: int) -> Run:
            decoder.use_router(router)
            begin = time.perf_counter()
            out = decoder.generate(ids, max_new_tokens=count)
            return Run(out.sequences[0, len(ids) :].tolist(), time.perf_counter() - begin, out.rounds, out.arms)

        return call

    specs = ["static:ar", *(f"static:{kind}" for kind in decoder.drafters)]
    routers = [build_router(spec, decoder.drafters, decoder.target) for spec in specs]
    sides = {str(router.arms[0]): side(router) for router in routers}
    name = type(decoder.router).__name__.removesuffix("Router").lower()
    routed = f"router ({name}{''.join(f' {arm}' for arm in decoder.router.arms) if name == 'static' else ''})"
    sides[routed] = side(decoder.router)
    if target is not None:
        sides = {"transformers": transformers_side(decoder, target)} | sides
    return sides, routed


def transformers_side(decoder, target: str) -> Side:
    """transformers' own model from the same source, in the same dtype, on the same device; greedy, same end tokens."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    path, gguf = Path(resolve_source(target)[0]), {}
    if path.suffix == ".gguf":
        path, gguf = path.parent, {"gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(path, dtype=decoder.target.dtype, **gguf)
    model = model.to(decoder.target.device).eval()
    stops = decoder.eos_token_ids or None
    pad = stops[0] if stops else 0
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=stops, pad_token_id=pad)

    def call(ids: list[int], count: int) -> Run:
        begin = time.perf_counter()
        prompt = torch.tensor([ids], device=decoder.target.device)
        with torch.inference_mode():
            out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count)
        tokens = out[0, len(ids) :].tolist()
        decoder._decode(tokens)
        return Run(tokens, time.perf_counter() - begin)

    return call


def stream(decoder, ids: list[int], count: int, show: Show) -> Run:
    """The routed side, shown as it is accepted. Only the time spent in the decoder counts."""
    decoder.use_router(show.router)
    result, begin = Run([], 0.0), time.perf_counter()
    pieces = decoder.stream(ids, max_new_tokens=count)
    while True:
        piece = next(pieces, None)
        result.seconds += time.perf_counter() - begin
        if piece is None:
            show.end(result.arms)
            return result
        result.tokens += piece.tokens
        result.arms += piece.arms
        result.rounds += [piece.round] if piece.round else []
        show.tokens(piece.tokens, piece.arms)
        begin = time.perf_counter()


class Show:
    """Text on stdout, coloured by arm on a terminal; progress on stderr, one line that is rewritten on a terminal."""

    def __init__(self, decoder, quiet: bool):
        self.decoder, self.router, self.quiet = decoder, decoder.router, quiet
        self.colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        self.ids: list[int] = []
        self.shown = ""

    def line(self, text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
        elif text:
            print(text, file=sys.stderr, flush=True)

    def legend(self, arms: tuple[Arm, ...]) -> None:
        if self.colour and not self.quiet:
            self.line("")
            kinds = dict.fromkeys(arm.kind for arm in arms if arm.kind != "ar")
            print(", ".join([*(f"{COLOURS[kind]}drafted by {kind}{RESET}" for kind in kinds), "the target's own token"]))

    def heading(self, kind: str, text: str) -> None:
        self.ids, self.shown = [], ""
        if not self.quiet:
            self.line("")
            print(f"\n{kind}> {text if len(text) <= 100 else text[:97] + '...'}", flush=True)

    def tokens(self, tokens: list[int], arms: list[Arm]) -> None:
        if self.quiet:
            return
        for token, arm in zip(tokens, arms, strict=True):
            self.ids.append(token)
            text = self.decoder._decode(self.ids)
            if text.endswith("\ufffd"):  # the middle of a character
                continue
            new, self.shown = text[len(self.shown) :], text
            code = COLOURS[arm.kind] if self.colour else ""
            print(f"{code}{new}{RESET if code else ''}", end="", flush=True)

    def end(self, arms: list[Arm]) -> None:
        if self.quiet:
            return
        if self.colour:
            print(flush=True)
        else:
            counts = {str(arm): arms.count(arm) for arm in arms}
            own = counts.pop("ar", 0)
            drafted = "".join(f"{name} drafted {n}, " for name, n in counts.items())
            print(f"\n[{drafted}the target's own {own}]", flush=True)


def read_prompts(path: Path) -> list[tuple[str, str]]:
    """JSON lines with `prompt`, or `turns` as in Spec-Bench (the first is taken) -> (kind, text)."""
    prompts = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            text = row["prompt"] if "prompt" in row else row["turns"][0]
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: not a JSON object with a prompt or turns ({error})") from error
        if not isinstance(text, str) or not text:
            raise ValueError(f"{path}, line {number}: the prompt must be text that is not empty")
        prompts.append((str(row.get("category", row.get("domain", "prompt"))), text))
    if not prompts:
        raise ValueError(f"{path} holds no prompt: one JSON object a line with a prompt or turns")
    return prompts
