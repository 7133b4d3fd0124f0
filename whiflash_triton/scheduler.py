"""The round on one screen: route, draft, verify, accept, commit.

Invariants after every round: one committed token (the anchor) has no KV row yet; target cache length == start; a drafter's cache
length + its pending rows == start, for every drafter, whichever arm ran.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from . import ops
from .arms import Arm
from .cache import KVCache
from .drafters.base import Drafter
from .drafters.draft import draft
from .drafters.lookup import SuffixAutomaton, copied
from .routers.base import RoundState, Router
from .sampling import Sampling, choose, float_logits, host_scores, node_scores
from .stats import Round
from .target import Target
from .tree import DraftTree, chain

if TYPE_CHECKING:
    from .device_round import DeviceRounds


class NaNLogits(FloatingPointError):
    """The target produced NaN, or every token is ruled out: the text cannot go on."""


@dataclass
class Step:
    """One round's committed tokens, oldest first, and who drafted them (the last one is the target's own unless the text ended).

    finish: why the text ends with the last of them, None where it goes on.
    """

    tokens: list[int]
    arms: list[Arm]
    round: Round | None
    finish: str | None = None


@dataclass
class Pick:
    """What the target chose along the tree: path int32 [1, N] and path_len int32 [1], bonus int64 [1] on the device; nodes of the
    path, their drafted tokens without the anchor, and what the text gains of them and the bonus before it ends, on the host."""

    path: torch.Tensor
    path_len: torch.Tensor
    bonus: torch.Tensor
    nodes: list[int]
    accepted: list[int]
    new: list[int]
    finish: str | None


class Workspace:
    """A target with its drafters and all their caches. Streams take turns: the owner's text is what the caches hold."""

    def __init__(self, target: Target, drafters: dict[str, Drafter], cache: KVCache | None = None):
        self.target, self.drafters, self.cache = target, drafters, cache
        self.taps = tuple(sorted({t for d in drafters.values() for t in d.taps}))
        self.tap_rows = {name: [self.taps.index(t) for t in d.taps] for name, d in drafters.items()}
        self.owner: Stream | None = None
        self.rows: list[int] | None = []  # the token of every committed row; None within a round, or after one that failed
        self.device: DeviceRounds | None = None  # rounds that never wait for the host, once a decoder has warmed up

    def fill(self, owner: Stream, tokens: list[int], more_than: int) -> torch.Tensor:
        """Hold the rows of `tokens` for `owner`; returns hidden [1, 1, H] of the last one.

        Drafters get the features, and ingest them when they are first chosen. The rows of the leading tokens in common with what
        the caches hold are kept where these are more than `more_than`.
        """
        same = next((i for i, (a, b) in enumerate(zip(self.rows or (), tokens, strict=False)) if a != b), None)
        same = min(len(self.rows or ()), len(tokens)) if same is None else same
        # EAGLE-3's row i embeds token i + 1, so the last row in common is computed anew, and everyone's with it.
        keep = same - 1 if same > more_than else 0
        if self.device is not None:
            self.device.abandon()
        self.owner, self.rows = owner, None
        self.cache.set_length(keep)
        for drafter in self.drafters.values():
            drafter.crop(keep) if keep else drafter.reset()
        ids = torch.tensor([tokens[keep:]], device=self.target.device)
        hidden, features = self.target.prefill(ids, self.cache, self.taps)
        for part, tapped in zip(ids.split([f.shape[2] for f in features], 1), features, strict=True):
            self.ingest(tapped, part)
        self.rows = list(tokens)
        owner.reused = keep
        return hidden

    def replace_cache(self, cache: KVCache) -> None:
        """Another target cache, empty: whoever comes next fills it."""
        self.cache, self.owner, self.rows, self.device = cache, None, [], None

    def ingest(self, features: torch.Tensor, tokens: torch.Tensor) -> None:
        for name, drafter in self.drafters.items():
            drafter.ingest(features[self.tap_rows[name]], tokens)


