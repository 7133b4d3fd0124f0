"""Distil a DFlash or an EAGLE-3 drafter from text the target wrote: losses, schedule, checkpoints, resumption."""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file

from ..checkpoints import DFlashConfig, Eagle3Config, dflash_default_taps
from ..layers import rms_norm
from ..target import Target
from .data import Shard
from .models import Pack, Params, Rope, dflash_forward, eagle3_forward, init_dflash, init_eagle3
from .packs import list_shards, packs


@dataclass
class Recipe:
    """Defaults per kind in RECIPES; see the README for what they were measured to do."""

    lr: float
    weight_decay: float
    tokens: int = 1024  # a pack
    anchors: int = 64  # DFlash blocks a pack
    slot_decay: float = 3.0  # DFlash: slot k weighs exp(-(k - 1) / slot_decay)
    unroll: int = 3  # EAGLE-3 steps of training-time test
    later_share: float = 0.5  # EAGLE-3: slots of the later steps whose head and loss are computed (the head is most of the cost)
    step_decay: float = 0.8
    warmup: float = 0.03
    floor: float = 0.02
    clip: float = 1.0
    seed: int = 0


RECIPES = {"eagle3": Recipe(lr=2.5e-3, weight_decay=0.05), "dflash": Recipe(lr=1.2e-3, weight_decay=0.02)}


def eagle3_taps(num_layers: int) -> tuple[int, ...]:
    """The published default: hidden_states 2, N // 2, N - 3 (EAGLE-3)."""
    return 2, num_layers // 2, num_layers - 3


def dflash_taps(num_layers: int, points: int = 5) -> tuple[int, ...]:
    """The published default, duplicates of very small targets dropped (DFlash)."""
    return tuple(dict.fromkeys(dflash_default_taps(num_layers, points)))


def draft_vocabulary(shards: list[Path], size: int, vocab: int) -> torch.Tensor:
    """int64 [size], ascending: the ids most frequent in the responses; ties and the rest by lowest id."""
    counts: Counter = Counter()
    for path in shards:
        shard = Shard(path)
        for (first, last), prompt in zip(shard.spans, shard.prompt_lens, strict=True):
            counts.update(shard.tokens[first + prompt : last].tolist())
    ranked = sorted(range(vocab), key=lambda i: (-counts[i], i))
    return torch.tensor(sorted(ranked[: min(size, vocab)]))


def eagle3_loss(p: Params, c: Eagle3Config, target: Target, ids: torch.Tensor, rope: Rope, pack: Pack, r: Recipe, rng):
    """Soft cross-entropy against the target's softmax on the draft vocabulary; rows whose argmax lies outside are dropped."""
    inside = torch.zeros(target.config.vocab_size, dtype=torch.bool, device=ids.device)
    inside[ids] = True
    head = target.head[ids].float()
    total, weight, hits = 0.0, 0.0, []
    teacher: dict[int, torch.Tensor] = {}
    for step, (states, slots) in enumerate(eagle3_forward(p, c, target.embed, rope, pack, r.unroll)):
        keep = inside[pack.choices[slots + 1]]
        if step and r.later_share < 1:
            keep &= (torch.rand(len(slots), generator=rng) < r.later_share).to(keep.device)
        states, slots = states[keep], slots[keep]
        if step == 0:
            with torch.no_grad():
                soft = F.linear(pack.final[slots + 1], head).softmax(-1)
            teacher = {"rows": torch.full_like(pack.tokens, -1), "soft": soft}
            teacher["rows"][slots] = torch.arange(len(slots), device=slots.device)
        soft = teacher["soft"][teacher["rows"][slots]]
        logits = F.linear(states, p["lm_head.weight"])
        loss = (logits.logsumexp(-1) - (soft * logits).sum(-1)).mean()
        total, weight = total + r.step_decay**step * loss, weight + r.step_decay**step
        hits.append((ids[logits.detach().argmax(-1)] == pack.choices[slots + 1]).float().mean().item())
    return total / weight, hits


