"""Lookup: copy what followed the longest suffix of the text that occurred before, in prompt or output; no model.

A suffix automaton (Blumer et al. 1985) grows by one token at a time in amortised constant time and knows that suffix at any
moment; prompt lookup of a fixed n-gram length searches the text anew every round and misses the longer matches.
"""

from __future__ import annotations

import math
from itertools import accumulate

import torch

from ..tree import DraftTree, Proposal, chain

MAX_DRAFT = 64
TRUST = 2  # a match of n tokens is good for TRUST * n more: after a single token the copy is right one time in four
# Chance that the next copied token is right, by the length of the match, 1, 2, 3...: as in greedy text of SmolLM2-135M-Instruct.
COPY = (0.23, 0.55, 0.62, 0.68, 0.75, 0.78, 0.8, 0.82, 0.84, 0.87, 0.9, 0.96)
RECENT_STATES = 8  # how many of a text's suffixes learn of their newest occurrence at every token


class SuffixAutomaton:
    """All substrings of a growing text. A state is a set of substrings that end at the same places."""

    def __init__(self) -> None:
        self.text: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link, self._length = [-1], [0]
        self._end = [-1]  # where an occurrence of the state's substrings ends, before the newest token where there is one
        self._last = 0

    def extend(self, tokens: list[int]) -> None:
        for token in tokens:
            self._append(token)

    def read(self, text: list[int]) -> None:
        """Take in what is new of a text that begins with what has been read."""
        self.extend(text[len(self.text) :])

    def _append(self, token: int) -> None:
        at, state = len(self.text), self._last
        # The suffixes of the text so far now end before its newest token: the recent occurrence is the better one to copy.
        for _ in range(RECENT_STATES):
            if state <= 0:
                break
            self._end[state] = at - 1
            state = self._link[state]
        self.text.append(token)
        new = self._add({}, 0, self._length[self._last] + 1, at)
        state = self._last
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        if state >= 0:
            target = self._next[state][token]
            if self._length[target] != self._length[state] + 1:
                target = self._split(state, token, target)
            self._link[new] = target
        self._last = new

    def _add(self, following: dict[int, int], link: int, length: int, end: int) -> int:
        self._next.append(following)
        self._link.append(link)
        self._length.append(length)
        self._end.append(end)
        return len(self._link) - 1

    def _split(self, state: int, token: int, target: int) -> int:
        """Give the shorter substrings of `target` a state of their own: they now end in one more place."""
        clone = self._add(dict(self._next[target]), self._link[target], self._length[state] + 1, self._end[target])
        while state >= 0 and self._next[state].get(token) == target:
            self._next[state][token] = clone
            state = self._link[state]
        self._link[target] = clone
        return clone

    def match(self) -> tuple[int, int]:
        """(length, end) of the longest suffix that also ends earlier, at text[end]; (0, -1) if there is none."""
        state = self._link[self._last] if self._last else 0
        return (self._length[state], self._end[state]) if state > 0 else (0, -1)

    def continuation(self, count: int) -> tuple[int, list[int]]:
        """Length of the match and up to `count` tokens that followed it, or would if the copy itself goes on repeating."""
        length, end = self.match()
        if not length:
            return 0, []
        period = len(self.text) - 1 - end
        return length, [self.text[end + 1 + i % period] for i in range(count)]


def copied(automaton: SuffixAutomaton, text: list[int], anchor: torch.Tensor, count: int) -> DraftTree:
    """anchor int64 [B, 1], the last token of text -> a chain of at most `count` copied tokens after it, none without a match."""
    automaton.read(text)
    length, tokens = automaton.continuation(count)
    drafted = torch.tensor([tokens[: TRUST * length]], dtype=torch.int64, device=anchor.device)
    return chain(torch.cat((anchor, drafted), 1))


def proposal(automaton: SuffixAutomaton, anchor: torch.Tensor, count: int) -> Proposal | None:
    """The copy as a chain of nodes with their chances, each token that is right making the match longer; None without a match.

    anchor int64 [B, 1] is the last token that the automaton has read.
    """
    length, tokens = automaton.continuation(count)
    n = len(tokens)
    if not n:
        return None
    steps = [math.log(COPY[min(length + i, len(COPY)) - 1]) for i in range(n)]
    order = torch.arange(n + 1, dtype=torch.int32, device=anchor.device)
    scores = torch.tensor([0.0, *accumulate(steps)], dtype=torch.float64, device=anchor.device)
    return Proposal(torch.tensor([int(automaton.text[-1]), *tokens], device=anchor.device), order - 1, order, scores)
