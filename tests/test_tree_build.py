"""Tree build and ancestor words, kernels and references, against a walk over all prefixes and a full enumeration."""

import itertools
import math

import pytest
import torch

from whiflash_triton.autotune import lookup
from whiflash_triton.kernels import tree_build as module
from whiflash_triton.kernels.tree_build import ancestor_words, ancestor_words_torch, tree_build, tree_build_torch

INF, NAN = float("inf"), float("nan")
BUDGETS = [1, 15, 63, 64, 65, 256, 1024]
KINDS = ["normal", "sure", "ties", "zeros", "flat"]


def make(kind: str, levels: int, ranks: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """log_probs, tokens, anchor; rows of both as views whose strides are multiples of nothing."""
    draw = torch.Generator().manual_seed(levels * 1031 + ranks)
    logits = torch.randn(levels, ranks + 3, generator=draw) * {"normal": 1.5, "sure": 8.0}.get(kind, 1.0)
    if kind == "ties":
        logits = logits.round()
    elif kind == "flat":
        logits = torch.zeros_like(logits)
    log_probs = logits.log_softmax(-1).sort(-1, descending=True).values
    if kind == "zeros":  # a certain token, or all of them: children that score exactly as their parents
        log_probs[0::2, 0] = 0.0
        log_probs[1::3] = 0.0
    tokens = torch.randperm(levels * (ranks + 5), generator=draw).view(levels, ranks + 5) + 100
    return log_probs.to(device)[:, :ranks], tokens.to(device)[:, :ranks], torch.tensor([77], device=device)


def best_first(log_probs: torch.Tensor, tokens: torch.Tensor, budget: int) -> list[tuple[int, int, int, float]]:
    """(token, parent, depth, score) of the nodes, each the best of all that could be taken: no heap, no ranks kept.

    A rank may be taken once the better ones of its parent are."""
    rows = [list(map(float, row)) for row in log_probs.tolist()]
    nodes, children = [(77, -1, 0, 0.0)], {0: 0}
    while len(nodes) <= budget:
        choices = []
        for parent, (_, _, depth, score) in enumerate(nodes):
            rank = children[parent]
            if depth < len(rows) and rank < len(rows[0]) and rows[depth][rank] > -INF:
                choices.append((-(score + rows[depth][rank]), parent, rank))
        if not choices:
            break
        cost, parent, rank = min(choices)
        depth = nodes[parent][2]
        children[parent] += 1
        children[len(nodes)] = 0
        nodes.append((tokens[depth, rank].item(), parent, depth + 1, -cost))
    return nodes + [(0, -1, 0, -INF)] * (budget + 1 - len(nodes))


def words_of(parents: list[int]) -> list[list[int]]:
    """Bit words as Python integers, each node's path walked anew."""
    rows = []
    for node in range(len(parents)):
        words, at = [0] * math.ceil(len(parents) / 64), node
        while at >= 0:
            words[at // 64] |= 1 << at % 64
            at = parents[at]
        rows.append([word - 2**64 if word >= 2**63 else word for word in words])
    return rows


def check(fn, inputs: tuple, budget: int) -> list[tuple[int, int, int, float]]:
    log_probs, tokens, anchor = inputs
    out = fn(log_probs, tokens, anchor, budget)
    n = budget + 1
    assert [x.dtype for x in out] == [torch.int64, torch.int32, torch.int32, torch.int64, torch.float64]
    assert [x.shape for x in out] == [(1, n), (n,), (n,), (n, (n + 63) // 64), (n,)]
    assert {x.device.type for x in out} == {log_probs.device.type}
    expected = best_first(log_probs.cpu(), tokens.cpu(), budget)
    got = list(zip(*(x.tolist() for x in (out.tokens[0], out.parents, out.depths, out.scores)), strict=True))
    assert got == expected
    assert out.words.tolist() == words_of([node[1] for node in expected])
    return got


def check_most_probable(fn, inputs: tuple, budget: int) -> None:
    """No tree of this size holds more probability: its scores are the highest of all prefixes."""
    rows = inputs[0].double().tolist()
    scores = []
    for length in range(1, len(rows) + 1):
        for ranks in itertools.product(range(len(rows[0])), repeat=length):
            scores.append(0.0)
            for row, rank in zip(rows, ranks, strict=False):
                scores[-1] += row[rank]
    best = sorted(scores, reverse=True)[:budget]
    assert fn(*inputs, budget).scores[1 : len(best) + 1].tolist() == best


def check_by_hand(fn, device: str = "cpu") -> None:
    """Equal scores: the lowest parent, then the best rank; no node at all without candidates."""
    tokens = torch.tensor([[5, 6, 7], [8, 9, 10]], device=device)
    anchor = torch.tensor([3], device=device)

    def build(rows: list[list[float]], budget: int):
        out = fn(torch.tensor(rows, device=device), tokens, anchor, budget)
        return out.tokens[0].tolist(), out.parents.tolist(), out.scores.tolist()

    assert build([[-1.0] * 3, [0.0] * 3], 6) == ([3, 5, 6, 7, 8, 9, 10], [-1, 0, 0, 0, 1, 1, 1], [0.0] + [-1.0] * 6)
    assert build([[-1.0, -2.0, -4.0], [-1.0, -3.0, -INF]], 5)[:2] == ([3, 5, 6, 8, 8, 7], [-1, 0, 0, 1, 2, 0])
    for nothing in (-INF, NAN):
        padded = ([3] + [0] * 4, [-1] * 5, [0.0] + [-INF] * 4)
        assert build([[nothing] * 3, [-1.0] * 3], 4) == padded
        # A depth's list ends where it has nothing more; below it there is nothing either.
        assert build([[-1.0, nothing, -2.0], [nothing] * 3], 2) == ([3, 5, 0], [-1, 0, -1], [0.0, -1.0, -INF])
        assert build([[-1.0, -2.0, nothing], [-4.0, nothing, -5.0]], 6)[:2] == ([3, 5, 6, 8, 8, 0, 0], [-1, 0, 0, 1, 2, -1, -1])


def check_words(fn, size: int, device: str = "cpu") -> None:
    """Random trees, chains, stars, pads in between; parents that are none."""
    draw = torch.Generator().manual_seed(size)
    below = (torch.rand(size, generator=draw) * torch.arange(size)).int()
    chain = torch.arange(-1, size - 1, dtype=torch.int32)
    pads = torch.rand(size, generator=draw) < 0.3
    for parents in (below, chain, chain * 0, below.masked_fill(pads, -1)):
        parents = parents.clone()
        parents[0] = -1
        words = fn(parents.to(device))
        assert words.dtype == torch.int64 and words.shape == (size, (size + 63) // 64)
        assert words.tolist() == words_of(parents.tolist())


def check_words_of_no_trees(fn, device: str = "cpu") -> None:
    wrong = torch.tensor([0, 1, 7, -5, 3], dtype=torch.int32, device=device)  # itself, itself, above, negative: no parents
    assert fn(wrong).tolist() == [[1], [2], [4], [8], [24]]


def test_rejections():
    log_probs, tokens, anchor = make("normal", 3, 4)
    wide = torch.zeros(3, 1025)
    for fn in (tree_build, tree_build_torch):
        for wrong, message in (
            ((log_probs, tokens[:, :3], anchor, 4), "one shape"),
            ((log_probs.double(), tokens, anchor, 4), "float32"),
            ((log_probs, tokens.int(), anchor, 4), "int64"),
            ((log_probs, tokens, anchor[0], 4), "anchor"),
            ((log_probs, tokens, anchor, 0), "budget"),
            ((log_probs, tokens, anchor, 1025), "budget"),
            ((wide, wide.long(), anchor, 4), "1024"),
            ((wide.T[:33, :2], wide.T[:33, :2].long(), anchor, 4), "32"),
            ((log_probs.T.contiguous().T, tokens, anchor, 4), "contiguous"),
        ):
            with pytest.raises(AssertionError, match=message):
                fn(*wrong)
    for fn in (ancestor_words, ancestor_words_torch):
        with pytest.raises(AssertionError, match="int32"):
            fn(torch.zeros(3, dtype=torch.int64))
        with pytest.raises(AssertionError, match="contiguous"):
            fn(torch.zeros(6, dtype=torch.int32)[::2])
        with pytest.raises(AssertionError, match="N > 0"):
            fn(torch.zeros(0, dtype=torch.int32))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("levels, ranks", [(1, 1), (1, 40), (2, 3), (15, 16), (32, 2), (7, 100)])
def test_reference(levels, ranks, kind):
    inputs = make(kind, levels, ranks)
    for budget in (1, 2, 15, 65):
        check(tree_build_torch, inputs, budget)


@pytest.mark.parametrize("kind", KINDS)
def test_reference_holds_the_most_probable(kind):
    for levels, ranks in [(1, 4), (2, 5), (4, 3), (5, 4), (3, 1)]:
        for budget in (1, 4, 17, 400):
            check_most_probable(tree_build_torch, make(kind, levels, ranks), budget)


@pytest.mark.parametrize("kind", ["normal", "zeros"])
def test_smaller_trees_begin_larger_ones(kind):
    inputs = make(kind, 15, 1024)
    largest = check(tree_build_torch, inputs, 300)
    for budget in (1, 15, 63, 64, 65, 256):
        assert check(tree_build_torch, inputs, budget) == largest[: budget + 1]
    whole = tree_build_torch(*inputs, 1024)
    assert list(zip(whole.tokens[0, :301].tolist(), whole.scores.tolist(), strict=False)) == [(n[0], n[3]) for n in largest]
    assert (whole.scores.diff() <= 0).all() and whole.scores.isfinite().all()


def test_one_rank_gives_the_chain():
    log_probs, tokens, anchor = make("normal", 15, 1)
    out = tree_build_torch(log_probs, tokens, anchor, 15)
    assert out.parents.tolist() == list(range(-1, 15)) and out.tokens[0].tolist() == [77, *tokens[:, 0].tolist()]


def test_reference_by_hand():
    check_by_hand(tree_build_torch)


@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 129, 1025])
def test_reference_words(size):
    check_words(ancestor_words_torch, size)
    check_words_of_no_trees(ancestor_words_torch)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "budget, levels, ranks, kind",
    [
        (1, 15, 16, "normal"),
        (2, 1, 1, "sure"),
        (15, 15, 1, "normal"),
        (15, 3, 1024, "zeros"),
        (63, 32, 2, "ties"),
        (64, 15, 100, "sure"),
        (65, 4, 33, "flat"),
        (256, 2, 9, "normal"),  # 90 prefixes, then pads
        (1024, 32, 1, "sure"),  # 32 prefixes, then pads
    ],
)
def test_kernel(budget, levels, ranks, kind):
    check(tree_build, make(kind, levels, ranks), budget)


@pytest.mark.interpreter
def test_kernel_by_hand():
    check_by_hand(tree_build)
    check_most_probable(tree_build, make("ties", 3, 3), 25)


@pytest.mark.interpreter
@pytest.mark.parametrize("size", [1, 64, 65, 1025])
def test_kernel_words(size):
    check_words(ancestor_words, size) if size < 1000 else check_words_of_no_trees(ancestor_words)


@pytest.mark.interpreter
@pytest.mark.slow
@pytest.mark.parametrize("budget", [256, 1024])
@pytest.mark.parametrize("kind", ["normal", "zeros"])
def test_kernel_large(kind, budget):
    inputs = make(kind, 15, budget)
    for got, wanted in zip(tree_build(*inputs, budget), tree_build_torch(*inputs, budget), strict=True):
        assert got.equal(wanted)


@pytest.mark.interpreter
@pytest.mark.slow
def test_kernel_words_of_a_long_chain():
    check_words(ancestor_words, 257)


@pytest.mark.compile
@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("entry", list(lookup.shipped("tree_build")), ids=lambda entry: f"{entry.device}-{entry.key}")
def test_compiles(compiles, entry, arch):
    if entry.arch not in (None, arch):
        pytest.skip(f"meant for sm_{entry.arch}")
    signature = {"log_probs_ptr": "*fp32", "tokens_ptr": "*i64", "anchor_ptr": "*i64"}
    signature |= {"token_ptr": "*i64", "parent_ptr": "*i32", "depth_ptr": "*i32", "score_ptr": "*fp64"}
    signature |= dict.fromkeys(("stride_log_probs", "stride_tokens", "levels", "ranks", "budget"), "i32")
    compiles(module._tree_build_kernel, signature, {"BLOCK": entry.key["N"]}, arch, dtype="fp64", **entry.config)


@pytest.mark.compile
@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("words", [1, 2, 4, 8, 16, 32])  # every width of up to 1025 nodes
def test_words_compile(compiles, words, arch):
    signature = {"parents_ptr": "*i32", "words_ptr": "*i64", "n_nodes": "i32", "n_words": "i32"}
    widths = {"BLOCK": module.WORDS_BLOCK, "WORDS": words}
    compiles(module._ancestor_words_kernel, signature, widths, arch, dtype="int", num_warps=1)


@pytest.mark.gpu
def test_on_gpu():
    check_by_hand(tree_build, "cuda")
    check_words_of_no_trees(ancestor_words, "cuda")
    for size in (1, 64, 65, 1025):
        check_words(ancestor_words, size, "cuda")
    for budget, kind in itertools.product(BUDGETS, KINDS):
        for levels, ranks in ((1, 1), (15, min(budget, 300)), (32, 2)):
            inputs = make(kind, levels, ranks)
            wanted = tree_build_torch(*inputs, budget)
            assert [x.tolist() for x in tree_build(*(x.cuda() for x in inputs), budget)] == [x.tolist() for x in wanted]


@pytest.mark.gpu
def test_graph_replay():
    inputs = make("normal", 15, 64, "cuda")
    tree_build(*inputs, 64)  # compiles before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tree_build(*inputs, 64)
    for kind in ("sure", "ties", "zeros"):
        for old, new in zip(inputs, make(kind, 15, 64, "cuda"), strict=True):
            old.copy_(new)
        graph.replay()
        check(lambda *_: out, inputs, 64)
