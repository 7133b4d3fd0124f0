"""draft_window: drafters that look at the newest rows only."""

from __future__ import annotations

import pytest
import torch

from tests.oracle import build, models
from tests.trees import ROWS, START, example, fed
from whiflash_triton import WhiFlashDecoder
from whiflash_triton.arms import parse_arm
from whiflash_triton.drafters.draft import draft
from whiflash_triton.loading import ASSETS


@pytest.mark.parametrize("scratch", [False, True], ids=["tail", "scratch"])
@pytest.mark.parametrize("arm", ["dflash:4", "eagle3:3", "ddtree:9", "eagle3-tree:9:3:3"])
def test_a_window_hides_the_older_rows_and_no_others(arm, scratch):
    """What lies behind the window may be anything; one row further on it counts; a window that holds all changes nothing."""
    target = models("qwen3")[1]
    tokens, features = example(target)
    arm, anchor = parse_arm(arm), tokens[:, START : START + 1]

    def logits(window: int, spoiled: int) -> torch.Tensor:
        drafter = fed(build(arm.needs[0], target, ROWS, scratch), (tokens, features))
        drafter.window = window
        drafter.catch_up(*([anchor] if arm.needs[0] == "eagle3" else []))
        drafter.cache.kv[..., :spoiled, :] = 7.0
        seen, head = [], drafter.head
        drafter.head = lambda x: seen.append(head(x)) or seen[-1]
        draft({arm.needs[0]: drafter}, anchor, arm, 99)
        return torch.cat([s.view(-1, s.shape[-1]) for s in seen])[: 1 if arm.needs == ("eagle3",) else None]  # later rows see less

    with torch.no_grad():
        assert torch.equal(logits(0, 0), logits(99, 0))
        alone = logits(6, 0)
        assert torch.equal(alone, logits(6, START - 6))
        assert not torch.equal(alone, logits(6, START - 5))
        assert not torch.equal(alone, logits(0, 0))


def test_the_text_stays_the_same():
    paths = {kind: ASSETS / "tiny" / kind for kind in ("dflash", "eagle3")}
    plain, windowed = (
        WhiFlashDecoder.from_pretrained(str(ASSETS / "tiny" / "target"), **paths, router="entropy", dtype="float32", draft_window=w)
        for w in (None, 3)
    )
    ids = [5, 9, 3, 12, 44, 7, 9, 3]
    assert torch.equal(plain.generate(ids, max_new_tokens=24).sequences, windowed.generate(ids, max_new_tokens=24).sequences)
    assert {d.window for d in windowed.drafters.values()} == {3}
    with pytest.raises(ValueError, match="draft_window"):
        WhiFlashDecoder.from_pretrained(str(ASSETS / "tiny" / "target"), **paths, draft_window=0)
