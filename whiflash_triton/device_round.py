"""Rounds that never ask the host: every shape is fixed by the arm, every length is read on the device.

The host gives a round to the device and learns of its tokens from a copy that a side lane brings, one round later if `ahead` is
1. It knows only bounds of the lengths meanwhile: `known` rows for certain, `most` at the outside. Because nothing in a round
depends on the host, a round can be captured in a CUDA graph (graphs.py); on a CPU the same code runs the references.

Rows past a length hold leftovers and are overwritten before anything counts them in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from . import ops
from .arms import Arm
from .drafters.draft import draft
from .lanes import EAGER, HOST, MAIN, SIDE, Lanes
from .sampling import Sampling, choose, node_scores
from .scheduler import Workspace

IDLE_ROWS = 16  # an idle drafter so far behind catches up beside the verification, so that a switch never waits for more


class DeviceText:
    """One text as the device knows it: tokens int64 [1, rows + nodes + 1], its anchor at the target cache's length; features
    [taps, 1, rows, H] of the rows that some drafter may still have to ingest; hidden [H] and entropy [1] of the last accepted
    row; newest [1, 1, H], EAGLE-3's state of its cache's last row; result int64 [nodes + 1], the last round's count and tokens.
    """

    def __init__(self, work: Workspace, nodes: int):
        target, device = work.target, work.target.device
        rows, width = work.cache.rows, target.config.hidden_size
        self.tokens = torch.zeros(1, rows + nodes + 1, dtype=torch.int64, device=device)
        self.features = torch.zeros(len(work.taps), 1, rows, width, dtype=target.dtype, device=device)
        self.hidden = torch.zeros(width, dtype=target.dtype, device=device)
        self.entropy = torch.zeros(1, dtype=torch.float32, device=device)
        self.newest = torch.zeros(1, 1, width, dtype=target.dtype, device=device)
        self.result = torch.zeros(nodes + 1, dtype=torch.int64, device=device)
        self.before = torch.zeros(1, dtype=torch.int32, device=device)  # the target's rows when the round began
        self.taps = {name: torch.tensor(rows, device=device) for name, rows in work.tap_rows.items()}

    def anchor(self, lengths: torch.Tensor) -> torch.Tensor:
        """int64 [1, 1]."""
        return self.tokens.index_select(1, lengths.long())

    def append(self, tree_tokens: torch.Tensor, path: torch.Tensor, path_len: torch.Tensor, bonus: torch.Tensor, at: torch.Tensor):
        """The tokens of the path after its root, and the bonus, follow the anchor at int32 [1] `at`; they are the result too."""
        order = torch.arange(path.shape[1], device=path.device)
        drafted = tree_tokens[0].index_select(0, path[0].clamp(min=0).long()).roll(-1)
        new = torch.where(order == path_len - 1, bonus, drafted)
        self.tokens.index_copy_(1, at.long() + 1 + order, new[None].clamp(min=0))  # -1, of NaN, embeds nothing; the host raises
        self.result[: len(new) + 1].copy_(torch.cat((path_len.long(), new)))


def catch_up(work: Workspace, text: DeviceText, name: str, rows: int, upto: torch.Tensor) -> None:
    """The drafter ingests up to `rows` rows, those below int32 [1] `upto`; what it computes of later ones does not count."""
    drafter = work.drafters[name]
    where = drafter.cache.positions(0, rows)
    features = text.features.index_select(0, text.taps[name]).index_select(2, where)  # [taps, 1, rows, H]
    features = features.permute(1, 2, 0, 3).flatten(2)
    following = text.tokens.index_select(1, where + 1)
    if name == "eagle3":
        hidden = drafter.ingest_at(features, following, where)
        text.newest.copy_(hidden.index_select(1, (upto - 1 - drafter.cache.lengths).long()))
    else:
        drafter.ingest_at(features, where)
    drafter.cache.lengths.copy_(upto)


def verify_round(work: Workspace, text: DeviceText, arm: Arm, sampling: Sampling) -> None:
    """Draft, verify, accept, commit: one round of an arm whose drafters have caught up."""
    cache, target = work.cache, work.target
    anchor = text.anchor(cache.lengths)
    if "eagle3" in arm.needs:
        work.drafters["eagle3"].newest = text.newest, anchor
    tree = draft(work.drafters, anchor, arm, arm.size)
    hidden, features = target.forward(tree, cache, work.taps)
    logits = target.logits(hidden)[0]
    raw = ops.block_sampling(logits)
    choices = raw.token
    if not sampling.is_plain:
        positions = tree.depths.long() + (cache.lengths.long() + 1)
        choices = choose(node_scores(logits, sampling, tree, text.tokens[0]), sampling, positions)
    path, path_len, bonus = ops.tree_walk(tree.tokens, tree.parents.view(1, -1), choices.view(1, -1))
    tapped = (features, text.features, cache.lengths) if work.taps else ()
    ops.kv_compaction(cache.scratch[:, :, :, :, : tree.size], cache.kv, path, path_len, cache.lengths, *tapped)
    text.append(tree.tokens, path, path_len, bonus, cache.lengths)
    last = path[0].index_select(0, path_len.long() - 1).long()
    text.hidden.copy_(hidden[0].index_select(0, last)[0])
    text.entropy.copy_(raw.entropy.index_select(0, last))
    cache.lengths += path_len


class Record:
    """What the host gets of a round: result int64 [nodes + 1], pinned where there is a device; hidden and entropy stay there."""

    def __init__(self, text: DeviceText, name: str):
        self.name = name
        self.result = torch.empty_like(text.result, device="cpu", pin_memory=text.result.is_cuda)
        self.hidden, self.entropy = torch.empty_like(text.hidden), torch.empty_like(text.entropy)

    def copy(self, text: DeviceText) -> None:
        self.result.copy_(text.result, non_blocking=True)
        self.hidden.copy_(text.hidden)
        self.entropy.copy_(text.entropy)


@dataclass
class InFlight:
    """A round that the host has not read yet: at most `rows` tokens come of it."""

    arm: Arm
    rows: int
    caught_up: int
    record: Record
    done: object  # mark of the copy
    ms: dict[str, float] = field(default_factory=dict)


class DeviceRounds:
    """Gives rounds to the device and reads what came of them. Between `enter` and `leave` the caches are the device's own.

    replay(key, work): runs `work`, or a graph captured of it under `key`.
    """

    def __init__(
        self, work: Workspace, lanes: Lanes, ahead: int, nodes: int, replay: Callable[[object, Callable], None] | None = None
    ):
        if ahead not in (0, 1):
            raise ValueError(f"ahead {ahead}: 0 reads every round before the next begins, 1 reads it one round late")
        self.caches = caches = [work.cache, *(d.cache for d in work.drafters.values())]
        if not all(cache.uses_scratch for cache in caches):
            raise ValueError("rounds on the device need caches whose draft rows wait in scratch (scratch=True)")
        self.work, self.lanes, self.ahead = work, lanes, ahead
        self.replay = replay or (lambda key, work: work())
        self.text = DeviceText(work, nodes)
        self.buckets = [n for n in (512 << i for i in range(20)) if n < work.cache.rows] + [work.cache.rows]
        self.nodes, self.rows = nodes, min(cache.rows for cache in caches)
        self.records = [Record(self.text, f"record {i}") for i in range(ahead + 1)]
        self.in_flight: deque[InFlight] = deque()
        self.tokens: list[int] | None = None  # all that have been read; None: the caches are not the device's
        self.begun = 0

    def enter(self, tokens: list[int]) -> None:
        """Take over a text whose caches are complete, its anchor the last of `tokens`."""
        work, text, n = self.work, self.text, len(tokens) - 1
        text.tokens[0, : n + 1] = torch.tensor(tokens, device=text.tokens.device)
        self.behind = {}  # rows that each drafter has for certain
        self.entered = {}
        for name, drafter in work.drafters.items():
            first = self.behind[name] = self.entered[name] = drafter.cache.length
            if drafter.pending:
                text.features[text.taps[name], :, first:n] = torch.cat(drafter.queue.features, 2)
                drafter.queue.clear()
        work.rows = None
        self.tokens, self.known, self.most = list(tokens), n, n
        self.copied = None
        self.lanes.wait(MAIN, self.lanes.mark(EAGER))

    def fits(self, arm: Arm) -> bool:
        """Whether a round of the arm, and the catch-up before it, stays within the caches for certain."""
        rows = max([0, *(_bucket(self.most - have) for have in self.behind.values())])
        return self.most + max(rows, arm.size + 1) <= self.rows and arm.size < self.nodes

    def pending(self) -> dict[str, int]:
        """Rows that each drafter has to ingest, at the outside."""
        return {name: self.most - have for name, have in self.behind.items()}

    def launch(self, arm: Arm, sampling: Sampling) -> None:
        """One more round, on the device's own state; returns before it is done."""
        work, text, lanes, key = self.work, self.text, self.lanes, self.begun
        self._look_at(next(rows for rows in self.buckets if rows >= self.most))
        caught_up = sum(self.pending()[name] for name in arm.needs)
        lanes.wait(MAIN, self.copied)  # the last round's copy, and the idle catch-up before it
        lanes.run(MAIN, lambda: text.before.copy_(work.cache.lengths), reads=("lengths",), writes=("before",))
        for name in arm.needs:
            self._catch_up(MAIN, name)
        idle = [name for name, rows in self.pending().items() if name not in arm.needs and rows >= IDLE_ROWS]
        if idle:
            lanes.wait(SIDE, lanes.mark(MAIN))
            for name in idle:
                self._catch_up(SIDE, name)
        reads = ("lengths", f"rows {key - 1}", *arm.needs)
        writes = ("lengths", f"rows {key}", "result", *arm.needs)
        whole = (str(arm), work.cache.bucket) if sampling.is_plain else None
        lanes.run(MAIN, lambda: self.replay(whole, lambda: verify_round(work, text, arm, sampling)), reads, writes)
        lanes.wait(SIDE, lanes.mark(MAIN))
        record = self.records[self.begun % len(self.records)]
        lanes.run(SIDE, lambda: record.copy(text), reads=("result",), writes=(record.name,))
        self.copied = lanes.mark(SIDE)
        self.in_flight.append(InFlight(arm, arm.size + 1, caught_up, record, self.copied))
        self.most += arm.size + 1
        self.begun += 1

    def _catch_up(self, lane: str, name: str) -> None:
        rows, work, text = _bucket(self.most - self.behind[name]), self.work, self.text
        self.lanes.run(
            lane,
            lambda: self.replay((name, rows), lambda: catch_up(work, text, name, rows, text.before)),
            reads=("before", f"rows {self.begun - 1}"),
            writes=(name,),
        )
        self.behind[name] = self.known + len(self.in_flight)  # every round in flight brings one row at least

    def read(self) -> tuple[InFlight, list[int]]:
        """Wait for the oldest round; the tokens it committed, the bonus last."""
        flight = self.in_flight.popleft()
        self.lanes.wait(HOST, flight.done)
        count, *tokens = self.lanes.run(HOST, flight.record.result.tolist, reads=(flight.record.name,))
        self.tokens += tokens[:count]
        self.known += count
        self.most = self.known + sum(f.rows for f in self.in_flight)
        return flight, tokens[:count]

    def leave(self) -> None:
        """Read what is in flight and give the caches back, complete, for all tokens that were read."""
        while self.in_flight:
            self.read()
        for lane in (MAIN, SIDE):
            self.lanes.wait(EAGER, self.lanes.mark(lane))
        work, tokens = self.work, self.tokens
        work.cache.set_length(self.known)
        ids = torch.tensor([tokens], device=work.target.device)
        for name, drafter in work.drafters.items():
            first, have = self.entered[name], int(drafter.cache.lengths)
            drafter.cache.set_length(have)
            shift = name == "eagle3"  # its row i embeds token i + 1
            if have > first:
                drafter.ingested.append(ids[:, first + shift : have + shift])
            # The last round's rows at least are pending, so that nobody needs the state that the device kept.
            drafter.queue.add(self.text.features[self.text.taps[name], :, have : self.known], ids[:, have : self.known])
        work.rows, self.tokens = tokens[:-1], None
        self._look_at(None)

    def abandon(self) -> None:
        """Another text takes the caches: what is in flight is forgotten."""
        if self.tokens is not None:
            for lane in (MAIN, SIDE):
                self.lanes.wait(EAGER, self.lanes.mark(lane))
            self.in_flight.clear()
            self.tokens = None
            self._look_at(None)

    def _look_at(self, bucket: int | None) -> None:
        for cache in self.caches:
            cache.bucket = bucket


def _bucket(rows: int) -> int:
    """The power of two at or above; 0 stays."""
    return 1 << (rows - 1).bit_length() if rows else 0
