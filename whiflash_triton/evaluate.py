"""`whiflash bench`: arms, routers and other people's decoders on the same prompts in one run; speed, tau, and exactness."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import astuple
from importlib.metadata import version
from pathlib import Path

import torch

from .arms import Arm, parse_arm
from .decoder import WhiFlashDecoder
from .demo_report import EXACT
from .evaluation.markdown import render
from .evaluation.peers import PEERS, check_peers, make_peers
from .evaluation.plot import check_plot, plot
from .evaluation.prompts import DATASETS, PARTS, Prompt, ask, check_room, read_dataset, read_file, round_robin
from .evaluation.report import PLAIN, agreement, collect, summarise
from .evaluation.runs import Run, Runs, Side, Text, measure, measure_replayed, write_traces
from .loading import build_router, default_lengths, resolve_source
from .machine import describe_machine
from .options import add_sampling, sampling_options
from .routers.base import RoundState, Router
from .weights import resolve_folder

WARM_UP_TOKENS = 8
RANDOM_MORE = ("lookup:7", "ddtree:3", "ddtree:12", "eagle3-tree:5:2:3", "eagle3-tree:12:4:3", "mixed:4:2:2", "mixed:12:4:3")


class RandomRouter:
    """Switches arm and draft length at random every round: any routing must give the same text."""

    def __init__(self, arms: tuple[Arm, ...], seed: int = 0):
        self.arms, self.rng = arms, random.Random(seed)

    def choose(self, state: RoundState) -> Arm:
        return self.rng.choice(self.arms)


def _random(decoder: WhiFlashDecoder) -> RandomRouter:
    lengths = [1, 2, 3, 5, 7]
    arms = [Arm("ar")] + [Arm(kind, n) for kind, d in decoder.drafters.items() for n in lengths if n <= d.max_draft]
    arms += [arm for arm in map(parse_arm, RANDOM_MORE) if set(arm.needs) <= set(decoder.drafters)]
    return RandomRouter(tuple(arms))


def add_bench_parser(subparsers) -> None:
    p = subparsers.add_parser("bench", help="arms, routers and peers over a set of prompts: tokens per second, tau, exactness")
    given = p.add_mutually_exclusive_group(required=True)
    given.add_argument("--prompts", type=Path, help="JSON lines as in Spec-Bench (question_id, category, turns), or with `prompt`")
    given.add_argument(
        "--dataset", metavar="NAME", help=f"a public set through `datasets`: NAME[:split], of {', '.join(DATASETS)}, or a hub id"
    )
    p.add_argument(
        "--split",
        choices=(*PARTS, "all"),
        default="all",
        help="two thirds of each category tune, a third is held out (default: all)",
    )
    p.add_argument("--every", type=int, default=1, help="take every n-th prompt of the split, from the first")
    p.add_argument("--skip", type=int, default=0, help="leave out the first of those taken")
    p.add_argument("--limit", type=int, help="at most so many, taken from all groups in turn")
    p.add_argument(
        "--arms",
        default="ar,dflash,eagle3",
        help="arms that run alone, several sizes of a kind too: ar,dflash:3,dflash:7,ddtree:16; or none (default: %(default)s)",
    )
    p.add_argument(
        "--routers",
        default="entropy",
        help="entropy, throughput, neural (the shipped one), neural:PATH, random; or none (default: %(default)s)",
    )
    p.add_argument(
        "--peers",
        default="none",
        help=f"others' decoders in the same run: {', '.join(PEERS)}, prompt-lookup:N (default: %(default)s)",
    )
    p.add_argument("--repeats", type=int, default=1, help="passes over the prompts")
    p.add_argument("--minutes", type=float, help="stop after so long; with --out the same command goes on where it stopped")
    p.add_argument("--max-new-tokens", type=int, default=96)
    p.add_argument("--target", default="smollm2-135m", help="hub id, folder or .gguf file (default: %(default)s)")
    p.add_argument("--dflash", default="auto", help="hub id or folder of a DFlash drafter, or none")
    p.add_argument("--eagle3", default="auto", help="hub id or folder of an EAGLE-3 drafter, or none")
    p.add_argument("--dtype", choices=("float32", "bfloat16", "float16", "float64"), help="default: what the device is fast in")
    p.add_argument("--device", help="cpu or cuda (default: cuda where there is one)")
    p.add_argument("--max-cache-len", type=int, default=4096)
    p.add_argument("--draft-window", type=int, help="drafters look at so many of the newest rows only (default: all)")
    p.add_argument("--threads", type=int, help="PyTorch's CPU threads")
    p.add_argument("--chat-template-kwargs", metavar="JSON", default="{}", help="""as in '{"enable_thinking": false}'""")
    p.add_argument(
        "--graphs", type=int, choices=(0, 1), help="on CUDA: rounds as graphs, so many ahead of the host (default: none)"
    )
    add_sampling(p)
    p.add_argument("--replay", action="store_true", help="decode plainly, then only draft along that text: tau of arms, no speed")
    p.add_argument("--out", type=Path, metavar="DIR", help="runs.jsonl (kept as it goes), report.json and report.md go there")
    p.add_argument("--plot", action="store_true", help="report.png too: speed by group, and who drafted which token")
    p.add_argument("--traces", type=Path, metavar="FILE", help="write one JSON line a round: arm, drafted, accepted, milliseconds")
    p.add_argument("--json", action="store_true", help="print the report as JSON")
    p.set_defaults(run=lambda args: run_bench(args, p), router="static:ar", router_threshold=None)


def run_bench(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Exit code 1 if, in float32 or float64, some token differs from the reference's (plain decoding's) and it is no tie."""
    from .cli import load_decoder

    deadline = time.perf_counter() + (math.inf if args.minutes is None else 60 * args.minutes)
    options, template_kwargs = checked_options(args)
    assets = resolve_source(args.target)[1]
    paths = {kind: assets.get(kind) if getattr(args, kind) == "auto" else getattr(args, kind) for kind in ("dflash", "eagle3")}
    paths = {kind: path for kind, path in paths.items() if path not in (None, "none")}
    check_peers(listed(args.peers), paths.get("dflash"), options)
    chosen = chosen_prompts(args)
    decoder = load_decoder(args)
    check_room(decoder, chosen, args.max_new_tokens, template_kwargs)
    routers = make_routers(args, decoder, assets)
    if args.graphs is not None:
        decoder.use_router(RandomRouter(tuple(dict.fromkeys(arm for router in routers.values() for arm in router.arms))))
        decoder.warmup(args.graphs)
    arms = {name: router.arms[0] for name, router in routers.items() if name not in listed(args.routers)}
    sides = {name: routed_side(decoder, router, options) for name, router in routers.items()}
    sides |= make_peers(decoder, args.target, paths.get("dflash"), listed(args.peers), options)
    if not sides:
        raise ValueError("give --arms, --routers or --peers: there is nothing to run")
    settings, machine = settings_of(args, decoder, list(sides), options, chosen, paths, assets), describe_machine()
    if any(name.startswith("peer:dflash") for name in sides):
        machine["versions"]["dflash"] = version("dflash")
    settings["machine"] = {name: machine[name] for name in ("cpu", "cores", "gpus", "versions")}
    runs, reference = Runs(args.out, settings), PLAIN if PLAIN in sides else next(iter(sides))
    asked = sum(len(p.turns) for p in chosen) * len(sides) * (1 if args.replay else args.repeats)
    with progress_bar(asked, len(runs.done)) as bar:
        if args.replay:
            measure_replayed(decoder, chosen, list(arms.values()), args.max_new_tokens, template_kwargs, runs, deadline, bar.update)
        else:
            if len(runs.done) < asked:
                for side in sides.values():
                    side(ask(decoder, chosen[0], [], template_kwargs), min(WARM_UP_TOKENS, args.max_new_tokens))
            measure(
                decoder, chosen, sides, reference, args.max_new_tokens, template_kwargs, args.repeats, runs, deadline, bar.update
            )  # fmt: skip
    data = collect(chosen, list(sides), runs, args.repeats, args.replay)
    if not data.prompts:
        raise ValueError(
            f"--minutes {args.minutes}: no prompt was finished by every side; give more, or --out and repeat the command"
        )
    exact = settings["dtype"] in EXACT
    gap = logit_gap(decoder, chosen, runs, reference, template_kwargs) if exact and not options.get("do_sample") else None
    report = {
        "command": command_line(args, parser),
        "settings": settings,
        "machine": machine,
        "measure": "tau" if args.replay else "tokens per second",
        "exact_dtype": exact,
        "reference": reference,
        "routers": [name for name in routers if name not in arms],
        "asked": len(chosen),
        "complete": len(runs.done) == asked,
        "results": summarise(data, arms, list(sides)),
        "agreement": {} if args.replay else agreement(runs, list(sides), reference, bool(options.get("do_sample")), gap),
    }
    hand_out(args, report, data.prompts, runs)
    return 1 if exact and any(a["different"] for a in report["agreement"].values()) else 0


