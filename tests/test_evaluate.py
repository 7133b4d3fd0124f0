"""`whiflash bench` on a tiny random target: pooled numbers, groups, and what it says of texts that differ."""

from __future__ import annotations

import json

import pytest

from tests.tiny_folder import save_folders
from whiflash_triton import evaluate
from whiflash_triton.cli import main
from whiflash_triton.stats import Output


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_folders(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [("writing", "tell me"), ("qa", "who"), ("coding", "a loop"), ("qa", "when")]
    path.write_text("".join(json.dumps({"category": c, "turns": [t]}) + "\n" for c, t in rows))
    return path


def bench(tiny, prompts, capsys, *options: str) -> tuple[int, dict]:
    models = [o for pair in zip(tiny.options[::2], tiny.options[1::2], strict=True) if pair[0] != "--router" for o in pair]
    code = main(["bench", "--prompts", str(prompts), *models, "--dtype", "float32", "--max-new-tokens", "12", *options, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_totals_groups_and_equality_with_transformers(tiny, prompts, capsys):
    code, report = bench(tiny, prompts, capsys, "--arms", "ar,dflash:3,ddtree:6,eagle3:2", "--routers", "random,entropy", "--peer")
    assert code == 0 and report["prompts"] == 4 and report["transformers_tokens_per_second"] > 0
    names = ["static:ar", "static:dflash:3", "static:ddtree:6", "static:eagle3:2", "random", "entropy"]
    assert [r["router"] for r in report["results"]] == names
    for r in report["results"]:
        assert r["different"] == [] and set(r["groups"]) == {"mt_bench", "qa"}
        for number in ("tokens", "forwards"):
            assert r[number] == sum(group[number] for group in r["groups"].values())
        assert r["tokens"] == 48 and r["tau"] == pytest.approx(44 / r["forwards"], abs=1e-4)
        assert sum(r["rounds"].values()) == r["forwards"]
    assert report["results"][0]["tau"] == 1.0 and report["results"][0]["rounds"] == {"ar": 44}


def test_a_replay_counts_the_rounds_that_decoding_takes(tiny, prompts, capsys):
    arms = "ar,lookup:4,dflash:3,ddtree:9,eagle3:2,eagle3-tree:6:3:2,mixed:9:3:3"
    runs = [bench(tiny, prompts, capsys, "--arms", arms, "--routers", "none", *more) for more in ([], ["--replay"])]
    for decoded, replayed in zip(*(report["results"] for _, report in runs), strict=True):
        assert replayed["router"].removeprefix("replay:") == decoded["router"].removeprefix("static:")
        assert (replayed["tokens"], replayed["forwards"], replayed["tau"]) == tuple(
            decoded[k] for k in ("tokens", "forwards", "tau")
        )
        assert replayed["tokens_per_second"] is None
        assert {g: t["forwards"] for g, t in replayed["groups"].items()} == {g: t["forwards"] for g, t in decoded["groups"].items()}


def test_sampled_texts_are_the_same_under_every_router(tiny, prompts, capsys):
    code, report = bench(tiny, prompts, capsys, "--arms", "ar,dflash:3,eagle3:2", "--routers", "none", "--temperature", "0.8")
    assert code == 0 and report["options"]["seed"] == 0 and report["options"]["do_sample"] is True
    assert all(r["different"] == [] for r in report["results"])


def test_a_text_that_differs_is_told(tiny, prompts, capsys, monkeypatch):
    inner = evaluate.WhiFlashDecoder.generate

    def other(self, *args, **options) -> Output:
        out = inner(self, *args, **options)
        if str(self.router.arms[0]) != "ar":
            out.sequences[0, -2] = (out.sequences[0, -2] + 1) % 200
        return out

    monkeypatch.setattr(evaluate.WhiFlashDecoder, "generate", other)
    code, report = bench(tiny, prompts, capsys, "--arms", "ar,dflash:3", "--routers", "none")
    assert code == 1 and report["results"][0]["different"] == []
    assert [text.split(", gap")[0] for text in report["results"][1]["different"]] == [f"prompt {n}, token 10" for n in range(4)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--arms", "", "--routers", "none"], "nothing to run"),
        (["--temperature", "0.5", "--peer"], "--peer"),
        (["--skip", "9"], "no prompt is left"),
        (["--replay", "--routers", "entropy"], "--replay"),
        (["--arms", "dflash:99"], "out of range"),
    ],
)
def test_bad_input(tiny, prompts, capsys, options, message):
    assert main(["bench", "--prompts", str(prompts), *tiny.options[:6], *options]) == 2
    assert message in capsys.readouterr().err
