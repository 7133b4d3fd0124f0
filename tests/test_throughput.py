"""The throughput router: what it expects, what it chooses, and that its choices leave the text alone."""

from __future__ import annotations

from collections import deque

import pytest
import torch

from tests.oracle import build, models, prompt_ids, static
from whiflash_triton.arms import Arm, parse_arm
from whiflash_triton.decoder import WhiFlashDecoder
from whiflash_triton.loading import build_router
from whiflash_triton.routers.base import RoundState
from whiflash_triton.routers.throughput import Costs, ThroughputRouter, measure_costs

ARMS = tuple(map(parse_arm, ("ar", "lookup:8", "dflash:2", "eagle3:1", "eagle3:3", "mixed:7:4:3")))


def table(draft: float = 1.0, more_rows: float = 1.0, contexts=(10, 110)) -> Costs:
    """10 ms a forward of one row, `more_rows` for every further one, twice as much at the longer context."""
    rows = {str(n): [10 + more_rows * (n - 1), 20 + 2 * more_rows * (n - 1)] for n in range(1, 10)}
    drafts = {str(a): [0.0 if not a.needs else draft, 0.0 if not a.needs else 2 * draft] for a in ARMS}
    return Costs(list(contexts), rows, drafts, {"dflash": 0.5, "eagle3": 0.25})


def state(history=(), match: int = 0, position: int = 10, pending=None) -> RoundState:
    return RoundState(torch.zeros(4), torch.tensor(1.0), position, pending or {}, deque(history, maxlen=256), match)


def test_milliseconds():
    router = ThroughputRouter(ARMS, table())
    assert router.expected_ms(Arm("ar"), state()) == 10
    assert router.expected_ms(Arm("dflash", 2), state()) == 10 + 2 + 1
    assert router.expected_ms(Arm("dflash", 2), state(position=60)) == pytest.approx(1.5 * 13)  # between the contexts
    assert router.expected_ms(Arm("dflash", 2), state(pending={"dflash": 12, "eagle3": 40})) == 13 + 10 * 0.5
    assert router.expected_ms(Arm("mixed", 7, 4, 3), state(pending={"dflash": 2, "eagle3": 42})) == 10 + 7 + 1 + 40 * 0.25
    assert router.expected_ms(Arm("lookup", 8), state(match=2)) == 10 + 4  # four tokens are copied after a match of two


def test_tokens_follow_what_was_accepted():
    router, arm = ThroughputRouter(ARMS, table()), Arm("eagle3", 3)
    prior = router.expected_tokens(arm, state())
    assert prior == pytest.approx(1 + 0.45 + 0.45**2 + 0.45**3)
    good, bad = state([(arm, 3, 3)] * 40), state([(arm, 3, 0)] * 40)
    assert router.expected_tokens(arm, good) > 3 > prior > 1.3 > router.expected_tokens(arm, bad)
    assert router.expected_tokens(Arm("eagle3", 1), bad) < 1.15  # rounds of another length count too
    assert router.expected_tokens(Arm("dflash", 2), bad) == router.expected_tokens(Arm("dflash", 2), state())
    faded = state([(arm, 3, 0)] * 10 + [(Arm("ar"), 0, 0)] * 256)
    assert router.expected_tokens(arm, faded) == prior  # forgotten, so it is tried again
    turned = state([(arm, 3, 0)] * 60 + [(arm, 3, 3)] * 30)
    assert router.expected_tokens(arm, turned) > 2  # recent rounds count most
    assert router.expected_tokens(Arm("ar"), state()) == 1


def test_a_copy_is_worth_what_its_match_is():
    router, arm = ThroughputRouter(ARMS, table()), Arm("lookup", 8)
    worth = [router.expected_tokens(arm, state(match=n)) for n in range(14)]
    assert worth[0] == 1 and worth == sorted(worth) and worth[12] == worth[13] > 7
    failed = state([(arm, 8, 0)] * 30, match=12)
    assert router.expected_tokens(arm, failed) < 2.5
    assert router.expected_tokens(arm, state([(arm, 2, 0)] * 30, match=12)) == worth[12]  # short matches say nothing of long ones


