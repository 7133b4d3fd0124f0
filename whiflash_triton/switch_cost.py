"""What switching between drafters costs: `python -m whiflash_triton.switch_cost --prompts FILE --rates 0,0.1,0.5,1`.

Real rounds under a router that switches at a given rate. Switch cost is what a round spends on routing, and on ingestion beyond
what a drafter that stays spends on the last round's rows; it is told as a share of the round's latency, in four ways:
  lazy, KV only    as the package decodes: an idle drafter does nothing, and catch-up makes K and V alone
  lazy, whole      without KV-only Prefill: every late row also runs through the drafter's layers (not its head)
  eager, KV only   without Lazy Catch-up: after every round the idle drafters ingest its rows
  eager, whole     without either
The prompt's own ingestion is not counted: every drafter that is used pays it once, however often it is switched to.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F

from .arms import Arm, parse_arm
from .cache import KVCache
from .cli import _add_models, load_decoder
from .decoder import WhiFlashDecoder
from .demo import read_prompts
from .drafters.dflash import DFlashDrafter
from .drafters.eagle3 import Eagle3Drafter
from .layers import rms_norm, swiglu
from .loading import default_lengths
from .machine import describe_machine
from .rope import apply_rope
from .routers.base import RoundState, Router
from .scheduler import Stream

OWN = "own"  # the rate of the router's own choices
WAYS = {
    "lazy, KV only": (False, False),
    "lazy, whole": (False, True),
    "eager, KV only": (True, False),
    "eager, whole": (True, True),
}


class Switching:
    """Asks `inner`, and pays for its answer; then throws a coin instead: the other arm with probability `rate`. "own": obeys."""

    def __init__(self, inner: Router, pair: tuple[Arm, Arm], rate: float | str, first: int, seed: int):
        self.inner, self.pair, self.rate, self.at = inner, pair, rate, first
        self.arms = tuple(dict.fromkeys((*inner.arms, *pair)))
        self.rng = random.Random(seed)

    def choose(self, state: RoundState) -> Arm:
        chosen = self.inner.choose(state)
        if self.rate == OWN:
            return chosen
        self.at ^= self.rng.random() < self.rate
        return self.pair[self.at]


@dataclass
class Tally:
    """Sums over rounds; ms are the host's clock, the device's work included."""

    rounds: int = 0
    switches: int = 0
    tokens: int = 0
    ms: float = 0.0
    routing_ms: float = 0.0
    ingestion_ms: dict[str, float] = field(default_factory=dict)  # by drafter
    drafts: dict[str, int] = field(default_factory=dict)  # rounds that drew on the drafter

    def row(self, stay: dict[str, float]) -> dict:
        """stay: ms that a drafter which stays spends on ingestion a round."""
        extra = sum(self.ingestion_ms.values()) - sum(stay[name] * n for name, n in self.drafts.items())
        return {
            "rounds": self.rounds, "switches_per_round": self.switches / self.rounds, "round_ms": self.ms / self.rounds,
            "catch_up_share": extra / self.ms, "routing_share": self.routing_ms / self.ms,
            "switch_cost_share": (extra + self.routing_ms) / self.ms, "tokens_per_second": 1000 * self.tokens / self.ms,
        }  # fmt: skip


def through_dflash(drafter: DFlashDrafter, x: torch.Tensor, start: int) -> torch.Tensor:
    """Context states x [1, C, H] of the cache's newest rows through every draft layer, causally."""
    c, n = drafter.config, x.shape[1]
    cos, sin = (table[start : start + n] for table in drafter.tables)
    for i, layer in enumerate(drafter.layers):
        q = layer.qkv(rms_norm(x, layer.input_norm, c.rms_norm_eps)).view(1, n, -1, c.head_dim)[:, :, : c.num_heads]
        q = apply_rope(rms_norm(q, layer.q_norm, c.rms_norm_eps), cos, sin)
        x = x + layer.o(_attend(drafter.cache, i, q, start))
        x = x + swiglu(rms_norm(x, layer.post_norm, c.rms_norm_eps), layer.gate_up, layer.down)
    return x


def through_eagle3(drafter: Eagle3Drafter, hidden: torch.Tensor, tokens: torch.Tensor, start: int) -> torch.Tensor:
    """Fused features [1, C, H] and the tokens after them, of the cache's newest rows, through the draft layer, causally."""
    c, n = drafter.config, hidden.shape[1]
    q = drafter.q(drafter._inputs(hidden, tokens)).view(1, n, c.num_heads, c.head_dim)
    q = q if drafter.q_norm is None else rms_norm(q, drafter.q_norm, c.rms_norm_eps)
    q = apply_rope(q, *(table[start : start + n] for table in drafter.tables))
    residual = rms_norm(hidden, drafter.hidden_norm, c.rms_norm_eps) if c.norm_before_residual else hidden
    x = residual + drafter.o(_attend(drafter.cache, 0, q, start))
    return x + swiglu(rms_norm(x, drafter.post_norm, c.rms_norm_eps), drafter.gate_up, drafter.down)


