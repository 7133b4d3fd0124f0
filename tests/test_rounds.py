"""Rounds: whatever was drafted, routed and accepted, the text is transformers' greedy text and every cache is what a fresh one
would hold. Everything uncommitted is NaN after each round."""

from __future__ import annotations

import dataclasses
import itertools
import random
from types import SimpleNamespace

import pytest
import torch

from tests.oracle import (
    OracleDrafter,
    RandomRouter,
    Recorder,
    build,
    hf_generate,
    models,
    prompt_ids,
    run,
    static,
)
from tests.rebuild import close
from whiflash_triton.arms import Arm
from whiflash_triton.decoder import WhiFlashDecoder
from whiflash_triton.scheduler import Stream, Workspace

ROWS, NEW = 100, 60
TARGETS = {
    "llama": {"num_key_value_heads": 6},
    "mistral": {"sliding_window": 9},
    "qwen2": {"tie_word_embeddings": True, "seed": 1},
    "qwen3": {"seed": 2},
}
MODES = pytest.mark.parametrize("scratch", [False, True], ids=["tail", "scratch"])
_texts: dict[tuple, list[int]] = {}


def setting(family: str, dtype=torch.float64, prompt: int = 7) -> SimpleNamespace:
    """A random target, a prompt, and the text transformers makes of it, long enough to draft past the end of any test."""
    model, target = models(family, dtype, **TARGETS[family])
    ids = prompt_ids(prompt)
    if (family, dtype, prompt) not in _texts:
        _texts[family, dtype, prompt] = hf_generate(model, ids, max_new_tokens=NEW + 25)
    return SimpleNamespace(model=model, target=target, prompt=ids, text=_texts[family, dtype, prompt])


def oracle_stream(s: SimpleNamespace, rights, size: int, branching: bool, scratch: bool, **others) -> Stream:
    oracle = OracleDrafter(s.text, iter(rights), ROWS, branching, seed=size)
    drafters = {"oracle": oracle, **others}
    return Stream(Workspace(s.target, drafters, s.target.new_cache(ROWS, 10, scratch)), static("oracle", size))


