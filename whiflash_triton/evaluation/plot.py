"""The picture: speed by group and side with intervals; for a few texts, which arm drafted each token and how much was accepted."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from .prompts import Prompt
from .runs import ROUND, Run, Runs

TEXTS, ROUTERS = 4, 3  # strips: texts, and sides of each
COLOURS = {
    "ar": "#d0d0d0", "dflash": "#2a7f62", "ddtree": "#7fc8a9", "eagle3": "#8e44ad", "eagle3-tree": "#c39bd3", "mixed": "#2e86c1",
    "lookup": "#e0a526",
}  # fmt: skip


def check_plot() -> None:
    """ImportError that says what to install."""
    if find_spec("matplotlib") is None:
        raise ImportError("--plot needs matplotlib: pip install 'whiflash-triton[bench]'")


def strip(run: Run) -> tuple[list[str], list[tuple[int, int, float | None]]]:
    """(who drafted each token: a kind, `ar` for the target's own), and of each round (first token, tokens, share accepted).

    The share is None where the round drafted nothing. The first token is the prompt's.
    """
    kinds, rounds = ["ar"], []
    for row in run.rounds:
        r = dict(zip(ROUND, row, strict=True))
        rounds.append((len(kinds), r["committed"], r["accepted"] / r["drafted"] if r["drafted"] else None))
        drafted = min(r["accepted"], r["committed"])
        kinds += [r["arm"].partition(":")[0]] * drafted + ["ar"] * (r["committed"] - drafted)
    return kinds, rounds


def strips(prompts: list[Prompt], sides: list[str], runs: Runs) -> list[tuple[str, Run]]:
    """(label, run): first turns of the first prompts, no group twice, under each of the sides that keep their rounds."""
    chosen: dict[str, Prompt] = {}
    for prompt in prompts:
        chosen.setdefault(prompt.group, prompt)
    found = [
        (f"{group}, {side}", runs.done.get((prompt.id, 0, side, 0)))
        for group, prompt in list(chosen.items())[:TEXTS]
        for side in sides
    ]
    return [(label, run) for label, run in found if run is not None and run.rounds]


def plot(report: dict, prompts: list[Prompt], runs: Runs, path: Path) -> None:
    """Write a PNG."""
    check_plot()
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    results = report["results"]
    scopes = {"all": results["scopes"]["all"]} | (results["groups"] if len(results["groups"]) > 1 else {})
    routed = report["routers"][-ROUTERS:] or [side for side in results["sides"] if side != "ar"][:ROUTERS]
    rows = strips(prompts, routed, runs)
    heights = [4.0, *[0.55] * len(rows)]
    figure = Figure(figsize=(13, sum(heights) + 1.5), layout="constrained")
    axes = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    _speeds(axes[0], scopes, list(results["sides"]), report["measure"])
    for axis, (label, run) in zip(axes[1:], rows, strict=True):
        _strip(axis, label, *strip(run))
        axis.tick_params(labelbottom=axis is axes[-1])
    if rows:
        axes[-1].set_xlabel("token of the answer; black line: share of the round's draft that was accepted")
        kinds = [kind for kind in COLOURS if any(kind in strip(run)[0] for _, run in rows)]
        names = {"ar": "the target's own"}
        handles = [Patch(color=COLOURS[kind], label=names.get(kind, f"drafted by {kind}")) for kind in kinds]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.savefig(path, dpi=110)


def _speeds(axis, scopes: dict, sides: list[str], measure: str) -> None:
    from matplotlib import colormaps

    width = 0.8 / len(sides)
    for i, side in enumerate(sides):
        rows = [scope["sides"][side] for scope in scopes.values()]
        places = [x + (i - (len(sides) - 1) / 2) * width for x in range(len(rows))]
        colour = colormaps["tab20"](i % 20)
        axis.bar(places, [row["speed"] for row in rows], width * 0.9, color=colour, label=side)
        ranged = [(x, row) for x, row in zip(places, rows, strict=True) if row["interval"]]
        low, high = ([abs(row["interval"][end] - row["speed"]) for _, row in ranged] for end in (0, 1))
        axis.errorbar([x for x, _ in ranged], [row["speed"] for _, row in ranged], [low, high], fmt="none", color="#404040", lw=1)
    axis.set_xticks(range(len(scopes)), [f"{name} ({scope['prompts']})" for name, scope in scopes.items()])
    axis.set_ylabel(measure)
    axis.legend(fontsize=8, ncols=min(6, len(sides)), frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0))


def _strip(axis, label: str, kinds: list[str], rounds: list[tuple[int, int, float | None]]) -> None:
    axis.bar(range(len(kinds)), 1.0, 1.0, align="edge", color=[COLOURS[kind] for kind in kinds], linewidth=0)
    for first, count, share in rounds:
        axis.axvline(first, color="white", lw=0.6)
        if share is not None:
            axis.hlines(share, first, first + count, color="black", lw=1.2)
    axis.set_xlim(0, len(kinds))
    axis.set_ylim(0, 1.05)
    axis.set_yticks([])
    axis.set_ylabel(label, rotation=0, ha="right", va="center", fontsize=8)
