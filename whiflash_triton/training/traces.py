"""Same-state traces: at the places of a greedy text, what every arm would have committed from there, and what the target showed.

The text says what the target would take, so nothing is verified: one prefill gives the features and states of every place, and
the arms only draft (as in replay.py). A folder of traces holds `traces.json` (settings), `costs.json` (milliseconds by arm, as
the throughput router measures them) and one safetensors file a prompt, written whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import deque
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from .. import ops
from ..arms import Arm, parse_arm
from ..checkpoint_files import CheckpointError, read_safetensors
from ..decoder import WhiFlashDecoder
from ..drafters.draft import check_arm, draft
from ..drafters.lookup import SuffixAutomaton, copied
from ..replay import _accepted

LONGEST = 7  # drafted tokens of a chain, unless --arms says otherwise
RECENT = 8  # rounds
SETTINGS, COSTS = "traces.json", "costs.json"


@dataclass
class Trace:
    """n places of one text, A arms in the settings' order.

    place int64 [n]: committed rows (the text's token there is the anchor); hidden [n, H] after the final norm and entropy float32
    [n] in nats, both of the row before the anchor, as a router sees them; match int64 [n]: tokens at the end of the text that
    occurred before; drafted, accepted int64 [n, A]; recent float32 [n, A]: mean acceptance of the last RECENT places whose rounds
    were over by then, NaN where there is none; draft_ms float32 [n, A]: this draft, with the ingestion of the rows since the last
    place; tokens int64 [T], prompt included.
    """

    place: torch.Tensor
    hidden: torch.Tensor
    entropy: torch.Tensor
    match: torch.Tensor
    drafted: torch.Tensor
    accepted: torch.Tensor
    recent: torch.Tensor
    draft_ms: torch.Tensor
    tokens: torch.Tensor
    domain: str = ""


def deepest(arm: Arm, drafters: dict) -> int:
    """Drafted tokens on the longest path the arm can have."""
    return arm.depth or (drafters["dflash"].max_draft if arm.kind in ("ddtree", "mixed") else arm.size)


def told(agrees: list[bool], reach: int) -> list[int]:
    """Places where the text is the target's own choice from the anchor to one token past the longest draft.

    agrees: one a token, whether it is what the target chose there.
    """
    run, places = 0, []
    for place in reversed(range(len(agrees))):
        run = run + 1 if agrees[place] else 0
        if run >= reach + 2:
            places.append(place)
    return places[::-1]


@torch.inference_mode()
def trace(decoder: WhiFlashDecoder, text: list[int], prompt: int, arms: list[Arm], stride: int, domain: str = "") -> Trace | None:
    """The places of text[prompt:] where it tells of every arm's longest draft (`told`), of every `stride` the first.

    None where there is no such place. Leaves the drafters' caches empty: no stream of this decoder may be open.
    """
    work, target, drafters = decoder.work, decoder.target, decoder.drafters
    final = target.config.num_layers
    taps = tuple(sorted({*work.taps, final}))
    ids, cache = torch.tensor([text], device=target.device), target.new_cache(len(text), 1)
    work.rows = None
    _, parts = target.prefill(ids, cache, taps)
    features = torch.cat(parts, 2)
    hidden = features[taps.index(final), 0, prompt - 1 : -1]
    samples = [ops.block_sampling(target.logits(part)) for part in hidden.split(128)]
    choices, entropy = (torch.cat([getattr(s, name) for s in samples]) for name in ("token", "entropy"))
    at = told((choices == ids[0, prompt:]).tolist(), max(deepest(arm, drafters) for arm in arms))
    at = [i for i, before in zip(at, [-1, *at], strict=False) if i // stride != before // stride]
    if not at:
        return None
    places = [prompt + i for i in at]
    rows = {name: [taps.index(t) for t in d.taps] for name, d in drafters.items()}
    sync = torch.cuda.synchronize if target.device.type == "cuda" else lambda: None
    for drafter in drafters.values():
        drafter.reset()
    copies, known = SuffixAutomaton(), 0
    match, drafted, accepted, ms = [], [], [], []
    for place in places:
        for name in {name for arm in arms for name in arm.needs}:
            drafters[name].ingest(features[rows[name]][:, :, known:place], ids[:, known:place])
        known, anchor = place, ids[:, place : place + 1]
        copies.read(text[: place + 1])
        match.append(copies.match()[0])
        trees, took = [], []
        for arm in arms:
            sync()
            begin = time.perf_counter()
            if arm.kind == "lookup":
                trees.append(copied(copies, text[: place + 1], anchor, arm.size))
            else:
                trees.append(draft(drafters, anchor, arm, len(text) - place - 2))
            sync()
            took.append((time.perf_counter() - begin) * 1e3)
        drafted.append([tree.size - 1 for tree in trees])
        accepted.append([_accepted(tree, ids[0, place + 1 :]) for tree in trees])
        ms.append(took)
    return Trace(
        torch.tensor(places), hidden[at].cpu(), entropy[at].float().cpu(), torch.tensor(match), torch.tensor(drafted),
        torch.tensor(accepted), recent_acceptance(places, accepted), torch.tensor(ms), torch.tensor(text), domain,
    )  # fmt: skip


def recent_acceptance(places: list[int], accepted: list[list[int]]) -> torch.Tensor:
    """float32 [n, A]: mean over the last RECENT places whose round had ended, NaN before the first."""
    columns = []
    for column in zip(*accepted, strict=True):
        ended = sorted(range(len(places)), key=lambda i: places[i] + column[i] + 1)  # by where their rounds end
        last: deque[int] = deque(maxlen=RECENT)
        at, means = 0, []
        for place in places:
            while at < len(ended) and places[ended[at]] + column[ended[at]] + 1 <= place:
                last.append(column[ended[at]])
                at += 1
            means.append(sum(last) / len(last) if last else float("nan"))
        columns.append(means)
    return torch.tensor(columns).T.contiguous()


def trace_path(folder: Path, prompt: str) -> Path:
    """Named by the prompt, so that the prompts' file may grow between runs."""
    return folder / f"trace-{hashlib.sha256(prompt.encode()).hexdigest()[:16]}.safetensors"


def save_trace(found: Trace | None, path: Path) -> None:
    """A text too short to tell anything leaves a file without tensors, so that it is not decoded again."""
    tensors = {} if found is None else {f.name: getattr(found, f.name) for f in fields(Trace) if f.name != "domain"}
    partial = path.with_suffix(f".{os.getpid()}.partial")
    save_file(tensors, partial, metadata={"domain": "" if found is None else found.domain})
    os.replace(partial, path)


def read_traces(folder: Path) -> tuple[dict, list[Trace]]:
    """Settings, and traces by file name. FileNotFoundError or ValueError say what is missing."""
    file = Path(folder) / SETTINGS
    if not file.exists():
        raise FileNotFoundError(f"{folder} holds no {SETTINGS}: run `whiflash train traces --out {folder}`")
    traces = []
    for path in sorted(Path(folder).glob("trace-*.safetensors")):
        tensors = read_safetensors(path)
        if tensors:
            with safe_open(path, framework="pt") as handle:
                domain = handle.metadata()["domain"]
            if set(tensors) != {f.name for f in fields(Trace)} - {"domain"}:
                raise CheckpointError(f"{path} is no trace: it holds {', '.join(sorted(tensors))}")
            traces.append(Trace(**tensors, domain=domain))
    if not traces:
        raise ValueError(f"{folder} holds no places yet: let `whiflash train traces` run longer, or give it longer texts")
    return json.loads(file.read_text()), traces


def spread(prompts: list[tuple[str, str]], limit: int | None) -> list[tuple[str, str]]:
    """At most `limit` prompts, the domains taken in turn, each in the order of the file."""
    queues: dict[str, deque] = {}
    for prompt in prompts:
        queues.setdefault(prompt[0], deque()).append(prompt)
    chosen: list[tuple[str, str]] = []
    limit = len(prompts) if limit is None else min(limit, len(prompts))
    while len(chosen) < limit:
        for queue in queues.values():
            if queue and len(chosen) < limit:
                chosen.append(queue.popleft())
    return chosen


def greedy_answers(path: Path) -> dict[str, dict]:
    """The rows of a JSON lines file whose response is greedy text, by prompt: they need not be decoded again."""
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return {row["prompt"]: row for row in rows if row.get("temperature") == 0 and row.get("response")}


def add_parser(commands) -> None:
    p = commands.add_parser("traces", help="what every arm would have committed from the same states, for routers to learn from")
    p.add_argument("--target", default="smollm2-135m", help="hub id, folder or .gguf file")
    p.add_argument("--dflash", default="auto", help="hub id or folder of a DFlash drafter, or none")
    p.add_argument("--eagle3", default="auto", help="hub id or folder of an EAGLE-3 drafter, or none")
    p.add_argument(
        "--prompts", "--data", type=Path, required=True, dest="prompts",
        help="JSON lines with `prompt` or `turns`, text that the drafters never saw; greedy responses there are not decoded anew",
    )  # fmt: skip
    p.add_argument("--out", type=Path, required=True, help="folder of the traces; an interrupted run goes on from it")
    p.add_argument("--arms", help=f"what to draft (default: a chain of at most {LONGEST} of every drafter, and lookup)")
    p.add_argument("--stride", type=int, default=1, help="take every n-th place")
    p.add_argument("--limit", type=int, help="so many prompts, the domains in turn")
    p.add_argument("--max-new-tokens", type=int, default=128)
    p.add_argument("--minutes", type=float, default=float("inf"), help="stop after the prompt in which they are over")
    p.add_argument("--dtype")
    p.add_argument("--device")
    p.add_argument("--threads", type=int)
    p.set_defaults(run=run)


def run(args) -> int:
    from tqdm import tqdm

    from ..demo import read_prompts
    from ..loading import MEASURED_ROWS, default_lengths
    from ..routers.throughput import measure_costs

    if min(args.stride, args.max_new_tokens) < 1 or not args.minutes > 0 or (args.limit is not None and args.limit < 1):
        raise ValueError("--stride, --max-new-tokens, --minutes and --limit must be positive")
    if args.threads:
        torch.set_num_threads(args.threads)
    until = time.monotonic() + 60 * args.minutes
    paths = {kind: None if getattr(args, kind) == "none" else getattr(args, kind) for kind in ("dflash", "eagle3")}
    decoder = WhiFlashDecoder.from_pretrained(args.target, **paths, device=args.device, dtype=args.dtype)
    drafters, target = decoder.drafters, decoder.target
    lengths = default_lengths(drafters, target.device)
    longest = {kind: min(LONGEST, d.max_draft) for kind, d in drafters.items()} | {"lookup": lengths["lookup"]}
    arms = [parse_arm(text, longest) for text in (args.arms.split(",") if args.arms else longest)]
    for arm in arms:
        check_arm(drafters, arm)
        if arm.kind == "ar":
            raise ValueError("--arms: ar drafts nothing, its acceptance length is known")
    if len({arm.kind for arm in arms}) < len(arms):
        raise ValueError("--arms: name every kind once, at its longest; a chain's shorter lengths follow from it")
    prompts, answers = spread(read_prompts(args.prompts), args.limit), greedy_answers(args.prompts)
    settings = {
        "target": args.target, "dflash": args.dflash, "eagle3": args.eagle3, "dtype": str(target.dtype),
        "hidden_size": target.config.hidden_size, "arms": [str(arm) for arm in arms], "stride": args.stride,
        "max_new_tokens": args.max_new_tokens, "lengths": lengths,
    }  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / SETTINGS
    if file.exists() and json.loads(file.read_text()) != settings:
        raise ValueError(f"{args.out} holds traces with other settings ({file.name}): give another folder, or the same options")
    file.write_text(json.dumps(settings, indent=1) + "\n")
    left = [(domain, prompt) for domain, prompt in prompts if not trace_path(args.out, prompt).exists()]
    with tqdm(total=len(prompts), initial=len(prompts) - len(left), desc="traces", unit="prompt", dynamic_ncols=True) as bar:
        for domain, prompt in left:
            if time.monotonic() > until:
                break
            ids = decoder._encode(prompt, {})
            if prompt in answers:
                end = decoder.eos_token_ids[:1] if answers[prompt].get("finished") else []
                answer = decoder.tokenizer(answers[prompt]["response"], add_special_tokens=False)["input_ids"] + end
                text = ids + answer[: args.max_new_tokens]
            else:
                text = decoder.generate(ids, max_new_tokens=args.max_new_tokens, reuse_prefix=False).sequences[0].tolist()
            save_trace(trace(decoder, text, len(ids), arms, args.stride, domain), trace_path(args.out, prompt))
            bar.update()
    if not (args.out / COSTS).exists():
        rows = min([MEASURED_ROWS, *(d.cache.rows for d in drafters.values())])
        measure_costs(target, drafters, cost_arms(arms), rows).save(args.out / COSTS)
    done = sum(trace_path(args.out, prompt).exists() for _, prompt in prompts)
    print(f"{args.out} holds {done} of {len(prompts)} prompts")
    return 0


def cost_arms(arms: list[Arm]) -> tuple[Arm, ...]:
    """Plain decoding, every length of the chains, and the other arms as they are."""
    found = [Arm("ar")]
    for arm in arms:
        found += [Arm(arm.kind, n) for n in range(1, arm.size + 1)] if arm.kind in ("dflash", "eagle3") else [arm]
    return tuple(found)
