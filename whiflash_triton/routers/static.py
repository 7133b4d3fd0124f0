"""The same arm every round."""

from __future__ import annotations

from ..arms import Arm
from .base import RoundState


class StaticRouter:
    def __init__(self, arm: Arm):
        self.arms = (arm,)

    def choose(self, state: RoundState) -> Arm:
        return self.arms[0]
