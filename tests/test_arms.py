"""Arms: their text, what they need, and what the drafters at hand can draft."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from whiflash_triton.arms import AUTOREGRESSIVE, DIFFUSION, KINDS, Arm, parse_arm
from whiflash_triton.drafters.draft import check_arm

DEFAULTS = {"dflash": 3, "eagle3": 2, "ddtree": 16, "eagle3-tree": 12, "mixed": 8}
PAIR = {"dflash": SimpleNamespace(max_draft=7), "eagle3": SimpleNamespace(max_draft=16)}


@pytest.mark.parametrize(
    ("text", "arm", "shortest"),
    [
        ("ar", Arm("ar"), "ar"),
        ("dflash:4", Arm("dflash", 4), "dflash:4"),
        ("eagle3:12", Arm("eagle3", 12), "eagle3:12"),
        ("dflash", Arm("dflash", 3), "dflash:3"),
        ("eagle3", Arm("eagle3", 2), "eagle3:2"),
        ("ddtree", Arm("ddtree", 16), "ddtree:16"),
        ("ddtree:1024", Arm("ddtree", 1024), "ddtree:1024"),
        ("eagle3-tree", Arm("eagle3-tree", 12, 4, 5), "eagle3-tree:12"),
        ("eagle3-tree:16:4:5", Arm("eagle3-tree", 16), "eagle3-tree:16"),
        ("eagle3-tree:16:4:3", Arm("eagle3-tree", 16, 4, 3), "eagle3-tree:16:4:3"),
        ("eagle3-tree:16:1:5", Arm("eagle3-tree", 16, 1), "eagle3-tree:16:1:5"),
        ("mixed", Arm("mixed", 8, 4, 5), "mixed:8"),
        ("mixed:16:2:6", Arm("mixed", 16, 2, 6), "mixed:16:2:6"),
    ],
)
def test_text(text, arm, shortest):
    assert parse_arm(text, DEFAULTS) == arm
    assert str(arm) == shortest
    assert parse_arm(shortest) == arm and hash(parse_arm(shortest)) == hash(arm)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "unknown arm ''"),
        ("medusa:3", "choose from ar, dflash, ddtree, eagle3, eagle3-tree, mixed"),
        ("DFlash:3", "unknown arm"),
        (" dflash:3", "unknown arm"),
        ("ar:2", "takes no size"),
        ("ar:", "takes no size"),
        ("dflash", "needs a draft length, as in dflash:4"),
        ("dflash:", "needs a draft length"),
        ("mixed", "needs a number of nodes, as in mixed:4"),
        ("dflash:0", "at least 1"),
        ("dflash:-1", "whole number"),
        ("dflash:1.5", "whole number"),
        ("dflash:four", "whole number"),
        ("eagle3:2:3", "one whole number"),
        ("ddtree:16:4:5", "one whole number"),
        ("dflash:²", "whole number"),
        ("eagle3-tree:16:4", "size, top_k and depth, as in eagle3-tree:16 or eagle3-tree:16:4:5"),
        ("mixed:16:4:5:6", "size, top_k and depth"),
        ("mixed:16:0:5", "top_k must be a whole number of at least 1"),
        ("mixed:16:4:", "depth must be a whole number of at least 1"),
        ("mixed::4:5", "number of nodes must be"),
    ],
)
def test_bad_text(text, message):
    with pytest.raises(ValueError, match=message):
        parse_arm(text)


def test_needs():
    assert {kind: Arm(kind, 3).needs for kind in KINDS} == {
        "ar": (),
        "dflash": ("dflash",),
        "ddtree": ("dflash",),
        "eagle3": ("eagle3",),
        "eagle3-tree": ("eagle3",),
        "mixed": ("dflash", "eagle3"),
        "lookup": (),
    }
    assert Arm("oracle", 5).needs == ("oracle",)
    assert {Arm(kind, 1).needs for kind in DIFFUSION} == {("dflash",)}
    assert {Arm(kind, 1).needs for kind in AUTOREGRESSIVE} == {("eagle3",)}


@pytest.mark.parametrize("kind", ["ar", "dflash", "eagle3", "ddtree", "oracle"])
def test_only_eagle_trees_have_a_shape(kind):
    with pytest.raises(ValueError, match="no top_k and no depth: only eagle3-tree and mixed do"):
        Arm(kind, 4, 2, 3)


@pytest.mark.parametrize(
    "text",
    [
        "ar", "dflash:1", "dflash:7", "eagle3:16", "ddtree:1", "ddtree:1024", "eagle3-tree:1", "eagle3-tree:68",
        "eagle3-tree:5:1:5", "eagle3-tree:16:1:16", "eagle3-tree:1024:16:8", "mixed:1024", "mixed:7:1:1",
        "lookup:1", "lookup:64",
    ],
)  # fmt: skip
def test_arms_that_can_be_drafted(text):
    check_arm(PAIR, parse_arm(text))


@pytest.mark.parametrize(
    ("arm", "message"),
    [
        (Arm("dflash", 0), "dflash:0 is out of range: this drafter drafts dflash:1 to dflash:7"),
        (Arm("dflash", 8), "dflash:8 is out of range"),
        (Arm("eagle3", 17), "eagle3:1 to eagle3:16"),
        (Arm("lookup", 65), "lookup:1 to lookup:64"),
        (Arm("ddtree", 0), "a tree has 1 to 1024 nodes"),
        (Arm("ddtree", 1025), "a tree has 1 to 1024 nodes"),
        (Arm("mixed", 1025), "a tree has 1 to 1024 nodes"),
        (Arm("mixed", -1), "a tree has 1 to 1024 nodes"),
        (Arm("eagle3-tree", 69), "top_k 4 and depth 5 propose only 68 nodes"),
        (Arm("eagle3-tree", 6, 1, 5), "propose only 5 nodes"),
        (Arm("eagle3-tree", 7, 17, 5), r"top_k must lie in 1\.\.16"),
        (Arm("mixed", 7, -1, 5), r"top_k must lie in 1\.\.16"),
        (Arm("mixed", 7, 16, 9), r"with top_k 16 the depth must lie in 1\.\.8"),
        (Arm("eagle3-tree", 7, 2, 17), r"the depth must lie in 1\.\.16"),
        (Arm("eagle3-tree", 7, 2, -3), r"the depth must lie in 1\.\.16"),
    ],
    ids=str,
)
def test_arms_out_of_range(arm, message):
    with pytest.raises(ValueError, match=message):
        check_arm(PAIR, arm)


@pytest.mark.parametrize(
    ("have", "text", "missing"),
    [
        ((), "dflash:2", "dflash"),
        (("eagle3",), "ddtree:2", "dflash"),
        (("dflash",), "eagle3-tree:2", "eagle3"),
        (("dflash",), "mixed:2", "eagle3"),
        (("eagle3",), "mixed:2", "dflash"),
    ],
)
def test_missing_drafters(have, text, missing):
    with pytest.raises(ValueError, match=f"arm {text} needs a {missing} drafter, none is loaded: give {missing}="):
        check_arm({name: PAIR[name] for name in have}, parse_arm(text))


def test_drafters_of_other_kinds_are_checked_too():
    check_arm({"oracle": SimpleNamespace(max_draft=9)}, Arm("oracle", 9))
    with pytest.raises(ValueError, match="oracle:10 is out of range"):
        check_arm({"oracle": SimpleNamespace(max_draft=9)}, Arm("oracle", 10))