def listed(text: str) -> list[str]:
    """A comma separated option; `none` and nothing are the empty list."""
    return [word for word in text.split(",") if word not in ("", "none")]


def checked_options(args: argparse.Namespace) -> tuple[dict, dict]:
    """(sampling options, the chat template's); ValueError or ImportError for what cannot go together, before anything is loaded."""
    for name in ("every", "repeats", "max_new_tokens"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)}: give at least 1")
    options = sampling_options(args)
    if options.get("do_sample"):
        options.setdefault("seed", 0)
    if args.replay and (options or args.repeats > 1 or args.traces or listed(args.routers) or listed(args.peers)):
        raise ValueError("--replay: arms alone, greedily, once and untimed; give --routers none, no peers, repeats or traces")
    if args.plot:
        if args.out is None:
            raise ValueError("--plot: give --out, the folder for report.png")
        check_plot()
    try:
        template_kwargs = json.loads(args.chat_template_kwargs)
    except ValueError as error:
        raise ValueError(f"--chat-template-kwargs {args.chat_template_kwargs}: not JSON ({error})") from error
    if not isinstance(template_kwargs, dict):
        raise ValueError(f"--chat-template-kwargs {args.chat_template_kwargs}: give a JSON object")
    return options, template_kwargs


def chosen_prompts(args: argparse.Namespace) -> list[Prompt]:
    prompts = read_file(args.prompts) if args.prompts else read_dataset(args.dataset)
    kept = [p for p in prompts if args.split in (p.part, "all")]
    kept = round_robin(kept[:: args.every][args.skip :])[: args.limit]
    if not kept:
        raise ValueError(f"{args.prompts or args.dataset}: no prompt is left after --split, --every, --skip and --limit")
    return kept


