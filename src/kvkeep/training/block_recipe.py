"""Everything that decides the result of training block gates."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from kvkeep.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class BlockRecipe:
    """Settings of a training run; the defaults are the published ones but for the length of rows.

    Parameters
    ----------
    block, width, normed
        Of the gates, see :class:`~kvkeep.gates.BlockShape`; ``width=None`` is the model's head_dim.
    steps, rows, row
        Optimizer steps, documents of a step, and tokens of a document at most (published: 32,768).
    rate, least_rate, warmup
        Largest and smallest learning rate of half a cosine, and steps in which the rate rises before.
    share
        Last part of each document whose queries count: the first ones have few blocks to choose from.
    weight
        Factor on the loss.
    seed
        Of the first weights and the order of data.

    Raises
    ------
    ConfigError
        Naming the setting that is out of range.

    Source
    ------
    SeerAttention-R (arXiv 2506.08889), recipe of the official code.
    """

    block: int = 64
    width: int | None = None
    normed: bool = True
    steps: int = 800
    rows: int = 16
    row: int = 4096
    rate: float = 1e-3
    least_rate: float = 1e-5
    warmup: int = 20
    share: float = 0.5
    weight: float = 10.0
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"block": 1, "width": 1, "steps": 1, "rows": 1, "row": 2, "warmup": 0}
        for name, bound in least.items():
            number = getattr(self, name)
            if number is not None and number < bound:
                raise ConfigError(f"{name} {number} is below {bound}.")
        for name in ("rate", "weight"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} {getattr(self, name)} is not a positive number.")
        if not 0 <= self.least_rate <= self.rate:
            raise ConfigError(f"least_rate {self.least_rate} is not between 0 and the rate, {self.rate}.")
        if not 0 < self.share <= 1:
            raise ConfigError(f"share {self.share} is outside (0, 1].")
        if self.row < 2 * self.block:
            raise ConfigError(
                f"rows of {self.row} tokens hold less than two blocks of {self.block}: there is nothing to "
                "choose. Take longer rows or smaller blocks."
            )

    def rate_at(self, step: int) -> float:
        """Learning rate of a step: a linear start, then half a cosine."""
        if step < self.warmup:
            return self.rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(self.steps - self.warmup, 1)
        return self.least_rate + (self.rate - self.least_rate) * 0.5 * (1 + math.cos(math.pi * done))

    def facts(self) -> dict[str, Any]:
        """JSON-ready settings."""
        return dataclasses.asdict(self)
