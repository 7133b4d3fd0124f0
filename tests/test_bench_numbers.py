"""The bench's arithmetic without a model: intervals, best arms, the oracle, the split, the order, and what is read back."""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from whiflash_triton.arms import parse_arm
from whiflash_triton.evaluation.intervals import interval, resamples, speeds
from whiflash_triton.evaluation.markdown import render
from whiflash_triton.evaluation.peers import cut
from whiflash_triton.evaluation.plot import strip, strips
from whiflash_triton.evaluation.prompts import PARTS, Prompt, read_dataset, read_file, round_robin
from whiflash_triton.evaluation.report import Data, agreement, collect, per_prompt_oracle, summarise
from whiflash_triton.evaluation.runs import Run, Runs, in_order


def test_a_resample_draws_with_replacement():
    """Against the multinomial law: of the 256 ways to draw 4 of 4, so many give each count."""
    law = Counter(tuple(way.count(i) for i in range(4)) for way in itertools.product(range(4), repeat=4))
    drawn = resamples(4, draws=40_000)
    seen = Counter(map(tuple, drawn.tolist()))
    assert drawn.sum(1).tolist() == [4] * 40_000 and set(seen) == set(law)
    for counts, ways in law.items():
        p = ways / 256
        assert abs(seen[counts] / 40_000 - p) < 5 * (p * (1 - p) / 40_000) ** 0.5
    assert (resamples(4) == resamples(4)).all()


def test_an_interval_is_that_of_all_resamples_by_brute_force():
    tokens, seconds = [96, 10, 55, 96], [9.0, 0.5, 6.0, 2.0]
    ratios, weights = [], []
    for way in itertools.product(range(4), repeat=4):
        ratios.append(sum(tokens[i] for i in way) / sum(seconds[i] for i in way))
        weights.append([way.count(i) for i in range(4)])
    got = speeds(np.array(weights), np.array(tokens), np.array(seconds))
    assert got == pytest.approx(ratios, rel=1e-12)
    ratios.sort()
    at = [q * 255 for q in (0.025, 0.975)]  # numpy's quantile: between the order statistics on both sides
    exact = [ratios[int(i)] + (i - int(i)) * (ratios[int(i) + 1] - ratios[int(i)]) for i in at]
    assert interval(got) == pytest.approx(exact, rel=1e-12)


def test_an_interval_of_a_mean_is_the_normal_one():
    values = np.random.default_rng(1).normal(30, 6, 500)
    low, high = interval(speeds(resamples(500), values, np.ones(500)))
    half = 1.96 * values.std() / 500**0.5
    assert (low + high) / 2 == pytest.approx(values.mean(), abs=0.1 * half) and (high - low) / 2 == pytest.approx(half, rel=0.05)


def test_an_interval_of_nothing_is_none():
    assert interval(np.array([])) is None and interval(np.array([np.nan])) is None
    assert interval(speeds(np.array([[1, 0], [0, 1]]), np.array([3, 4]), np.array([0, 2]))) == [2.0, 2.0]


SIDES = ["ar", "dflash:2", "dflash:4", "ddtree:8", "entropy", "peer:hf"]
ARMS = {name: parse_arm(name) for name in SIDES[:4]}
SECONDS = {  # of a text of 10 tokens, by prompt; two turns of prompt c, repeats below
    "ar": {"a": 2.0, "b": 2.0, "c": 2.0},
    "dflash:2": {"a": 1.0, "b": 4.0, "c": 2.0},
    "dflash:4": {"a": 4.0, "b": 1.5, "c": 4.0},
    "ddtree:8": {"a": 2.5, "b": 2.5, "c": 2.5},
    "entropy": {"a": 1.0, "b": 2.0, "c": 2.0},
    "peer:hf": {"a": 4.0, "b": 4.0, "c": 4.0},
}


def made_runs(parts=("tune", "tune", "held-out")) -> tuple[list[Prompt], Runs]:
    """Three passes: the first as in SECONDS, the others 10% slower and faster, so that the medians are those of SECONDS."""
    names = [("a", "qa", ("x",)), ("b", "rag", ("y",)), ("c", "writing", ("z", "zz"))]
    prompts = [Prompt(*name, part) for name, part in zip(names, parts, strict=True)]
    runs = Runs(None, {})
    for (repeat, factor), side, p in itertools.product(enumerate((1.0, 1.1, 0.9)), SIDES, prompts):
        for turn in range(len(p.turns)):
            rounds = None if side == "peer:hf" else [["ar" if side == "entropy" else side, 2, 1, 3, 0, 0, 0, 0, 0, 0]] * 3
            runs.add(Run(p.id, turn, side, repeat, SECONDS[side][p.id] * factor, list(range(10)), 3, rounds))
    return prompts, runs


