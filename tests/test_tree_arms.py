"""Tree arms: ddtree against all prefixes, eagle3-tree against one chain a path, and all of them as trees and in rounds."""

from __future__ import annotations

import copy
import itertools
import random

import pytest
import torch

from tests.oracle import RandomRouter, build, hf_generate, models, prompt_ids, run
from tests.tiny import dflash, eagle3
from tests.trees import ROWS, START, example, fed, pair, paths
from whiflash_triton.arms import Arm, parse_arm
from whiflash_triton.decoder import WhiFlashDecoder
from whiflash_triton.drafters import ddtree, eagle3_tree
from whiflash_triton.drafters.base import likeliest
from whiflash_triton.drafters.dflash import DFlashDrafter
from whiflash_triton.drafters.draft import check_arm, draft
from whiflash_triton.drafters.eagle3 import Eagle3Drafter
from whiflash_triton.loading import ASSETS
from whiflash_triton.scheduler import Stream, Workspace
from whiflash_triton.training.tiny import sentence
from whiflash_triton.tree import chain, from_parents
from whiflash_triton.weights import load_target

MODES = pytest.mark.parametrize("scratch", [False, True], ids=["tail", "scratch"])
ARMS = [
    "ddtree:1",
    "ddtree:12",
    "ddtree:70",
    "eagle3-tree:1",
    "eagle3-tree:12",
    "eagle3-tree:40:3:6",
    "mixed:1",
    "mixed:12",
    "mixed:70:3:6",
]


@pytest.fixture(scope="module")
def target():
    return models("qwen3")[1]


@pytest.fixture(scope="module")
def text(target):
    return example(target)


def check_tree(tree, anchor: torch.Tensor, most: int, deepest: int) -> None:
    """Rooted at the anchor, parents first, siblings distinct, words and depths those that the parents imply."""
    parents = tree.parents.tolist()
    expected = from_parents(tree.tokens, parents)
    assert tree.tokens[0, 0] == anchor and tree.size <= most + 1
    assert torch.equal(tree.words, expected.words) and torch.equal(tree.depths, expected.depths)
    assert tree.words.dtype == torch.int64 and tree.parents.dtype == tree.depths.dtype == torch.int32
    assert int(tree.depths.max()) <= deepest
    assert len(set(paths(tree))) == tree.size, "two siblings with one token"


# Every tree arm


@MODES
@pytest.mark.parametrize("max_depth", [1, 3, 99])
@pytest.mark.parametrize("text_form", ARMS)
def test_trees_are_trees(target, text, text_form, max_depth, scratch):
    drafters, arm, anchor = pair(target, text, scratch), parse_arm(text_form), text[0][:, START : START + 1]
    check_arm(drafters, arm)
    with torch.no_grad():
        tree = draft(drafters, anchor, arm, max_depth)
        check_tree(tree, anchor, arm.size, max_depth)
        again = draft(drafters, anchor, arm, max_depth)
    assert torch.equal(tree.tokens, again.tokens) and torch.equal(tree.words, again.words)
    for name in arm.needs:
        assert drafters[name].pending == 0 and drafters[name].cache.length == START == int(drafters[name].cache.lengths)
    if max_depth == 99:
        assert tree.size == arm.size + 1


@MODES
@pytest.mark.parametrize("text_form", ["ddtree:9", "eagle3-tree:9", "mixed:9"])
@pytest.mark.parametrize("broken", ["norm", "head"])
def test_nan_weights_draft_nothing(target, text, text_form, broken, scratch):
    """Broken everywhere: nothing is drafted. Broken in a row of the head, which the softmax spreads: the same."""
    drafters, arm, anchor = pair(target, text, scratch), parse_arm(text_form), text[0][:, START : START + 1]
    for drafter in drafters.values():
        if broken == "norm":
            drafter.norm = torch.full_like(drafter.norm, float("nan"))
        else:
            weight = drafter.head.weights[0].clone()
            weight[5] = float("nan")
            drafter.head = type(drafter.head)([weight])
    with torch.no_grad():
        tree = draft(drafters, anchor, arm, 9)
        pads = eagle3_tree.propose(drafters["eagle3"], anchor, 9, 3, 4, prune=False)
    assert tree.tokens.tolist() == anchor.tolist() and tree.parents.tolist() == [-1]
    assert pads.tokens.tolist() == [*anchor[0].tolist(), *9 * [0]] and pads.parents.tolist() == 10 * [-1]


