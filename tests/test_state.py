"""What a decoder keeps between texts: a prompt that goes on from the last answer reuses its rows, and nothing else is kept."""

from __future__ import annotations

import functools
import itertools
import random
from types import SimpleNamespace

import pytest
import torch

from tests.oracle import OracleDrafter, RandomRouter, Recorder, build, models, prompt_ids, static
from tests.rebuild import check_rows
from whiflash_triton.arms import Arm, parse_arm
from whiflash_triton.decoder import WhiFlashDecoder
from whiflash_triton.routers.static import StaticRouter

ROWS, PROMPT = 120, prompt_ids(7)
ARMS = [parse_arm(text) for text in ("ar", "dflash:3", "eagle3:3", "ddtree:8", "eagle3-tree:8:3:3", "mixed:8", "lookup:4")] + 3 * [
    Arm("oracle", 5)
]
SAMPLED = {"do_sample": True, "temperature": 0.9, "top_p": 0.95, "seed": 7}
HOW = pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
MODES = pytest.mark.parametrize("scratch", [False, True], ids=["tail", "scratch"])
BRANCHING = pytest.mark.parametrize("branching", [False, True], ids=["chain", "tree"])


def target():
    return models("qwen3", seed=2)[1]


def plain(prompt: list[int], new: int, options: dict) -> list[int]:
    """Prompt and text of a decoder that has seen nothing before and drafts nothing."""
    return list(_plain(tuple(prompt), new, bool(options)))


@functools.cache
def _plain(prompt: tuple[int, ...], new: int, sampled: bool) -> list[int]:
    decoder = WhiFlashDecoder(target(), None, {}, StaticRouter(Arm("ar")), ROWS + 20, [])
    return decoder.generate(prompt, max_new_tokens=new, **(SAMPLED if sampled else {})).sequences[0].tolist()


def remade(kind: str, scratch: bool = False, pending_limit: int = 10**6):
    return build(kind, target(), ROWS, scratch, pending_limit)


def talker(
    arms=ARMS, seed: int = 0, scratch: bool = False, pending_limit: int = 10**6, rights=None, branching=True
) -> SimpleNamespace:
    """A decoder of both drafters and an oracle; `say` tells the oracle the text to come, generates and checks it."""
    rng = random.Random(seed)
    oracle = OracleDrafter([], rights or (rng.randrange(6) for _ in itertools.count()), ROWS, branching, seed)
    drafters = {kind: remade(kind, scratch, pending_limit) for kind in ("dflash", "eagle3")} | {"oracle": oracle}
    decoder = WhiFlashDecoder(target(), None, drafters, RandomRouter(arms, seed), ROWS, [])
    decoder.work.replace_cache(decoder.target.new_cache(ROWS, 17, scratch))

    def say(prompt: list[int], new: int, **options):
        shape = {k: v for k, v in options.items() if k in SAMPLED}
        oracle.text = plain(prompt, new + 12, shape)
        out = decoder.generate(prompt, max_new_tokens=new, **options)
        assert out.sequences[0].tolist() == oracle.text[: out.sequences.shape[1]]
        return out

    return SimpleNamespace(decoder=decoder, oracle=oracle, say=say, work=decoder.work)


def text_of(out) -> list[int]:
    return out.sequences[0].tolist()


@MODES
@HOW
@pytest.mark.parametrize("pending_limit", [10**6, 3])
def test_a_conversation_computes_only_what_is_new(options, scratch, pending_limit):
    """Five turns, other arms every round: all rows but the last two are kept, which are the anchor and the last in common."""
    talk, prompt, expected, accepted = talker(scratch=scratch, pending_limit=pending_limit), PROMPT, 0, 0
    for turn in range(5):
        out = talk.say(prompt, 11, **options)
        assert out.stats.reused_tokens == expected and out.stats.prompt_tokens == len(prompt)
        accepted += sum(r.accepted for r in out.rounds)
        text = text_of(out)
        if turn != 2:  # once without having caught up
            check_rows(talk.work, remade, text[:-1], text[-1])
        prompt, expected = text + prompt_ids(1 + turn, turn), len(text) - 2
    assert accepted > 12 and expected == 7 + 5 * 11 + (1 + 2 + 3 + 4) - 2


def test_only_new_rows_reach_the_target():
    talk = talker()
    out = talk.say(PROMPT, 9)
    rows, forward = [], talk.decoder.target.forward
    counted = SimpleNamespace(on=True)

    def count(tree, *args, **kwargs):
        if counted.on:
            rows.append(tree.size)
        return forward(tree, *args, **kwargs)

    prompt = text_of(out) + prompt_ids(4, 1)
    talk.oracle.text = plain(prompt, 20, {})
    talk.decoder.target.forward = count
    try:
        again = talk.decoder.generate(prompt, max_new_tokens=1)
    finally:
        del talk.decoder.target.forward
    assert rows == [len(prompt) - again.stats.reused_tokens] == [4 + 2]


