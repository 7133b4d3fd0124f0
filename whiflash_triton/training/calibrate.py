"""Fit what `drafters/calibration.py` applies: how often the target takes what a drafter proposes, by depth.

Rows that training never read are teacher-forced. At a few positions of each, every drafter proposes a tree, and every node whose
parent the target itself would have written is a sample: the drafter's log-probability, and whether the target takes the node.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from ..drafters import ddtree, eagle3_tree
from ..drafters.base import Drafter
from ..drafters.calibration import logit
from ..target import Target
from ..tree import chain
from .data import Row

TOP_K, DEPTH = 4, 7
Samples = dict[int, list[tuple[float, bool]]]  # depth -> (log-probability of the step, whether the target takes it)


@torch.inference_mode()
def collect(
    target: Target,
    drafters: dict[str, Drafter],
    rows: list[Row],
    positions: int,
    nodes: int,
    tokens: int,
    progress: Callable[[int], object] | None = None,
) -> dict[str, Samples]:
    """Samples of every drafter from the first `tokens` tokens of each row, at `positions` places of its response."""
    taps = tuple(sorted({t for d in drafters.values() for t in d.taps}))
    cache = target.new_cache(tokens, 1)
    samples: dict[str, Samples] = {name: {} for name in drafters}
    for row in rows:
        ids = torch.tensor([row.tokens[:tokens]], device=target.device)
        places = _spread(row.prompt_len, ids.shape[1] - 1, positions)
        if places:
            cache.set_length(0)
            hidden, features = target.forward(chain(ids), cache, taps, prefill=True)
            choices = target.logits(hidden)[0].argmax(-1).tolist()
            for name, drafter in drafters.items():
                own, known = features[[taps.index(t) for t in drafter.taps]], 0
                drafter.reset()
                for place in places:
                    drafter.ingest(own[:, :, known:place], ids[:, known:place])
                    known = place
                    proposal = _propose(name, drafter, ids[:, place : place + 1], nodes)
                    add_samples(samples[name], proposal, target_path(row.tokens[:tokens], choices, place))
        if progress is not None:
            progress(1)
    return samples


def _spread(first: int, last: int, count: int) -> list[int]:
    """At most `count` places of first..last, evenly spread."""
    step = max(last - first + 1, 0) / count
    return sorted({first + int(step * i) for i in range(count)}) if step > 0 else []


def _propose(name: str, drafter: Drafter, anchor: torch.Tensor, nodes: int):
    if name == "dflash":
        return ddtree.propose(drafter, anchor, nodes, drafter.max_draft)
    return eagle3_tree.propose(drafter, anchor, nodes, TOP_K, min(DEPTH, drafter.max_draft))


def target_path(tokens: list[int], choices: list[int], place: int) -> list[int]:
    """What the target writes after tokens[: place + 1], as far as the text agrees and so tells; choices: its argmax a row."""
    path = [choices[place]]
    while place + len(path) < len(tokens) and tokens[place + len(path)] == path[-1]:
        path.append(choices[place + len(path)])
    return path


def add_samples(samples: Samples, proposal, path: list[int]) -> None:
    """One sample for every node of the proposal whose parent lies on the path; nodes of probability 0 teach nothing."""
    scores, parents, tokens = proposal.scores.tolist(), proposal.parents.tolist(), proposal.tokens.flatten().tolist()
    on_path = {0: 0}  # node -> depth
    for node in range(1, len(tokens)):
        depth = on_path.get(parents[node], len(path))
        if depth < len(path) and scores[node] > float("-inf"):
            hit = tokens[node] == path[depth]
            samples.setdefault(depth + 1, []).append((scores[node] - scores[parents[node]], hit))
            if hit:
                on_path[node] = depth + 1


def fit(samples: list[tuple[float, bool]]) -> tuple[float, float, float, float]:
    """Logistic regression of the hits on the logit of the drafter's probability: (slope, offset, log-loss before, after).

    A weak pull to slope 1 and offset 0 rules where samples are few.
    """
    steps, hits = (torch.tensor(values, dtype=torch.float64) for values in zip(*samples, strict=True))
    x = logit(steps.clamp(-30.0, -1e-6))
    log_slope, offset = (torch.zeros((), dtype=torch.float64, requires_grad=True) for _ in range(2))
    optimiser = torch.optim.LBFGS([log_slope, offset], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(log_slope.exp() * x + offset, hits)

    def closure() -> torch.Tensor:
        optimiser.zero_grad()
        total = loss() + (log_slope**2 + offset**2) / len(hits)
        total.backward()
        return total

    with torch.no_grad():
        before = float(loss())
    optimiser.step(closure)
    with torch.no_grad():
        return float(log_slope.exp()), float(offset), before, float(loss())


def calibration_of(samples: Samples) -> dict[str, list]:
    """The part of calibration.json for one drafter: slope, offset, and what they were fitted on, depth 1 first."""
    if not samples:
        raise ValueError("no drafted node had a parent that the target would have written: give more rows or positions")
    fits = [fit(samples[depth]) for depth in range(1, max(samples) + 1)]
    slope, offset, before, after = ([round(value, 4) for value in column] for column in zip(*fits, strict=True))
    counts = [len(samples[depth]) for depth in range(1, len(fits) + 1)]
    return {"slope": slope, "offset": offset, "samples": counts, "log_loss": before, "log_loss_calibrated": after}