def test_speeds_ratios_best_arms_and_oracle_by_hand():
    prompts, runs = made_runs()
    report = summarise(collect(prompts, SIDES, runs, 3, False), ARMS, SIDES)
    assert (report["prompts"], report["texts"], report["repeats"]) == (3, 4, 3)
    rows = report["scopes"]["all"]["sides"]
    seconds = {"ar": 8, "dflash:2": 9, "dflash:4": 13.5, "ddtree:8": 10, "entropy": 7, "peer:hf": 16}  # prompt c counts twice
    for side, total in seconds.items():
        row = rows[side]
        assert row["speed"] == pytest.approx(40 / total) and row["cost"] == pytest.approx(total) and row["tokens"] == 40
        assert row["tau"] == (40 - 4) / 12
        assert row["ratios"]["plain"]["ratio"] == pytest.approx(8 / total)
        assert row["ratios"]["peer:hf"]["ratio"] == pytest.approx(16 / total)
        assert row["interval"][0] <= row["speed"] <= row["interval"][1]
        assert report["sides"][side]["spread_over_repeats"] == pytest.approx(0.2)
    assert rows["dflash:2"]["median"] == pytest.approx(5.0) and rows["dflash:2"]["quartiles"] == pytest.approx([3.75, 7.5])
    # On the tuning prompts a and b: ar 4 s, dflash:2 5 s, dflash:4 5.5 s.
    assert report["chosen_on"] == "the tuning prompts"
    assert report["bases"] == {"plain": "ar", "best_single": "ar", "best_tree": "ddtree:8", "peer:hf": "peer:hf"}
    assert report["sizes"]["dflash"]["best"] == "dflash:2"
    assert report["sizes"]["dflash"]["speeds"] == pytest.approx({"dflash:2": 20 / 5, "dflash:4": 20 / 5.5})
    # Each prompt's best arm: dflash:2, dflash:4, and ar or dflash:2 (the first listed), 1 + 1.5 + 4 s against ar's 8.
    oracle = report["scopes"]["all"]["oracle"]
    assert oracle == {
        "speed": pytest.approx(40 / 6.5),
        "best_arm": "ar",
        "best_speed": 5.0,
        "chosen": {"dflash:2": 1, "dflash:4": 1, "ar": 1},
    }
    assert rows["entropy"]["oracle_share"] == pytest.approx((40 / 7 - 5) / (40 / 6.5 - 5))
    assert rows["ar"]["oracle_share"] == 0.0
    assert [scope["prompts"] for scope in report["scopes"].values()] == [3, 2, 1]
    assert report["scopes"]["held-out"]["sides"]["ar"]["interval"] is None  # one prompt says nothing of others
    qa = report["groups"]["qa"]
    assert qa["best_single"] == "dflash:2" and qa["sides"]["entropy"]["ratios"]["scope_best_single"]["ratio"] == pytest.approx(1.0)


def test_ratios_are_paired():
    """A side that takes a fixed share of another's time on every prompt has that ratio without doubt."""
    prompts = [Prompt(str(i), "qa", ("x",), "tune") for i in range(20)]
    runs, rng = Runs(None, {}), random.Random(0)
    for p in prompts:
        seconds = rng.uniform(1, 9)
        for side, share in (("ar", 1.0), ("dflash:2", 0.8)):
            runs.add(Run(p.id, 0, side, 0, seconds * share, [1] * 10, 5, []))
    sides = ["ar", "dflash:2"]
    row = summarise(collect(prompts, sides, runs, 1, False), {side: ARMS[side] for side in sides}, sides)
    row = row["scopes"]["all"]["sides"]["dflash:2"]
    assert row["interval"][1] - row["interval"][0] > 0.1 and row["ratios"]["plain"]["interval"] == pytest.approx([1.25, 1.25])


def test_what_is_not_complete_does_not_count():
    prompts, runs = made_runs()
    del runs.done["a", 0, "dflash:2", 1], runs.done["c", 1, "ar", 0], runs.done["b", 0, "peer:hf", 0]
    for repeat in (1, 2):
        del runs.done["b", 0, "entropy", repeat]
    data = collect(prompts, SIDES, runs, 3, False)
    assert [p.id for p in data.prompts] == ["a", "c"] and data.repeats == 2
    assert data.cost["ar"].tolist() == pytest.approx([2 * (1.0 + 0.9) / 2, 4 * (1.1 + 0.9) / 2])


def test_the_best_arms_without_tuning_prompts_are_chosen_on_all():
    prompts, runs = made_runs(("held-out",) * 3)
    report = summarise(collect(prompts, SIDES, runs, 3, False), ARMS, SIDES)
    assert report["chosen_on"] == "all prompts of this run" and list(report["scopes"]) == ["all"]


