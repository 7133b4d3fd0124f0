"""Tree walk, kernel and reference, against a naive walk that lists the children of every node."""

import random

import pytest
import torch

from whiflash_triton.autotune import lookup
from whiflash_triton.kernels import tree_walk as module
from whiflash_triton.kernels.tree_walk import tree_walk, tree_walk_torch

SIZES = [1, 2, 3, 15, 17, 63, 64, 65, 129, 256, 257, 1024, 1025]


def make_tree(size: int, nodes: int, alphabet: int, draw: random.Random) -> tuple[list, list, list]:
    """A random tree, padded from nodes to size; few tokens, so that siblings share some and choices often match."""
    shape = draw.choice(["chain", "wide", "mixed"])
    parents = [-1]
    for j in range(1, nodes):
        any_parent = draw.randrange(j)
        parents.append({"chain": j - 1, "wide": any_parent, "mixed": draw.choice([j - 1, any_parent])}[shape])
    tokens = [draw.randrange(alphabet) for _ in range(size)]
    choices = [draw.choice([draw.randrange(alphabet), draw.randrange(alphabet), -1]) for _ in range(size)]
    return tokens, parents + [-1] * (size - nodes), choices


def make(size: int, alphabet: int, device: str = "cpu") -> list[torch.Tensor]:
    """A full tree, a padded one, a root alone, and one whose every choice is a child's token."""
    draw = random.Random(size * 31 + alphabet)
    trees = [make_tree(size, nodes, alphabet, draw) for nodes in (size, max(1, size * 2 // 3), 1, size)]
    tokens, parents, choices = trees[3]
    for j in range(1, size):
        choices[parents[j]] = tokens[j]
    columns = [torch.tensor(column, device=device) for column in zip(*trees, strict=True)]
    return [columns[0], columns[1].int(), columns[2]]


def walk(tokens: list[int], parents: list[int], choices: list[int]) -> list[int]:
    path = [0]
    while True:
        children = [child for child in range(len(tokens)) if parents[child] == path[-1]]
        taken = [child for child in children if choices[path[-1]] >= 0 and tokens[child] == choices[path[-1]]]
        if not taken:
            return path
        path.append(min(taken))


def check(fn, inputs: list[torch.Tensor]) -> list[int]:
    path, length, bonus = (x.cpu() for x in fn(*inputs))
    assert (path.dtype, length.dtype, bonus.dtype) == (torch.int32, torch.int32, torch.int64)
    for b, (tokens, parents, choices) in enumerate(zip(*(x.tolist() for x in inputs), strict=True)):
        expected = walk(tokens, parents, choices)
        assert path[b].tolist() == expected + [-1] * (len(tokens) - len(expected))
        assert length[b] == len(expected) and bonus[b] == choices[expected[-1]]
    return length.tolist()


def check_by_hand(fn, device: str = "cpu") -> None:
    """Equal siblings: the lowest is taken, and its subtree alone; -1 and pads match nothing; rows may be strided."""
    tokens = torch.tensor([[5, 7, 7, 8, 9, -1, -1, 99]] * 3, device=device)[:, :7]
    parents = torch.tensor([[-1, 0, 0, 2, 1, -1, -1, 0]] * 3, dtype=torch.int32, device=device)[:, :7]
    choices = torch.tensor([[7, 8, 8, 1, 1, 1, 1, 0], [7, 9, 8, 1, 4, 1, 1, 0], [-1, 9, 8, 1, 4, 1, 1, 0]]).to(device)
    path, length, bonus = fn(tokens, parents, choices[:, :7])
    assert length.tolist() == [2, 3, 1] and bonus.tolist() == [8, 4, -1]
    assert path.tolist() == [[0, 1] + [-1] * 5, [0, 1, 4] + [-1] * 4, [0] + [-1] * 6]


def chain(size: int, device: str = "cpu") -> list[torch.Tensor]:
    """A chain whose every token is accepted."""
    tokens = torch.arange(size, device=device)[None]
    return [tokens, tokens.int() - 1, tokens + 1]


def test_rejections():
    tokens, parents, choices = make(3, 2)
    for fn in (tree_walk, tree_walk_torch):
        with pytest.raises(AssertionError, match="one shape"):
            fn(tokens, parents[:, :2], choices)
        with pytest.raises(AssertionError, match="int32"):
            fn(tokens, parents.long(), choices)
        with pytest.raises(AssertionError, match="1025"):
            fn(*(x.repeat(1, 342) for x in (tokens, parents, choices)))
        with pytest.raises(AssertionError, match="contiguous"):
            fn(*(x.T.contiguous().T for x in (tokens, parents, choices)))


@pytest.mark.parametrize("alphabet", [1, 2, 3, 50])
@pytest.mark.parametrize("size", SIZES)
def test_reference(size, alphabet):
    inputs = make(size, alphabet)
    assert check(tree_walk_torch, inputs)[2] == 1
    assert check(tree_walk_torch, chain(size)) == [size]


def test_reference_by_hand():
    check_by_hand(tree_walk_torch)
    assert [x.shape for x in tree_walk_torch(*(x[:0] for x in chain(5)))] == [(0, 5), (0,), (0,)]


@pytest.mark.interpreter
@pytest.mark.parametrize("size", SIZES)
def test_kernel(size):
    check(tree_walk, make(size, 2 + size % 2))


@pytest.mark.interpreter
def test_kernel_by_hand():
    check_by_hand(tree_walk)
    assert check(tree_walk, chain(65)) == [65]
    assert [x.shape for x in tree_walk(*(x[:0] for x in chain(5)))] == [(0, 5), (0,), (0,)]


@pytest.mark.interpreter
@pytest.mark.slow
@pytest.mark.parametrize("alphabet", [1, 2, 3, 50])
@pytest.mark.parametrize("size", SIZES)
def test_kernel_full_product(size, alphabet):
    check(tree_walk, make(size, alphabet))


@pytest.mark.interpreter
@pytest.mark.slow
def test_kernel_longest_chain():
    assert check(tree_walk, chain(1025)) == [1025]


@pytest.mark.compile
@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("entry", list(lookup.shipped("tree_walk")), ids=lambda entry: f"{entry.device}-{entry.key}")
def test_compiles(compiles, entry, arch):
    if entry.arch not in (None, arch):
        pytest.skip(f"meant for sm_{entry.arch}")
    signature = {"tokens_ptr": "*i64", "parents_ptr": "*i32", "choices_ptr": "*i64"}
    signature |= {"path_ptr": "*i32", "length_ptr": "*i32", "bonus_ptr": "*i64"}
    signature |= {name: "i32" for name in ("stride_tokens", "stride_parents", "stride_choices", "n_nodes")}
    compiles(module._tree_walk_kernel, signature, {"BLOCK": entry.key["N"]}, arch, dtype="int", **entry.config)


@pytest.mark.gpu
def test_on_gpu():
    check_by_hand(tree_walk, "cuda")
    for size in SIZES:
        assert check(tree_walk, chain(size, "cuda")) == [size]
        for alphabet in (1, 2, 3, 50):
            check(tree_walk, make(size, alphabet, "cuda"))


@pytest.mark.gpu
def test_graph_replay():
    inputs = make(65, 2, "cuda")
    tree_walk(*inputs)  # compiles before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tree_walk(*inputs)
    for alphabet in (2, 3, 4):
        for old, new in zip(inputs, make(65, alphabet, "cuda"), strict=True):
            old.copy_(new)
        graph.replay()
        check(lambda *_: out, inputs)