def _attend(cache: KVCache, layer: int, q: torch.Tensor, start: int) -> torch.Tensor:
    """q [1, C, Hq, D] at rows start.. over the cache -> [1, C, Hq * D]."""
    n, (k, v) = q.shape[1], cache.kv[layer, :, :, :, : start + q.shape[1]]
    visible = torch.ones(n, start + n, dtype=torch.bool, device=q.device).tril(start)
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=visible, enable_gqa=True)
    return out.transpose(1, 2).reshape(1, n, -1)


@contextmanager
def replaced(owner: object, **attributes) -> Iterator[None]:
    """Attributes of one object, put back afterwards; methods of its class show again."""
    before = {name: vars(owner)[name] for name in attributes if name in vars(owner)}
    vars(owner).update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del vars(owner)[name]
        vars(owner).update(before)


def whole_dflash(drafter: DFlashDrafter) -> dict[str, Callable]:
    """What to replace so that catch-up runs its rows through all layers too."""
    project, plain, contexts = drafter.context_kv, drafter.catch_up, []

    def context_kv(x: torch.Tensor) -> torch.Tensor:
        contexts.append(x)
        return project(x)

    def with_layers() -> None:
        start = drafter.cache.length
        plain()
        while contexts:
            through_dflash(drafter, contexts.pop(), start)

    return {"context_kv": context_kv, "catch_up": with_layers}


