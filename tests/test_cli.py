"""The command line on a tiny random target: output, JSON, exit codes, and one clear line for every bad input."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import pytest
import torch

from tests.tiny_folder import save_folders
from whiflash_triton import WhiFlashDecoder, demo, demo_report
from whiflash_triton.arms import KINDS, Arm
from whiflash_triton.cli import main
from whiflash_triton.stats import Round


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_folders(tmp_path_factory.mktemp("tiny"))


def plain_tokens(folders, prompt: str, count: int) -> list[int]:
    """transformers' own greedy text."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folders.target, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(folders.target)(prompt, return_tensors="pt")["input_ids"]
    return model.generate(ids, do_sample=False, max_new_tokens=count, pad_token_id=0)[0, ids.shape[1] :].tolist()


def test_generate_streams_the_same_text_that_json_reports(tiny, capsys, monkeypatch):
    common = [*tiny.options, "--max-new-tokens", "20", "--max-cache-len", "64"]
    assert main(["generate", "hello", *common, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["tokens"] == plain_tokens(tiny, "hello", 20)
    assert report["finish"] == "length" and report["stats"]["new_tokens"] == len(report["drafted_by"]) == 20
    assert sum(r["committed"] for r in report["rounds"]) == 19
    assert sum(report["share_of_rounds"].values()) == pytest.approx(1)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello"))
    assert main(["generate", *common]) == 0
    out, err = capsys.readouterr()
    assert out == report["text"] + "\n"
    assert f"tau {report['stats']['tau']:.2f}, " in err and "(20 tokens in" in err
    for arm, share in report["share_of_rounds"].items():
        assert f"{arm} {share:.0%}" in err


def test_info(tiny, capsys):
    assert main(["info", *tiny.options, "--dtype", "float32", "--max-cache-len", "64", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    target, drafters = report["target"], report["drafters"]
    assert (target["family"], target["layers"], target["hidden_size"], target["dtype"]) == ("llama", 4, 48, "float32")
    parameters = 2 * 211 * 48 + 48 + 4 * (2 * 48 + 48 * 16 * (6 + 2 + 2) + 96 * 48 + 3 * 48 * 80)
    assert target["weight_bytes"] == 4 * parameters
    rows = 64 + 17  # the drafts of the longest arm, and the anchor
    matrices = target["weight_bytes"] - 4 * (211 * 48 + 9 * 48)
    assert target["packed_bytes"] == (matrices if torch.backends.mkldnn.is_available() else 0)
    assert target["cache_bytes"] == 4 * 4 * 2 * 2 * rows * 16
    assert drafters["dflash"]["taps"] == drafters["eagle3"]["taps"] == [1, 2, 3]
    assert drafters["dflash"]["draft_length"] == {"default": 3, "max": 5}
    assert 0 < drafters["eagle3"]["weight_bytes"] < target["weight_bytes"]
    assert report["router"] == {"kind": "EntropyRouter", "arms": ["dflash:3", "eagle3:2"], "threshold": 0.05}
    assert report["machine"]["versions"]["torch"] == torch.__version__
    assert set(report["seconds"]) == {"import", "load"}
    assert main(["info", *tiny.options, "--router", "static:ar"]) == 0
    text = capsys.readouterr().out
    assert "dflash: taps 1 2 3, draft_length default 3/max 5" in text and "router: kind StaticRouter, arms ar" in text
    assert main(["info", "--target", "none"]) == 0
    assert "target" not in capsys.readouterr().out


def test_demo_texts_are_identical(tiny, capsys):
    command = ["demo", *tiny.options, "--dtype", "float32", "--max-new-tokens", "16", "--max-cache-len", "256", "--json"]
    assert main(command) == 0
    report = json.loads(capsys.readouterr().out)
    routed = "router (throughput)"
    assert [row["side"] for row in report["rows"]] == ["transformers", "ar", "dflash:3", "eagle3:2", routed]
    assert report["exact_dtype"] and report["differences"] == []
    assert set(report["divergence"]) == {"transformers", "dflash:3", "eagle3:2", routed}
    for row in report["rows"]:
        assert row["tokens"] == 16 * len(demo.PROMPTS) == sum(row["tokens_by_prompt"])
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / sum(row["seconds_by_prompt"]))
        assert row["tau"] >= 1
    shares = {row["side"]: row["share_of_rounds"] for row in report["rows"]}
    assert shares["ar"] == {"ar": 1} and shares["transformers"] == {}
    assert shares["dflash:3"]["dflash:3"] > 0.8 and set(shares["dflash:3"]) <= {"dflash:3", "ar"}  # no room to draft: ar
    assert sum(shares[routed].values()) == pytest.approx(1)
    assert {arm.partition(":")[0] for arm in shares[routed]} <= {"ar", "lookup", "dflash", "eagle3", "eagle3-tree", "mixed"}


def test_demo_prints_text_table_and_progress(tiny, capsys, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one"}\n\n{"category": "math", "turns": ["two", "three"]}\n')
    command = [
        "demo",
        *tiny.options,
        "--max-new-tokens",
        "12",
        "--dtype",
        "float32",
        "--no-transformers",
        "--prompts",
        str(prompts),
    ]
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert "prompt> one\n" in out and "math> two\n" in out and "three" not in out
    assert "\033" not in out and "the target's own" in out
    assert "All texts are identical" in out and "2 prompts of 6 tokens" in out
    table = out[out.index("tau") :].splitlines()
    assert [line.split("  ")[0] for line in table[1:5]] == ["plain", "dflash:3", "eagle3:2", "router (throughput)"]
    order = [line.rpartition(": ")[2] for line in err.splitlines() if line.startswith("prompt")]
    assert order == order[:4] + order[:4][::-1]


def test_demo_colours_by_arm_on_a_terminal(tiny, capsys, monkeypatch):
    decoder = WhiFlashDecoder.from_pretrained(tiny.target, dflash=tiny.dflash, eagle3=tiny.eagle3, max_cache_len=64)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    ids = [decoder.tokenizer.convert_tokens_to_ids(c) for c in "abc"]
    arms = [Arm("ar"), Arm("dflash", 3), Arm("eagle3", 2)]
    demo.Show(decoder, quiet=False).tokens(ids, arms)
    assert capsys.readouterr().out == "a\033[32mb\033[0m\033[35mc\033[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    demo.Show(decoder, quiet=False).tokens(ids, arms)
    assert capsys.readouterr().out == "abc"


def test_demo_fails_where_a_text_differs(tiny, capsys, monkeypatch):
    honest = demo.transformers_side

    def lying(decoder, target):
        side = honest(decoder, target)

        def call(ids, count):
            run = side(ids, count)
            if count == 12:
                run.tokens[5] += 1
            return run

        return call

    monkeypatch.setattr(demo, "transformers_side", lying)
    command = ["demo", *tiny.options, "--max-new-tokens", "12", "--max-cache-len", "256", "--dtype"]
    assert main([*command, "float32"]) == 1
    out = capsys.readouterr().out
    assert "TEXTS DIFFER" in out and "transformers, prompt 1 (chat), new token 6: " in out
    assert main([*command, "bfloat16"]) == 0
    out = capsys.readouterr().out
    assert "near ties" in out and f"transformers: {len(demo.PROMPTS)} of {len(demo.PROMPTS)} texts depart" in out


def run_of(tokens: list[int], seconds: float, *rounds: tuple[str, int, int, int]) -> demo.Run:
    return demo.Run(tokens, seconds, [Round(Arm(kind, size), drafted=size, accepted=a, committed=c, caught_up=0, ms={})
                                      for kind, size, a, c in rounds])  # fmt: skip


def test_levels_of_trees_are_counted_as_far_as_they_were_accepted():
    rounds = run_of([], 1.0, ("ddtree", 7, 2, 3), ("ddtree", 7, 0, 1), ("dflash", 3, 1, 2)).rounds
    assert demo_report.slot_acceptance(rounds) == pytest.approx([2 / 3, 1 / 3, 0])
    assert set(demo.COLOURS) == set(KINDS)


def test_demo_under_another_router(tiny, capsys):
    options = [*tiny.options[:6], "--router", "static:ddtree:5", "--max-new-tokens", "12", "--max-cache-len", "256"]
    assert main(["demo", *options, "--no-transformers", "--dtype", "float32", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["differences"] == [] and report["rows"][-1]["side"] == "router (static ddtree:5)"


def test_report_numbers():
    plain = [run_of([1, 2, 3, 4], 4.0, *[("ar", 0, 0, 1)] * 3), run_of([5, 6], 1.0, ("ar", 0, 0, 1))]
    side = [run_of([1, 2, 3, 4], 2.0, ("dflash", 3, 1, 2), ("eagle3", 2, 0, 1)), run_of([5, 7], 2.0, ("dflash", 3, 3, 1))]
    setup = {"target": {"dtype": "float32"}}
    report = demo_report.build_report(setup, {}, [("a", "x", 3), ("b", "y", 4)], {"ar": plain, "side": side})
    row = report["rows"][1]
    assert row["tau"] == pytest.approx((3 + 1) / 3)
    assert row["slot_acceptance"] == pytest.approx([2 / 3, 1 / 3, 1 / 2])
    assert row["share_of_rounds"] == pytest.approx({"dflash:3": 2 / 3, "eagle3:2": 1 / 3})
    assert row["ratio_to_plain"] == pytest.approx({"median": (2 + 0.5) / 2, "total": 5 / 4})
    assert row["ratio_to_transformers"] is None
    assert report["divergence"]["side"] == {"texts": 2, "differ": 1, "tokens_compared": 6, "rate_per_token": 1 / 6}
    expected = {"side": "side", "prompt": 1, "kind": "b", "text": "y", "position": 1, "token": 7, "plain_token": 6}
    assert report["differences"] == [expected]
    assert demo_report.first_difference([1, 2], [1, 2, 3]) == 2 and demo_report.first_difference([1], [1]) is None


BAD_OPTIONS = {
    "missing target": (["--target", "{tmp}/missing"], "neither a local folder nor a hub id"),
    "empty target folder": (["--target", "{tmp}"], "config.json"),
    "missing drafter": (["--dflash", "{tmp}/missing"], "no such file or folder"),
    "drafter of the other kind": (["--dflash", "{tiny.eagle3}"], "eagle3"),
    "hidden size": (["--eagle3", "{wide.eagle3}"], "hidden_size"),
    "vocabulary": (["--dflash", "{words.dflash}"], "vocab"),
    "truncated drafter": (["--dflash", "{cut.dflash}"], "model.safetensors"),
    "truncated target": (["--target", "{cut.target}"], "corrupt, truncated"),
    "unknown router": (["--router", "magic"], "unknown router 'magic'"),
    "unknown arm": (["--router", "static:medusa"], "unknown arm 'medusa'"),
    "arm too long": (["--router", "static:dflash:9"], "dflash:1 to dflash:5"),
    "arm without size": (["--router", "static:dflash:x"], "whole number"),
    "arm without drafter": (["--eagle3", "none", "--router", "static:eagle3"], "needs a eagle3 drafter"),
    "router without pair": (["--dflash", "none", "--router", "entropy"], "missing: dflash"),
    "router of another target": (["--router", "{tiny.eagle3}"], "expected exactly"),
    "threshold for a static arm": (["--router", "static:ar", "--router-threshold", "1"], "router threshold 1.0"),
    "negative threshold": (["--router-threshold", "-1"], "entropy threshold -1.0"),
    "no tokens": (["--max-new-tokens", "0"], "nothing to generate"),
    "long text": (["--max-new-tokens", "99"], "raise max_cache_len"),
    "long prompt": (["--max-cache-len", "3"], "raise max_cache_len"),
    "no threads": (["--threads", "0"], "give at least 1"),
}


@pytest.fixture(scope="module")
def broken(tiny, tmp_path_factory):
    """The tiny folders, ones of another width and vocabulary, and ones whose weights are cut off."""
    tmp = tmp_path_factory.mktemp("broken")
    cut = save_folders(tmp / "cut")
    for folder in (cut.target, cut.dflash):
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
    wide, words = save_folders(tmp / "wide", hidden_size=96), save_folders(tmp / "words", vocab_size=199)
    return {"tmp": tmp, "tiny": tiny, "cut": cut, "wide": wide, "words": words}


@pytest.mark.parametrize("case", list(BAD_OPTIONS))
def test_bad_options(case, tiny, broken, capsys):
    options, expected = BAD_OPTIONS[case]
    error = failure(capsys, ["generate", "hello", *tiny.options, "--max-cache-len", "64", *[o.format(**broken) for o in options]])
    assert expected in error


def failure(capsys, command: list[str]) -> str:
    """The error of a command that must fail with one line and nothing else."""
    assert main(command) == 2
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if line.startswith("whiflash: ")]
    assert out == "" and len(lines) == 1 and lines[0].startswith("whiflash: error: ") and "Traceback" not in err
    return lines[0]


def test_empty_prompt(tiny, capsys, monkeypatch):
    assert "prompt is empty" in failure(capsys, ["generate", "", *tiny.options])
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert "prompt is empty" in failure(capsys, ["generate", *tiny.options])


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "holds no prompt"),
        ('{"prompt": "fine"}\n{"question": "?"}', "line 2"),
        ("not json", "line 1"),
        ('{"turns": []}', "line 1"),
        ('{"prompt": ""}', "not empty"),
    ],
)
def test_bad_prompt_files(content, expected, tiny, capsys, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    assert expected in failure(capsys, ["demo", *tiny.options, "--prompts", str(file)])


def test_demo_needs_drafters_and_a_prompt_file_that_exists(tiny, capsys, tmp_path):
    assert "give --dflash" in failure(capsys, ["demo", "--target", str(tiny.target)])
    assert "missing.jsonl" in failure(capsys, ["demo", *tiny.options, "--prompts", str(tmp_path / "missing.jsonl")])


@pytest.mark.parametrize("command", [["generate", "--beams", "4"], ["bake"], [], ["info", "--dtype", "int3"]])
def test_unknown_commands_and_options(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(command)
    assert stopped.value.code == 2 and "error: " in capsys.readouterr().err


def test_module_runs_as_a_program(tiny):
    command = [sys.executable, "-m", "whiflash_triton", "generate", "hello", *tiny.options, "--router", "magic"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2 and "whiflash: error: unknown router" in result.stderr and "Traceback" not in result.stderr
