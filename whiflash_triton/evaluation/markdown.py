"""The report as Markdown: what was run on what, the table of all sides, the parts and groups, and which texts agree."""

from __future__ import annotations

ROLES = {"plain": "x plain", "best_single": "x best single-source", "best_tree": "x best tree"}


def render(report: dict) -> str:
    """report: as `whiflash bench` writes it to report.json."""
    parts = [_head(report), *_totals(report), *_groups(report), _sizes(report), _agreement(report)]
    return "\n\n".join(part for part in parts if part) + "\n"


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, its columns padded so that it reads as plain text too."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: list[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    return "\n".join([line(header), line(["-" * width for width in widths]), *map(line, rows)])


def ranged(value: float | None, interval: list[float] | None, digits: int = 2) -> str:
    if value is None:
        return ""
    return f"{value:.{digits}f}" + (f" [{interval[0]:.{digits}f}, {interval[1]:.{digits}f}]" if interval else "")


def _head(report: dict) -> str:
    s, m, r = report["settings"], report["machine"], report["results"]
    hardware = ", ".join(m["gpus"]) if s["device"].startswith("cuda") else m["cpu"]
    versions = ", ".join(f"{name} {number}" for name, number in m["versions"].items() if number)
    counts = ", ".join(f"{group} {scope['prompts']}" for group, scope in r["groups"].items())
    options = ", ".join(f"{name} {value}" for name, value in s["options"].items())
    drafters = ", ".join(f"{kind} {told['path']} ({told['sha256']})" for kind, told in s["drafters"].items())
    more = [f"draft_window {s['draft_window']}"] * (s["draft_window"] is not None)
    more += [f"CUDA graphs, {s['graphs']} rounds ahead"] * (s["graphs"] is not None)
    cut = "" if report["complete"] else f" of {report['asked']} asked for; the same command with the same --out goes on"
    sampling = "sampled" if s["options"].get("do_sample") else "greedy"
    return "\n".join(
        [
            "# whiflash bench",
            "",
            f"    {report['command']}",
            "",
            f"- Hardware: {hardware}, {s['threads']} CPU threads of {m['cores']} cores; {s['dtype']} on {s['device']}; {versions}.",
            f"- Models: target {s['target']}; drafters {drafters or 'none'}.",
            f"- Data: {s['prompts']['source']}, split {s['prompts']['split']}, {r['prompts']} prompts with {r['texts']} turns "
            f"({counts}){cut}; {sampling}, {', '.join([options, *more])}; {r['repeats']} repeats.",
            f"- {_what_is_measured(s)}",
        ]
    )


def _what_is_measured(settings: dict) -> str:
    if settings["replay"]:
        return (
            "Replayed along the plain target's text: tau, tokens after the first per target forward, says nothing of speed. "
            "Brackets: bootstrap 95% interval over prompts."
        )
    return (
        "Speed: total new tokens per total second, prompt, drafters' ingestion and detokenising included, tokens after a stop not "
        "counted; a prompt's seconds are the median over repeats. Every turn is asked after the reference's answers, with nothing "
        "cached. Brackets: bootstrap 95% interval over prompts, ratios paired. Median and quartiles are over prompts. tau: tokens "
        "after the first per target forward."
    )


def _totals(report: dict) -> list[str]:
    r = report["results"]
    names = {"all": "All prompts", "tune": "Tuning prompts", "held-out": "Held-out prompts"}
    notes = []
    for role, what in (("best_single", "single-source arm"), ("best_tree", "tree or mixed arm")):
        if role in r["bases"]:
            notes.append(f"Best static {what}: `{r['bases'][role]}`, chosen on {r['chosen_on']}.")
    if r["scopes"]["all"]["oracle"]:
        notes.append(
            "The oracle is one per prompt, not per round: the static arm that did best on that prompt. Share of its gain: how much "
            "of the way from the one static arm that did best on all these prompts to it."
        )
        if not report["settings"]["replay"]:
            notes.append("It knows the clock's noise, which flatters it.")
    spreads = {side: told["spread_over_repeats"] for side, told in r["sides"].items() if told["spread_over_repeats"] is not None}
    if spreads:
        told = ", ".join(f"`{side}` {spread:.1%}" for side, spread in spreads.items())
        notes.append(f"A prompt's seconds over its repeats, (max - min) / median, median over prompts: {told}.")
    tables = [f"## {names[name]} ({scope['prompts']})\n\n{_scope(report, scope)}" for name, scope in r["scopes"].items()]
    return [" ".join(notes), *tables]