def whole_eagle3(drafter: Eagle3Drafter) -> dict[str, Callable]:
    """The same for the one layer of EAGLE-3."""
    fuse, plain, states = drafter._fuse, drafter.catch_up, []

    def fused(features: torch.Tensor) -> torch.Tensor:
        states.append(fuse(features))
        return states[-1]

    def with_layer(anchor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        start = drafter.cache.length
        states.clear()
        newest = plain(anchor)
        while states:
            through_eagle3(drafter, states.pop(), drafter.ingested[-1], start)
        return newest

    return {"_fuse": fused, "catch_up": with_layer}


def timed(call: Callable, sync: Callable[[], None], log: list[float]) -> Callable:
    """The same call; its milliseconds go to the log."""

    def measured(*args):
        sync()
        begin = time.perf_counter()
        result = call(*args)
        sync()
        log.append((time.perf_counter() - begin) * 1e3)
        return result

    return measured


@torch.inference_mode()
def decode(
    decoder: WhiFlashDecoder, ids: list[int], count: int, router: Switching, eager: bool, whole: bool, tally: Tally
) -> list[int]:
    """The text of at most `count` new tokens, as far as rounds can draft; its rounds go to the tally."""
    decoder.use_router(router)
    drafters, stream = decoder.drafters, Stream(decoder.work, router)
    sync = torch.cuda.synchronize if decoder.target.device.type == "cuda" else lambda: None
    stops, limit, last = set(decoder.eos_token_ids), len(ids) + count, None
    stream.start(ids)
    with ExitStack() as stack:
        logs: dict[str, list[float]] = {name: [] for name in drafters}
        for name, drafter in drafters.items():
            if whole:
                changed = whole_dflash(drafter) if name == "dflash" else whole_eagle3(drafter)
                stack.enter_context(replaced(drafter, **changed))
            catch_up(drafter, name, stream.anchor)  # the prompt's rows
            stack.enter_context(replaced(drafter, catch_up=timed(drafter.catch_up, sync, logs[name])))
        while len(stream.tokens) < limit - 1 and stops.isdisjoint(stream.tokens[len(ids) :]):
            begin = time.perf_counter()
            step = stream.round(limit - len(stream.tokens) - 1)
            arm = step.round.arm
            if eager:
                for name in drafters.keys() - set(arm.needs):
                    catch_up(drafters[name], name, stream.anchor)
            sync()
            tally.ms += (time.perf_counter() - begin) * 1e3
            tally.rounds, tally.tokens = tally.rounds + 1, tally.tokens + len(step.tokens)
            tally.routing_ms += step.round.ms["route"]
            tally.switches += last is not None and last.needs != arm.needs
            for name in arm.needs:
                tally.drafts[name] = tally.drafts.get(name, 0) + 1
            last = arm
        for name, log in logs.items():
            tally.ingestion_ms[name] = tally.ingestion_ms.get(name, 0.0) + sum(log)
    return stream.tokens


def catch_up(drafter: DFlashDrafter | Eagle3Drafter, name: str, anchor: torch.Tensor) -> None:
    drafter.catch_up(*((anchor,) if name == "eagle3" else ()))


def measure(
    decoder: WhiFlashDecoder, prompts: list[list[int]], count: int, pair: tuple[Arm, Arm], rates: list, seed: int, progress
) -> dict:
    """Every way at every rate over every prompt, in an order that turns round with each prompt."""
    inner, tallies = decoder.router, {}
    runs = [("stay", 0, first, False, False) for first in (0, 1)]
    runs += [(way, rate, None, *flags) for way, flags in WAYS.items() for rate in rates]

    def run(number: int, ids: list[int], tokens: int, way: str, rate, first, eager: bool, whole: bool, tally: Tally) -> None:
        router = Switching(inner, pair, rate, number % 2 if first is None else first, seed + number)
        decode(decoder, ids, tokens, router, eager, whole, tally)

    for way in runs:
        run(0, prompts[0], 8, *way, Tally())  # warm-up
    for number, ids in enumerate(prompts):
        for way in runs if number % 2 == 0 else reversed(runs):
            run(number, ids, count, *way, tallies.setdefault(way[:3], Tally()))
            progress()
    decoder.use_router(inner)
    stay = {}
    for first in (0, 1):
        alone = tallies["stay", 0, first]
        stay |= {name: alone.ingestion_ms[name] / alone.rounds for name in pair[first].needs}
    return {
        "pair": [str(arm) for arm in pair], "router": type(inner).__name__, "stay_ms": stay,
        "rows": [
            {"way": way, "rate": rate} | tallies[way, rate, None].row(stay) for way in WAYS for rate in rates
        ],
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    from tqdm import tqdm

    p = argparse.ArgumentParser(prog="python -m whiflash_triton.switch_cost", description=__doc__.splitlines()[0])
    _add_models(p)
    p.add_argument("--prompts", type=Path, required=True, help="JSON lines with `turns` (first turn is used) or `prompt`")
    p.add_argument("--limit", type=int, help="so many prompts")
    p.add_argument(
        "--rates", default=f"0,0.1,0.5,1,{OWN}", help=f"switches a round; {OWN}: as --router chooses (default: %(default)s)"
    )
    p.add_argument("--arms", default="dflash,eagle3", help="the two arms between which a rate switches (default: %(default)s)")
    p.add_argument("--max-new-tokens", type=int, default=64)
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args(argv)
    try:
        rates = [OWN if text == OWN else float(text) for text in args.rates.split(",")]
    except ValueError:
        rates = [2.0]
    if any(rate != OWN and not 0 <= rate <= 1 for rate in rates):
        raise ValueError(f"--rates {args.rates}: numbers from 0 to 1, or {OWN}, separated by commas")
    decoder = load_decoder(args)
    lengths = default_lengths(decoder.drafters, decoder.target.device)
    pair = tuple(parse_arm(text, lengths) for text in args.arms.split(","))
    if len(pair) != 2 or any(len(arm.needs) != 1 for arm in pair) or pair[0].needs == pair[1].needs:
        raise ValueError(f"--arms {args.arms}: name two arms of one drafter each, as in dflash:3,eagle3:2")
    prompts = [decoder._encode(text, {}) for _, text in read_prompts(args.prompts)[: args.limit]]
    with tqdm(total=len(prompts) * (2 + len(WAYS) * len(rates)), unit="text", file=sys.stderr) as bar:
        report = measure(decoder, prompts, args.max_new_tokens, pair, rates, args.seed, bar.update)
    report |= {"prompts": len(prompts), "max_new_tokens": args.max_new_tokens, "dtype": str(decoder.target.dtype),
               "threads": torch.get_num_threads(), "machine": describe_machine()["cpu"]}  # fmt: skip
    print(json.dumps(report, indent=1) if args.json else table(report))
    return 0


def table(report: dict) -> str:
    settings = f"{report['prompts']} prompts, {report['max_new_tokens']} new tokens, {report['dtype']}, {report['threads']} threads"
    stay = ", ".join(f"{name} {ms:.3f} ms" for name, ms in report["stay_ms"].items())
    lines = [
        f"{settings}, {report['machine']}; {' and '.join(report['pair'])}, {report['router']}; a stay ingests for {stay}",
        f"{'way':<16}{'rate':>6}{'switches':>10}{'round ms':>10}{'catch-up':>10}{'routing':>10}{'in all':>9}{'tok/s':>8}",
    ]
    for r in report["rows"]:
        shares = "".join(f"{100 * r[name]:>{width}.2f}%" for name, width in (("catch_up_share", 9), ("routing_share", 9)))
        lines.append(
            f"{r['way']:<16}{r['rate']!s:>6}{r['switches_per_round']:>10.2f}{r['round_ms']:>10.2f}{shares}"
            f"{100 * r['switch_cost_share']:>8.2f}%{r['tokens_per_second']:>8.1f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