def test_mixed_with_one_broken_drafter_is_the_others_tree(target, text):
    anchor = text[0][:, START : START + 1]
    for broken, other in (("dflash", "eagle3-tree:9"), ("eagle3", "ddtree:9")):
        drafters = pair(target, text)
        drafters[broken].norm = torch.full_like(drafters[broken].norm, float("nan"))
        with torch.no_grad():
            alone, both = (draft(drafters, anchor, parse_arm(arm), 9) for arm in (other, "mixed:9"))
        assert sorted(paths(alone)) == sorted(paths(both))


@MODES
@pytest.mark.parametrize("seed", [0, 1])
def test_rounds_of_tree_arms_write_the_targets_own_text(scratch, seed):
    model, target = models("qwen3")
    prompt = prompt_ids(7, seed)
    drafters = {kind: build(kind, target, ROWS, scratch, pending_limit=5) for kind in ("dflash", "eagle3")}
    arms = [Arm("ar"), *map(parse_arm, ["ddtree:5", "eagle3-tree:12", "mixed:9:2:3", "dflash:3", "eagle3:2", "eagle3-tree:2:1:2"])]
    stream = Stream(Workspace(target, drafters, target.new_cache(ROWS, 13, scratch)), RandomRouter(arms, seed))
    committed, rounds = run(stream, prompt, 40)
    assert committed == hf_generate(model, prompt, max_new_tokens=60)[: len(committed)]
    assert {r.arm.kind for r in rounds} == {arm.kind for arm in arms}


# ddtree


def marginals(drafter, anchor) -> tuple[torch.Tensor, list[int]]:
    """Log-probabilities float64 [slots, rows of the head], and the token of every row."""
    logits = drafter.head(drafter.block_hidden(anchor)[0, 1:]).float()
    ids = range(logits.shape[1]) if drafter.draft_ids is None else drafter.draft_ids.tolist()
    return logits.double().log_softmax(-1), list(ids)


@MODES
@pytest.mark.parametrize("draft_vocab", [None, 5])
@pytest.mark.parametrize("size", [1, 6, 40, 100])
def test_ddtree_is_the_best_of_all_prefixes(target, text, size, draft_vocab, scratch):
    """Scores of every prefix that could rank, sorted; the reduced head of 5 rows has fewer ranks than the tree has nodes."""
    drafter = fed(DFlashDrafter(*dflash(target, block_size=4, draft_vocab=draft_vocab), target, ROWS, scratch=scratch), text)
    anchor = text[0][:, START : START + 1]
    with torch.no_grad():
        table, ids = marginals(drafter, anchor)
        nodes = ddtree.propose(drafter, anchor, size, 99)
        tree = draft({"dflash": drafter}, anchor, Arm("ddtree", size), 99)
    ranked = [sorted(zip((-row).tolist(), ids, strict=True))[:size] for row in table]
    # A prefix whose ranks multiply to more than `size` has that many better ones: all that take lower ranks.
    best = []
    for depth in range(1, 4):
        for choice in itertools.product(*(row[: size if d == 0 else 12] for d, row in enumerate(ranked[:depth]))):
            best.append((sum(cost for cost, _ in choice), tuple(token for _, token in choice)))
    best = sorted(best)[:size]
    assert paths(tree)[1:] == [path for _, path in best]
    torch.testing.assert_close(nodes.scores[1:], -torch.tensor([cost for cost, _ in best], dtype=torch.float64), rtol=0, atol=1e-4)


def test_a_small_ddtree_is_the_start_of_a_large_one(target, text):
    drafters, anchor = pair(target, text), text[0][:, START : START + 1]
    with torch.no_grad():
        large = draft(drafters, anchor, Arm("ddtree", 200), 99)
        for size in (1, 2, 17, 63, 64, 65, 199):
            small = draft(drafters, anchor, Arm("ddtree", size), 99)
            n = size + 1
            assert torch.equal(small.tokens, large.tokens[:, :n]) and torch.equal(small.parents, large.parents[:n])
            assert (
                torch.equal(small.words, large.words[:n, : small.words.shape[1]])
                and not large.words[:n, small.words.shape[1] :].any()
            )


@MODES
def test_a_ddtree_of_one_token_a_slot_is_the_chain(target, text, scratch, monkeypatch):
    """Nodes, and bit for bit what the target makes of them: states, features and the cache after the commit."""
    monkeypatch.setattr(ddtree, "likeliest", lambda logits, k: likeliest(logits, 1))
    drafters, anchor = pair(target, text, scratch), text[0][:, START : START + 1]
    results = []
    with torch.no_grad():
        for arm in (Arm("dflash", 5), Arm("ddtree", 5)):
            tree = draft(drafters, anchor, arm, 99)
            cache = target.new_cache(ROWS, 6, scratch)
            target.prefill(text[0][:, :START], cache)
            hidden, features = target.forward(tree, cache, (1, 3))
            path = torch.tensor([[0, 1, 2, 3, -1, -1]], dtype=torch.int32)
            kept = cache.commit(path, torch.tensor([4], dtype=torch.int32), 4, tree.is_chain, features)
            results.append((tree, hidden, features, kept, cache.kv[..., : START + 4, :]))
    (line, *expected), (tree, *got) = results
    assert line.is_chain and not tree.is_chain
    for field in ("tokens", "parents", "depths", "words"):
        assert torch.equal(getattr(line, field), getattr(tree, field)), field
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


