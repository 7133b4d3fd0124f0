"""Caches under whatever comes: random trees and paths, stops, arms, texts that take turns, go on, change and fail, in any order.
Every row of target and drafters is compared with a fresh pass over the tokens that a model of the rules says are held."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.oracle import OracleDrafter
from tests.rebuild import check_rows
from tests.small import MINIMAL, make, small
from whiflash_triton.arms import Arm, parse_arm
from whiflash_triton.routers.static import StaticRouter
from whiflash_triton.scheduler import Stream, Workspace
from whiflash_triton.tree import DraftTree, chain, from_parents

V, ROWS, NODES = 20, 56, 130
TARGETS = {"qwen3": {}, "mistral": {"num_hidden_layers": 2, "sliding_window": 7}}
REAL = [parse_arm(text) for text in ("ar", "dflash:4", "eagle3:3", "ddtree:7", "eagle3-tree:7:3:2", "mixed:7:3:2", "lookup:4")]
WILD = [Arm("wild", size) for size in (1, 3, 8, 20, 40)]
STEPS = ["round"] * 6 + ["wide round", "start", "go on", "go on", "fail", "check"]


class WildDrafter(OracleDrafter):
    """Random trees of any shape; siblings may hold equal tokens."""

    def __init__(self):
        super().__init__([], iter(()), ROWS, vocab=V)
        self.max_draft = NODES

    def draft(self, anchor: torch.Tensor, arm: Arm, max_depth: int) -> DraftTree:
        rng, parents, depths = self.rng, [-1], [0]
        self.tokens = list(self.seen)
        self.cache.set_length(len(self.seen))
        deep, bushy = rng.choice((0.2, 0.6, 0.98)), rng.random()
        for node in range(1, arm.size + 1):
            parent = node - 1 if rng.random() < deep else rng.randrange(1 + int((node - 1) * bushy))
            parent = parent if depths[parent] < max_depth else 0
            parents.append(parent)
            depths.append(depths[parent] + 1)
        tokens = torch.tensor([[int(anchor), *(rng.randrange(V) for _ in range(arm.size))]])
        return chain(tokens) if parents == list(range(-1, arm.size)) else from_parents(tokens, parents)


class Scripted:
    """A target that chooses at random: at a node with children one of their tokens, more or less often."""

    def __init__(self, target):
        self.inner, self.rng, self.tree, self.choices = target, random.Random(), None, []

    def __getattr__(self, name: str):
        return getattr(self.inner, name)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[1, N, V]; the tree is the one drafted last, if this is its verification."""
        rng, n = self.rng, hidden.shape[1]
        self.choices, follow = [rng.randrange(V) for _ in range(n)], rng.choice((0.0, 0.6, 0.95, 1.0))
        if self.tree is not None:
            tokens, parents = self.tree.tokens[0].tolist(), self.tree.parents.tolist()
            assert n == len(tokens)
            for node in range(n - 1, 0, -1):
                if rng.random() < follow:
                    self.choices[parents[node]] = tokens[node]
        return torch.nn.functional.one_hot(torch.tensor([self.choices]), V).double()

    def walked(self) -> tuple[list[int], int]:
        """The drafted tokens that the last choices accept, and the choice at the end of them, by definition."""
        tokens, parents = self.tree.tokens[0].tolist(), self.tree.parents.tolist()
        node, path = 0, []
        while True:
            fits = [j for j in range(1, len(tokens)) if parents[j] == node and tokens[j] == self.choices[node]]
            if not fits:
                return path, self.choices[node]
            node = fits[0]
            path.append(tokens[node])


