"""Bootstrap over prompts: how far a speed, or a ratio of two, would move with another draw of prompts like these."""

from __future__ import annotations

import numpy as np

DRAWS = 10_000
LEVEL = 0.95


def resamples(prompts: int, draws: int = DRAWS, seed: int = 0) -> np.ndarray:
    """How often each prompt is drawn, int64 [draws, prompts]: `prompts` draws with replacement a row."""
    return np.random.default_rng(seed).multinomial(prompts, np.full(prompts, 1 / prompts), size=draws)


def speeds(weights: np.ndarray, gain: np.ndarray, cost: np.ndarray) -> np.ndarray:
    """Total gain over total cost of each resample, float64 [draws]; nan where the cost is 0. gain, cost: [prompts]."""
    total = (weights @ cost).astype(np.float64)
    return np.divide(weights @ gain, total, out=np.full(len(weights), np.nan), where=total != 0)


def interval(values: np.ndarray) -> list[float] | None:
    """The middle 95% of them; None where there are none, or one prompt gave them all."""
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    return np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]).tolist()