def test_an_oracle_takes_the_least_seconds_of_each_prompt():
    rng, arms = np.random.default_rng(0), ["ar", "dflash:2", "dflash:4"]
    for _ in range(20):
        gain, cost = dict.fromkeys(arms, np.full(7, 12)), {arm: rng.uniform(1, 5, 7) for arm in arms}
        told = per_prompt_oracle(Data([], gain, cost, gain, gain, {}, np.ones(7), {}, 1), arms)
        assert (
            told["speed"] == pytest.approx(84 / np.min(list(cost.values()), axis=0).sum()) and told["speed"] >= told["best_speed"]
        )
        assert told["best_speed"] == pytest.approx(84 / min(seconds.sum() for seconds in cost.values()))


def test_texts_that_differ_and_ties_are_told_apart():
    runs = Runs(None, {})
    for side, texts in {"ar": [[1, 2, 3], [4, 5]], "dflash:2": [[1, 2, 9], [4, 5]], "peer:hf": [[1, 2, 3], [4, 5, 6]]}.items():
        for prompt, tokens in zip("ab", texts, strict=True):
            runs.add(Run(prompt, 0, side, 0, 1.0, tokens, 1, []))
    sides = ["ar", "dflash:2", "peer:hf"]
    told = agreement(runs, sides, "ar", False, lambda run, at: {"dflash:2": 2e-5, "peer:hf": 0.5}[run.side])
    assert told["dflash:2"]["ties"] == ["prompt a, turn 1, token 2, gap of the two best logits 2.00e-05"]
    assert told["dflash:2"]["different"] == [] and told["dflash:2"]["rate_per_token"] == pytest.approx(1 / 5)
    assert told["peer:hf"]["different"] == ["prompt b, turn 1, token 2, gap of the two best logits 5.00e-01"]
    told = agreement(runs, sides, "ar", True, None)
    assert told["dflash:2"]["different"] == ["prompt a, turn 1, token 2"] and "peer:hf" not in told


def test_markdown_of_one_prompt_has_no_intervals_and_of_no_arms_no_oracle():
    prompts, runs = made_runs()
    sides = ["entropy", "peer:hf"]
    results = summarise(collect(prompts[:1], sides, runs, 1, False), {}, sides)
    settings = {
        "device": "cpu", "threads": 2, "dtype": "bfloat16", "target": "t", "drafters": {}, "options": {"max_new_tokens": 10},
        "draft_window": 64, "graphs": None, "replay": False, "prompts": {"source": "p.jsonl", "split": "tune"},
    }  # fmt: skip
    text = render(
        {
            "command": "whiflash bench", "settings": settings, "machine": {"gpus": [], "cpu": "a CPU", "cores": 2, "versions": {}},
            "results": results, "complete": True, "routers": ["entropy"], "exact_dtype": False, "reference": "entropy",
            "agreement": agreement(runs, sides, "entropy", False, None),
        }
    )  # fmt: skip
    total = next(line for line in text.splitlines() if line.startswith("| `entropy`"))
    assert [cell.strip() for cell in total.split("|")[1:-1]] == [
        "`entropy`", "3.00", "10.00", "10.00 (10.00 to 10.00)", "4.00", "", "ar 100%",
    ]  # fmt: skip
    assert (
        "oracle per prompt" not in text
        and "near ties may fall the other way" in text
        and "a CPU" in text
        and "draft_window 64" in text
    )