def make_routers(args: argparse.Namespace, decoder: WhiFlashDecoder, assets: dict[str, Path]) -> dict[str, Router]:
    """Arms by their full name, then routers by the name given. With --out, the throughput router's table of costs is kept there."""
    made = {}
    for text in listed(args.arms):
        router = build_router(f"static:{text}", decoder.drafters, decoder.target)
        made[str(router.arms[0])] = router
    for name in listed(args.routers):
        spec = name.removeprefix("neural:")
        costs = None if args.out is None or name != "throughput" else args.out / "costs.json"
        if name == "neural":
            if "router" not in assets:
                raise ValueError("router neural: none is shipped for this target; give its checkpoint as neural:PATH")
            spec = str(assets["router"])
        elif costs is not None and costs.exists():
            spec = f"throughput:{costs}"
        made[name] = _random(decoder) if name == "random" else build_router(spec, decoder.drafters, decoder.target)
        if costs is not None and not costs.exists():
            args.out.mkdir(parents=True, exist_ok=True)
            made[name].costs.save(costs)
    for router in made.values():
        decoder.use_router(router)  # an arm out of range is an error now, and the cache gets the rows that the largest asks for
    return made


def routed_side(decoder: WhiFlashDecoder, router: Router, options: dict) -> Side:
    def call(ids: list[int], new_tokens: int) -> Text:
        decoder.use_router(router)
        out = decoder.generate(ids, reuse_prefix=False, max_new_tokens=new_tokens, **options)
        return Text(out.sequences[0, len(ids) :].tolist(), out.stats.target_forwards, out.rounds)

    return call


