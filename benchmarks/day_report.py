"""results.json of gpu_day.py as Markdown."""

from __future__ import annotations

from collections.abc import Iterable


def markdown(results: dict) -> str:
    steps = {record["name"]: record for record in results["steps"]}
    data = {name: record["data"] for name, record in steps.items() if record["data"]}
    title = "Rehearsal on a CPU: times mean nothing" if results["rehearsal"] else "A day with a GPU"
    lines = [f"# {title}", "", f"Started {results['started']}, {results['minutes']:g} minutes.", ""]
    lines += _table("step status seconds box", ([r["name"], r["status"], r["seconds"], r["box"]] for r in steps.values()))
    sections = {
        "environment": _plain,
        "correctness": _correctness,
        "rounds-4b": _rounds,
        "rounds-8b": _rounds,
        "kernels": _kernels,
        "tiny": _end_to_end,
        "smollm2": _end_to_end,
        "tune": _tune,
        "sanitizer": _plain,
    }
    for name, content in data.items():
        lines += [f"## {name}", "", *sections.get(name, _plain)(content)]
    for name, record in steps.items():
        if "error" in record:
            lines += [f"## {name}: {record['status']}", "", "```", record["error"], "```", ""]
    return "\n".join(lines)


def _table(header: str, rows: Iterable[Iterable]) -> list[str]:
    names = header.split()
    lines = ["| " + " | ".join(name.replace("_", " ") for name in names) + " |", "| " + " | ".join("---" for _ in names) + " |"]
    return [*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows), ""]


def _plain(content: dict) -> list[str]:
    return [*(f"- {name}: {value}" for name, value in content.items() if value is not None), ""]


def _correctness(content: dict) -> list[str]:
    counts = ", ".join(f"{n} {name}" for name, n in content.get("counts", {}).items())
    state = {True: "finished", False: "cut off by its time"}.get(content.get("finished"), "running")
    return [f"`pytest -m gpu`, {state}: {counts or 'no test ran'}.", "", *(f"- {name}" for name in content.get("failed", [])), ""]


def _rounds(content: dict) -> list[str]:
    """A round left alone, against its bytes at the measured copy bandwidth, and its phases."""
    lines = [
        "Random weights in the model's shapes. `ms` is a round left alone. Phases: eager, those of rounds that wait for the device "
        "after each; in graphs a round is one piece, `draft` the host's time to launch it and `accept` its wait for the tokens.",
        "",
    ]
    rows = content.get("rounds", [])
    phases = list(rows[0]["phases"]) if rows else []
    head = f"mode context arm ms floor_ms times_floor {' '.join(phases)} committed"
    shown = ("mode", "context", "arm", "ms", "floor_ms", "times_floor")
    lines += _table(head, ([*(r[k] for k in shown), *(r["phases"][p] for p in phases), r["committed"]] for r in rows))
    keys = "mode context from to caught_up first_ms steady_ms cost_ms share_of_round"
    lines += ["Switches: the first round of an arm against its later ones.", "", *_rows(keys, content.get("switches", []))]
    lines += ["Prompt, drafters' taps included:", "", *_rows("mode context ms", content.get("prefill", []))]
    if content.get("captures"):
        lines += ["Warm-up:", "", *_rows("mode context graphs seconds bytes", content["captures"])]
    lines += ["Routed rounds:", "", *_rows("mode context router arms ms", content.get("routed", []))]
    if content.get("profile"):
        lines += ["What the device does in one round:", "", *_rows("mode name calls us", content["profile"])]
    if content.get("not_reached"):
        lines += [f"Not reached in time: context {'; '.join(content['not_reached'])}.", ""]
    return lines


def _rows(keys: str, rows: list[dict]) -> list[str]:
    return _table(keys, ([row[key] for key in keys.split()] for row in rows))


def _kernels(content: dict) -> list[str]:
    """Each case with its baselines side by side, times ours."""
    cases: dict[tuple[str, str], dict[str, dict]] = {}
    for row in content.get("rows", []):
        cases.setdefault((row["kernel"], row["case"]), {})[row["side"]] = row
    table = []
    for (kernel, case), sides in cases.items():
        ours = sides.get("whiflash", {})
        others = ", ".join(
            f"{name} {row['us']:g} ({row['us'] / ours['us']:.2f}x)" for name, row in sides.items() if ours and row is not ours
        )
        rates = [ours.get(key, "") for key in ("us", "gb_per_s", "tflop_per_s", "share_of_floor")]
        table.append([kernel, case, *rates, {True: "memory", False: "L2"}.get(ours.get("cold"), ""), others])
    return _table("kernel case us GB/s TFLOP/s share_of_floor inputs_from baselines_in_us", table)


def _end_to_end(content: dict) -> list[str]:
    lines = []
    for dtype, rows in content.items():
        lines += [f"{dtype}:", "", *_rows("router tokens tokens_per_second times_plain tau same_texts texts", rows)]
    return lines


def _tune(content: dict) -> list[str]:
    return [
        "```",
        *content.get("last_lines", []),
        "```",
        "",
        *_plain({"configs": content.get("configs"), "finished": content["finished"]}),
    ]
