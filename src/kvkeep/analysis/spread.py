"""How a magnitude is spread: quantiles, the tail, and where in the text the large ones are. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

#: First positions of a text, whose values are drained: they stand apart everywhere here.
SINKS = 4
#: Stretches of equal length that the rest of a text is cut into.
STRETCHES = 16

_QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Quantiles of a set of numbers, their mean and the largest."""

    p1: float
    p5: float
    p25: float
    p50: float
    p75: float
    p95: float
    p99: float
    mean: float
    largest: float

    @property
    def tail(self) -> float:
        """P99 / P50: how far the largest hundredth is from the middle; 0 where the middle is 0."""
        return self.p99 / self.p50 if self.p50 > 0 else 0.0


def spread(numbers: Tensor) -> Spread | None:
    """Sum up any number of numbers, of any shape; ``None`` if there is none."""
    flat = numbers.detach().double().flatten().numpy()
    if not flat.size:
        return None
    low = np.quantile(flat, _QUANTILES).tolist()
    names = ("p1", "p5", "p25", "p50", "p75", "p95", "p99")
    return Spread(**dict(zip(names, low, strict=True)), mean=float(flat.mean()), largest=float(flat.max()))


def stretch(length: int) -> Tensor:
    """In which stretch of its text each position lies.

    Returns
    -------
    Tensor
        int64 ``[length]``: -1 for sinks, else 0 … 15; a short text leaves some stretches empty.
    """
    places = torch.arange(length) - SINKS
    return torch.where(places < 0, -1, places * STRETCHES // max(1, length - SINKS))