@HOW
def test_what_is_not_a_continuation_reuses_nothing(options):
    talk = talker()
    first = talk.say(PROMPT, 10, **options)
    for prompt in (PROMPT, PROMPT, PROMPT + [prompt_ids(1, 9)[0]], PROMPT[:4] + prompt_ids(6, 3), PROMPT[:5]):
        out = talk.say(prompt, 10, **options)
        assert out.stats.reused_tokens == 0
        check_rows(talk.work, remade, text_of(out)[:-1], text_of(out)[-1])
    again = talk.say(PROMPT, 10, **options)
    assert text_of(again) == text_of(first) and again.stats.reused_tokens == 0


@HOW
def test_reuse_can_be_refused(options):
    talk = talker()
    prompt = text_of(talk.say(PROMPT, 10, **options)) + [5, 6]
    out = talk.say(prompt, 6, reuse_prefix=False, **options)
    assert out.stats.reused_tokens == 0
    assert talk.say(text_of(out) + [8], 6, **options).stats.reused_tokens == len(text_of(out)) - 2


@MODES
@HOW
def test_a_changed_answer_is_reused_up_to_the_change(options, scratch):
    """The prompt's last row is computed anew even where the change comes right after it."""
    talk = talker(scratch=scratch)
    for kept in (0, 1, 2, 6, 10):
        text = text_of(talk.say(PROMPT, 11, reuse_prefix=False, **options))
        other = (text[len(PROMPT) + kept] + 1) % 211
        prompt = text[: len(PROMPT) + kept] + [other, *prompt_ids(3, kept)]
        out = talk.say(prompt, 9, **options)
        assert out.stats.reused_tokens == (len(PROMPT) + kept - 1 if kept else 0)
        check_rows(talk.work, remade, text_of(out)[:-1], text_of(out)[-1])


def test_a_prompt_that_ends_inside_the_last_answer():
    talk = talker()
    text = text_of(talk.say(PROMPT, 12))
    prompt = text[: len(PROMPT) + 6]
    out = talk.say(prompt, 12)
    assert out.stats.reused_tokens == len(prompt) - 1 and text_of(out)[: len(text)] == text
    check_rows(talk.work, remade, text_of(out)[:-1], text_of(out)[-1])


