"""Arm: one way to spend a round, with its size. `ar`, `dflash:4`, `eagle3:3`; the size counts drafted nodes without the anchor."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = ("ar", "dflash", "eagle3")
DIFFUSION, AUTOREGRESSIVE = ("dflash",), ("eagle3",)


@dataclass(frozen=True)
class Arm:
    kind: str
    size: int = 0

    def __str__(self) -> str:
        return self.kind if self.kind == "ar" else f"{self.kind}:{self.size}"


def parse_arm(text: str, defaults: dict[str, int] | None = None) -> Arm:
    """'dflash:4' -> Arm; without a size, the default of its kind. ValueError names what is allowed."""
    kind, _, size = text.partition(":")
    if kind not in KINDS:
        raise ValueError(f"unknown arm {text!r}: choose from {', '.join(KINDS)}, with a draft length as in dflash:4")
    if kind == "ar":
        if size:
            raise ValueError(f"arm {text!r}: ar drafts nothing and takes no size")
        return Arm("ar")
    if not size:
        if not defaults or kind not in defaults:
            raise ValueError(f"arm {text!r} needs a draft length, as in {kind}:4")
        return Arm(kind, defaults[kind])
    if not (size.isascii() and size.isdigit()) or int(size) < 1:
        raise ValueError(f"arm {text!r}: the draft length must be a whole number of at least 1")
    return Arm(kind, int(size))