class Stream:
    """Decoding state of one text: its tokens (the anchor last), how they are chosen, where it ends, and what the router may see."""

    def __init__(
        self,
        work: Workspace,
        router: Router,
        sampling: Sampling | None = None,
        ending: Callable[[list[int], tuple | None], str | None] | None = None,
        keep_scores: bool = False,
    ):
        self.work, self.router = work, router
        self.target, self.drafters = work.target, work.drafters
        self.sampling, self.ending = sampling or Sampling(), ending or (lambda tokens, scores: None)
        self.scores: tuple[torch.Tensor, ...] | None = () if keep_scores else None
        self.tokens: list[int] = []
        self.prompt_len = self.reused = self.forwards = 0
        self.anchor: torch.Tensor | None = None  # int64 [1, 1]
        self.copies = SuffixAutomaton()  # of the text, as far as lookup has read it
        self.state: RoundState | None = None

    @property
    def cache(self) -> KVCache:
        return self.work.cache

    def start(self, prompt: list[int], reuse_prefix: bool = False) -> Step:
        """Prefill the prompt. With reuse_prefix, a prompt that goes on from the last text's answer keeps its rows."""
        last = self.work.owner
        least = last.prompt_len if last is not None and reuse_prefix else len(prompt)
        self.tokens, self.prompt_len = list(prompt), len(prompt)
        logits, greedy = self._restore(self.tokens, least)
        root = chain(torch.tensor([prompt[-1:]], device=self.target.device))
        pick = self._pick(root, logits, greedy, self.cache.length - 1)
        self.anchor = pick.bonus.view(1, 1)
        return self._step(pick.new, 0, pick.finish, Arm("ar"), None)

    def round(self, max_draft: int) -> Step:
        """max_draft: drafted tokens in a row that still fit the text and the cache beside the anchor."""
        device = self.work.device
        # What a processor, the scores or a penalty need of the text, the device does not have.
        if device is None or self.sampling.host or self.scores is not None or self.sampling.repetition_penalty != 1.0:
            return self._eager_round(max_draft)
        try:
            step = self._device_round(device, max_draft)
        except BaseException:
            device.abandon()  # the next round starts from the text
            raise
        return self._eager_round(max_draft) if step is None else step

    def _device_round(self, device: DeviceRounds, max_draft: int) -> Step | None:
        """Keep the device busy and read its oldest round; None, and the caches complete, where the next round is not for it."""
        self._hand_over(device)
        while max_draft >= 1 and len(device.in_flight) <= device.ahead:
            begin = time.perf_counter()
            self.state.pending = device.pending()
            arm = self._choose()
            self._hand_over(device)  # a router may have run a generation of its own
            if arm.kind == "lookup" or not device.fits(arm):
                break
            routed = time.perf_counter()
            device.launch(arm, self.sampling)
            device.in_flight[-1].ms = {"route": (routed - begin) * 1e3, "draft": (time.perf_counter() - routed) * 1e3}
        if not device.in_flight:
            device.leave()
            return None
        begin = time.perf_counter()
        flight, tokens = device.read()
        self.forwards += 1
        new, finish = self._take(tokens)
        arm, drafted, accepted = flight.arm, flight.rows - 1, len(tokens) - 1
        self.state.hidden, self.state.entropy, self.state.position = flight.record.hidden, flight.record.entropy[0], device.known
        self.state.history.append((arm, drafted, accepted))
        if finish is not None:
            device.leave()
        flight.ms["accept"] = (time.perf_counter() - begin) * 1e3
        self.anchor = torch.tensor([tokens[-1:]], device=self.target.device)
        return self._step(new, accepted, finish, arm, Round(arm, drafted, accepted, 0, flight.caught_up, flight.ms))

    def _hand_over(self, device: DeviceRounds) -> None:
        """The caches hold this text, and the device goes on from there."""
        if self.work.owner is not self or device.tokens is None:
            self._own()
            device.enter(self.tokens)

    def _eager_round(self, max_draft: int) -> Step:
        self._own()
        times, begin = {}, time.perf_counter()

        def lap(phase: str) -> None:
            nonlocal begin
            now = time.perf_counter()
            times[phase], begin = (now - begin) * 1e3, now

        self.state.pending = {name: d.pending for name, d in self.drafters.items()}
        arm = self._choose()
        arm = arm if max_draft >= 1 else Arm("ar")  # no draft fits
        self._own()  # a router may have run a generation of its own
        self.work.rows = None
        lap("route")
        caught_up = sum(self.state.pending.get(name, 0) for name in arm.needs)
        tree = self._draft(arm, max_draft)
        lap("draft")
        hidden, features = self.target.forward(tree, self.cache, self.work.taps)
        logits = self.target.logits(hidden)[0]  # [N, V]
        self.forwards += 1
        lap("verify")
        raw, before = ops.block_sampling(logits), len(self.tokens)
        pick = self._pick(tree, logits, raw.token, self.cache.length)
        lap("accept")
        if self.work.owner is not self:
            raise RuntimeError("another generation has started on this decoder from within a drafter: load a second decoder")
        kept, last = len(pick.nodes), pick.nodes[-1]
        kept_features = self.cache.commit(pick.path, pick.path_len, kept, tree.is_chain, features)
        self.work.ingest(kept_features, tree.tokens[:, :kept] if tree.is_chain else tree.tokens[:, pick.path[0, :kept].long()])
        self.work.rows = self.tokens[:before] + pick.accepted
        self.state.hidden, self.state.entropy = hidden[0, last], raw.entropy[last]
        self.state.position = self.cache.length
        self.state.history.append((arm, tree.size - 1, kept - 1))
        lap("commit")
        self.anchor = pick.bonus.view(1, 1)
        return self._step(pick.new, kept - 1, pick.finish, arm, Round(arm, tree.size - 1, kept - 1, kept, caught_up, times))

    def _choose(self) -> Arm:
        """The router's choice."""
        if any(arm.copies for arm in self.router.arms):
            self.copies.read(self.tokens)
            self.state.match = self.copies.match()[0]
        arm = self.router.choose(self.state)
        if arm not in self.router.arms:
            listed = ", ".join(map(str, self.router.arms))
            raise ValueError(f"{type(self.router).__name__} chose {arm}, which its arms do not list: {listed}")
        return arm

    def _draft(self, arm: Arm, max_draft: int) -> DraftTree:
        if arm.kind == "lookup":
            return copied(self.copies, self.tokens, self.anchor, min(arm.size, max_draft))
        return draft(self.drafters, self.anchor, arm, max_draft, self.copies if arm.copies else None)

    def _own(self) -> None:
        """Take the caches back if another stream has had them since, or a round has failed."""
        if self.work.owner is not self or self.work.rows is None:
            self._restore(self.tokens[:-1], 0)

    def _restore(self, tokens: list[int], more_than: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Fill the caches with the rows of tokens; returns logits [1, V] of the last one, and their argmax."""
        hidden = self.work.fill(self, tokens, more_than)
        logits = self.target.logits(hidden)[0]
        sample = ops.block_sampling(logits)
        seen = {} if self.state is None else {"history": self.state.history}
        self.state = RoundState(hidden[0, -1], sample.entropy[0], len(tokens), {}, **seen)
        return logits, sample.token

    def _pick(self, tree: DraftTree, logits: torch.Tensor, greedy: torch.Tensor, start: int) -> Pick:
        """The path of the tree that the target's choices follow; the text gains its tokens. start: position of the tree's root."""
        s = self.sampling
        if s.host:
            return self._pick_on_host(tree, logits)
        scores, choices = logits, greedy
        if not s.is_plain:
            scores = node_scores(logits, s, tree, torch.tensor(self.tokens, device=logits.device))
            choices = choose(scores, s, tree.depths.long() + (start + 1))
        path, path_len, bonus = ops.tree_walk(tree.tokens, tree.parents.view(1, -1), choices.view(1, -1))
        # One transfer holds all that the host needs; on CUDA it waits for the round, so `accept` carries the device's time.
        kept, end, *rest = torch.cat((path_len.long(), bonus, path[0].long(), tree.tokens[0])).tolist()
        nodes, drafted = rest[:kept], rest[path.shape[1] :]
        accepted = [drafted[node] for node in nodes[1:]]
        new, finish = self._take([*accepted, end], None if self.scores is None else float_logits(scores)[nodes])
        return Pick(path, path_len, bonus, nodes, accepted, new, finish)

    def _pick_on_host(self, tree: DraftTree, logits: torch.Tensor) -> Pick:
        """The same, row by row along the walk: a processor sees exactly the calls that plain decoding makes, and no others."""
        parents, drafted, device = tree.parents.tolist(), tree.tokens[0].tolist(), logits.device
        nodes, new, finish = [0], [], None
        while finish is None:
            scores = host_scores(logits[nodes[-1]], self.sampling, self.tokens)
            position = torch.tensor([len(self.tokens)], device=device)
            new.append(self._possible(int(choose(scores, self.sampling, position))))
            finish = self._append(new[-1], scores)
            child = next((j for j in range(1, tree.size) if parents[j] == nodes[-1] and drafted[j] == new[-1]), None)
            if child is None:
                break
            nodes.append(child)
        path = torch.full((1, tree.size), -1, dtype=torch.int32)
        path[0, : len(nodes)] = torch.tensor(nodes, dtype=torch.int32)
        length = torch.tensor([len(nodes)], dtype=torch.int32, device=device)
        bonus = torch.tensor(new[-1:], device=device)
        return Pick(path.to(device), length, bonus, nodes, [drafted[node] for node in nodes[1:]], new, finish)

    def _take(self, tokens: list[int], scores: torch.Tensor | None = None) -> tuple[list[int], str | None]:
        """What the text gains of tokens with their scores [len(tokens), V] before it ends, and why it ends."""
        new, finish = [], None
        for i, token in enumerate(tokens):
            finish = self._append(self._possible(token), None if scores is None else scores[i : i + 1])
            new.append(token)
            if finish is not None:
                break
        return new, finish

    def _append(self, token: int, scores: torch.Tensor | None) -> str | None:
        """The text gains a token; whether it ends there, and why."""
        self.tokens.append(token)
        if self.scores is not None:
            self.scores += (scores,)
        return self.ending(self.tokens, self.scores)

    def _step(self, new: list[int], accepted: int, finish: str | None, arm: Arm, round_: Round | None) -> Step:
        if round_ is not None:
            round_.committed, round_.accepted = len(new), min(accepted, len(new))
        return Step(new, ([arm] * accepted + [Arm("ar")])[: len(new)], round_, finish)

    @staticmethod
    def _possible(token: int) -> int:
        if token == -1:
            raise NaNLogits(
                "no token can follow: the target's logits hold NaN (try float32, or check the weights), or the options rule out all"
            )
        return token
