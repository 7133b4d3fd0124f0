"""Routers choose the arm of a round from what the target just showed. They see only the past, so any choice is lossless."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ..arms import Arm


@dataclass
class RoundState:
    """hidden [H] after the target's final norm at the last accepted row; entropy in nats, float32 scalar tensor, same row.

    match: tokens at the end of the text that occurred before, 0 unless the router has a lookup arm.
    """

    hidden: torch.Tensor
    entropy: torch.Tensor
    position: int
    pending: dict[str, int]
    history: deque[tuple[Arm, int, int]] = field(default_factory=lambda: deque(maxlen=256))  # (arm, drafted, accepted)
    match: int = 0


class Router(Protocol):
    """`arms` lists every arm it may return, so that a missing drafter is an error before the first round."""

    arms: tuple[Arm, ...]

    def choose(self, state: RoundState) -> Arm: ...