def dflash_loss(p: Params, c: DFlashConfig, target: Target, ids: torch.Tensor, rope: Rope, pack: Pack, r: Recipe, rng):
    """Half hard, half soft cross-entropy on the draft vocabulary; a slot counts while the text follows the target's argmax."""
    n, size = len(pack.tokens), c.block_size
    possible = (pack.learn & (pack.position > 0)).nonzero()[:, 0]
    anchors = possible[torch.randperm(len(possible), generator=rng)[: r.anchors].to(possible.device)]
    states = dflash_forward(p, c, target.embed, rope, pack, anchors)[:, 1:]  # [A, B - 1, H]
    slot = torch.arange(size - 1, device=anchors.device)
    before = anchors[:, None] + slot  # slot k = j + 1 is predicted from row anchor + j
    row = before.clamp(max=n - 1)
    same = (before < n) & (pack.segment[row] == pack.segment[anchors][:, None])
    follows = torch.ones_like(same)
    earlier = (row[:, 1:] - 1).clamp(min=0)
    follows[:, 1:] = (pack.tokens[row[:, 1:]] == pack.choices[earlier]).cumprod(-1).bool()
    lookup = torch.full((target.config.vocab_size,), -1, device=ids.device)
    lookup[ids] = torch.arange(len(ids), device=ids.device)
    label = lookup[pack.choices[row]]
    counts = same & follows & (label >= 0)
    weight = torch.exp(-slot / r.slot_decay).expand_as(counts)[counts]
    head = target.head[ids].float()
    logits = F.linear(states[counts], head)
    with torch.no_grad():
        soft = F.linear(pack.final[row[counts]], head).softmax(-1)
    lse = logits.logsumexp(-1)
    hard = lse - logits.gather(1, label[counts][:, None])[:, 0]
    loss = 0.5 * hard + 0.5 * (lse - (soft * logits).sum(-1))
    hit = torch.zeros_like(counts)
    hit[counts] = logits.detach().argmax(-1) == label[counts]
    hits = [(hit[:, j].sum() / counts[:, j].sum().clamp(min=1)).item() for j in range(size - 1)]
    return (loss * weight).sum() / weight.sum(), hits


def qk_sizes(target: Target, shard: Shard, layers: int) -> list[tuple[float, float]]:
    """(rms of q, rms of k) per head row of the target's last `layers` layers, over one row of text."""
    from ..tree import chain

    c = target.config
    first, last = shard.spans[0]
    tokens = shard.tokens[first:last][None].to(target.device)
    cache = target.new_cache(tokens.shape[1], 1)
    taps = tuple(range(c.num_layers - layers, c.num_layers))
    with torch.no_grad():
        _, features = target.forward(chain(tokens), cache, taps, prefill=True)
        sizes = []
        for x, i in zip(features, taps, strict=True):
            layer = target.layers[i]
            qkv = layer.qkv(rms_norm(x, layer.input_norm, c.rms_norm_eps)).view(-1, c.num_heads + 2 * c.num_kv_heads, c.head_dim)
            q, k = qkv[:, : c.num_heads], qkv[:, c.num_heads : c.num_heads + c.num_kv_heads]
            sizes.append((q.float().pow(2).mean().sqrt().item(), k.float().pow(2).mean().sqrt().item()))
    return sizes


def scheduled(progress: float, r: Recipe) -> float:
    """Learning rate at progress 0..1: linear warm-up, cosine to the floor."""
    if progress < r.warmup:
        return r.lr * max(progress, 1e-3) / r.warmup
    x = min(1.0, (progress - r.warmup) / (1 - r.warmup))
    return r.lr * (r.floor + (1 - r.floor) * 0.5 * (1 + math.cos(math.pi * x)))


