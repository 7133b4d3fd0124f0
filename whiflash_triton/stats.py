"""What a generation returns: text, ids, the trace of every round, and the numbers people quote."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from .arms import Arm

PHASES = ("route", "draft", "verify", "accept", "commit")


@dataclass
class Round:
    """drafted, accepted: draft tokens, without anchor and bonus; committed: tokens the text kept, bonus included;
    caught_up: pending rows the arm ingested first. Tokens after a stop count nowhere.

    ms is the host's clock: on CUDA the device's time falls to the phase that waits for it, `accept`.
    """

    arm: Arm
    drafted: int
    accepted: int
    committed: int
    caught_up: int
    ms: dict[str, float]


@dataclass
class Stats:
    """tokens_per_second includes prefill and the drafters' own ingestion; tau is tokens per target forward after the prompt.

    seed: what the text was sampled with, None when greedy. reused_tokens: rows of the prompt that the last generation had left.
    host_options: the options that cost a pass on the host for every token.
    """

    prompt_tokens: int
    new_tokens: int
    target_forwards: int
    seconds: float
    prefill_seconds: float
    seed: int | None = None
    reused_tokens: int = 0
    host_options: tuple[str, ...] = ()

    @property
    def tau(self) -> float:
        """Tokens committed per target forward, bonus included, tokens after a stop excluded; the prompt's forward not counted."""
        return (self.new_tokens - 1) / self.target_forwards if self.target_forwards else 1.0

    @property
    def tokens_per_second(self) -> float:
        return self.new_tokens / self.seconds if self.seconds else 0.0


@dataclass
class Output:
    text: str
    sequences: torch.Tensor  # int64 [1, prompt + new]
    stats: Stats
    rounds: list[Round] = field(default_factory=list)
    arms: list[Arm] = field(default_factory=list)  # one a new token: who drafted it; the target's own tokens are `ar`
    finish: str = "length"  # or "stop"
    scores: tuple[torch.Tensor, ...] | None = None  # with output_scores: processed logits [1, V], one a new token
