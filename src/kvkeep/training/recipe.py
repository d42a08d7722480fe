"""Everything that decides the result of training gates: one dial, the memory, and what follows from it."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from kvkeep.core.errors import ConfigError
from kvkeep.core.spec import ModelSpec
from kvkeep.gates.capacity import Scope
from kvkeep.gates.shape import Architecture, GateShape


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Settings of a training run.

    Rate, warm-up, weight decay, losses and bias are the published ones. Steps (published: 10,000), row
    (32,768 and 131,072), ``least_rate`` and ``clip`` are ours: a first run that ends.

    Parameters
    ----------
    memory
        Entries per KV head that the gates learn to live with; below 1 a share of a row's length.
    architecture, tied, scalar, width
        Of the gates, see :class:`~kvkeep.gates.GateShape`; ``tied=None`` is as published, ``width=None``
        512 or, for smaller models, their hidden size.
    scope
        Whether ``memory`` holds for each head (``"local"``, TrimKV) or on average (``"global"``, DBTrimKV);
        ``None``: as the architecture was published.
    steps
        Optimizer steps.
    row
        Tokens of a packed row.
    rows
        Rows in one forward of one process.
    accumulate
        Forwards of each process in one step.
    rate, least_rate, warmup, weight_decay
        AdamW: the rate rises over ``warmup`` steps (``None``: 100 as published, or a tenth of the steps if
        they are fewer than 1,000), then falls along half a cosine to this share of itself.
    clip
        Norm to which gradients are cut.
    kl, next_token, capacity
        Weights of the losses. The first two are averaged over those that are not 0, as published.
    bias
        Where the last projection starts: 18 keeps everything (published recipes).
    seed
        Of the first weights and of the order of the data.
    block
        Tokens whose logits exist at once.
    checkpointing
        Compute activations of layers again in the backward pass: less memory, a third more time.

    Raises
    ------
    ConfigError
        Naming the setting that is out of range.

    Source
    ------
    TrimKV (arXiv 2512.03324) and DBTrimKV (arXiv 2605.09649), recipes of the official code.
    """

    memory: float
    architecture: Architecture = "rg10"
    tied: bool | None = None
    scalar: bool = False
    width: int | None = None
    scope: Scope | None = None
    steps: int = 1000
    row: int = 4096
    rows: int = 1
    accumulate: int = 4
    rate: float = 2e-4
    least_rate: float = 0.1
    warmup: int | None = None
    weight_decay: float = 1e-6
    clip: float = 1.0
    kl: float = 1.0
    next_token: float = 1.0
    capacity: float = 1.0
    bias: float = 18.0
    seed: int = 0
    block: int = 8192
    checkpointing: bool = False

    def __post_init__(self) -> None:
        least = {"steps": 1, "row": 2, "rows": 1, "accumulate": 1, "block": 1, "warmup": 0, "width": 1}
        for name, bound in least.items():
            number = getattr(self, name)
            if number is not None and number < bound:
                raise ConfigError(f"{name} {number} is below {bound}.")
        for name in ("memory", "rate", "clip"):
            number = getattr(self, name)
            if not 0 < number < math.inf:
                raise ConfigError(f"{name} {number} is not a positive number.")
        for name in ("kl", "next_token", "capacity", "weight_decay", "least_rate"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} {getattr(self, name)} is negative or not finite.")
        if not math.isfinite(self.bias):
            raise ConfigError(f"bias {self.bias} is not finite.")
        if self.kl == self.next_token == 0:
            raise ConfigError("kl and next_token are both 0: nothing would keep the gates open.")
        if self.memory >= self.row:
            raise ConfigError(
                f"memory {self.memory:g} is not below row {self.row}: no document of a row would ever fill "
                "it, and the gates would learn nothing. Take longer rows or a smaller memory."
            )

    @property
    def limit(self) -> Scope:
        """Where ``memory`` holds, with ``None`` resolved."""
        if self.scope is not None:
            return self.scope
        return "local" if self.architecture == "rg" else "global"

    @property
    def rising(self) -> int:
        """Steps of warm-up, with ``None`` resolved."""
        return min(100, self.steps // 10) if self.warmup is None else self.warmup

    def shape(self, spec: ModelSpec) -> GateShape:
        """The gates to train for a model."""
        width = min(512, spec.config.hidden_size) if self.width is None else self.width
        return GateShape.of(spec, self.architecture, tied=self.tied, scalar=self.scalar, width=width)

    def rate_at(self, step: int) -> float:
        """Learning rate of a step: a linear start, then half a cosine."""
        if step < self.rising:
            return self.rate * (step + 1) / self.rising
        done = (step - self.rising) / max(self.steps - self.rising, 1)
        return self.rate * (self.least_rate + (1 - self.least_rate) * 0.5 * (1 + math.cos(math.pi * done)))

    def facts(self) -> dict[str, Any]:
        """JSON-ready settings."""
        return dataclasses.asdict(self) | {"scope": self.limit, "warmup": self.rising}