@BRANCHING
@MODES
@HOW
def test_after_a_stop_inside_an_accepted_block(options, scratch, branching):
    """Rows beyond the stop lie in the caches: they serve whoever goes on with the same tokens, and harm nobody else."""
    whole = plain(PROMPT, 32, options)
    new = whole[len(PROMPT) :]
    fresh = [i for i in range(1, 13) if new[i] not in new[:i]]
    ends = [next(i for i in fresh if i % 6 == slot) for slot in (1, 3, 5, 0)]  # rounds commit 6: accepted slots, and the bonus
    talk = talker(scratch=scratch, rights=itertools.repeat(5), branching=branching)
    for i, end in enumerate(ends):
        talk.decoder.router.arms = (Arm("oracle", 5),)
        out = talk.say(PROMPT, 20, eos_token_id=new[end], reuse_prefix=False, **options)
        assert out.finish == "stop" and out.stats.new_tokens == end + 1
        held = whole[: len(PROMPT) + 6 * ((end - 1) // 6) + 6]  # the rows of whole rounds, without the bonus
        assert talk.work.rows == held
        same = len(PROMPT) + end + 1 + (i + branching) % 3
        prompt = whole[:same] + [(whole[same] + 1) % 211, 9]
        talk.decoder.router.arms = ARMS
        again = talk.say(prompt, 8, **options)
        assert again.stats.reused_tokens == min(len(held), same) - 1
        check_rows(talk.work, remade, text_of(again)[:-1], text_of(again)[-1])


def test_a_closed_stream_is_gone_on_from():
    talk = talker()
    talk.oracle.text = plain(PROMPT, 40, {})
    stream, got = talk.decoder.stream(PROMPT, max_new_tokens=30), []
    while len(got) < 8:
        got += next(stream).tokens
    stream.close()
    prompt = PROMPT + got + [4]
    assert talk.say(prompt, 5).stats.reused_tokens == len(prompt) - 3


def test_only_the_last_text_is_kept():
    """A text, another one, and the first again; and a stream that takes the caches back in between."""
    talk = talker([Arm("ar"), Arm("dflash", 3), Arm("mixed", 8)])
    first, second = text_of(talk.say(PROMPT, 8)), text_of(talk.say(prompt_ids(9, 4), 8))
    assert talk.say(first + [3], 4).stats.reused_tokens == 0
    stream = talk.decoder.stream(second + [3], max_new_tokens=20)
    begun = [t for _ in range(2) for t in next(stream).tokens]
    assert talk.say(first + [3], 4).stats.reused_tokens == 0
    rest = [t for piece in stream for t in piece.tokens]
    assert second + [3] + begun + rest == plain(second + [3], 20, {})
    prompt = second + [3] + begun + rest + [6]
    assert talk.say(prompt, 4).stats.reused_tokens == len(prompt) - 3


def test_another_router_starts_with_empty_caches():
    """Choosing it may have run the drafters; a tree of more rows than before even brings another cache."""
    talk = talker([Arm("dflash", 3), Arm("eagle3-tree", 8, 3, 3)])
    text = text_of(talk.say(PROMPT, 8))
    for kind, size in (("eagle3", 2), ("ddtree", 40)):
        talk.decoder.use_router(static(kind, size))
        out = talk.say(text + [3], 8)
        assert out.stats.reused_tokens == 0 and {r.arm.kind for r in out.rounds} == {kind, "ar"}
        check_rows(talk.work, remade, text_of(out)[:-1], text_of(out)[-1])
        text = text_of(out)


class Broken(Exception):
    pass


def fails(inner, after: int):
    calls = itertools.count()

    def broken(*args, **kwargs):
        if next(calls) >= after:
            raise Broken
        return inner(*args, **kwargs)

    return broken


PLACES = {
    "draft": lambda d: (d.drafters["eagle3"], "draft"),
    "forward": lambda d: (d.target, "forward"),
    "logits": lambda d: (d.target, "logits"),
    "attend": lambda d: (d.work.cache, "attend"),
    "commit": lambda d: (d.work.cache, "commit"),
    "ingest": lambda d: (d.drafters["dflash"], "ingest"),
    "set_length": lambda d: (d.drafters["dflash"].cache, "set_length"),
}


@pytest.mark.parametrize("place", PLACES)
def test_after_a_failure_in_mid_round_nothing_is_reused(place, monkeypatch):
    talk = talker(4 * [Arm("eagle3", 3)] + [Arm("dflash", 3), Arm("ddtree", 8)], rights=itertools.repeat(2))
    text = text_of(talk.say(PROMPT, 8))
    for after in (1, 2, 4):
        owner, name = PLACES[place](talk.decoder)
        talk.oracle.text = whole = plain(text + [3], 60, {})
        with monkeypatch.context() as patch, pytest.raises(Broken):
            patch.setattr(owner, name, fails(getattr(owner, name), after))
            talk.decoder.generate(text + [3], max_new_tokens=40)
        out = talk.say(whole[: len(text) + 3] + [4], 6)  # goes on from the answer that was cut off
        assert out.stats.reused_tokens == 0
        check_rows(talk.work, remade, text_of(out)[:-1], text_of(out)[-1])
        text = text_of(out)


@pytest.mark.parametrize("option", ["logits_processor", "stopping_criteria"])
def test_after_a_callable_of_the_callers_has_failed(option):
    talk = talker()
    text = text_of(talk.say(PROMPT, 8))
    good = {"logits_processor": lambda ids, scores: scores, "stopping_criteria": lambda ids, scores: False}[option]
    for after in (0, 3, 9):
        talk.oracle.text = whole = plain(text + [3], 40, {})
        with pytest.raises(Broken):
            talk.decoder.generate(text + [3], max_new_tokens=30, **{option: [fails(good, after)]})
        out = talk.say(whole[: len(text) + 3] + [4], 6)
        # Before the first round the prompt's rows are whole, but they end a prompt, not an answer.
        assert out.stats.reused_tokens == 0
        check_rows(talk.work, remade, text_of(out)[:-1], text_of(out)[-1])


def test_after_a_streamer_has_failed_between_rounds():
    """Whole rounds lie in the caches: going on from them is right."""
    talk = talker()

    class Hurt(Recorder):
        def put(self, value):
            super().put(value)
            if len(self.values) == 5:
                raise Broken

    hurt = Hurt()
    talk.oracle.text = plain(PROMPT, 60, {})
    with pytest.raises(Broken):
        talk.decoder.generate(PROMPT, max_new_tokens=40, streamer=hurt)
    text = PROMPT + hurt.tokens
    assert text == talk.oracle.text[: len(text)]
    out = talk.say(text + [3], 6)
    assert out.stats.reused_tokens == len(text) - 2
    check_rows(talk.work, remade, text_of(out)[:-1], text_of(out)[-1])


def test_rows_in_nobodys_hands_are_never_read():
    """Everything that is not committed becomes NaN between turns."""
    talk, prompt = talker(seed=3), PROMPT
    for turn in range(4):
        out = talk.say(prompt, 9, **(SAMPLED if turn % 2 else {}))
        for cache in (talk.work.cache, *(d.cache for d in talk.decoder.drafters.values())):
            cache.poison()
        prompt = text_of(out)[: len(prompt) + 7] + prompt_ids(2, turn)
        assert torch.isfinite(talk.work.cache.kv[..., : talk.work.cache.length, :]).all()