def _scope(report: dict, scope: dict) -> str:
    r, replayed, roles = report["results"], report["settings"]["replay"], list(report["results"]["bases"])
    header = ["side", "tau", *([] if replayed else ["tokens/s", "median (quartiles)"])]
    header += [*(ROLES.get(role, f"x {role}") for role in roles), "share of oracle's gain", "rounds"]
    rows = {}
    for side, row in scope["sides"].items():
        speed, (low, high) = ranged(row["speed"], row["interval"]), row["quartiles"]
        numbers = [speed] if replayed else [f"{row['tau']:.2f}", speed, f"{row['median']:.2f} ({low:.2f} to {high:.2f})"]
        numbers += [ranged(row["ratios"][role]["ratio"], row["ratios"][role]["interval"]) for role in roles]
        share = f"{row['oracle_share']:.0%}" if side in report["routers"] and row["oracle_share"] is not None else ""
        rows[side] = [*numbers, share, _shares(r["sides"][side]["rounds"]) if side in report["routers"] else ""]
    named = [[f"`{side}`", *cells] for side, cells in rows.items()]
    for role, what in (("best_single", "single-source"), ("best_tree", "tree or mixed")):
        if role in r["bases"]:
            named.append([f"best static {what} arm, `{r['bases'][role]}`", *rows[r["bases"][role]]])
    if oracle := scope["oracle"]:
        cells = [f"oracle per prompt ({_shares(oracle['chosen'])})", *([] if replayed else [""]), f"{oracle['speed']:.2f}"]
        named.append(cells + [""] * (len(header) - len(cells)))
    return table(header, named)


def _shares(counts: dict[str, int]) -> str:
    """The four commonest, and the rest together."""
    total, most = sum(counts.values()), list(counts.items())[:4]
    rest = total - sum(n for _, n in most)
    return ", ".join(f"{name} {n / total:.0%}" for name, n in [*most, *([("others", rest)] if rest else [])])


def _groups(report: dict) -> list[str]:
    r, replayed = report["results"], report["settings"]["replay"]
    if len(r["groups"]) < 2:
        return []
    header = ["side", *(f"{group} ({scope['prompts']})" for group, scope in r["groups"].items())]

    def cells(shown, sides) -> str:
        return table(header, [[f"`{side}`", *(shown(g["sides"][side]) for g in r["groups"].values())] for side in sides])

    def ratios(role: str, sides) -> str:
        return cells(lambda row: ranged(row["ratios"][role]["ratio"], row["ratios"][role]["interval"]), sides)

    told, all_sides = [], list(r["sides"])
    if not replayed:
        speeds = cells(lambda row: ranged(row["speed"], row["interval"], 1), all_sides)
        told.append(f"## Tokens per second by group\n\n{speeds}")
    taus = cells(lambda row: ranged(row["tau"], row["interval"] if replayed else None), all_sides)
    told.append(f"## tau by group\n\n{taus}")
    if any(g["best_single"] for g in r["groups"].values()):
        best = ", ".join(f"{group} `{g['best_single']}`" for group, g in r["groups"].items())
        told.append(
            f"## Ratio to the group's own best static single-source arm\n\nChosen on the group's prompts: {best}.\n\n"
            + ratios("scope_best_single", all_sides)
        )
    for role, side in r["bases"].items():
        if role.startswith("peer:"):
            ours = [name for name in all_sides if not name.startswith("peer:")]
            told.append(f"## Ratio to `{side}` by group\n\n{ratios(role, ours)}")
    return told


def _sizes(report: dict) -> str:
    r = report["results"]
    several = {kind: told for kind, told in r["sizes"].items() if len(told["speeds"]) > 1}
    if not several:
        return ""
    unit = "tau" if report["settings"]["replay"] else "tokens per second"
    rows = [
        [kind, f"`{told['best']}`", ", ".join(f"{name} {speed:.2f}" for name, speed in told["speeds"].items())]
        for kind, told in several.items()
    ]
    return f"## Best size of each kind, on {r['chosen_on']}\n\n{table(['kind', 'best', f'{unit} of its sizes'], rows)}"


def _agreement(report: dict) -> str:
    if not report["agreement"]:
        return ""
    exact, reference = report["exact_dtype"], report["reference"]
    rows = [
        [f"`{side}`", str(a["texts"]), str(len(a["different"])), str(len(a["ties"])), f"{a['rate_per_token']:.3%}"]
        for side, a in report["agreement"].items()
    ]
    dtype = report["settings"]["dtype"]
    if not exact:
        promise = f"In {dtype} rounding depends on the row count, so near ties may fall the other way."
    elif report["settings"]["options"].get("do_sample"):
        promise = f"In {dtype}, with one seed, every side of ours must sample the same text; peers sample texts of their own."
    else:
        promise = f"In {dtype} every greedy text must be the same, but for ties of the two best logits."
    told = [
        f"- `{side}`: {text}" for side, a in report["agreement"].items() for text in (a["different"] if exact else []) + a["ties"]
    ]
    header = ["side", "texts", "different", "ties", "first differences per token compared"]
    lines = [f"## Texts against those of `{reference}`", promise, table(header, rows)]
    return "\n\n".join(lines + (["\n".join(told)] if told else []))
