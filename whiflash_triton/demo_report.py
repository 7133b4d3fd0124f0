"""The demo's numbers, and the table it prints."""

from __future__ import annotations

from collections import Counter
from itertools import zip_longest
from statistics import median

TREES = ("ddtree", "eagle3-tree", "mixed")
EXACT = ("float32", "float64")  # dtypes in which identical texts are promised
PLAIN, BASELINE = "ar", "transformers"


def build_report(setup: dict, settings: dict, prompts: list[tuple[str, str, int]], runs: dict[str, list]) -> dict:
    """setup: machine and decoder (machine.py); prompts: (kind, text, prompt tokens); runs: side -> one Run a prompt, in order.

    Ratios compare tokens per second prompt by prompt (their median) and over all prompts (total).
    """
    rows = []
    for name, results in runs.items():
        rounds = [r for run in results for r in run.rounds]
        tokens, seconds = sum(len(run.tokens) for run in results), sum(run.seconds for run in results)
        counts = Counter(str(r.arm) for r in rounds)
        row = {
            "side": name,
            "tokens": tokens,
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "tau": (tokens - len(results)) / len(rounds) if rounds else 1.0,
            "slot_acceptance": slot_acceptance(rounds),
            "share_of_rounds": {arm: n / len(rounds) for arm, n in counts.most_common()},
            "ratio_to_plain": ratio(results, runs[PLAIN]),
            "ratio_to_transformers": ratio(results, runs[BASELINE]) if BASELINE in runs else None,
            "seconds_by_prompt": [run.seconds for run in results],
            "tokens_by_prompt": [len(run.tokens) for run in results],
        }
        rows.append(row)
    return setup | {
        "settings": settings | {"prompts": len(prompts), "prompt_tokens": sum(n for _, _, n in prompts)},
        "exact_dtype": setup["target"]["dtype"] in EXACT,
        "rows": rows,
        "differences": differences(prompts, runs),
        "divergence": {name: divergence(results, runs[PLAIN]) for name, results in runs.items() if name != PLAIN},
    }


def ratio(side: list, base: list) -> dict[str, float]:
    """Tokens per second of `side` over those of `base`: median over prompts, and of the totals."""

    def speed(runs: list) -> float:
        return sum(len(run.tokens) for run in runs) / sum(run.seconds for run in runs)

    return {
        "median": median(speed([a]) / speed([b]) for a, b in zip(side, base, strict=True)),
        "total": speed(side) / speed(base),
    }


def slot_acceptance(rounds: list) -> list[float]:
    """Share of the rounds that drafted slot j (1, 2, ...) in which it, and all before it, were accepted."""
    reached = {}  # a tree's nodes are no slots: its levels are counted, as far down as it was ever accepted
    for r in rounds:
        reached[r.arm] = max(reached.get(r.arm, 0), r.accepted)
    levels = [min(r.drafted, reached[r.arm]) if r.arm.kind in TREES else r.drafted for r in rounds]
    shares = []
    for slot in range(1, max(levels, default=0) + 1):
        drafted = [r for r, level in zip(rounds, levels, strict=True) if level >= slot]
        shares.append(sum(r.accepted >= slot for r in drafted) / len(drafted))
    return shares


def first_difference(a: list[int], b: list[int]) -> int | None:
    """Index of the first token that differs, or where one text ends before the other; None if they are equal."""
    return next((i for i, (x, y) in enumerate(zip_longest(a, b)) if x != y), None)


def differences(prompts: list[tuple[str, str, int]], runs: dict[str, list]) -> list[dict]:
    """Every text that departs from the plain target's: side, prompt, and the first token that differs."""
    found = []
    for name, results in runs.items():
        for i, (side, plain) in enumerate(zip(results, runs[PLAIN], strict=True)):
            at = first_difference(side.tokens, plain.tokens)
            if at is not None:
                pair = [tokens[at] if at < len(tokens) else None for tokens in (side.tokens, plain.tokens)]
                where = {"side": name, "prompt": i, "kind": prompts[i][0], "text": prompts[i][1], "position": at}
                found.append(where | {"token": pair[0], "plain_token": pair[1]})
    return found


def divergence(side: list, plain: list) -> dict:
    """How many texts depart from the plain one, and the rate: departures per token compared, the departing one included."""
    firsts = [first_difference(a.tokens, b.tokens) for a, b in zip(side, plain, strict=True)]
    compared = sum(len(run.tokens) if at is None else at + 1 for at, run in zip(firsts, side, strict=True))
    count = sum(at is not None for at in firsts)
    return {"texts": len(firsts), "differ": count, "tokens_compared": compared, "rate_per_token": count / compared}


def print_report(report: dict) -> None:
    machine, target, settings = report["machine"], report["target"], report["settings"]
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items() if number)
    hardware = machine["gpus"][0] if target["device"].startswith("cuda") else machine["cpu"]
    print(f"\n{hardware}, {machine['threads']} CPU threads of {machine['cores']} cores, {target['dtype']} on {target['device']}")
    print(f"{versions}; kernels: {machine['kernels']}")
    print(
        f"{settings['target']}, {settings['prompts']} prompts of {settings['prompt_tokens']} tokens in all, at most "
        f"{settings['max_new_tokens']} new tokens each, greedy, batch 1; cache {target['max_cache_len']} rows"
    )
    print("all times include the prompt and the drafters' ingestion; ratios of tokens/s: median over prompts, then total\n")
    with_baseline = any(row["ratio_to_transformers"] for row in report["rows"])
    header = ["", "tau", "tokens/s", "x plain"] + ["x transformers"] * with_baseline + ["accepted by slot", "rounds"]
    lines = [header]
    for row in report["rows"]:
        speeds = [row["ratio_to_plain"]] + [row["ratio_to_transformers"]] * with_baseline
        lines.append(
            ["plain" if row["side"] == PLAIN else row["side"], f"{row['tau']:.2f}", f"{row['tokens_per_second']:.1f}"]
            + [f"{speed['median']:.2f} {speed['total']:.2f}" for speed in speeds]
            + [" ".join(f"{share:.2f}" for share in row["slot_acceptance"])]
            + [", ".join(f"{arm} {share:.0%}" for arm, share in row["share_of_rounds"].items())]
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    print()
    print_agreement(report)


def print_agreement(report: dict) -> None:
    """Whether the texts are the plain target's; what the dtype promises about it."""
    compared = ", ".join(report["divergence"])
    if not report["differences"]:
        print(f"All texts are identical to the plain target's, token for token ({compared}).")
        return
    if not report["exact_dtype"]:
        print(f"In {report['target']['dtype']} rounding depends on the row count, so near ties may fall the other way:")
        for name, d in report["divergence"].items():
            print(
                f"  {name}: {d['differ']} of {d['texts']} texts depart from the plain one, "
                f"{d['differ']} first divergences in {d['tokens_compared']} tokens ({d['rate_per_token']:.2%})"
            )
        return
    print("TEXTS DIFFER, which must not happen in this dtype:")
    for d in report["differences"]:
        where = f"{d['side']}, prompt {d['prompt'] + 1} ({d['kind']}), new token {d['position'] + 1}"
        print(f"  {where}: {d['token']}, plain {d['plain_token']}")
