"""Rounds that never ask the host, on the references: the text of plain decoding, caches as if rebuilt, and every order kept."""

from __future__ import annotations

import functools
import random

import pytest
import torch

from tests.lanes import OrderViolation, RecordingLanes
from tests.oracle import RandomRouter, prompt_ids
from tests.rebuild import check_rows
from tests.small import ARMS, make, small, small_decoder
from whiflash_triton.arms import Arm, parse_arm
from whiflash_triton.device_round import IDLE_ROWS, DeviceRounds
from whiflash_triton.lanes import HOST, MAIN, SIDE
from whiflash_triton.routers.static import StaticRouter
from whiflash_triton.scheduler import NaNLogits

ROWS, VOCAB, NEW = 160, 13, 28
PROMPT = [t % VOCAB for t in prompt_ids(9)]
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "seed": 5}
HOW = pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
AHEAD = pytest.mark.parametrize("ahead", [0, 1])
EVERY = [Arm("ar"), *ARMS]


def target():
    return small("qwen3", VOCAB)[1]


@functools.cache
def plain(prompt: tuple[int, ...], new: int, sampled: bool) -> list[int]:
    options = SAMPLED if sampled else {}
    return small_decoder(target(), ROWS + 60).generate(list(prompt), max_new_tokens=new, **options).sequences[0].tolist()


def on_device(router, ahead: int = 0, rows: int = ROWS, model=None):
    """A decoder whose rounds run as on a device, with lanes that keep a record."""
    decoder = small_decoder(model or target(), rows, scratch=True)
    decoder._use(router)
    decoder.work.replace_cache(decoder.target.new_cache(rows, 20, scratch=True))
    lanes = RecordingLanes()
    decoder.work.device = DeviceRounds(decoder.work, lanes, ahead, nodes=20)
    return decoder, lanes


def remade(kind: str):
    return make(kind, target(), ROWS, True)


def check(decoder, tokens: list[int]) -> None:
    """The caches hold at least the text's rows, as fresh ones would."""
    rows = decoder.work.rows
    assert rows[: len(tokens) - 1] == tokens[:-1][: len(rows)]
    whole = plain(tuple(PROMPT), NEW + 60, False)
    if rows == whole[: len(rows)]:
        check_rows(decoder.work, remade, rows, whole[len(rows)])


@AHEAD
@HOW
@pytest.mark.parametrize("arm", EVERY, ids=str)
def test_every_arm_gives_the_plain_text(arm, options, ahead):
    decoder, lanes = on_device(StaticRouter(arm), ahead)
    out = decoder.generate(PROMPT, max_new_tokens=NEW, **options)
    assert out.sequences[0].tolist() == plain(tuple(PROMPT), NEW, bool(options))
    assert bool(lanes.log) == (arm.kind != "lookup"), "copies come from the host"
    assert out.stats.target_forwards >= len(out.rounds) and sum(r.committed for r in out.rounds) == NEW - 1
    if not options:
        check(decoder, out.sequences[0].tolist())


@AHEAD
@HOW
@pytest.mark.parametrize("seed", range(3))
def test_a_random_router_turn_after_turn(seed, options, ahead):
    """Arms change every round, the host's own among them; stops fall anywhere; what is kept serves the next turn."""
    decoder, lanes = on_device(RandomRouter(EVERY, seed), ahead)
    rng, tokens, total = random.Random(seed), PROMPT, len(PROMPT)
    for turn in range(4):
        new = rng.randrange(1, 18)
        total += new
        out = decoder.generate(tokens, max_new_tokens=new, **options)
        tokens = out.sequences[0].tolist()
        assert tokens == plain(tuple(PROMPT), 80, bool(options))[:total]
        assert out.stats.reused_tokens > 0 if turn else True
        if not options:
            check(decoder, tokens)
    used = {r for lane, _, writes in lanes.log for r in writes}
    assert {"dflash", "eagle3", "lengths"} <= used


@AHEAD
def test_streams_take_turns_and_may_be_closed(ahead):
    decoder, _ = on_device(RandomRouter(EVERY, 3), ahead)
    other = [t % VOCAB for t in prompt_ids(6, seed=4)]
    expected = plain(tuple(PROMPT), 30, False)[len(PROMPT) :], plain(tuple(other), 30, False)[len(other) :]
    streams = [decoder.stream(p, max_new_tokens=30) for p in (PROMPT, other)]
    closed, got = decoder.stream(other, max_new_tokens=30), ([], [])
    next(closed), next(closed)
    done = [False, False]
    while not all(done):
        for i, stream in enumerate(streams):
            piece = next(stream, None)
            done[i] = piece is None
            got[i].extend(piece.tokens if piece else [])
    closed.close()
    assert got == expected
    assert decoder.generate(PROMPT, max_new_tokens=30).sequences[0, len(PROMPT) :].tolist() == expected[0]


