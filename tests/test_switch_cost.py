"""Switch cost: the ablations change no token, compute what they claim, and the shares add up."""

from __future__ import annotations

import json
import random

import pytest
import torch

from whiflash_triton.arms import Arm
from whiflash_triton.decoder import WhiFlashDecoder
from whiflash_triton.loading import ASSETS
from whiflash_triton.switch_cost import OWN, WAYS, Switching, Tally, decode, main, replaced, through_dflash, through_eagle3
from whiflash_triton.training.tiny import sentence
from whiflash_triton.tree import chain

TINY = ASSETS / "tiny"
MODELS = ["--target", str(TINY / "target"), "--dflash", str(TINY / "dflash"), "--eagle3", str(TINY / "eagle3")]
PAIR = Arm("dflash", 3), Arm("eagle3", 2)


@pytest.fixture(scope="module")
def decoder():
    return WhiFlashDecoder.from_pretrained(
        str(TINY / "target"), dflash=TINY / "dflash", eagle3=TINY / "eagle3", device="cpu", dtype="float32", max_cache_len=256
    )


@pytest.mark.parametrize("way", WAYS)
def test_every_way_decodes_the_same_text_and_leaves_nothing_behind(decoder, way):
    ids = decoder._encode("tell about fox", {})
    decoder.use_router("entropy")
    expected = decoder.generate(ids, max_new_tokens=30).sequences[0].tolist()
    inner = decoder.router
    attributes = {name: set(vars(d)) for name, d in decoder.drafters.items()}
    for rate in (0, 1, OWN):
        tally = Tally()
        text = decode(decoder, ids, 30, Switching(inner, PAIR, rate, 1, 7), *WAYS[way], tally)
        assert text == expected[: len(text)] and 29 <= len(text) - len(ids) <= 30
        assert tally.tokens == len(text) - len(ids) - 1 and sum(tally.drafts.values()) == tally.rounds > 5
        if rate == 0:
            assert tally.switches == 0 and set(tally.drafts) == {"eagle3"}
            assert (tally.ingestion_ms["dflash"] > 0) == WAYS[way][0]  # the idle drafter: only where it is eager
        elif rate == 1:
            assert tally.switches == tally.rounds - 1
    for name, drafter in decoder.drafters.items():
        assert set(vars(drafter)) == attributes[name] and type(drafter).catch_up == drafter.catch_up.__func__


@torch.inference_mode()
def test_whole_layers_compute_what_a_forward_does(decoder):
    """EAGLE-3: the state that drafting starts from. DFlash: rows in two pieces as in one, and no row sees a later one."""
    target, ids = decoder.target, torch.tensor([decoder._encode(sentence(random.Random(3))[0] + " the old fox", {})])
    n, taps = ids.shape[1], decoder.work.taps
    _, features = target.forward(chain(ids), target.new_cache(n, 1), taps, prefill=True)
    eagle3, dflash = decoder.drafters["eagle3"], decoder.drafters["dflash"]

    eagle3.reset()
    eagle3.ingest(features[decoder.work.tap_rows["eagle3"]], ids)
    fused, states = [], []
    fuse, forward = eagle3._fuse, eagle3.forward
    with (
        replaced(eagle3, _fuse=lambda x: (fused.append(fuse(x)), fused[-1])[1]),
        replaced(eagle3, forward=lambda *args: (states.append(forward(*args)), states[-1])[1]),
    ):
        eagle3.draft(ids[:, -1:], Arm("eagle3", 1), 1)
    (hidden,), ((state, _),), tokens = fused, states, torch.cat((ids[:, 1:], ids[:, -1:]), 1)
    torch.testing.assert_close(through_eagle3(eagle3, hidden, tokens, 0)[:, -1:], state, rtol=1e-4, atol=1e-4)
    pieces = [through_eagle3(eagle3, hidden[:, part], tokens[:, part], part.start) for part in (slice(0, 4), slice(4, n))]
    torch.testing.assert_close(torch.cat(pieces, 1), through_eagle3(eagle3, hidden, tokens, 0), rtol=1e-4, atol=1e-4)

    dflash.reset()
    contexts: list[torch.Tensor] = []
    inner = dflash.context_kv
    with replaced(dflash, context_kv=lambda x: (contexts.append(x), inner(x))[1]):
        dflash.ingest(features[decoder.work.tap_rows["dflash"]], ids)
        dflash.catch_up()
    assert dflash.context_kv is inner
    (x,) = contexts
    whole = through_dflash(dflash, x, 0)
    assert not torch.equal(whole, x)
    torch.testing.assert_close(through_dflash(dflash, x[:, 3:], 3), whole[:, 3:], rtol=1e-4, atol=1e-4)
    dflash.cache.kv[:, :, :, :, 5:] = float("nan")
    torch.testing.assert_close(through_dflash(dflash, x[:, :5], 0), whole[:, :5], rtol=1e-4, atol=1e-4)


def test_shares():
    tally = Tally(4, 2, 10, 100.0, 3.0, {"dflash": 6.0, "eagle3": 2.0}, {"dflash": 3, "eagle3": 1})
    row = tally.row({"dflash": 1.0, "eagle3": 0.5})
    assert row["catch_up_share"] == pytest.approx((6 + 2 - 3 - 0.5) / 100) and row["routing_share"] == pytest.approx(0.03)
    assert row["switch_cost_share"] == pytest.approx(0.075) and row["round_ms"] == 25 and row["tokens_per_second"] == 100
    assert row["switches_per_round"] == 0.5


def test_command(tmp_path, capsys):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"turns": ["tell about owl"]}\n{"prompt": "count from 1 by 2"}\n')
    base = ["--prompts", str(file), "--max-new-tokens", "12", *MODELS, "--limit", "1"]
    assert main([*base, "--rates", "1,own", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(r["way"], r["rate"]) for r in report["rows"]] == [(way, rate) for way in WAYS for rate in (1.0, OWN)]
    assert set(report["stay_ms"]) == {"dflash", "eagle3"} and all(ms > 0 for ms in report["stay_ms"].values())
    assert main([*base, "--rates", "0"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(WAYS)
    for options, message in ((["--rates", "2"], "--rates"), (["--rates", "x"], "--rates"), (["--arms", "dflash,ddtree"], "--arms")):
        with pytest.raises(ValueError, match=message):
            main([*base, *options])
