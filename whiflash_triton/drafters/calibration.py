"""How far a drafter's own probabilities can be trusted: Platt scaling (1999) of every step, by depth.

A step is one token given that everything before it is right. A drafter says p; the target then takes the token with probability
sigmoid(slope * logit(p) + offset). Slope 1 and offset 0 change nothing.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F

FILE = "calibration.json"


@dataclass(frozen=True)
class Calibration:
    """One slope (above 0) and one offset a depth, depth 1 first; deeper steps take the last ones."""

    slopes: tuple[float, ...]
    offsets: tuple[float, ...]

    def apply(self, steps: torch.Tensor, depth: int, deeper: int = 0) -> torch.Tensor:
        """Log-probabilities [R, K] -> calibrated ones, at most 0; -inf stays -inf.

        All rows are steps to one depth, or, with deeper = R - 1, row i is a step to depth + i.
        """
        slope, offset = _columns(self, depth, deeper + 1, steps.device)
        return F.logsigmoid(slope * logit(steps) + offset)


def logit(steps: torch.Tensor) -> torch.Tensor:
    """log(p / (1 - p)) of p = exp(steps); 0 gives inf, -inf gives -inf."""
    return steps - torch.log(-torch.expm1(steps))


@lru_cache(maxsize=64)
def _columns(calibration: Calibration, depth: int, rows: int, device: torch.device) -> list[torch.Tensor]:
    last = len(calibration.slopes) - 1
    at = [min(depth - 1 + row, last) for row in range(rows)]
    return [torch.tensor([[v[i]] for i in at], device=device) for v in (calibration.slopes, calibration.offsets)]


def read_calibration(path: Path) -> dict[str, Calibration]:
    """{"dflash": {"slope": [...], "offset": [...]}, ...}, one number a depth. ValueError says what is wrong with the file."""
    try:
        return {kind: _checked(item["slope"], item["offset"]) for kind, item in json.loads(path.read_text()).items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no calibration ({error}): delete it, or write it with `whiflash train calibrate`") from error


def _checked(slopes: list[float], offsets: list[float]) -> Calibration:
    values = [*slopes, *offsets]
    if len(slopes) != len(offsets) or not slopes or not all(math.isfinite(v) for v in values) or min(slopes) <= 0:
        raise ValueError("give one finite slope above 0 and one finite offset a depth")
    return Calibration(tuple(map(float, slopes)), tuple(map(float, offsets)))
