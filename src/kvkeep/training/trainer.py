"""One training of retention gates: what a step does."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from kvkeep.core.errors import KvkeepError
from kvkeep.training.documents import Documents
from kvkeep.training.loop import Progress, Training
from kvkeep.training.recipe import Recipe
from kvkeep.training.student import Student, Terms


@dataclass
class Trainer(Training):
    """A training run: everything that a checkpoint holds, and what makes a step.

    Parameters
    ----------
    student, documents, recipe
        What learns, from what, and how.
    accelerator
        Of the accelerate package.
    base
        Hash of the model's weights; a checkpoint of another model is refused.
    """

    kind: ClassVar[str] = "retention gates"

    student: Student
    documents: Documents
    recipe: Recipe
    accelerator: Any
    base: str
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    optimizer: Any = field(init=False)
    wrapped: Any = field(init=False)

    def __post_init__(self) -> None:
        adam = torch.optim.AdamW(
            self.student.gates.parameters(), lr=self.recipe.rate, weight_decay=self.recipe.weight_decay
        )
        self.wrapped, self.optimizer = self.accelerator.prepare(self.student, adam)

    @property
    def gates(self) -> nn.Module:
        """What learns."""
        return self.student.gates

    @property
    def steps(self) -> int:
        """Steps in all."""
        return self.recipe.steps

    @property
    def writes(self) -> bool:
        """Whether this is the main process."""
        return bool(self.accelerator.is_main_process)

    def train_step(self) -> Progress:
        """Take one optimizer step."""
        begin, recipe, accelerator = time.perf_counter(), self.recipe, self.accelerator
        rate = recipe.rate_at(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        sums, read = torch.zeros(len(Terms._fields), device=accelerator.device), 0
        for nth in range(recipe.accumulate):
            rows = self.documents.batch(
                self.step * recipe.accumulate + nth, accelerator.num_processes, accelerator.process_index
            )
            read += int(rows.packing.real.sum())
            rows = rows.to(accelerator.device)
            with accelerator.accumulate(self.wrapped):
                terms: Terms = self.wrapped(rows)
                accelerator.backward(terms.total)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(self.student.gates.parameters(), recipe.clip)
                self.optimizer.step()
                self.optimizer.zero_grad()
            sums += torch.stack(terms).detach()
        shared = accelerator.reduce(torch.cat([sums, sums.new_tensor([float(read)])]), "mean").tolist()
        means = {name: each / recipe.accumulate for name, each in zip(Terms._fields, shared, strict=False)}
        _require_finite(means, self.step + 1)
        self.step += 1
        self.tokens += round(shared[-1] * accelerator.num_processes)
        self.seconds += time.perf_counter() - begin
        return Progress(self.step, recipe.steps, means, rate, self.tokens, self.seconds)

    @torch.no_grad()
    def measure(self, held_out: Documents, batches: int) -> dict[str, float]:
        """Losses on rows that were not trained on, mean over batches."""
        found = [
            torch.stack(self.student(held_out.batch(number).to(self.accelerator.device)))
            for number in range(batches)
        ]
        return dict(zip(Terms._fields, torch.stack(found).mean(0).tolist(), strict=True))

    @property
    def facts(self) -> dict[str, Any]:
        """What a checkpoint must agree in."""
        return {
            "recipe": self.recipe.facts(),
            "data": self.documents.name,
            "base": self.base,
            "processes": self.accelerator.num_processes,
        }


def _require_finite(means: dict[str, float], step: int) -> None:
    """Stop at numbers that are none, and say whose they are."""
    if all(map(math.isfinite, means.values())):
        return
    if not math.isfinite(means["full"]):
        advice = "The model itself gives no finite numbers here: load it in float32 or bfloat16."
    else:
        advice = "The gates ran away: train anew with a lower rate."
    wrong = ", ".join(f"{name} {value}" for name, value in means.items() if not math.isfinite(value))
    raise KvkeepError(f"training failed at step {step}: {wrong}. {advice}")