@AHEAD
def test_stops_inside_a_block(ahead):
    text = plain(tuple(PROMPT), NEW, False)[len(PROMPT) :]
    for token in sorted(set(text)):
        decoder, _ = on_device(StaticRouter(parse_arm("eagle3-tree:12:4:3")), ahead)
        out = decoder.generate(PROMPT, max_new_tokens=NEW, eos_token_id=[token])
        assert out.sequences[0, len(PROMPT) :].tolist() == text[: text.index(token) + 1]
        again = decoder.generate(PROMPT, max_new_tokens=NEW)
        assert again.sequences[0, len(PROMPT) :].tolist() == text


@AHEAD
@pytest.mark.parametrize("arm", ["dflash:4", "mixed:12:4:3"])
def test_the_cache_is_filled_to_its_last_row(arm, ahead):
    """Where a round might not fit, the host's own rounds go on."""
    decoder, lanes = on_device(StaticRouter(parse_arm(arm)), ahead, rows=64)
    out = decoder.generate(PROMPT, max_length=65)
    assert out.sequences[0].tolist() == plain(tuple(PROMPT), 65 - len(PROMPT), False)
    assert lanes.log and len(out.rounds) > sum(MAIN == lane and "result" in writes for lane, _, writes in lanes.log)


def test_what_needs_the_text_runs_on_the_host():
    decoder, lanes = on_device(StaticRouter(parse_arm("dflash:4")))
    for options in ({"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}, {"output_scores": True}):
        expected = small_decoder(target(), ROWS).generate(PROMPT, max_new_tokens=20, **options)
        assert torch.equal(decoder.generate(PROMPT, max_new_tokens=20, **options).sequences, expected.sequences)
    assert not lanes.log


@AHEAD
def test_an_idle_drafter_keeps_up_beside_the_verification(ahead):
    """On the side lane, behind the target's back, never further behind than a switch may cost."""
    decoder, lanes = on_device(StaticRouter(parse_arm("eagle3:3")), ahead)
    decoder.generate(PROMPT, max_new_tokens=80)
    side = [writes for lane, _, writes in lanes.log if lane == SIDE and writes == ("dflash",)]
    assert side and decoder.drafters["dflash"].pending <= IDLE_ROWS + 3 * 4
    check(decoder, plain(tuple(PROMPT), 80, False)[: len(decoder.work.rows) + 1])


@pytest.mark.parametrize("skipped,ahead", [("copy", 1), ("commit", 0), ("commit", 1), ("record", 0), ("record", 1)])
def test_a_missing_wait_is_caught(ahead, skipped):
    """Each of the waits that order the lanes, left out, is a violation; one round at a time the host waits for the copy."""
    decoder, lanes = on_device(RandomRouter([parse_arm("eagle3:3")] * 9 + [parse_arm("dflash:4")], 1), ahead)
    device, wait = decoder.work.device, lanes.wait

    def without(lane, mark):
        is_copy = mark is not None and mark is device.copied
        if not ((skipped, lane) in (("record", HOST), ("commit", SIDE)) or (skipped, lane, is_copy) == ("copy", MAIN, True)):
            wait(lane, mark)

    lanes.wait = without
    with pytest.raises(OrderViolation):
        decoder.generate(PROMPT, max_new_tokens=80)


@AHEAD
def test_nan_is_an_error_and_leaves_the_decoder_usable(ahead, monkeypatch):
    decoder, _ = on_device(StaticRouter(parse_arm("dflash:4")), ahead)
    expected = plain(tuple(PROMPT), 20, False)
    logits, calls = decoder.target.logits, []

    def broken(hidden):
        calls.append(hidden)
        return logits(hidden) * (float("nan") if len(calls) == 4 else 1.0)

    monkeypatch.setattr(decoder.target, "logits", broken)
    with pytest.raises(NaNLogits):
        decoder.generate(PROMPT, max_new_tokens=20)
    monkeypatch.undo()
    assert decoder.generate(PROMPT, max_new_tokens=20).sequences[0].tolist() == expected


def test_caches_in_the_tail_are_refused():
    decoder = small_decoder(target(), ROWS)
    with pytest.raises(ValueError, match="scratch"):
        DeviceRounds(decoder.work, RecordingLanes(), 0, 20)
    with pytest.raises(ValueError, match="ahead"):
        DeviceRounds(on_device(StaticRouter(Arm("ar")))[0].work, RecordingLanes(), 2, 20)