def test_choices():
    cheap = ThroughputRouter(ARMS, table(draft=0.1, more_rows=0.1))
    assert cheap.choose(state(match=12)) == Arm("lookup", 8)
    assert cheap.choose(state()).needs
    dear = ThroughputRouter(ARMS, table(draft=10, more_rows=10))
    assert dear.choose(state()) == Arm("ar")


def test_drafters_that_are_never_right_cost_little():
    """Plain decoding, but for a trial now and then: within 5% of its speed, and no loop among arms that lose."""
    costs = table(draft=1, more_rows=0.5)
    router, history, spent = ThroughputRouter(ARMS, costs), [], 0.0
    for _ in range(600):
        now = state(history[-256:])
        arm = router.choose(now)
        spent += router.expected_ms(arm, now)
        history.append((arm, arm.size, 0))
    assert spent / (600 * router.expected_ms(Arm("ar"), state())) < 1.05
    assert len({arm for arm, _, _ in history[:40]}) > 2 and sum(arm == Arm("ar") for arm, _, _ in history) > 450


def test_tables_are_checked_saved_and_loaded(tmp_path):
    costs = table()
    costs.save(tmp_path / "costs.json")
    assert Costs.load(tmp_path / "costs.json") == costs
    (tmp_path / "bad.json").write_text('{"contexts": [1]}')
    with pytest.raises(ValueError, match="no table of costs"):
        Costs.load(tmp_path / "bad.json")
    with pytest.raises(ValueError, match="nothing on eagle3:2"):
        ThroughputRouter((*ARMS, Arm("eagle3", 2)), costs)
    with pytest.raises(ValueError, match="nothing on lookup:16, 11, 13, 15, 17"):
        ThroughputRouter((*ARMS, Arm("lookup", 16)), costs)
    with pytest.raises(ValueError, match="fall back"):
        ThroughputRouter((Arm("eagle3", 1),), costs)


def test_end_to_end(tmp_path):
    """Measured on a small model, the text is plain text; measuring in mid-conversation loses nothing; a saved table is taken."""
    _, target = models("qwen3", torch.float64, seed=2)
    drafters = {kind: build(kind, target, 160, False) for kind in ("dflash", "eagle3")}
    prompt = prompt_ids(6) * 4
    decoder = WhiFlashDecoder(target, None, drafters, static("ar", 0), 160, [])
    expected = decoder.generate(prompt, max_new_tokens=60).sequences
    stream = decoder.stream(prompt, max_new_tokens=60)
    tokens = next(stream).tokens
    decoder.use_router("throughput")
    assert {a.kind for a in decoder.router.arms} >= {"ar", "lookup", "dflash", "eagle3", "mixed"}
    assert all(len(v) == 2 and min(v) > 0 for v in decoder.router.costs.verify.values())
    assert torch.equal(decoder.generate(prompt, max_new_tokens=60).sequences, expected)
    assert tokens + [t for piece in stream for t in piece.tokens] == expected[0, len(prompt) :].tolist()
    decoder.router.costs.save(tmp_path / "costs.json")
    again = build_router(f"throughput:{tmp_path / 'costs.json'}", drafters, target)
    assert again.costs == decoder.router.costs and again.arms == decoder.router.arms
    with pytest.raises(ValueError, match="no use for it"):
        build_router("throughput", drafters, target, threshold=1.0)


def test_without_drafters():
    _, target = models("llama", seed=3)
    router = build_router("throughput", {}, target)
    assert router.arms == (Arm("ar"), Arm("lookup", 7), Arm("lookup", 3))
    assert measure_costs(target, {}, router.arms, 20, repeats=1).contexts == [12]