def train(
    kind: str,
    target: Target,
    config: DFlashConfig | Eagle3Config,
    ids: torch.Tensor,
    features: Path,
    out: Path,
    steps: int | None,
    minutes: float | None,
    recipe: Recipe,
    init: Params | None = None,
    export: Callable[[Params, dict], None] | None = None,
    evaluate: Callable[[Params], float] | None = None,
    every_minutes: float = 5.0,
    evaluate_minutes: float = 15.0,
    progress=None,
) -> Params:
    """Train until `steps` or `minutes` (whichever is given ends the cosine). Interrupted runs resume from out/state.safetensors.

    The first shard is held out. `export(params, progress)` is called with every checkpoint, `evaluate(params) -> tau` at intervals.
    """
    if (steps is None) == (minutes is None):
        raise ValueError("give either steps or minutes")
    out.mkdir(parents=True, exist_ok=True)
    state_file = out / "state.safetensors"
    step, spent, seen = 0, 0.0, 0
    params = init
    if state_file.exists():
        params, moments, meta = _load_state(state_file, target.device)
        if meta["config"] != _plain(config) or not torch.equal(moments["draft_ids"], ids.to(target.device)):
            raise ValueError(f"{state_file} belongs to a run with other settings or draft vocabulary: give another --out")
        step, spent, seen = meta["step"], meta["seconds"], meta["tokens"]
    elif params is None:
        held = Shard(list_shards(features)[0])
        params = (
            init_eagle3(config, target, ids, recipe.seed)
            if kind == "eagle3"
            else init_dflash(config, target, qk_sizes(target, held, config.num_layers), recipe.seed)
        )
    params = dict(sorted(params.items()))  # one order, so that a resumed run sums gradient norms alike
    decay = [w for w in params.values() if w.dim() > 1]
    rest = [w for w in params.values() if w.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": recipe.weight_decay}, {"params": rest, "weight_decay": 0.0}],
        lr=recipe.lr, betas=(0.9, 0.95),
    )  # fmt: skip
    if state_file.exists():
        _restore(optimizer, params, moments, step)
    rope = Rope(config, recipe.tokens + config.block_size if kind == "dflash" else recipe.tokens, torch.float32, target.device)
    rng = torch.Generator()
    log, begin = (out / "log.jsonl").open("a"), time.monotonic() - spent
    saved = evaluated = time.monotonic()
    running: list[tuple[float, list[float]]] = []
    for _, pack in packs(features, config.taps, recipe.tokens, recipe.seed, start=step):
        pack = pack.to(target.device)
        done = step / steps if steps else (time.monotonic() - begin) / (60 * minutes)
        if done >= 1:
            break
        rng.manual_seed(recipe.seed * 1_000_003 + step)  # a resumed run draws what the uninterrupted one would
        for group in optimizer.param_groups:
            group["lr"] = scheduled(done, recipe)
        if kind == "eagle3":
            loss, hits = eagle3_loss(params, config, target, ids, rope, pack, recipe, rng)
        else:
            loss, hits = dflash_loss(params, config, target, ids, rope, pack, recipe, rng)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params.values(), recipe.clip)
        optimizer.step()
        step, seen = step + 1, seen + int((pack.segment >= 0).sum())
        running.append((loss.item(), hits))
        if not math.isfinite(running[-1][0]):
            raise FloatingPointError(f"loss is {running[-1][0]} at step {step}: lower the learning rate and resume")
        if len(running) == 20:
            mean = [sum(h[i] for _, h in running) / 20 for i in range(len(hits))]
            record = {
                "step": step,
                "tokens": seen,
                "seconds": round(time.monotonic() - begin, 1),
                "loss": sum(x for x, _ in running) / 20,
            }
            log.write(json.dumps(record | {"hits": [round(m, 4) for m in mean]}) + "\n")
            log.flush()
            running.clear()
        if progress is not None:
            progress(done, loss.item(), hits)
        now = time.monotonic()
        if now - saved > 60 * every_minutes:
            _checkpoint(state_file, params, optimizer, config, ids, {"step": step, "seconds": now - begin, "tokens": seen}, export)
            saved = now
        if evaluate is not None and now - evaluated > 60 * evaluate_minutes:
            log.write(json.dumps({"step": step, "tokens": seen, "tau": evaluate(params)}) + "\n")
            log.flush()
            evaluated = time.monotonic()
    _checkpoint(
        state_file, params, optimizer, config, ids, {"step": step, "seconds": time.monotonic() - begin, "tokens": seen}, export
    )
    if evaluate is not None:
        log.write(json.dumps({"step": step, "tokens": seen, "tau": evaluate(params)}) + "\n")
    log.close()
    return params


def _plain(config) -> dict:
    """The config as JSON keeps it."""
    return json.loads(json.dumps(asdict(config)))


def stored_ids(out: Path) -> torch.Tensor | None:
    """The draft vocabulary of an interrupted run, None where there is none."""
    path = out / "state.safetensors"
    if not path.exists():
        return None
    with safe_open(path, framework="pt") as file:
        return file.get_tensor("draft_ids")


def _checkpoint(path: Path, params: Params, optimizer, config, ids: torch.Tensor, meta: dict, export) -> None:
    tensors = {f"param.{k}": v.detach() for k, v in params.items()} | {"draft_ids": ids}
    for name, w in params.items():
        if w in optimizer.state:
            tensors[f"first.{name}"] = optimizer.state[w]["exp_avg"]
            tensors[f"second.{name}"] = optimizer.state[w]["exp_avg_sq"]
    partial = path.with_suffix(".partial")
    save_file(
        {k: v.contiguous() for k, v in tensors.items()},
        partial,
        metadata={"progress": json.dumps(meta | {"config": _plain(config)})},
    )
    os.replace(partial, path)
    if export is not None:
        export(params, meta)


def _load_state(path: Path, device: torch.device) -> tuple[Params, dict[str, torch.Tensor], dict]:
    with safe_open(path, framework="pt") as file:
        meta = json.loads(file.metadata()["progress"])
        tensors = {k: file.get_tensor(k).to(device) for k in file.keys()}
    params = {k.removeprefix("param."): v.clone().requires_grad_() for k, v in tensors.items() if k.startswith("param.")}
    return params, tensors, meta


def _restore(optimizer, params: Params, tensors: dict[str, torch.Tensor], step: int) -> None:
    for name, w in params.items():
        if f"first.{name}" in tensors:
            optimizer.state[w] = {
                "step": torch.tensor(float(step)),
                "exp_avg": tensors[f"first.{name}"].clone(),
                "exp_avg_sq": tensors[f"second.{name}"].clone(),
            }
