"""Lookup: copy what followed the longest suffix of the text that occurred before, in prompt or output; no model.

A suffix automaton (Blumer et al. 1985) grows by one token at a time in amortised constant time and knows that suffix at any
moment; prompt lookup of a fixed n-gram length searches the text anew every round and misses the longer matches.
"""

from __future__ import annotations

import torch

from ..tree import DraftTree, chain

MAX_DRAFT = 64
TRUST = 2  # a match of n tokens is good for TRUST * n more: after a single token the copy is right one time in four
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