class Play:
    """One workspace and its texts, beside a model of what it holds: `held` tokens, None after a failure."""

    def __init__(self, stage: SimpleNamespace, met: Counter):
        self.stage, self.met, self.target = stage, met, stage.target
        for drafter in stage.drafters.values():
            drafter.reset()
        self.work = Workspace(self.target, stage.drafters, stage.cache)
        self.held: list[int] | None = []
        self.streams: list[Stream] = []
        self.texts: list[list[int]] = []  # of every stream, ended or not
        self.last: tuple[int, Stream] | None = None  # prompt length and stream of whoever filled the caches last
        stage.cache.set_length(0)
        self.poison()

    def step(self, kind: str, rng: random.Random) -> None:
        self.target.rng = self.stage.drafters["wild"].rng = rng
        open_ = [s for s in self.streams if len(s.tokens) < ROWS]
        if kind == "check":
            self.check()
        elif kind == "go on" and self.texts:
            text = rng.choice(self.texts[-2:])
            cut = len(text) if rng.random() < 0.5 else rng.randrange(1, len(text) + 1)
            self.start(text[: min(cut, ROWS - 20)] + [rng.randrange(V) for _ in range(rng.choice((0, 1, 4)))], rng)
        elif kind in ("start", "go on") or not open_:
            self.start([rng.randrange(V) for _ in range(rng.randint(1, 12))], rng)
        else:
            self.round(open_[-1] if rng.random() < 0.6 else rng.choice(open_), kind, rng)
        self.poison()

    def start(self, prompt: list[int], rng: random.Random) -> None:
        ends, reuse = {len(prompt) + rng.randint(1, 30) for _ in range(2)}, rng.random() < 0.8
        stream = Stream(self.work, StaticRouter(Arm("ar")), None, lambda text, _: "stop" if len(text) in ends else None)
        same = common(self.held or [], prompt)
        least = self.last[0] if self.last and reuse else len(prompt)
        self.target.tree = None
        first = stream.start(prompt, reuse)
        assert stream.reused == (same - 1 if same > least else 0)
        assert first.tokens == self.target.choices == stream.tokens[len(prompt) :]
        self.met["reused"] += stream.reused > 0
        self.held, self.last = prompt, (len(prompt), stream)
        self.told(stream, first)

    def round(self, stream: Stream, kind: str, rng: random.Random) -> None:
        arm = Arm("wild", rng.randint(41, NODES)) if kind == "wide round" else rng.choice(REAL if rng.random() < 0.5 else WILD)
        room = min(ROWS - len(stream.tokens), rng.choice((1, 3, 99)))
        stream.router, before = StaticRouter(arm), list(stream.tokens)
        if self.last[1] is not stream or self.held is None:
            self.met["taken back"] += 1
        self.target.tree = None
        self.last = (stream.prompt_len, stream)
        if kind == "fail":
            self.fail(stream, room, rng)
            return
        step = stream.round(room)
        accepted, bonus = self.target.walked()
        assert step.tokens == [*accepted, bonus][: len(step.tokens)]
        assert stream.tokens == before + step.tokens and step.round.drafted == self.target.tree.size - 1
        assert len(step.tokens) == len(accepted) + 1 or step.finish == "stop"
        self.held = before + accepted
        self.met["over 64 nodes"] += self.target.tree.size > 64
        self.met["no prefix"] += accepted != self.target.tree.tokens[0, 1 : 1 + len(accepted)].tolist()
        self.met["deep"] += len(accepted) > 5
        self.met["rows beyond a stop"] += len(self.held) > len(stream.tokens) - (step.finish is None)
        self.told(stream, step)

    def fail(self, stream: Stream, room: int, rng: random.Random) -> None:
        """The round breaks before the verification or before the commit; whatever was written is not to be trusted."""
        owner, name = rng.choice(((self.target.inner, "forward"), (self.work.cache, "commit")))

        def broken(*args, **kwargs):
            if name == "forward" and kwargs.get("prefill"):  # on its way to take the caches back
                return inner(*args, **kwargs)
            raise ZeroDivisionError

        inner = getattr(owner, name)
        setattr(owner, name, broken)
        try:
            with pytest.raises(ZeroDivisionError):
                stream.round(room)
        finally:
            delattr(owner, name)
        self.held = None
        self.streams.remove(stream)
        self.met["failed"] += 1

    def told(self, stream: Stream, step) -> None:
        if step.finish is None:
            self.streams += [stream] * (stream not in self.streams)
        elif stream in self.streams:
            self.streams.remove(stream)
        self.texts.append(list(stream.tokens))

    def check(self) -> None:
        if self.held is None:
            assert self.work.rows is None
        elif self.held:
            stream = self.last[1]
            anchor = stream.tokens[-1] if len(stream.tokens) == len(self.held) + 1 else 0
            check_rows(self.work, self.stage.remade, self.held, anchor)
            assert self.stage.drafters["wild"].seen == self.held
            self.met["checked"] += 1

    def poison(self) -> None:
        for cache in (self.stage.cache, *(d.cache for d in self.stage.drafters.values())):
            cache.poison()


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def stage_of(family: str, scratch: bool) -> SimpleNamespace:
    """What all plays of a kind share, as building it takes longer than playing."""
    target = Scripted(small(family, V, **MINIMAL | TARGETS[family])[1])
    drafters = {kind: make(kind, target.inner, ROWS, scratch) for kind in ("dflash", "eagle3")} | {"wild": WildDrafter()}
    twins = {kind: make(kind, target.inner, ROWS, False) for kind in ("dflash", "eagle3")}

    def remade(kind: str):
        twins[kind].reset()
        twins[kind].cache.poison()
        return twins[kind]

    cache = target.new_cache(ROWS, NODES + 1, scratch)
    return SimpleNamespace(target=target, drafters=drafters, cache=cache, remade=remade)


@pytest.mark.parametrize("scratch", [False, True], ids=["tail", "scratch"])
@pytest.mark.parametrize("family", TARGETS)
def test_caches_hold_what_a_fresh_pass_would(family, scratch, monkeypatch):
    """500 plays each; a fixed set, so that a failure is a failure on every machine."""
    stage, met, draft = stage_of(family, scratch), Counter(), Stream._draft

    def drafted(*args):
        stage.target.tree = draft(*args)
        return stage.target.tree

    monkeypatch.setattr(Stream, "_draft", drafted)

    @settings(max_examples=500, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(
        st.sampled_from((1, 4, 10**6)),
        st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 2**32 - 1)), min_size=3, max_size=10),
    )
    def play(pending_limit, steps):
        for kind in ("dflash", "eagle3"):
            stage.drafters[kind].pending_limit = pending_limit
        with torch.inference_mode():
            game = Play(stage, met)
            for kind, seed in steps:
                game.step(kind, random.Random(seed))
            game.check()

    play()
    wanted = ("reused", "taken back", "over 64 nodes", "no prefix", "deep", "rows beyond a stop", "failed", "checked")
    assert all(met[name] >= 5 for name in wanted), met  # hypothesis draws otherwise when other test files are loaded too