def settings_of(
    args: argparse.Namespace, decoder: WhiFlashDecoder, sides: list[str], options: dict, prompts: list[Prompt], paths: dict,
    assets: dict[str, Path],
) -> dict:  # fmt: skip
    """What runs must share to be told together."""
    digest = hashlib.sha256(json.dumps([astuple(p) for p in prompts]).encode()).hexdigest()[:16]
    named = [Path(name.removeprefix("neural:")) for name in listed(args.routers)]
    router_files = [path for path in (assets.get("router"), *named) if path is not None and path.exists()]
    source = str(args.prompts) if args.prompts else f"dataset {args.dataset}"
    target = decoder.target
    return {
        "target": str(args.target),
        "drafters": {kind: {"path": str(path), "sha256": fingerprint(path)} for kind, path in paths.items()},
        "router_files": {str(path): fingerprint(path) for path in router_files},
        "sides": sides,
        "default_lengths": default_lengths(decoder.drafters, target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
        "threads": torch.get_num_threads(),
        "options": options | {"max_new_tokens": args.max_new_tokens},
        "chat_template_kwargs": args.chat_template_kwargs,
        "draft_window": args.draft_window,
        "graphs": args.graphs,
        "repeats": args.repeats,
        "replay": args.replay,
        "prompts": {"source": source, "count": len(prompts), "split": args.split, "sha256": digest},
    }


def fingerprint(path: str | Path) -> str:
    """Of a checkpoint's files: 16 hexadecimal digits. A calibration beside its folder counts."""
    if Path(path).is_file():
        files = [Path(path)]
    else:
        folder = resolve_folder(str(path))
        files = sorted([f for f in folder.iterdir() if f.suffix in (".json", ".safetensors")])
        files += folder.parent.glob("calibration.json")
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def logit_gap(
    decoder: WhiFlashDecoder, prompts: list[Prompt], runs: Runs, reference: str, template_kwargs: dict
) -> Callable[[Run, int], float]:
    by_id = {p.id: p for p in prompts}

    @torch.inference_mode()
    def gap(run: Run, at: int) -> float:
        """Distance of the two best logits before the run's token `at`."""
        answers = [decoder._decode(runs.done[run.prompt, turn, reference, 0].tokens) for turn in range(run.turn)]
        ids = ask(decoder, by_id[run.prompt], answers, template_kwargs) + run.tokens[:at]
        cache = decoder.target.new_cache(len(ids), 1)
        hidden, _ = decoder.target.prefill(torch.tensor([ids], device=decoder.target.device), cache)
        best = decoder.target.logits(hidden)[0, -1].topk(2).values
        return float(best[0] - best[1])

    return gap


def command_line(args: argparse.Namespace, parser: argparse.ArgumentParser) -> str:
    """The command that gives these arguments, defaults left out."""
    words = ["whiflash", "bench"]
    for name, value in vars(args).items():
        if name != "command" and value != parser.get_default(name):
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return shlex.join(words)


def progress_bar(total: int, done: int):
    from tqdm import tqdm

    return tqdm(total=total, initial=done, unit="text", file=sys.stderr)


def hand_out(args: argparse.Namespace, report: dict, prompts: list[Prompt], runs: Runs) -> None:
    text = render(report)
    if args.out is not None:
        (args.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
        (args.out / "report.md").write_text(text)
    if args.plot:
        plot(report, prompts, runs, args.out / "report.png")
    if args.traces is not None:
        write_traces(args.traces, runs)
    print(json.dumps(report, indent=1) if args.json else text)
