"""The suffix automaton against brute force, and the copies it proposes."""

from __future__ import annotations

import random

import pytest
import torch

from tests.oracle import RandomRouter, check_invariants, models, prompt_ids, run, static
from whiflash_triton.arms import Arm
from whiflash_triton.decoder import WhiFlashDecoder
from whiflash_triton.drafters.lookup import SuffixAutomaton, copied
from whiflash_triton.scheduler import Stream, Workspace


def longest_repeated_suffix(text: list[int]) -> int:
    n = len(text)
    for length in range(n - 1, 0, -1):
        if any(text[i : i + length] == text[n - length :] for i in range(n - length)):
            return length
    return 0


@pytest.mark.parametrize("alphabet", [1, 2, 3, 20])
@pytest.mark.parametrize("seed", range(4))
def test_the_longest_suffix_at_every_token(alphabet, seed):
    rng, automaton = random.Random(seed), SuffixAutomaton()
    for _ in range(120):
        automaton.extend([rng.randrange(alphabet)])
        text = automaton.text
        length, end = automaton.match()
        assert length == longest_repeated_suffix(text)
        if length:
            assert 0 <= end < len(text) - 1 and text[end + 1 - length : end + 1] == text[len(text) - length :]
        else:
            assert end == -1


def test_one_by_one_or_at_once():
    rng = random.Random(1)
    text = [rng.randrange(4) for _ in range(200)]
    whole, parts = SuffixAutomaton(), SuffixAutomaton()
    whole.extend(text)
    for i in range(0, 200, 7):
        parts.extend(text[i : i + 7])
    assert whole.match() == parts.match() and whole.continuation(9) == parts.continuation(9)


def test_empty_and_single():
    automaton = SuffixAutomaton()
    assert automaton.match() == (0, -1) and automaton.continuation(3) == (0, [])
    automaton.extend([5])
    assert automaton.match() == (0, -1)
    automaton.extend([5])
    assert automaton.match() == (1, 0)


def test_the_recent_occurrence_is_copied():
    automaton = SuffixAutomaton()
    automaton.extend([1, 2, 3, 9, 1, 2, 4, 8, 1, 2])
    assert automaton.continuation(3) == (2, [4, 8, 1])


def test_a_copy_that_overlaps_its_source_goes_on_repeating():
    automaton = SuffixAutomaton()
    automaton.extend([7, 1, 2, 1, 2, 1, 2])
    assert automaton.continuation(5) == (4, [1, 2, 1, 2, 1])


def test_states_grow_linearly():
    automaton, rng = SuffixAutomaton(), random.Random(2)
    automaton.extend([rng.randrange(2) for _ in range(5000)])
    assert len(automaton._link) < 2 * 5000


def test_short_matches_draft_little():
    """One token in common is good for two more, two for four; without a match nothing is drafted."""
    automaton, text = SuffixAutomaton(), [1, 2, 3, 4, 5, 6, 9, 1]
    assert copied(automaton, text, torch.tensor([[1]]), 8).tokens.tolist() == [[1, 2, 3]]
    assert automaton.text == text  # it has read what it had not
    assert copied(automaton, [*text, 2], torch.tensor([[2]]), 8).tokens.tolist() == [[2, 3, 4, 5, 6]]
    assert copied(automaton, [*text, 2, 3], torch.tensor([[3]]), 1).tokens.tolist() == [[3, 4]]
    alone = copied(automaton, [*text, 2, 3, 77], torch.tensor([[77]]), 8)
    assert alone.tokens.tolist() == [[77]] and alone.size == 1


@pytest.mark.parametrize("scratch", [False, True], ids=["tail", "scratch"])
def test_rounds_that_copy(scratch):
    """Text as without drafts, some of it copied, whatever the length of the matches; the automaton has read what it copied from."""
    _, target = models("llama", seed=3)
    prompt = prompt_ids(5) * 6
    plain, _ = run(Stream(Workspace(target, {}, target.new_cache(140, 1, scratch)), static("ar", 0)), prompt, 90)
    stream = Stream(Workspace(target, {}, target.new_cache(140, 9, scratch)), static("lookup", 8))
    copies, rounds = run(stream, prompt, 90)
    assert copies[: len(plain)] == plain
    assert sum(r.accepted for r in rounds) > 5 and len({r.drafted for r in rounds}) > 2
    assert stream.copies.text == copies[: len(stream.copies.text)]
    check_invariants(stream, copies)


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "seed": 5, "top_k": 4}], ids=["greedy", "sampled"])
def test_without_any_drafter(sampling):
    _, target = models("qwen3", torch.float64, seed=2)
    prompt = prompt_ids(6) * 3
    plain = WhiFlashDecoder(target, None, {}, static("ar", 0), 100, [])
    expected = plain.generate(prompt, max_new_tokens=60, **sampling).sequences
    arms = [Arm("lookup", 1), Arm("lookup", 5), Arm("ar")]
    decoder = WhiFlashDecoder(target, None, {}, RandomRouter(arms), 100, [])
    assert torch.equal(decoder.generate(prompt, max_new_tokens=60, **sampling).sequences, expected)
    decoder.use_router("static:lookup")
    assert torch.equal(decoder.generate(prompt, max_new_tokens=60, **sampling).sequences, expected)
