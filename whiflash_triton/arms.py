"""Arm: one way to spend a round, with its size: `ar`, `dflash:4`, `ddtree:16`, `eagle3:3`, `eagle3-tree:16`, `mixed:16`,
`lookup:8`.

The size counts drafted nodes without the anchor. An EAGLE-3 tree also has top_k, the children a node gets, and depth, the drafted
tokens on its longest path: `eagle3-tree:16:4:3` and `mixed:16:4:3` name them after the size.
"""

from __future__ import annotations

from dataclasses import dataclass

KINDS = ("ar", "dflash", "ddtree", "eagle3", "eagle3-tree", "mixed", "lookup")
DIFFUSION, AUTOREGRESSIVE = ("dflash", "ddtree"), ("eagle3", "eagle3-tree")
SHAPED = ("eagle3-tree", "mixed")  # the kinds that have a top_k and a depth
TOP_K, DEPTH = 4, 5
_NEEDS = {"ar": (), "lookup": (), "ddtree": ("dflash",), "eagle3-tree": ("eagle3",), "mixed": ("dflash", "eagle3")}


@dataclass(frozen=True)
class Arm:
    """top_k and depth 0 mean the defaults of a kind that has them; ValueError for a kind that has none."""

    kind: str
    size: int = 0
    top_k: int = 0
    depth: int = 0

    def __post_init__(self) -> None:
        if self.kind in SHAPED:
            object.__setattr__(self, "top_k", self.top_k or TOP_K)
            object.__setattr__(self, "depth", self.depth or DEPTH)
        elif self.top_k or self.depth:
            raise ValueError(f"arm {self.kind} has no top_k and no depth: only {' and '.join(SHAPED)} do")

    @property
    def needs(self) -> tuple[str, ...]:
        """The drafters it draws on, by name."""
        return _NEEDS.get(self.kind, (self.kind,))

    @property
    def copies(self) -> bool:
        """Whether it takes from the text itself."""
        return self.kind in ("lookup", "mixed")

    def __str__(self) -> str:
        if self.kind == "ar":
            return self.kind
        shape = f":{self.top_k}:{self.depth}" if self.kind in SHAPED and (self.top_k, self.depth) != (TOP_K, DEPTH) else ""
        return f"{self.kind}:{self.size}{shape}"


def parse_arm(text: str, defaults: dict[str, int] | None = None) -> Arm:
    """'dflash:4' -> Arm; without a size, the default of its kind. ValueError names what is allowed."""
    kind, *numbers = text.split(":")
    if kind not in KINDS:
        raise ValueError(f"unknown arm {text!r}: choose from {', '.join(KINDS)}, with a size as in dflash:4")
    if kind == "ar":
        if text != "ar":
            raise ValueError(f"arm {text!r}: ar drafts nothing and takes no size")
        return Arm("ar")
    if numbers in ([], [""]):
        if not defaults or kind not in defaults:
            raise ValueError(f"arm {text!r} needs {_size(kind)}, as in {kind}:4")
        return Arm(kind, defaults[kind])
    if kind not in SHAPED and len(numbers) > 1:
        raise ValueError(f"arm {text!r}: {_size(kind)} is one whole number, as in {kind}:4")
    if len(numbers) not in (1, 3):
        raise ValueError(f"arm {text!r}: give the size, or size, top_k and depth, as in {kind}:16 or {kind}:16:{TOP_K}:{DEPTH}")
    for name, number in zip((_size(kind), "top_k", "depth"), numbers, strict=False):
        if not (number.isascii() and number.isdigit()) or int(number) < 1:
            raise ValueError(f"arm {text!r}: {name} must be a whole number of at least 1")
    return Arm(kind, *map(int, numbers))


def _size(kind: str) -> str:
    return "a draft length" if kind in ("dflash", "eagle3", "lookup") else "a number of nodes"
