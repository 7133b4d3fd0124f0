"""`whiflash bench` on a tiny random target: pooled numbers, groups, files, a run cut and gone on with, texts that differ."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from tests.tiny_folder import save_folders
from whiflash_triton import evaluate
from whiflash_triton.checkpoints import RouterConfig, save_router
from whiflash_triton.cli import main
from whiflash_triton.evaluation import runs as runs_module
from whiflash_triton.stats import PHASES, Output

TURNS, NEW = 5, 8  # turns of all prompts; tokens of an answer


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_folders(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [("writing", ["tell me", "and now shorter"]), ("qa", ["who"]), ("coding", ["a loop"]), ("qa", ["when"])]
    path.write_text("".join(json.dumps({"question_id": i, "category": c, "turns": t}) + "\n" for i, (c, t) in enumerate(rows)))
    return path


def bench(tiny, prompts, capsys, *options: str) -> tuple[int, dict]:
    models = [*tiny.options, "--dtype", "float32", "--max-new-tokens", str(NEW)]
    code = main(["bench", "--prompts", str(prompts), *models, *options, "--json"])
    return code, json.loads(capsys.readouterr().out or "{}")


def sides_of(report: dict, group: str | None = None) -> dict:
    results = report["results"]
    return (results["scopes"]["all"] if group is None else results["groups"][group])["sides"]


def paced(monkeypatch, seconds=lambda side, ids: 30.0, stop_at: int | None = None) -> list[str]:
    """Calls take the seconds told, on a clock that nothing else moves; call number `stop_at` is interrupted. Lists the calls."""
    now, calls = [0.0], []

    def timed(decoder, side, ids, new_tokens):
        if len(calls) == stop_at:
            raise KeyboardInterrupt
        calls.append(side)
        now[0] += seconds(side, ids)
        return seconds(side, ids), side(ids, new_tokens)

    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr(evaluate, "time", clock)
    monkeypatch.setattr(runs_module, "time", clock)
    monkeypatch.setattr(runs_module, "timed", timed)
    return calls


def test_totals_groups_and_equality_with_transformers(tiny, prompts, capsys):
    arms, routers = "ar,dflash:3,ddtree:6,eagle3:2", "random,entropy"
    code, report = bench(
        tiny, prompts, capsys, "--arms", arms, "--routers", routers, "--peers", "hf,prompt-lookup:3", "--graphs", "1"
    )
    assert code == 0 and report["complete"] and report["results"]["prompts"] == 4 and report["results"]["texts"] == TURNS
    sides = sides_of(report)
    assert list(sides) == [*arms.split(","), *routers.split(","), "peer:hf", "peer:prompt-lookup:3"]
    for name, row in sides.items():
        for number in ("tokens", "forwards"):
            assert row[number] == sum(sides_of(report, group)[name][number] for group in ("mt_bench", "qa"))
        assert row["tokens"] == NEW * TURNS and row["tau"] == pytest.approx((NEW - 1) * TURNS / row["forwards"])
        assert row["speed"] == pytest.approx(row["tokens"] / row["cost"])
        assert row["ratios"]["plain"]["ratio"] == pytest.approx(row["speed"] / sides["ar"]["speed"])
        if not name.startswith("peer:"):
            assert sum(report["results"]["sides"][name]["rounds"].values()) == row["forwards"]
    assert sides["ar"]["tau"] == sides["peer:hf"]["tau"] == 1.0
    assert set(report["agreement"]) == set(sides) - {"ar"}
    assert all(told["different"] == told["ties"] == [] and told["texts"] == TURNS for told in report["agreement"].values())


def test_a_replay_counts_the_rounds_that_decoding_takes(tiny, prompts, capsys):
    arms = "ar,lookup:4,dflash:3,ddtree:9,eagle3:2,eagle3-tree:6:3:2,mixed:9:3:3"
    (_, decoded), (_, replayed) = (
        bench(tiny, prompts, capsys, "--arms", arms, "--routers", "none", *more) for more in ([], ["--replay"])
    )
    assert replayed["measure"] == "tau" and sides_of(replayed).keys() == sides_of(decoded).keys()
    for group in (None, "mt_bench", "qa"):
        for name, row in sides_of(replayed, group).items():
            right = sides_of(decoded, group)[name]
            assert (row["tokens"], row["forwards"], row["tau"]) == (right["tokens"], right["forwards"], right["tau"])
            assert row["speed"] == row["tau"]
    oracle = replayed["results"]["scopes"]["all"]["oracle"]
    assert oracle["speed"] >= oracle["best_speed"] == max(row["tau"] for row in sides_of(replayed).values())


def test_sampled_texts_are_the_same_under_every_router(tiny, prompts, capsys):
    arms = ["--arms", "ar,dflash:3,eagle3:2", "--routers", "none", "--peers", "hf"]
    code, report = bench(tiny, prompts, capsys, *arms, "--temperature", "0.8")
    options = report["settings"]["options"]
    assert code == 0 and options["seed"] == 0 and options["do_sample"] is True
    assert set(report["agreement"]) == {"dflash:3", "eagle3:2"}  # a peer's text is its own
    assert all(told["different"] == [] for told in report["agreement"].values())


def test_a_text_that_differs_is_told(tiny, prompts, capsys, monkeypatch):
    inner = evaluate.WhiFlashDecoder.generate

    def other(self, *args, **options) -> Output:
        out = inner(self, *args, **options)
        if str(self.router.arms[0]) != "ar":
            out.sequences[0, -2] = (out.sequences[0, -2] + 1) % 200
        return out

    monkeypatch.setattr(evaluate.WhiFlashDecoder, "generate", other)
    code, report = bench(tiny, prompts, capsys, "--arms", "ar,dflash:3", "--routers", "none")
    told = report["agreement"]["dflash:3"]
    texts = [(0, 1), (1, 1), (2, 1), (3, 1), (0, 2)]
    assert code == 1 and {text.split(", gap")[0] for text in told["different"]} == {
        f"prompt {prompt}, turn {turn}, token {NEW - 2}" for prompt, turn in texts
    }
    assert told["ties"] == [] and told["differ"] == TURNS and told["rate_per_token"] == pytest.approx(1 / (NEW - 1))


def test_a_following_turn_is_asked_after_the_plain_answer(tiny, prompts, capsys, monkeypatch):
    asked = []
    inner = evaluate.WhiFlashDecoder.generate

    def heard(self, ids, **options) -> Output:
        out = inner(self, ids, **options)
        asked.append((str(self.router.arms[0]), self.tokenizer.decode(ids), out.text))
        return out

    monkeypatch.setattr(evaluate.WhiFlashDecoder, "generate", heard)
    bench(tiny, prompts, capsys, "--arms", "dflash:2,ar", "--routers", "none", "--limit", "1")
    answer = next(text for arm, ids, text in asked[2:] if arm == "ar" and ids == "tell me")
    follow = [(arm, ids) for arm, ids, _ in asked if "shorter" in ids]
    assert sorted(follow) == [(arm, f"tell me\n\n{answer}\n\nand now shorter") for arm in ("ar", "dflash:2")]


def test_files_picture_and_traces(tiny, prompts, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    options = ["--arms", "ar,dflash:2,dflash:3,mixed:6:2:3", "--routers", "random", "--peers", "hf", "--repeats", "2"]
    out, traces = tmp_path / "out", tmp_path / "traces.jsonl"
    _, report = bench(tiny, prompts, capsys, *options, "--out", str(out), "--plot", "--traces", str(traces))
    assert json.loads((out / "report.json").read_text()) == report
    assert (out / "report.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    text = (out / "report.md").read_text()
    for side in sides_of(report):
        assert text.count(f"| `{side}`") >= 3  # totals, groups, agreement
    for told in (
        "float32",
        "torch",
        "2 repeats",
        "4 prompts with 5 turns",
        report["command"],
        "## Best size of each kind",
        "per prompt",
    ):
        assert told in text
    assert report["command"].split(" --max-new-tokens")[0] == f"whiflash bench --prompts {prompts} " + " ".join(options)
    rows = [json.loads(line) for line in traces.read_text().splitlines()]
    for side, row in sides_of(report).items():
        rounds = [r for r in rows if r["side"] == side and r["repeat"] == 0]
        assert len(rounds) == (0 if side == "peer:hf" else row["forwards"])
        assert sum(r["committed"] for r in rounds) == (0 if side == "peer:hf" else row["tokens"] - TURNS)
        assert all(r["accepted"] <= r["drafted"] and list(r["ms"]) == list(PHASES) for r in rounds)


def test_a_run_that_was_killed_goes_on_where_it_stopped(tiny, prompts, capsys, tmp_path, monkeypatch):
    options = ["--arms", "ar,dflash:3", "--routers", "none", "--repeats", "2"]
    whole = paced(monkeypatch, lambda side, ids: 1.0 + len(ids))
    _, report = bench(tiny, prompts, capsys, *options, "--out", str(tmp_path / "whole"))
    assert len(whole) == 2 * 2 * TURNS
    paced(monkeypatch, lambda side, ids: 1.0 + len(ids), stop_at=8)
    assert bench(tiny, prompts, capsys, *options, "--out", str(tmp_path / "cut")) == (130, {})
    file = tmp_path / "cut" / "runs.jsonl"
    with file.open("a") as torn:
        torn.write('{"prompt": "2", "turn": 0, "si')
    rest = paced(monkeypatch, lambda side, ids: 1.0 + len(ids))
    _, again = bench(tiny, prompts, capsys, *options, "--out", str(tmp_path / "cut"))
    assert len(rest) == len(whole) - 8
    assert again | {"command": ""} == report | {"command": ""}
    assert len(file.read_text().splitlines()) == 1 + len(whole)
    assert main(["bench", "--prompts", str(prompts), *tiny.options, *options, "--every", "2", "--out", str(tmp_path / "cut")]) == 2
    error = capsys.readouterr().err
    assert "other settings" in error and "prompts:" in error and "options:" in error  # 96 new tokens, another selection


def test_a_run_cut_by_time_covers_all_groups(tiny, prompts, capsys, tmp_path, monkeypatch):
    calls = paced(monkeypatch)
    options = ["--arms", "ar,dflash:3", "--routers", "none", "--out", str(tmp_path)]
    _, report = bench(tiny, prompts, capsys, *options, "--minutes", "3.4")
    assert len(calls) == 7 and not report["complete"] and report["asked"] == 4
    assert {group: scope["prompts"] for group, scope in report["results"]["groups"].items()} == {"mt_bench": 1, "qa": 1}
    assert "2 prompts with 3 turns (mt_bench 1, qa 1) of 4 asked for" in (tmp_path / "report.md").read_text()
    _, report = bench(tiny, prompts, capsys, *options)
    assert len(calls) == 2 * TURNS and report["complete"] and report["results"]["prompts"] == 4
    assert main(["bench", "--prompts", str(prompts), *tiny.options, "--minutes", "-1"]) == 2
    assert "no prompt was finished" in capsys.readouterr().err


def test_the_table_of_costs_is_kept(tiny, prompts, capsys, tmp_path, monkeypatch):
    options = ["--arms", "none", "--routers", "throughput", "--limit", "1", "--out", str(tmp_path)]
    assert bench(tiny, prompts, capsys, *options)[0] == 0
    table = (tmp_path / "costs.json").read_bytes()
    monkeypatch.setattr("whiflash_triton.loading.measure_costs", None)  # it is not measured again
    assert bench(tiny, prompts, capsys, *options)[0] == 0 and (tmp_path / "costs.json").read_bytes() == table


def test_a_neural_router_by_path_or_as_shipped(tiny, prompts, capsys, tmp_path, monkeypatch):
    hidden, g = 48, torch.Generator().manual_seed(0)
    config = RouterConfig(hidden, 4, 0.0, "diffusion", True)
    weights = {"w1": (4, hidden), "b1": (4,), "w2": (4,), "b2": (1,)}
    save_router(tmp_path / "router", config, {name: torch.randn(*shape, generator=g) for name, shape in weights.items()})
    inner = evaluate.resolve_source
    monkeypatch.setattr(evaluate, "resolve_source", lambda target: (inner(target)[0], {"router": tmp_path / "router"}))
    path = f"neural:{tmp_path / 'router'}"
    code, report = bench(tiny, prompts, capsys, "--arms", "ar", "--routers", f"{path},neural", "--limit", "2")
    sides = report["results"]["sides"]
    assert code == 0 and report["routers"] == [path, "neural"] and sides[path]["rounds"] == sides["neural"]["rounds"]
    assert len(sides["neural"]["rounds"]) > 1 and report["settings"]["router_files"].keys() == {str(tmp_path / "router")}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--arms", "", "--routers", "none"], "nothing to run"),
        (["--skip", "9"], "no prompt is left"),
        (["--replay", "--routers", "entropy"], "--replay"),
        (["--replay", "--routers", "none", "--temperature", "0.5"], "--replay"),
        (["--arms", "dflash:99"], "out of range"),
        (["--routers", "neural"], "neural:PATH"),
        (["--peers", "vllm"], "unknown peer"),
        (["--peers", "hf:3"], "unknown peer"),
        (["--plot"], "--out"),
        (["--repeats", "0"], "--repeats"),
        (["--max-cache-len", "40"], "--max-cache-len"),
        (["--chat-template-kwargs", "{"], "not JSON"),
        (["--chat-template-kwargs", '{"enable_thinking": false}'], "no chat template"),
    ],
)
def test_bad_input(tiny, prompts, capsys, options, message):
    assert main(["bench", "--prompts", str(prompts), *tiny.options, *options]) == 2
    assert message in capsys.readouterr().err
