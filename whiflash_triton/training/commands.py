"""`whiflash train`: data, features, dflash, eagle3, calibrate, traces, router, export, tiny."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch

from ..checkpoints import DFlashConfig, Eagle3Config, TargetShape, load_dflash, load_eagle3, save_dflash, save_eagle3
from ..loading import load_drafters, load_tokenizer, pick_device, resolve_source
from ..target import Target
from ..weights import load_target
from . import router_training, selfgen, traces
from .calibrate import calibration_of, collect
from .data import ROWS_PER_SHARD, Row, read_rows, shard_path, write_features
from .drafters import RECIPES, dflash_taps, draft_vocabulary, eagle3_taps, stored_ids, train
from .models import Params
from .packs import list_shards
from .tau import held_out_tau


def add_train_parser(subparsers) -> None:
    """Add `train` and its subcommands; each sets `run`, a function of the parsed arguments that returns an exit code."""
    commands = subparsers.add_parser("train", help="distil drafters and routers from text the target wrote").add_subparsers(
        dest="what", required=True
    )

    for module in (selfgen, traces, router_training):
        module.add_parser(commands)

    features = commands.add_parser(
        "features", help="cache the target's features of a text (train does it too when they are missing)"
    )
    _common(features)
    features.add_argument("--part", default="1/1", metavar="I/N", help="this process's share, to run several side by side")
    features.set_defaults(run=run_features)

    for kind in ("dflash", "eagle3"):
        p = commands.add_parser(kind, help=f"train a {kind} drafter; an interrupted run goes on from --out")
        _common(p)
        p.add_argument("--out", type=Path, required=True, help="folder of the run: state, log.jsonl, drafter/")
        length = p.add_mutually_exclusive_group(required=True)
        length.add_argument("--steps", type=int)
        length.add_argument("--minutes", type=float)
        p.add_argument("--lr", type=float, default=RECIPES[kind].lr)
        p.add_argument("--weight-decay", type=float, default=RECIPES[kind].weight_decay)
        p.add_argument("--pack-tokens", type=int, default=RECIPES[kind].tokens)
        p.add_argument("--draft-vocab", type=int, default=12288, help="rows of the drafter's head, the most frequent tokens")
        p.add_argument("--init", type=Path, help="drafter folder to start from instead of the target's layers")
        p.add_argument("--eval-minutes", type=float, default=15.0)
        p.add_argument("--eval-prompts", type=int, default=12)
        p.add_argument("--seed", type=int, default=0)
        if kind == "dflash":
            p.add_argument("--layers", type=int, default=3)
            p.add_argument("--block-size", type=int, default=8)
            p.add_argument("--mask-token", type=int, help="an embedding row the text never uses (default: the last special token)")
            p.add_argument("--anchors", type=int, default=RECIPES[kind].anchors, help="blocks a pack")
        else:
            p.add_argument("--unroll", type=int, default=RECIPES[kind].unroll, help="draft steps unrolled in training")
        p.set_defaults(run=run_train, kind=kind)

    p = commands.add_parser("calibrate", help="measure how far the drafters' probabilities can be trusted, for mixed trees")
    p.add_argument("--target", default="smollm2-135m", help="hub id, folder or .gguf file")
    p.add_argument(
        "--data", type=Path, required=True, help="the JSON lines the drafters were trained on; only held-out rows are read"
    )
    p.add_argument(
        "--out", type=Path, required=True, help="calibration.json beside the drafters' folders is where they look for it"
    )
    for kind in ("dflash", "eagle3"):
        p.add_argument(f"--{kind}", type=Path, help="drafter folder (default: the shipped one of the target)")
    p.add_argument("--max-len", type=int, default=512, help="as in training: it decides which rows were held out")
    p.add_argument("--max-rows", type=int, default=ROWS_PER_SHARD, help=f"of the {ROWS_PER_SHARD} held-out rows")
    p.add_argument("--tokens", type=int, default=256, help="read only so many of a row")
    p.add_argument("--positions", type=int, default=24, help="places of a row to draft at")
    p.add_argument("--nodes", type=int, default=32, help="drafted nodes a place")
    p.add_argument("--device")
    p.add_argument("--threads", type=int)
    p.set_defaults(run=run_calibrate)

    export = commands.add_parser("export", help="rewrite a drafter folder in the published format")
    export.add_argument("kind", choices=("dflash", "eagle3"))
    export.add_argument("folder", type=Path)
    export.add_argument("out", type=Path)
    export.add_argument("--target", default="smollm2-135m")
    export.add_argument("--int8", action="store_true", help="matrices as int8 with a scale a row (only this package reads that)")
    export.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    export.set_defaults(run=run_export)

    tiny = commands.add_parser("tiny", help="train the tiny target and its two drafters that the tests use")
    tiny.add_argument("--out", type=Path, required=True)
    tiny.add_argument("--threads", type=int)
    tiny.set_defaults(run=run_tiny)


def _common(p: argparse.ArgumentParser) -> None:
    p.add_argument("--target", default="smollm2-135m", help="hub id, folder or .gguf file")
    p.add_argument("--data", type=Path, required=True, help="JSON lines with prompt and response, written by the target")
    p.add_argument("--features", type=Path, required=True, help="folder of the feature cache (about 8 KB a token for the default)")
    p.add_argument("--max-len", type=int, default=512)
    p.add_argument("--max-rows", type=int, help="use only so many rows")
    p.add_argument("--device")
    p.add_argument("--threads", type=int)


def _target(args) -> tuple[Target, object, list[Row], int]:
    if args.threads:
        torch.set_num_threads(args.threads)
    device = pick_device(args.device)
    source, _ = resolve_source(args.target)
    target, config = load_target(source, device, torch.float32)
    tokenizer = load_tokenizer(source)
    if tokenizer is None:
        raise ValueError(f"{args.target} has no tokenizer: training reads text")
    eos = config.eos_token_id
    end = eos[0] if isinstance(eos, list) else eos
    if end is None:
        raise ValueError(f"{args.target} names no eos_token_id: set it in its config.json")
    rows = read_rows(args.data, tokenizer, end, args.max_len)[: args.max_rows]
    return target, tokenizer, rows, end


def _shared_taps(num_layers: int) -> tuple[int, ...]:
    return tuple(sorted({*eagle3_taps(num_layers), *dflash_taps(num_layers)}))


def _bar(total: int, title: str, unit: str):
    from tqdm import tqdm

    return tqdm(total=total, desc=title, unit=unit, dynamic_ncols=True)


def cache_features(target: Target, rows: list[Row], folder: Path, part: tuple[int, int] = (1, 1)) -> None:
    """Write the missing shards, this process's share of them."""
    shards = range(part[0] - 1, (len(rows) + ROWS_PER_SHARD - 1) // ROWS_PER_SHARD, part[1])
    left = [i for i in shards if not shard_path(folder, i).exists()]
    tokens = sum(len(r.tokens) for i in left for r in rows[i * ROWS_PER_SHARD : (i + 1) * ROWS_PER_SHARD])
    extra = [
        p
        for p in folder.glob("shard-*.safetensors")
        if int(p.stem.split("-")[1]) >= (len(rows) + ROWS_PER_SHARD - 1) // ROWS_PER_SHARD
    ]
    if extra:
        raise ValueError(f"{folder} holds more shards than this text has ({extra[0].name}): give another --features folder")
    with _bar(tokens, "features", "tok") as bar:
        write_features(target, rows, folder, _shared_taps(target.config.num_layers), shards, bar.update)


def run_features(args) -> int:
    index, _, count = args.part.partition("/")
    if not (index.isdigit() and count.isdigit() and 1 <= int(index) <= int(count)):
        raise ValueError(f"--part {args.part}: give I/N with 1 <= I <= N, as in 1/2")
    target, _, rows, _ = _target(args)
    cache_features(target, rows, args.features, (int(index), int(count)))
    return 0


def drafter_config(kind: str, target: Target, vocab: int, layers: int = 3, block_size: int = 8, mask: int = 0):
    """The shape a new drafter gets: the target's own sizes, published default taps."""
    t = target.config
    if kind == "dflash" and not 1 <= layers <= t.num_layers:
        raise ValueError(f"{layers} draft layers: they start from the target's own, so give 1 to {t.num_layers}")
    common = dict(
        hidden_size=t.hidden_size,
        intermediate_size=t.intermediate_size,
        num_heads=t.num_heads,
        num_kv_heads=t.num_kv_heads,
        head_dim=t.head_dim,
        rms_norm_eps=t.rms_norm_eps,
        rope=t.rope,
        vocab_size=t.vocab_size,
        attention_bias=False,
        max_position_embeddings=t.max_position_embeddings,
        draft_vocab_size=vocab,
    )
    if kind == "eagle3":
        flags = dict.fromkeys(("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "qk_norm"), False)
        return Eagle3Config(**common, target_hidden_size=t.hidden_size, taps=eagle3_taps(t.num_layers), **flags)
    return DFlashConfig(
        **common, num_layers=layers, block_size=block_size, mask_token_id=mask,
        taps=dflash_taps(t.num_layers), num_target_layers=t.num_layers,
    )  # fmt: skip


def mask_row(tokenizer, rows: list[Row], vocab: int) -> int:
    """The highest special token that the text never uses, else the table's last row."""
    used = {t for r in rows for t in r.tokens}
    free = [i for i in tokenizer.all_special_ids if i < vocab and i not in used] + [
        i for i, token in getattr(tokenizer, "added_tokens_decoder", {}).items() if token.special and i < vocab and i not in used
    ]
    if not free and vocab - 1 in used:
        raise ValueError("every special token and the last embedding row occur in the text: give --mask-token")
    return max(free) if free else vocab - 1


def save_drafter(kind: str, folder: Path, config, params: Params, ids: torch.Tensor, **options) -> None:
    state = {k: v.detach().cpu() for k, v in params.items() if k != "draft_ids"} | {"draft_ids": ids.cpu()}
    (save_eagle3 if kind == "eagle3" else save_dflash)(folder, config, state, **options)


def run_train(args) -> int:
    kind = args.kind
    if (args.steps if args.minutes is None else args.minutes) <= 0 or args.eval_prompts < 1:
        raise ValueError("--steps, --minutes and --eval-prompts must be positive")
    target, tokenizer, rows, end = _target(args)
    cache_features(target, rows, args.features)
    t = target.config
    ids = stored_ids(args.out)
    if ids is None:
        ids = draft_vocabulary(list_shards(args.features)[1:], args.draft_vocab, t.vocab_size)
    init = None
    if args.init is not None:
        config, ids, init = _start_from(kind, args.init, target, ids)
    else:
        more = {}
        if kind == "dflash":
            mask = args.mask_token if args.mask_token is not None else mask_row(tokenizer, rows, t.vocab_size)
            more = dict(layers=args.layers, block_size=args.block_size, mask=mask)
        config = drafter_config(kind, target, len(ids), **more)
    ids = ids.to(target.device)
    recipe = replace(RECIPES[kind], lr=args.lr, weight_decay=args.weight_decay, tokens=args.pack_tokens, seed=args.seed)
    recipe = replace(recipe, anchors=args.anchors) if kind == "dflash" else replace(recipe, unroll=args.unroll)
    size = config.block_size - 1 if kind == "dflash" else 5

    history = args.init / "training.json" if args.init is not None else None
    earlier = json.loads(history.read_text()) if history is not None and history.exists() else {}

    def export(params: Params, progress: dict) -> None:
        save_drafter(kind, args.out / "drafter", config, params, ids, dtype=torch.float32)
        total = {name: value + earlier.get(name, 0) for name, value in progress.items()}
        (args.out / "drafter" / "training.json").write_text(json.dumps(total | {"seed": args.seed}) + "\n")

    def evaluate(params: Params) -> float:
        return held_out_tau(kind, target, config, params, ids, args.features, end, size, args.eval_prompts, 64)

    with _bar(1000, f"train {kind}", "‰") as bar:

        def progress(done: float, loss: float, hits: list[float]) -> None:
            bar.set_postfix_str(f"loss {loss:.3f} hits {' '.join(f'{h:.2f}' for h in hits[:4])}")
            bar.update(round(1000 * done) - bar.n)

        train(
            kind, target, config, ids, args.features, args.out, args.steps, args.minutes, recipe, init=init, export=export,
            evaluate=evaluate, evaluate_minutes=args.eval_minutes, progress=progress,
        )  # fmt: skip
    return 0


def _start_from(kind: str, folder: Path, target: Target, ids: torch.Tensor) -> tuple[object, torch.Tensor, Params]:
    """Config, draft vocabulary, parameters of a drafter to train on; ValueError for what the training forward does not compute."""
    config, tensors = _load(kind, folder, target)
    ids = tensors.pop("draft_ids", ids)
    flags = ("attention_bias", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "qk_norm")
    on = [name for name in flags if getattr(config, name, False)]
    own = [n for n in tensors if n == "embed_tokens.weight" or (n == "lm_head.weight" and kind == "dflash")]
    outside = sorted(set(config.taps) - set(_shared_taps(target.config.num_layers)))
    if on or own or outside:
        raise ValueError(f"{folder}: training does not support its {', '.join(map(str, on + own + [f'tap {t}' for t in outside]))}")
    config = replace(config, draft_vocab_size=len(ids))
    return config, ids, {k: v.float().to(target.device).requires_grad_() for k, v in tensors.items()}


def _load(kind: str, folder: Path, target: Target):
    t = target.config
    return (load_eagle3 if kind == "eagle3" else load_dflash)(folder, target=TargetShape(t.num_layers, t.hidden_size, t.vocab_size))


def run_calibrate(args) -> int:
    if not 1 <= args.max_rows <= ROWS_PER_SHARD:
        raise ValueError(f"--max-rows {args.max_rows}: 1 to {ROWS_PER_SHARD} rows were held out, and the others were trained on")
    if min(args.positions, args.nodes) < 1 or args.tokens < 2:
        raise ValueError("--positions, --nodes and --tokens must be positive, and two tokens are the least")
    _, assets = resolve_source(args.target)
    paths = {kind: getattr(args, kind) or assets.get(kind) for kind in ("dflash", "eagle3")}
    if not any(paths.values()):
        raise ValueError(f"{args.target} has no shipped drafters: give --dflash or --eagle3, or both")
    target, _, rows, _ = _target(args)
    drafters = load_drafters(target, paths, {}, args.tokens)
    with _bar(len(rows), "calibrate", "row") as bar:
        samples = collect(target, drafters, rows, args.positions, args.nodes, args.tokens, bar.update)
    found = {kind: calibration_of(part) for kind, part in samples.items()}
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    for kind, part in found.items():
        for depth, (slope, offset, count, before, after) in enumerate(zip(*part.values(), strict=True), 1):
            change = f"slope {slope:.3f} offset {offset:+.3f}, log-loss {before:.4f} -> {after:.4f}"
            print(f"{kind} depth {depth}: {change} ({count} nodes)")
    print(f"wrote {args.out}")
    return 0


def run_export(args) -> int:
    source, _ = resolve_source(args.target)
    target, _ = load_target(source, torch.device("cpu"), torch.float32)
    config, tensors = _load(args.kind, args.folder, target)
    writer = save_eagle3 if args.kind == "eagle3" else save_dflash
    writer(args.out, config, tensors, int8=args.int8, dtype=getattr(torch, args.dtype))
    progress = args.folder / "training.json"
    if progress.exists():
        (args.out / "training.json").write_text(progress.read_text())
    print(f"wrote {args.out}")
    return 0


def run_tiny(args) -> int:
    from .tiny import make_tiny

    if args.threads:
        torch.set_num_threads(args.threads)
    make_tiny(args.out)
    return 0
