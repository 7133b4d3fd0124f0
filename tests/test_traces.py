"""Traces: what they say an arm commits is what decoding commits, and what they say the target showed is what it shows."""

from __future__ import annotations

import json
import math
import random
from dataclasses import fields

import pytest
import torch

from whiflash_triton.arms import Arm, parse_arm
from whiflash_triton.cli import main
from whiflash_triton.decoder import WhiFlashDecoder
from whiflash_triton.loading import ASSETS
from whiflash_triton.routers.throughput import Costs
from whiflash_triton.training.tiny import sentence
from whiflash_triton.training.traces import RECENT, Trace, cost_arms, read_traces, recent_acceptance, save_trace, spread, trace

TINY = ASSETS / "tiny"
MODELS = ["--target", str(TINY / "target"), "--dflash", str(TINY / "dflash"), "--eagle3", str(TINY / "eagle3")]
ARMS = [parse_arm(text) for text in ("dflash:7", "eagle3:6", "lookup:5", "ddtree:9", "eagle3-tree:7:3:3")]


@pytest.fixture(scope="module")
def decoder():
    return WhiFlashDecoder.from_pretrained(
        str(TINY / "target"), dflash=TINY / "dflash", eagle3=TINY / "eagle3", device="cpu", dtype="float32", max_cache_len=256
    )


@pytest.fixture(scope="module")
def text(decoder) -> tuple[list[int], int]:
    ids = decoder._encode("tell about bee", {})
    decoder.use_router("static:ar")
    return decoder.generate(ids, max_new_tokens=44).sequences[0].tolist(), len(ids)


@pytest.fixture(scope="module")
def found(decoder, text) -> Trace:
    return trace(decoder, *text, ARMS, 3, "story")


def test_acceptance_is_that_of_real_rounds(decoder, text, found):
    """The first round of a text that begins at the place, verified by the target."""
    tokens, prompt = text
    assert found.place.tolist() == list(range(prompt, len(tokens) - 8, 3)) and len(found.place) > 8
    seen = set()
    for column, arm in enumerate(ARMS):
        decoder.use_router(f"static:{arm}")
        for row in range(0, len(found.place), 2):
            place = int(found.place[row])
            first = decoder.generate(tokens[:place], max_new_tokens=9, eos_token_id=None, reuse_prefix=False).rounds[0]
            got = int(found.drafted[row, column]), int(found.accepted[row, column])
            assert got == (first.drafted, first.accepted), (str(arm), place)
            seen.add(got[1])
    assert len(seen) > 3 and (found.draft_ms > 0).all() and found.domain == "story"


def test_states_are_the_targets(text, found):
    from transformers import AutoModelForCausalLM

    tokens, _ = text
    model = AutoModelForCausalLM.from_pretrained(TINY / "target", dtype=torch.float32)
    with torch.no_grad():
        out = model(torch.tensor([tokens]), output_hidden_states=True)
    before = found.place - 1
    torch.testing.assert_close(found.hidden, out.hidden_states[-1][0, before], rtol=1e-3, atol=1e-3)
    p = out.logits[0, before].double().log_softmax(-1)
    torch.testing.assert_close(found.entropy.double(), -(p.exp() * p).sum(-1), rtol=1e-3, atol=1e-4)


def test_matches_are_the_longest_repeated_suffixes(text, found):
    tokens, _ = text
    for place, match in zip(found.place.tolist(), found.match.tolist(), strict=True):
        known = tokens[: place + 1]
        ends = [n for n in range(1, len(known)) if any(known[i : i + n] == known[-n:] for i in range(len(known) - n))]
        assert match == max(ends, default=0)


