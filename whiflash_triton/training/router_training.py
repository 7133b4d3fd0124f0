"""Train the neural router, or the acceptance head, on same-state traces; report what it is worth on prompts it never saw.

Both are two-layer MLPs on the target's final hidden state. The router predicts the gain in acceptance length, diffusion minus
autoregressive (MSE; WhiFlash, arXiv 2606.07710); the head predicts slot by slot whether a draft is taken (BCE).
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from ..arms import AUTOREGRESSIVE, DIFFUSION, Arm, parse_arm
from ..checkpoints import RouterConfig, save_router
from ..routers.acceptance import AcceptanceHead
from ..routers.throughput import Costs
from . import simulation as sim
from .traces import COSTS, Trace, cost_arms, read_traces

SHARES = 0.6, 0.15  # of the prompts: trained on, stopped by; the rest is reported on
CANDIDATES = 41  # thresholds tried, quantiles of the scores
BINS = 10


@dataclass
class Samples:
    """x float32 [n, H]; y and weight float32 [n, O]: what each output should be, and whether this place tells."""

    x: torch.Tensor
    y: torch.Tensor
    weight: torch.Tensor


@dataclass(frozen=True)
class Recipe:
    width: int = 64
    lr: float = 1e-3
    weight_decay: float = 0.1
    epochs: int = 60
    patience: int = 6  # epochs without a lower loss on the stopping prompts
    batch: int = 512
    seed: int = 0


Weights = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # w1 [M, H], b1 [M], w2 [O, M], b2 [O]


def mlp(w: Weights, x: torch.Tensor) -> torch.Tensor:
    """[n, H] -> [n, O]."""
    return F.linear(F.gelu(F.linear(x, w[0], w[1])), w[2], w[3])


def fit(train: Samples, stop: Samples, loss: Callable, start: torch.Tensor, r: Recipe, progress=lambda loss: None) -> Weights:
    """AdamW until the loss on `stop` has not fallen for `patience` epochs; the best weights, the input's scale folded in.

    loss(outputs, y, reduction="none") a value; start [O]: the outputs' biases at first.
    """
    g = torch.Generator().manual_seed(r.seed)
    mean, scale = train.x.mean(0), train.x.std(0).clamp(min=1e-6)
    hidden, outputs = train.x.shape[1], train.y.shape[1]
    w1, w2 = (
        torch.randn(r.width, hidden, generator=g) * hidden**-0.5,
        torch.randn(outputs, r.width, generator=g) * 0.1 * r.width**-0.5,
    )
    weights = [w.requires_grad_() for w in (w1, torch.zeros(r.width), w2, start.clone())]
    groups = [{"params": weights[::2], "weight_decay": r.weight_decay}, {"params": weights[1::2], "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=r.lr)

    def value(s: Samples, rows: slice | torch.Tensor) -> torch.Tensor:
        out = mlp(weights, (s.x[rows] - mean) / scale)
        return (loss(out, s.y[rows], reduction="none") * s.weight[rows]).sum() / s.weight[rows].sum().clamp(min=1)

    best, kept, since = math.inf, None, 0
    for _ in range(r.epochs):
        for rows in torch.randperm(len(train.x), generator=g).split(r.batch):
            optimiser.zero_grad()
            value(train, rows).backward()
            optimiser.step()
        with torch.no_grad():
            now = float(value(stop, slice(None)))
        progress(now)
        since += 1
        if now < best:
            best, kept, since = now, [w.detach().clone() for w in weights], 0
        if since == r.patience:
            break
    if kept is None:
        raise RuntimeError("the loss was never a number: look for NaN in the traces, or lower --lr")
    return kept[0] / scale, kept[1] - kept[0] @ (mean / scale), kept[2], kept[3]


def split_prompts(traces: list[Trace], seed: int) -> tuple[list[Trace], list[Trace], list[Trace]]:
    """Trained on, stopped by, reported on: whole prompts, so that no place has a neighbour on the other side."""
    if len(traces) < 8:
        raise ValueError(f"{len(traces)} texts with traces: at least 8 are needed to hold some out")
    order = list(traces)
    random.Random(seed).shuffle(order)
    first, second = (round(len(order) * share) for share in (SHARES[0], sum(SHARES)))
    return order[:first], order[first:second], order[second:]


def column(settings: dict, kind: str) -> int:
    kinds = [parse_arm(text).kind for text in settings["arms"]]
    if kind not in kinds:
        raise ValueError(f"these traces have no {kind} arm, only {', '.join(settings['arms'])}: record them with --arms")
    return kinds.index(kind)


def gain_samples(traces: list[Trace], settings: dict, pair: tuple[Arm, Arm]) -> Samples:
    """Gain in acceptance length of pair[0] over pair[1]."""
    taken = [torch.cat([t.accepted[:, column(settings, arm.kind)] for t in traces]).clamp(max=arm.size) for arm in pair]
    gain = (taken[0] - taken[1]).float()[:, None]
    return Samples(torch.cat([t.hidden.float() for t in traces]), gain, torch.ones_like(gain))


def slot_samples(traces: list[Trace], settings: dict, slots: dict[str, int]) -> Samples:
    """Slot j of an arm: was draft j right; it tells where the drafts before it were."""
    ys, weights = [], []
    for kind, count in slots.items():
        accepted = torch.cat([t.accepted[:, column(settings, kind)] for t in traces])[:, None]
        j = torch.arange(count)
        ys.append(accepted > j)
        weights.append(accepted >= j)
    return Samples(torch.cat([t.hidden.float() for t in traces]), torch.cat(ys, 1).float(), torch.cat(weights, 1).float())


def r_squared(predicted: torch.Tensor, truth: torch.Tensor) -> float:
    return float(1 - (predicted - truth).square().sum() / (truth - truth.mean()).square().sum())


def auc(scores: torch.Tensor, positive: torch.Tensor) -> float:
    """Chance that a positive scores above a negative, ties half; NaN without one of either. scores [n], positive bool [n]."""
    below, above = scores[~positive].sort().values, scores[positive]
    rank = torch.searchsorted(below, above) + torch.searchsorted(below, above, right=True)
    return float(rank.double().mean() / (2 * len(below))) if len(below) and len(above) else math.nan


def calibration_error(predicted: torch.Tensor, hit: torch.Tensor) -> float:
    """Mean distance between prediction and share of hits over BINS groups of equal size, in order of the prediction."""
    order = predicted.argsort(stable=True)
    groups = list(zip(predicted[order].chunk(BINS), hit[order].chunk(BINS), strict=True))
    return sum(float((p.mean() - h.mean()).abs()) * len(p) for p, h in groups) / len(predicted)


def best_threshold(walks: list[sim.Walk], scores: list[torch.Tensor], above: Arm, below: Arm) -> float:
    """Of CANDIDATES quantiles of the scores, one arm alone among them, that of most tokens per second."""
    every = torch.cat(scores)
    candidates = [float(every.min()) - 1, *every.quantile(torch.linspace(0, 1, CANDIDATES, dtype=every.dtype)).tolist()]
    return max(candidates, key=lambda t: sim.per_second(sim.speeds(walks, sim.split_by(scores, t, above, below))))


def by_trace(values: torch.Tensor, traces: list[Trace]) -> list[torch.Tensor]:
    return list(values.split([len(t.place) for t in traces]))


def train_router(traces: list[Trace], settings: dict, costs: Costs, pair: tuple[Arm, Arm], r: Recipe, progress=lambda loss: None):
    """(RouterConfig, tensors as load_router gives them, report)."""
    parts = split_prompts(traces, r.seed)
    train, stop, test = (gain_samples(part, settings, pair) for part in parts)
    w = fit(train, stop, F.mse_loss, train.y.mean(0), r, progress)
    tuned, seen = (sim.make_walks(part, settings, costs) for part in (parts[0], parts[2]))
    with torch.inference_mode():
        scores, held_out = (by_trace(mlp(w, s.x)[:, 0], part) for s, part in ((train, parts[0]), (test, parts[2])))
    threshold = best_threshold(tuned, scores, *pair)
    runs = baselines(tuned, seen, pair)
    runs["neural"] = sim.speeds(seen, sim.split_by(held_out, threshold, *pair))
    predicted, gain = torch.cat(held_out), test.y[:, 0]
    differ = gain != 0
    report = head_of_report(parts) | {
        "pair": [str(arm) for arm in pair], "threshold": threshold, "r2": r_squared(predicted, gain),
        "auc": auc(predicted[differ], gain[differ] > 0),
        "diffusion_better": float((gain > 0).float().mean()), "autoregressive_better": float((gain < 0).float().mean()),
    } | speed_report(runs, "neural", tuned, seen, pair)  # fmt: skip
    config = RouterConfig(settings["hidden_size"], r.width, threshold, "diffusion", True)
    return config, {"w1": w[0], "b1": w[1], "w2": w[2][0], "b2": w[3]}, report


def train_heads(traces: list[Trace], settings: dict, costs: Costs, pair: tuple[Arm, Arm], r: Recipe, progress=lambda loss: None):
    """(AcceptanceHead, report)."""
    parts = split_prompts(traces, r.seed)
    chains = [parse_arm(text) for text in settings["arms"] if parse_arm(text).kind in ("dflash", "eagle3")]
    slots = {arm.kind: arm.size for arm in chains}
    if not slots:
        raise ValueError(f"these traces have no chain of a drafter, only {', '.join(settings['arms'])}")
    train, stop, test = (slot_samples(part, settings, slots) for part in parts)
    rate = ((train.y * train.weight).sum(0) + 0.5) / (train.weight.sum(0) + 1)
    w = fit(train, stop, F.binary_cross_entropy_with_logits, rate.logit(), r, progress)
    head = AcceptanceHead(slots, *w)
    tuned, seen = (sim.make_walks(part, settings, costs) for part in (parts[0], parts[2]))
    with torch.inference_mode():
        reach, logits = head.expected(test.x), mlp(w, test.x)
        each = [head.expected(t.hidden) for t in parts[2]]
    runs = baselines(tuned, seen, pair)
    runs["heads"] = sim.speeds(seen, [sim.most_expected(walk, one) for walk, one in zip(seen, each, strict=True)])
    calibration, first = {}, 0
    for kind, count in slots.items():
        accepted = sum(test.y[:, first + j] * test.weight[:, first + j] for j in range(count))
        length = reach[kind].sum(-1)
        rows = []
        for j in range(first, first + count):
            told = test.weight[:, j] > 0
            if told.any():
                p, hit = logits[told, j].sigmoid(), test.y[told, j]
                rows.append({
                    "places": int(told.sum()), "predicted": float(p.mean()), "right": float(hit.mean()),
                    "log_loss": float(F.binary_cross_entropy(p, hit)),
                    "log_loss_of_the_rate": float(F.binary_cross_entropy(rate[j].expand_as(hit), hit)),
                    "calibration_error": calibration_error(p, hit),
                })  # fmt: skip
        calibration[kind] = {
            "accepted_predicted": float(length.mean()), "accepted": float(accepted.mean()),
            "r2_of_accepted": r_squared(length, accepted), "slots": rows,
        }  # fmt: skip
        first += count
    report = head_of_report(parts) | {"slots": slots, "calibration": calibration} | speed_report(runs, "heads", tuned, seen, pair)
    return head, report


def head_of_report(parts) -> dict:
    names = ("trained_on", "stopped_by", "reported_on")
    return {
        "prompts": {name: len(part) for name, part in zip(names, parts, strict=True)},
        "places": {name: sum(len(t.place) for t in part) for name, part in zip(names, parts, strict=True)},
    }


def baselines(tuned: list[sim.Walk], seen: list[sim.Walk], pair: tuple[Arm, Arm]) -> dict[str, torch.Tensor]:
    """Runs of every arm alone, of the entropy rule at its best threshold, and of the oracles, over the texts of `seen`."""
    arms = list(seen[0].ms)
    runs = {str(arm): sim.speeds(seen, [sim.static(arm)(walk) for walk in seen]) for arm in arms}
    sides = []
    for above, below in (pair, pair[::-1]):
        scores = [walk.trace.entropy for walk in tuned]
        threshold = best_threshold(tuned, scores, above, below)
        sides.append((sim.per_second(sim.speeds(tuned, sim.split_by(scores, threshold, above, below))), threshold, above, below))
    _, threshold, above, below = max(sides, key=lambda side: side[0])
    runs["entropy"] = sim.speeds(seen, sim.split_by([walk.trace.entropy for walk in seen], threshold, above, below))
    for name, among in (("oracle of the pair", list(pair)), ("oracle of all arms", arms)):
        policy = sim.oracle(among)
        runs[name] = sim.speeds(seen, [policy(walk) for walk in seen])
    return runs


def speed_report(
    runs: dict[str, torch.Tensor], name: str, tuned: list[sim.Walk], seen: list[sim.Walk], pair: tuple[Arm, Arm]
) -> dict:
    """Simulated tokens per second; the policy against the static arms that were best on the prompts trained on, and how much of
    the oracle's gain over them it gets."""
    speed = {policy: sim.per_second(run) for policy, run in runs.items()}
    report: dict = {"simulated_tokens_per_second": speed}
    for label, arms in (("the pair", list(pair)), ("all arms", list(seen[0].ms))):
        arm = str(_best(arms, tuned))
        gain = speed[f"oracle of {label}"] - speed[arm]
        report[f"over the best static of {label}"] = {
            "arm": arm, "ratio": speed[name] / speed[arm], "interval": sim.ratio_interval(runs[name], runs[arm]),
            "share_of_oracle_gain": (speed[name] - speed[arm]) / gain if gain > 0 else None,
        }  # fmt: skip
    return report