@MODES
@pytest.mark.parametrize("branching", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("family", TARGETS)
def test_every_acceptance_length(family, branching, scratch):
    """0 to the whole block, in both directions; real drafters idle beside and collect what was accepted."""
    s = setting(family)
    rights = [*range(9), *range(8, -1, -1)]
    idle = {kind: build(kind, s.target, ROWS, scratch, pending_limit=5) for kind in ("dflash", "eagle3")}
    stream = oracle_stream(s, rights, 8, branching, scratch, **idle)
    committed, rounds = run(stream, s.prompt, NEW)
    assert committed == s.text[: len(committed)]
    accepted = [r.accepted for r in rounds]
    assert accepted == stream.drafters["oracle"].promised[: len(rounds)] == rights[: len(rounds)]
    assert set(accepted) == set(range(9))
    assert all(r.drafted == 8 and r.arm == Arm("oracle", 8) for r in rounds)
    same_caches(s, stream, committed, 1e-9)


@MODES
def test_accepted_paths_that_are_no_prefix(scratch):
    """The paths of the trees above really branch: wrong siblings before, between and after the right nodes."""
    s = setting("qwen3")
    stream = oracle_stream(s, itertools.cycle((3, 1, 4)), 9, True, scratch)
    seen = []
    inner = stream.cache.commit

    def commit(path, path_len, accepted, is_prefix, features):
        seen.append((path[0, :accepted].tolist(), is_prefix))
        return inner(path, path_len, accepted, is_prefix, features)

    stream.cache.commit = commit
    committed, _ = run(stream, s.prompt, 40)
    assert committed == s.text[: len(committed)]
    assert sum(path != list(range(len(path))) for path, _ in seen) > len(seen) // 2
    assert not any(is_prefix for _, is_prefix in seen)


def same_caches(s: SimpleNamespace, stream: Stream, committed: list[int], tolerance: float) -> None:
    """Target cache = a fresh prefill's; each drafter's = one rebuilt from that prefill's features."""
    with torch.no_grad():
        tokens, anchor = torch.tensor([committed[:-1]]), torch.tensor([committed[-1:]])
        fresh = s.target.new_cache(ROWS, 1, False)
        _, features = s.target.prefill(tokens, fresh, stream.work.taps)
        close(stream.cache, fresh, len(committed) - 1, tolerance)
        for kind in ("dflash", "eagle3"):
            drafter = stream.drafters[kind]
            rebuilt = build(kind, s.target, ROWS, False)
            rebuilt.ingest(torch.cat(features, 2)[stream.work.tap_rows[kind]], tokens)
            assert drafter.draft(anchor, Arm(kind, 3), 3).tokens.tolist() == rebuilt.draft(anchor, Arm(kind, 3), 3).tokens.tolist()
            first = 1 if kind == "eagle3" else 0
            assert drafter.tokens == rebuilt.tokens == committed[first : len(committed) - 1 + first]
            close(drafter.cache, rebuilt.cache, len(committed) - 1, tolerance)


@MODES
@pytest.mark.parametrize(
    ("family", "dtype", "tolerance"),
    [*((family, torch.float64, 1e-9) for family in TARGETS), ("llama", torch.float32, 1e-4), ("qwen3", torch.float32, 1e-4)],
    ids=lambda x: str(x).removeprefix("torch."),
)
@pytest.mark.parametrize("seed", [0, 1])
def test_random_arms_every_round(family, dtype, tolerance, scratch, seed):
    """Chains, trees, real drafters and none, of random lengths: text, and caches against rebuilt ones, at odd moments too."""
    s, rng = setting(family, dtype), random.Random(seed)
    limits = [10**6, 1, 4]
    drafters = {kind: build(kind, s.target, ROWS, scratch, rng.choice(limits)) for kind in ("dflash", "eagle3")}
    for kind, branching in (("chain", False), ("tree", True)):
        rights = (rng.randrange(6) for _ in itertools.count())
        drafters[kind] = OracleDrafter(s.text, rights, ROWS, branching, seed)
    arms = 4 * [Arm("ar")] + [Arm(kind, size) for kind in drafters for size in range(1, 1 + min(5, drafters[kind].max_draft))]
    stream = Stream(Workspace(s.target, drafters, s.target.new_cache(ROWS, 10, scratch)), RandomRouter(arms, seed))
    committed, rounds = run(stream, s.prompt, NEW)
    assert committed == s.text[: len(committed)]
    assert {r.arm.kind for r in rounds} == {"ar", "dflash", "eagle3", "chain", "tree"}
    assert all(r.drafted == r.arm.size for r in rounds)
    assert stream.forwards == len(rounds)
    assert list(stream.state.history) == [(r.arm, r.drafted, r.accepted) for r in rounds][-256:]
    same_caches(s, stream, committed, tolerance)


@MODES
def test_caches_between_any_two_rounds(scratch):
    """The comparison with rebuilt caches after each single round, not only at the end."""
    s = setting("qwen3")
    drafters = {kind: build(kind, s.target, ROWS, scratch) for kind in ("dflash", "eagle3")}
    drafters["tree"] = OracleDrafter(s.text, itertools.cycle((0, 3, 1)), ROWS, True)
    arms = [Arm("ar"), Arm("dflash", 2), Arm("eagle3", 2), Arm("tree", 5)]
    stream = Stream(Workspace(s.target, drafters, s.target.new_cache(ROWS, 10, scratch)), RandomRouter(arms, 5))
    run(stream, s.prompt, 14, lambda step, committed: same_caches(s, stream, committed, 1e-9))


@MODES
@pytest.mark.parametrize("kind", ["dflash", "eagle3"])
def test_a_broken_drafter_costs_speed_and_never_text(kind, scratch):
    """NaN in every weight of the drafter: its drafts are worthless, the text is what it was."""
    s = setting("llama")
    drafter = build(kind, s.target, ROWS, scratch)
    drafter.norm = torch.full_like(drafter.norm, float("nan"))
    drafter.fc.weights[0] = torch.full_like(drafter.fc.weights[0], float("nan"))
    decoder = WhiFlashDecoder(s.target, None, {kind: drafter}, static(kind, 3), ROWS, [])
    decoder.work.replace_cache(s.target.new_cache(ROWS, 10, scratch))
    assert decoder.generate(s.prompt, max_new_tokens=20).sequences[0].tolist() == s.text[: len(s.prompt) + 20]


def test_a_text_that_holds_the_mask_token():
    """The id that fills a diffusion block's empty slots is a token like any other in prompt and text."""
    s = setting("qwen3")
    drafter = build("dflash", s.target, ROWS, False)
    for mask in (s.text[len(s.prompt) + 1], s.prompt[-1], s.text[len(s.prompt)]):
        drafter.config = dataclasses.replace(drafter.config, mask_token_id=mask)
        decoder = WhiFlashDecoder(s.target, None, {"dflash": drafter}, static("dflash", 5), ROWS, [])
        assert decoder.generate(s.prompt, max_new_tokens=20).sequences[0].tolist() == s.text[: len(s.prompt) + 20]


@MODES
def test_a_window_of_one(scratch):
    """Every token sees itself alone. transformers' cache keeps too much here and departs from its own forward: use_cache=False."""
    model, target = models("mistral", seed=1, sliding_window=1)
    prompt = prompt_ids(3, 1)
    text = hf_generate(model, prompt, max_new_tokens=30, use_cache=False)
    oracle = OracleDrafter(text, itertools.cycle((2, 0, 4)), ROWS, branching=True)
    stream = Stream(Workspace(target, {"oracle": oracle}, target.new_cache(ROWS, 10, scratch)), static("oracle", 6))
    committed, _ = run(stream, prompt, 20)
    assert committed == text[: len(committed)]


def test_pending_rows_are_counted_and_caught_up():
    s = setting("llama")
    drafters = {kind: build(kind, s.target, ROWS, False) for kind in ("dflash", "eagle3")}
    order = iter([Arm("ar"), Arm("ar"), Arm("dflash", 2), Arm("eagle3", 2), Arm("ar"), Arm("dflash", 1)])
    router = SimpleNamespace(arms=(Arm("ar"), Arm("dflash", 1), Arm("dflash", 2), Arm("eagle3", 2)), choose=lambda _: next(order))
    stream = Stream(Workspace(s.target, drafters, s.target.new_cache(ROWS, 10)), router)
    with torch.no_grad():
        stream.start(s.prompt)
        ran = [stream.round(20).round for _ in range(6)]
    a, b, c = (r.accepted + 1 for r in ran[2:5])
    assert [r.caught_up for r in ran] == [0, 0, 9, 9 + a, 0, a + b + c]
    assert drafters["dflash"].pending == ran[5].committed and drafters["eagle3"].pending == b + c + ran[5].committed


# Stops


def decoder_of(s: SimpleNamespace, branching: bool, right: int = 9, size: int = 5, rows: int = ROWS, eos=()) -> WhiFlashDecoder:
    oracle = OracleDrafter(s.text, itertools.repeat(right), rows, branching)
    return WhiFlashDecoder(s.target, None, {"oracle": oracle}, static("oracle", size), rows, list(eos))


def first_seen(s: SimpleNamespace) -> list[int]:
    """Indices of new tokens that did not occur earlier among the new ones."""
    new = s.text[len(s.prompt) :]
    return [i for i, token in enumerate(new) if token not in new[:i]]


def check_end(s, out, recorder, expected: list[int], finish: str) -> None:
    """`expected` and nothing after it, wherever tokens are told or counted."""
    new = expected[len(s.prompt) :]
    assert out.sequences.tolist() == [expected]
    assert recorder.values[0].tolist() == [s.prompt] and recorder.tokens == new and recorder.ends == 1
    assert len(out.arms) == out.stats.new_tokens == len(new) and out.finish == finish
    assert out.stats.prompt_tokens == len(s.prompt)
    assert 1 + sum(r.committed for r in out.rounds) == len(new)
    assert sum(arm.kind == "oracle" for arm in out.arms) == sum(r.accepted for r in out.rounds)
    assert out.stats.target_forwards == len(out.rounds)
    assert out.stats.tau == ((len(new) - 1) / len(out.rounds) if out.rounds else 1.0)


@pytest.mark.parametrize("branching", [False, True], ids=["chain", "tree"])
def test_end_token_at_every_slot(branching):
    """In the prefill's token, in each slot of an accepted block, on the bonus, and in the next block."""
    s = setting("qwen2")
    hits = [i for i in first_seen(s) if i < 14]
    assert {i % 6 for i in hits} == set(range(6))  # rounds commit 6 tokens: slots 1..5 and the bonus, 0 is the prefill's
    decoder = decoder_of(s, branching)
    for i in hits:
        eos, recorder = s.text[len(s.prompt) + i], Recorder()
        out = decoder.generate(s.prompt, max_new_tokens=20, eos_token_id=eos, streamer=recorder)
        expected = s.text[: len(s.prompt) + i + 1]
        check_end(s, out, recorder, expected, "stop")
        if i in hits[::3]:
            assert expected == hf_generate(s.model, s.prompt, max_new_tokens=20, eos_token_id=eos)
        full, rest = divmod(i, 6)
        assert [r.committed for r in out.rounds] == [6] * full + [rest] * bool(rest)
        assert [r.accepted for r in out.rounds] == [5] * full + [rest] * bool(rest)
        pieces = list(decoder.stream(s.prompt, max_new_tokens=20, eos_token_id=eos))
        assert [t for p in pieces for t in p.tokens] == expected[len(s.prompt) :]
        assert [a for p in pieces for a in p.arms] == out.arms


@pytest.mark.parametrize("branching", [False, True], ids=["chain", "tree"])
def test_token_limits_inside_a_block(branching):
    s = setting("mistral")
    decoder = decoder_of(s, branching)
    for new in range(1, 15):
        recorder = Recorder()
        option = {"max_new_tokens": new} if new % 2 else {"max_length": len(s.prompt) + new}
        out = decoder.generate(s.prompt, streamer=recorder, **option)
        check_end(s, out, recorder, s.text[: len(s.prompt) + new], "length")
        if new in (1, 4, 7):
            assert out.sequences[0].tolist() == hf_generate(s.model, s.prompt, **option)
        assert [r.committed for r in out.rounds] == [6] * ((new - 1) // 6) + [(new - 1) % 6] * bool((new - 1) % 6)


def test_a_stop_inside_the_limit_wins_and_one_beyond_it_does_not():
    s = setting("qwen2")
    decoder, recorder = decoder_of(s, False), Recorder()
    i = next(i for i in first_seen(s) if i in (2, 3))
    eos = s.text[len(s.prompt) + i]
    for new, finish in ((i, "length"), (i + 1, "stop"), (i + 2, "stop")):
        recorder = Recorder()
        out = decoder.generate(s.prompt, max_new_tokens=new, eos_token_id=eos, streamer=recorder)
        check_end(s, out, recorder, s.text[: len(s.prompt) + min(new, i + 1)], finish)


@pytest.mark.parametrize("spelling", [list, tuple, set, torch.tensor], ids=["list", "tuple", "set", "tensor"])
def test_several_end_tokens(spelling):
    """The first to come counts, in whatever order they are given; those of the prompt do not."""
    s = setting("qwen2")
    a, b = (i for i in first_seen(s) if i in (3, 4))
    ids = [s.text[len(s.prompt) + b], s.text[len(s.prompt) + a]]
    out = decoder_of(s, True).generate(s.prompt, max_new_tokens=20, eos_token_id=spelling(ids))
    assert out.sequences[0].tolist() == s.text[: len(s.prompt) + a + 1] and out.finish == "stop"
    assert out.sequences[0].tolist() == hf_generate(s.model, s.prompt, max_new_tokens=20, eos_token_id=ids)
    unseen = next(t for t in s.prompt if t not in s.text[len(s.prompt) : len(s.prompt) + 20])
    out = decoder_of(s, True, eos=[unseen]).generate(s.prompt, max_new_tokens=20)
    assert out.finish == "length" and out.stats.new_tokens == 20


def test_default_end_tokens_and_none():
    s = setting("qwen2")
    eos = s.text[len(s.prompt) + 3]
    decoder = decoder_of(s, False, eos=[eos])
    assert decoder.generate(s.prompt, max_new_tokens=20).sequences.shape[1] == len(s.prompt) + 4
    assert decoder.generate(s.prompt, max_new_tokens=20, eos_token_id=[]).stats.new_tokens == 20


@pytest.mark.parametrize("branching", [False, True], ids=["chain", "tree"])
@MODES
@pytest.mark.parametrize("rows", [20, 21, 23, 26])
def test_to_the_exact_end_of_the_cache(rows, scratch, branching):
    """The last token needs no row, so a cache of n rows holds n + 1 tokens; drafts shrink, and never write past the end."""
    s = setting("llama")
    decoder = decoder_of(s, branching, rows=rows)
    decoder.work.replace_cache(s.target.new_cache(rows, 10, scratch))
    new = rows - len(s.prompt) + 1
    out = decoder.generate(s.prompt, max_new_tokens=new)
    assert out.sequences[0].tolist() == s.text[: rows + 1]
    assert decoder.work.cache.length <= rows
    assert all((r.drafted > 0) == (r.arm.kind == "oracle") for r in out.rounds)  # no room for a draft: the round is `ar`
    with pytest.raises(ValueError, match=f"max_cache_len {rows}"):
        decoder.generate(s.prompt, max_new_tokens=new + 1)


@MODES
def test_real_drafters_to_the_exact_end_of_the_cache(scratch):
    s, rows = setting("qwen3"), 24
    drafters = {kind: build(kind, s.target, rows, scratch) for kind in ("dflash", "eagle3")}
    arms = [Arm("dflash", 5), Arm("eagle3", 5)]
    decoder = WhiFlashDecoder(s.target, None, drafters, RandomRouter(arms), rows, [])
    decoder.work.replace_cache(s.target.new_cache(rows, 10, scratch))
    out = decoder.generate(s.prompt, max_new_tokens=rows - len(s.prompt) + 1)
    assert out.sequences[0].tolist() == s.text[: rows + 1]