def test_places_are_where_the_text_is_the_targets_own(decoder, text, found):
    """Words changed within it: places near them go, those before stay as they were, those after count if the target wrote on so."""
    from transformers import AutoModelForCausalLM

    tokens, prompt = list(text[0]), text[1]
    wrong = prompt + 16
    tokens[wrong] = (tokens[wrong] + 1) % 50 + 4
    after = torch.tensor([tokens[: wrong + 1]])
    model = AutoModelForCausalLM.from_pretrained(TINY / "target", dtype=torch.float32)
    with torch.no_grad():
        more = model.generate(after, attention_mask=torch.ones_like(after), do_sample=False, max_new_tokens=30, eos_token_id=-1)
        tokens = more[0].tolist()
        choices = [-1, *model(torch.tensor([tokens])).logits[0].argmax(-1).tolist()]
    cut = trace(decoder, tokens, prompt, ARMS, 1)
    expected = [p for p in range(prompt, len(tokens) - 8) if all(tokens[i] == choices[i] for i in range(p, p + 9))]
    assert (
        cut.place.tolist() == expected
        and {wrong - 9, wrong + 1} <= set(expected)
        and not set(range(wrong - 8, wrong + 1)) & set(expected)
    )
    every_third = trace(decoder, tokens, prompt, ARMS, 3).place.tolist()
    assert every_third == [
        min(p for p in expected if (p - prompt) // 3 == n) for n in sorted({(p - prompt) // 3 for p in expected})
    ]
    early = [i for i, p in enumerate(found.place.tolist()) if p <= wrong - 9]
    rows = [expected.index(int(found.place[i])) for i in early]
    assert torch.equal(cut.accepted[rows], found.accepted[early]) and torch.equal(cut.match[rows], found.match[early])
    assert trace(decoder, tokens[: prompt + 8], prompt, ARMS, 3) is None


def test_recent_acceptance():
    rng = random.Random(1)
    places = sorted(rng.sample(range(200), 60))
    accepted = [[rng.randrange(6), rng.randrange(3)] for _ in places]
    means = recent_acceptance(places, accepted)
    for row, place in enumerate(places):
        for arm in (0, 1):
            over = [
                (q + a[arm] + 1, i, a[arm]) for i, (q, a) in enumerate(zip(places, accepted, strict=True)) if q + a[arm] < place
            ]
            last = [a for _, _, a in sorted(over)[-RECENT:]]
            assert float(means[row, arm]) == pytest.approx(sum(last) / len(last)) if last else math.isnan(means[row, arm])


def test_prompts_are_spread_over_domains():
    prompts = [("a", "1"), ("a", "2"), ("a", "3"), ("b", "4"), ("c", "5"), ("c", "6")]
    assert [text for _, text in spread(prompts, 4)] == ["1", "4", "5", "2"]
    assert [text for _, text in spread(prompts, None)] == ["1", "4", "5", "2", "6", "3"]
    assert len(spread(prompts, 99)) == 6


def test_a_trace_comes_back(found, tmp_path):
    (tmp_path / "traces.json").write_text('{"arms": []}')
    with pytest.raises(ValueError, match="no places yet"):
        read_traces(tmp_path)
    save_trace(found, tmp_path / "trace-1.safetensors")
    save_trace(None, tmp_path / "trace-2.safetensors")  # a text too short
    settings, (back,) = read_traces(tmp_path)
    assert settings == {"arms": []} and back.domain == "story"
    for field in fields(Trace):
        if field.name != "domain":
            torch.testing.assert_close(getattr(back, field.name), getattr(found, field.name), rtol=0, atol=0, equal_nan=True)
    with pytest.raises(FileNotFoundError, match="whiflash train traces"):
        read_traces(tmp_path / "none")


def test_command_goes_on_where_it_stopped(decoder, tmp_path, capsys):
    """A growing file of prompts; greedy answers of the file stand in for decoding; other settings are refused."""
    rng = random.Random(8)
    rows = [{"prompt": sentence(rng)[0], "domain": str(i % 2)} for i in range(5)]
    rows[4]["prompt"] = "tell about ant"
    file, out = tmp_path / "prompts.jsonl", tmp_path / "traces"
    argv = ["train", "traces", *MODELS, "--prompts", str(file), "--out", str(out), "--max-new-tokens", "24", "--dtype", "float32"]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows[:3]))
    assert main(argv) == 0 and "holds 3 of 3 prompts" in capsys.readouterr().out
    times = {path: path.stat().st_mtime_ns for path in out.glob("trace-*")}
    settings, first = read_traces(out)
    assert settings["arms"] == ["dflash:7", "eagle3:7", "lookup:7"] and settings["stride"] == 1 and settings["hidden_size"] == 64
    costs = Costs.load(out / "costs.json")
    assert set(costs.draft) == {str(arm) for arm in cost_arms([Arm("dflash", 7), Arm("eagle3", 7), Arm("lookup", 7)])}

    decoder.use_router("static:ar")
    greedy = decoder.generate(rows[4]["prompt"], max_new_tokens=24)
    rows[4] |= {"response": greedy.text, "temperature": 0.0, "finished": greedy.finish == "stop"}
    file.write_text("".join(json.dumps(row) + "\n" for row in rows[3:] + rows[:3]))
    assert main(argv) == 0
    assert all(path.stat().st_mtime_ns == times[path] for path in times) and len(list(out.glob("trace-*"))) == 5
    (mine,) = [t for t in read_traces(out)[1] if t.tokens.tolist()[:4] == decoder._encode(rows[4]["prompt"], {})[:4]]
    text = greedy.sequences[0].tolist()
    again = trace(decoder, text, greedy.stats.prompt_tokens, [parse_arm(arm) for arm in settings["arms"]], 1)
    assert torch.equal(mine.tokens, again.tokens) and torch.equal(mine.accepted, again.accepted)

    assert main([*argv, "--stride", "2"]) == 2 and "other settings" in capsys.readouterr().err
    for options in (["--arms", "ar"], ["--arms", "eagle3:2,eagle3:3"], ["--arms", "dflash:8"], ["--stride", "0"]):
        assert main([*argv, *options]) == 2
