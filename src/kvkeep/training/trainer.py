"""The training loop, from top to bottom."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kvkeep.core.errors import KvkeepError
from kvkeep.gates.files import CHECKPOINT
from kvkeep.training.checkpoint import LOG, cut_log, read_checkpoint, write_checkpoint
from kvkeep.training.documents import Documents
from kvkeep.training.recipe import Recipe
from kvkeep.training.student import Student, Terms


@dataclass(frozen=True)
class Progress:
    """What a step reports.

    Parameters
    ----------
    step, steps
        Steps done, and in all.
    terms
        Losses by name, mean over the forwards of the step and over processes.
    rate
        Learning rate.
    tokens
        Tokens read so far, by all processes; padding is none.
    seconds
        Time so far, of all runs of this training.
    """

    step: int
    steps: int
    terms: dict[str, float]
    rate: float
    tokens: int
    seconds: float

    @property
    def line(self) -> str:
        """One line for a log."""
        terms = " ".join(f"{name} {value:.4g}" for name, value in self.terms.items())
        left = self.seconds / self.step * (self.steps - self.step) / 60
        pace = self.tokens / max(self.seconds, 1e-9)
        return (
            f"step {self.step}/{self.steps} {terms} | rate {self.rate:.2g} | {pace:.0f} tokens/s, "
            f"{left:.0f} min left"
        )


@dataclass
class Trainer:
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

    def save(self, folder: Path) -> None:
        """Write a checkpoint; an interrupted write leaves the one before."""
        if self.accelerator.is_main_process:
            state = {
                "gates": self.student.gates.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "progress": {"step": self.step, "tokens": self.tokens, "seconds": self.seconds},
            }
            write_checkpoint(folder, state | self.facts)

    def resume(self, folder: Path) -> None:
        """Continue where a checkpoint ended: the steps that follow are those that would have followed.

        Raises
        ------
        DataFileError
            If the checkpoint cannot be read.
        ConfigError
            If it belongs to another model, other data, another recipe or another number of processes.
        """
        state = read_checkpoint(folder, self.facts)
        self.student.gates.load_state_dict(state["gates"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.tokens = state["progress"]["step"], state["progress"]["tokens"]
        self.seconds = state["progress"]["seconds"]


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


def train(
    trainer: Trainer,
    folder: Path,
    *,
    resume: bool = False,
    report: Callable[[Progress], object] = lambda progress: None,
    save_every: float = 120.0,
) -> None:
    """Train to the last step.

    Parameters
    ----------
    folder
        Where checkpoint and log go.
    resume
        Continue from the checkpoint that is there, if there is one; the log goes back to its step.
    report
        Called after each step, by the main process.
    save_every
        Seconds between checkpoints; one more is written at the end.
    """
    folder.mkdir(parents=True, exist_ok=True)
    resumed = resume and (folder / CHECKPOINT).exists()
    if resumed:
        trainer.resume(folder)
    main, saved = trainer.accelerator.is_main_process, time.monotonic()
    # One process writes: another that opened the same log to write would empty it.
    path = folder / LOG if main else Path(os.devnull)
    if main and resumed:
        cut_log(folder, trainer.step)
    with path.open("a" if resumed else "w", encoding="utf-8") as log:
        while trainer.step < trainer.recipe.steps:
            progress = trainer.train_step()
            if main:
                log.write(json.dumps(dataclasses.asdict(progress)) + "\n")
                log.flush()
                report(progress)
            if time.monotonic() - saved > save_every:
                trainer.save(folder)
                saved = time.monotonic()
    trainer.save(folder)