def write(path, rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_split_holds_out_a_third_of_each_category_by_text_alone(tmp_path):
    rows = [{"question_id": i, "category": "math" if i < 5 else "qa", "turns": [f"question {i}"]} for i in range(17)]
    write(tmp_path / "a.jsonl", rows)
    parts = {p.id: p.part for p in read_file(tmp_path / "a.jsonl")}
    held_out = {i for i, part in parts.items() if part == PARTS[1]}
    assert len([i for i in held_out if int(i) < 5]) == 2 and len(held_out) == 2 + 4
    # Thresholds are tuned on the others, so the choice must never change.
    assert held_out == {"0", "1", "8", "11", "13", "14"}
    shuffled = random.Random(3).sample(rows, len(rows))
    write(tmp_path / "b.jsonl", [row | {"question_id": 100 + row["question_id"]} for row in shuffled])
    assert {p.id for p in read_file(tmp_path / "b.jsonl") if p.part == PARTS[1]} == {str(100 + int(i)) for i in held_out}


def test_prompts_come_from_all_groups_and_categories_in_turn():
    categories = ["writing"] * 3 + ["coding"] * 2 + ["qa"] * 2 + ["rag"]
    prompts = [Prompt(str(i), category, ("x",)) for i, category in enumerate(categories)]
    assert [p.id for p in round_robin(prompts)] == ["0", "5", "7", "3", "6", "1", "4", "2"]


def test_sides_take_turns_forth_and_back():
    orders = ["".join(in_order(list("ABC"), visit)) for visit in range(7)]
    assert orders == ["ABC", "CBA", "BCA", "ACB", "CAB", "BAC", "ABC"]
    places = Counter((side, place) for order in orders[:6] for place, side in enumerate(order))
    assert set(places.values()) == {2}  # every side is as often first as any other


def test_prompts_of_other_forms(tmp_path):
    write(
        tmp_path / "p.jsonl", [{"prompt": "hello"}, {"prompt": "bye", "domain": "chat"}, {"turns": ["a", "b"], "category": "stem"}]
    )
    prompts = read_file(tmp_path / "p.jsonl")
    assert [(p.id, p.category, p.group, p.turns) for p in prompts] == [
        ("1", "prompt", "prompt", ("hello",)),
        ("2", "chat", "chat", ("bye",)),
        ("3", "stem", "mt_bench", ("a", "b")),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no prompt"),
        ("[1]\n", "line 1"),
        ("\n{\n", "line 2"),
        ('{"turns": []}\n', "turns"),
        ('{"turns": ["a", ""]}\n', "turns"),
        ('{"turns": ["a", 3]}\n', "turns"),
        ('{"question_id": 7, "turns": ["a"]}\n{"question_id": 7, "turns": ["b"]}\n', "question_id 7 occurs 2 times"),
    ],
)
def test_bad_prompts(tmp_path, text, message):
    (tmp_path / "p.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_file(tmp_path / "p.jsonl")


def test_a_public_set(monkeypatch):
    asked = []

    def load_dataset(name, config, split):
        asked.append((name, config, split))
        if name == "nobody/nothing":
            raise ConnectionError("no network")
        return [{"question": "2 + 2?"}, {"instruction": "sum up", "input": "a text", "category": "qa"}, {"prompt": ["one", "two"]}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert [(p.id, p.category, p.turns) for p in read_dataset("gsm8k")] == [
        ("0", "gsm8k", ("2 + 2?",)),
        ("1", "qa", ("sum up\n\na text",)),
        ("2", "gsm8k", ("one", "two")),
    ]
    for spec in ("gsm8k:train", "someone/set", "someone/set:dev", "someone/set:hard:dev"):
        read_dataset(spec)
    assert asked[1:] == [
        ("openai/gsm8k", "main", "train"),
        ("someone/set", None, "train"),
        ("someone/set", None, "dev"),
        ("someone/set", "hard", "dev"),
    ]
    with pytest.raises(RuntimeError, match="no network.*--prompts"):
        read_dataset("nobody/nothing")
    with pytest.raises(ValueError, match="name:split"):
        read_dataset("a:b:c:d")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match="pip install datasets"):
        read_dataset("gsm8k")


def test_runs_are_read_back_and_a_torn_line_is_dropped(tmp_path):
    settings = {"sides": ("ar",), "n": 3}
    first = Runs(tmp_path / "out", settings)
    kept = [
        Run("a", 0, "ar", 0, 1.5, [1, 2], 1, [["ar", 0, 0, 1, 0, 0.1, 0.2, 0.3, 0.4, 0.5]]),
        Run("b", 1, "peer:hf", 2, 0.5, [3], 0),
    ]
    for run in kept:
        first.add(run)
    for torn in ("", '{"prompt"', '{"prompt": "c", "turn": 0}'):  # the last is whole but for its end of line
        with first.path.open("a") as file:
            file.write(torn)
        again = Runs(tmp_path / "out", settings)
        assert list(again.done.values()) == kept and len(again.path.read_bytes().splitlines()) == 3
    with pytest.raises(ValueError, match=r"n: 3, now 4\).*--out"):
        Runs(tmp_path / "out", settings | {"n": 4})


def test_a_peer_is_cut_after_its_end_token():
    assert cut([5, 6, 2, 7, 2], [2, 9], 10) == [5, 6, 2] and cut([5, 6, 7], [2], 2) == [5, 6] and cut([5], [], 4) == [5]


def test_a_strip_tells_who_drafted_each_token():
    times = [0.0] * 5
    rounds = [
        ["dflash:4", 4, 2, 3, 0, *times],
        ["ar", 0, 0, 1, 0, *times],
        ["eagle3-tree:8", 8, 3, 2, 0, *times],
    ]  # the last: a stop
    run = Run("a", 0, "entropy", 0, 1.0, [0] * 7, 3, rounds)
    kinds, spans = strip(run)
    assert kinds == ["ar", "dflash", "dflash", "ar", "ar", "eagle3-tree", "eagle3-tree"]
    assert spans == [(1, 3, 0.5), (4, 1, None), (5, 2, 0.375)]
    prompts, runs = made_runs()
    assert [label for label, _ in strips(prompts, ["entropy", "peer:hf"], runs)] == [
        "qa, entropy",
        "rag, entropy",
        "mt_bench, entropy",
    ]