# eagle3-tree


def chain_logits(drafter, anchor, path: tuple[int, ...]) -> torch.Tensor:
    """Logits after a path, drafted alone as a chain, one row a forward."""
    hidden, token = drafter.catch_up(anchor)
    start = drafter.cache.length
    drafter.cache.set_length(start - 1)
    line = chain(torch.zeros(1, len(path) + 1, dtype=torch.int64))
    for step, following in enumerate((*path, None)):
        hidden, normed = drafter.forward(hidden, token, step, drafter.cache.block(line, 1, step))
        token = torch.tensor([[following]]) if following is not None else None
    drafter.cache.set_length(start)
    return drafter.head(normed)[0, 0]


def grow(drafter, anchor, size: int, top_k: int, depth: int) -> tuple[list, dict]:
    """EAGLE-2 on paths: (best [(path, score)], oldest first; logits of every path that was run)."""
    ids, pool, seen, frontier = drafter.draft_ids.tolist(), [], {}, [((), 0.0)]
    for _ in range(depth):
        grown = []
        for path, score in frontier:
            seen[path] = logits = chain_logits(drafter, anchor, path)
            steps = logits.float().double().log_softmax(-1).tolist()
            ranked = sorted(range(len(steps)), key=lambda i: (-steps[i], i))[:top_k]
            grown += [((*path, ids[i]), score + steps[i]) for i in ranked]
        pool += grown
        frontier = [grown[i] for i in sorted(range(len(grown)), key=lambda i: (-grown[i][1], i))[:top_k]]
    kept = sorted(sorted(range(len(pool)), key=lambda i: (-pool[i][1], i))[:size])
    return [pool[i] for i in kept], seen


@MODES
@pytest.mark.parametrize("prune", [False, True], ids=["all", "pruned"])
@pytest.mark.parametrize(
    ("shape", "flags"),
    [
        ((20, 4, 3), {}),
        ((7, 4, 5), {"qk_norm": True}),
        ((21, 3, 3), {"norm_before_residual": True, "norm_before_fc": True}),
        ((9, 2, 6), {"fc_norm": True, "norm_output": True}),
    ],
    ids=str,
)
def test_eagle3_tree_equals_one_chain_a_path(target, text, shape, flags, prune, scratch, monkeypatch):
    """Nodes and scores; and every row of every frontier has the logits of its path drafted alone, to 1e-9."""
    size, top_k, depth = shape
    anchor = text[0][:, START : START + 1]

    def fresh():
        return fed(Eagle3Drafter(*eagle3(target, **flags), target, ROWS, scratch=scratch), text)

    with torch.no_grad():
        best, seen = grow(fresh(), anchor, size, top_k, depth)
        calls = []

        def spy(logits, k):
            calls.append(logits)
            return likeliest(logits, k)

        monkeypatch.setattr(eagle3_tree, "likeliest", spy)
        nodes = eagle3_tree.propose(fresh(), anchor, size, top_k, depth, prune=prune)
    assert paths(nodes)[1:] == [path for path, _ in best]
    torch.testing.assert_close(nodes.scores[1:], torch.tensor([score for _, score in best], dtype=torch.float64), rtol=0, atol=1e-4)
    rows = torch.cat(calls)
    assert len(calls[0]) == 1 and (prune or len(rows) == 1 + top_k * (depth - 1) == len(seen))
    assert len(rows) < len(seen) if prune and size < 10 else len(rows) <= len(seen)
    for row in rows:
        assert min((row - logits).abs().max() for logits in seen.values()) < 1e-9
    if not prune:  # all of them, and in the order of their paths
        torch.testing.assert_close(rows, torch.stack(list(seen.values())), rtol=1e-9, atol=1e-9)


@MODES
def test_an_eagle3_tree_without_branches_is_the_chain(target, text, scratch):
    drafters, anchor = pair(target, text, scratch), text[0][:, START : START + 1]
    with torch.no_grad():
        line, tree = (draft(drafters, anchor, arm, 99) for arm in (Arm("eagle3", 6), Arm("eagle3-tree", 6, 1, 6)))
        cut = draft(drafters, anchor, Arm("eagle3-tree", 6, 1, 6), 4)
    assert all(torch.equal(getattr(line, f), getattr(tree, f)) for f in ("tokens", "parents", "depths", "words"))
    assert torch.equal(cut.tokens, line.tokens[:, :5])


