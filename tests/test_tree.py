"""DraftTree: ancestor words against masks, trees against a naive walk up the parents, chains against trees."""

from __future__ import annotations

import random

import pytest
import torch

from whiflash_triton.tree import chain, from_parents, mask_to_words, words_to_mask

SIZES = [1, 2, 63, 64, 65, 128, 256]


def random_parents(n: int, rng: random.Random) -> list[int]:
    return [-1] + [rng.randrange(node) for node in range(1, n)]


def ancestors(parents: list[int], node: int) -> set[int]:
    """The node, its parent, that one's parent... up to the root."""
    seen = set()
    while node != -1:
        seen.add(node)
        node = parents[node]
    return seen


@pytest.mark.parametrize("n", SIZES)
def test_words_hold_the_mask(n):
    mask = torch.rand(7, n, generator=torch.Generator().manual_seed(n)) < 0.5
    words = mask_to_words(mask)
    assert words.dtype == torch.int64 and words.shape == (7, (n + 63) // 64)
    for row, values in zip(mask.tolist(), words.tolist(), strict=True):
        bits = sum(1 << j for j, seen in enumerate(row) if seen)
        unsigned = [value % (1 << 64) for value in values]  # bit 63 is the sign
        assert unsigned == [bits >> (64 * w) & ((1 << 64) - 1) for w in range(len(values))]
    assert torch.equal(words_to_mask(words, n), mask)


def test_bit_63_is_the_sign_bit():
    mask = torch.zeros(2, 128, dtype=torch.bool)
    mask[0, 63] = mask[1, 127] = True
    lowest = torch.iinfo(torch.int64).min
    assert mask_to_words(mask).tolist() == [[lowest, 0], [0, lowest]]
    assert torch.equal(words_to_mask(mask_to_words(mask), 128), mask)
    full = torch.ones(1, 64, dtype=torch.bool)
    assert mask_to_words(full).tolist() == [[-1]] and bool(words_to_mask(mask_to_words(full), 64).all())


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("seed", range(3))
def test_from_parents_equals_a_naive_walk(n, seed):
    parents = random_parents(n, random.Random(seed))
    tree = from_parents(torch.arange(n).view(1, n), parents)
    assert tree.size == n and tree.parents.tolist() == parents and not tree.is_chain
    assert tree.parents.dtype == tree.depths.dtype == torch.int32
    for node, row in enumerate(tree.visible().tolist()):
        above = ancestors(parents, node)
        assert {j for j, seen in enumerate(row) if seen} == above
        assert int(tree.depths[node]) == len(above) - 1


@pytest.mark.parametrize("n", SIZES)
def test_chain_is_one_tree(n):
    tokens = torch.arange(n).view(1, n) + 5
    straight, tree = chain(tokens), from_parents(tokens, list(range(-1, n - 1)))
    assert straight.is_chain
    for name in ("tokens", "parents", "depths", "words"):
        assert torch.equal(getattr(straight, name), getattr(tree, name)), name
        assert getattr(straight, name).dtype == getattr(tree, name).dtype
    assert torch.equal(straight.visible(), torch.ones(n, n, dtype=torch.bool).tril())


def test_many_chain_sizes_stay_right():
    """The table of chains is bounded; dropping it changes nothing."""
    for n in (*range(1, 300), 3, 64, 65):
        tree = chain(torch.zeros(1, n, dtype=torch.int64))
        assert tree.depths.tolist() == list(range(n)) and tree.parents.tolist() == list(range(-1, n - 1))


@pytest.mark.parametrize(
    ("n", "parents", "message"),
    [
        (3, [-1, 0], "3 tokens needs 3 parents"),
        (2, [0, 0], "the first -1"),
        (0, [], "needs 0 parents"),
        (3, [-1, 1, 0], "node 1 has parent 1"),
        (3, [-1, 2, 0], "parents must precede"),
        (3, [-1, 0, -1], "node 2 has parent -1"),  # a second root
    ],
)
def test_bad_parents(n, parents, message):
    with pytest.raises(ValueError, match=message):
        from_parents(torch.zeros(1, n, dtype=torch.int64), parents)