def _best(arms: list[Arm], walks: list[sim.Walk]) -> Arm:
    return max(arms, key=lambda arm: sim.per_second(sim.speeds(walks, [sim.static(arm)(walk) for walk in walks])))


def add_parser(commands) -> None:
    p = commands.add_parser("router", help="train the neural router, or acceptance heads, on traces")
    p.add_argument("--traces", type=Path, required=True, help="folder that `whiflash train traces` wrote")
    p.add_argument("--out", type=Path, required=True, help="folder of the router, or of the heads; report.json beside it")
    p.add_argument("--heads", action="store_true", help="train the throughput router's acceptance heads instead")
    p.add_argument("--costs", type=Path, help=f"table of milliseconds (default: {COSTS} of the traces)")
    p.add_argument("--pair", help="diffusion and autoregressive arm, as in dflash:3,eagle3:2 (default: the device's own lengths)")
    p.add_argument("--width", type=int, default=Recipe.width)
    p.add_argument("--lr", type=float, default=Recipe.lr)
    p.add_argument("--weight-decay", type=float, default=Recipe.weight_decay)
    p.add_argument("--epochs", type=int, default=Recipe.epochs)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--threads", type=int)
    p.set_defaults(run=run)


def run(args) -> int:
    from tqdm import tqdm

    if min(args.width, args.epochs, args.lr) <= 0 or args.weight_decay < 0:
        raise ValueError("--width, --epochs and --lr must be positive, --weight-decay not negative")
    if args.threads:
        torch.set_num_threads(args.threads)
    settings, traces = read_traces(args.traces)
    costs = Costs.load(args.costs or args.traces / COSTS)
    pair = tuple(parse_arm(text, settings["lengths"]) for text in (args.pair or "dflash,eagle3").split(","))
    if len(pair) != 2 or pair[0].kind not in DIFFUSION or pair[1].kind not in AUTOREGRESSIVE:
        raise ValueError(f"--pair {args.pair}: a diffusion arm, then an autoregressive one, as in dflash:3,eagle3:2")
    able = cost_arms([parse_arm(text) for text in settings["arms"]])
    if any(arm not in able for arm in pair):
        raise ValueError(f"--pair {args.pair}: these traces tell of {', '.join(map(str, able))}")
    recipe = Recipe(args.width, args.lr, args.weight_decay, args.epochs, seed=args.seed)
    with tqdm(total=args.epochs, desc="router", unit="epoch", dynamic_ncols=True) as bar:

        def progress(loss: float) -> None:
            bar.set_postfix_str(f"loss {loss:.4f}")
            bar.update()

        if args.heads:
            head, report = train_heads(traces, settings, costs, pair, recipe, progress)
            head.save(args.out)
        else:
            config, tensors, report = train_router(traces, settings, costs, pair, recipe, progress)
            save_router(args.out, config, tensors)
    (args.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))
    return 0