@pytest.mark.parametrize("prune", [False, True], ids=["all", "pruned"])
@pytest.mark.parametrize(("scale", "size"), [(0.0, 9), (0.0, 20), (1e6, 9), (1e6, 3)])
def test_ties_go_to_the_oldest_and_leave_no_orphans(target, text, prune, scale, size):
    """All tokens equally likely, and probabilities of exactly 1 along one path: siblings by lowest id, parents before children."""
    config, tensors = eagle3(target)
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * scale
    drafter, anchor = fed(Eagle3Drafter(config, tensors, target, ROWS), text), text[0][:, START : START + 1]
    with torch.no_grad():
        nodes = eagle3_tree.propose(drafter, anchor, size, 3, 3, prune=prune)
        best, _ = grow(drafter, anchor, size, 3, 3)
    assert paths(nodes)[1:] == [path for path, _ in best]
    parents = nodes.parents.tolist()
    assert all(0 <= parents[i] < i for i in range(1, len(parents)))
    lowest = drafter.draft_ids[:3].tolist()
    if scale == 0.0:
        assert paths(nodes)[1:4] == [(t,) for t in lowest] and paths(nodes)[4] == (lowest[0], lowest[0])
    else:
        assert (nodes.scores == 0).sum() == 4, "root and a path of three certain tokens"


def test_a_head_of_fewer_rows_than_children(target, text):
    drafter, anchor = fed(Eagle3Drafter(*eagle3(target, draft_vocab=3), target, ROWS), text), text[0][:, START : START + 1]
    with torch.no_grad():
        tree = draft({"eagle3": drafter}, anchor, Arm("eagle3-tree", 60, 8, 3), 99)
    check_tree(tree, anchor, 3 + 9 + 24, 3)
    assert tree.size == 1 + 3 + 9 + 24  # three, then three of each of three, then three of each of eight


# Trained drafters


def test_trained_trees_hold_more_of_the_text_than_chains():
    """The tiny trio: every tree arm writes what the target writes, and in fewer rounds than a chain of one drafter."""
    tiny = ASSETS / "tiny"
    decoder = WhiFlashDecoder.from_pretrained(
        str(tiny / "target"), dflash=tiny / "dflash", eagle3=tiny / "eagle3", device="cpu", dtype="float32", max_cache_len=256
    )
    rng = random.Random(3)
    prompts = [sentence(rng)[0] for _ in range(6)]
    texts, forwards = {}, {}
    for arm in ("ar", "dflash:5", "ddtree:20", "eagle3:5", "eagle3-tree:20", "mixed:20"):
        decoder.use_router(f"static:{arm}")
        outs = [decoder.generate(prompt, max_new_tokens=32) for prompt in prompts]
        texts[arm], forwards[arm] = [out.sequences.tolist() for out in outs], sum(out.stats.target_forwards for out in outs)
        assert texts[arm] == texts["ar"]
    assert forwards["ddtree:20"] < forwards["dflash:5"] and forwards["eagle3-tree:20"] < forwards["eagle3:5"], forwards
    assert forwards["mixed:20"] < min(forwards["dflash:5"], forwards["eagle3:5"]), forwards


@pytest.mark.gpu
@pytest.mark.parametrize(
    "text_form", ["ddtree:12", "ddtree:100", "eagle3-tree:12", "eagle3-tree:40:3:6", "mixed:12", "mixed:70:3:6"]
)
def test_cuda_drafts_the_same_trees_and_waits_for_nothing(text, text_form):
    model, on_cpu = models("qwen3", torch.float32)
    on_gpu = load_target(copy.deepcopy(model).cuda(), torch.device("cuda"), torch.float32)[0]
    arm, (tokens, features) = parse_arm(text_form), text
    trees = []
    with torch.no_grad():
        for target in (on_cpu, on_gpu):
            moved = tokens.to(target.device), features.to(target.device, torch.float32)
            drafters = {kind: fed(build(kind, target, ROWS, target is on_gpu), moved) for kind in ("dflash", "eagle3")}
            anchor = moved[0][:, START : START + 1]
            trees.append(draft(drafters, anchor, arm, 99))
        torch.cuda.set_sync_debug_mode("error")
        try:
            again = draft(drafters, anchor, arm, 99)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert sorted(paths(trees[0])) == sorted(paths(trees[1])) == sorted(paths(again))
