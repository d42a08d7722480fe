"""The loop around a training of any kind: steps, checkpoints, a log, and going on after a stop."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from kvkeep.gates.files import CHECKPOINT
from kvkeep.training.checkpoint import LOG, cut_log, read_checkpoint, write_checkpoint

_SOON = 120.0  # seconds left that are not said in minutes


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
        left = self.seconds / self.step * (self.steps - self.step)
        pace = self.tokens / max(self.seconds, 1e-9)
        return f"step {self.step}/{self.steps} {terms} | rate {self.rate:.2g} | {pace:.0f} tokens/s, " + (
            f"{left:.0f} s left" if left < _SOON else f"{left / 60:.0f} min left"
        )


class Training(ABC):
    """A run that can be stopped anywhere: everything that a checkpoint holds, and what makes a step.

    Parameters
    ----------
    step, tokens, seconds
        How far it has come, in all of its runs.
    optimizer
        Of the gates.
    """

    kind: ClassVar[str]
    step: int
    tokens: int
    seconds: float
    optimizer: Any

    @property
    @abstractmethod
    def gates(self) -> nn.Module:
        """What learns."""

    @property
    @abstractmethod
    def steps(self) -> int:
        """Steps in all."""

    @property
    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """What a checkpoint must agree in."""

    @abstractmethod
    def train_step(self) -> Progress:
        """Take one optimizer step."""

    @property
    def writes(self) -> bool:
        """Whether this process writes checkpoint and log, and reports."""
        return True

    def save(self, folder: Path) -> None:
        """Write a checkpoint; an interrupted write leaves the one before."""
        if self.writes:
            state = {
                "gates": self.gates.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "progress": {"step": self.step, "tokens": self.tokens, "seconds": self.seconds},
            }
            write_checkpoint(folder, state | {"kind": self.kind} | self.facts)

    def resume(self, folder: Path) -> None:
        """Continue where a checkpoint ended: the steps that follow are those that would have followed.

        Raises
        ------
        DataFileError
            If the checkpoint cannot be read.
        ConfigError
            If it belongs to gates of another kind, another model, other data, another recipe or another
            number of processes.
        """
        state = read_checkpoint(folder, self.kind, self.facts)
        self.gates.load_state_dict(state["gates"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.tokens = state["progress"]["step"], state["progress"]["tokens"]
        self.seconds = state["progress"]["seconds"]


def train(
    trainer: Training,
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
        Called after each step, by the process that writes.
    save_every
        Seconds between checkpoints; one more is written at the end.
    """
    folder.mkdir(parents=True, exist_ok=True)
    resumed = resume and (folder / CHECKPOINT).exists()
    if resumed:
        trainer.resume(folder)
    writes, saved = trainer.writes, time.monotonic()
    # One process writes: another that opened the same log to write would empty it.
    path = folder / LOG if writes else Path(os.devnull)
    if writes and resumed:
        cut_log(folder, trainer.step)
    with path.open("a" if resumed else "w", encoding="utf-8") as log:
        while trainer.step < trainer.steps:
            progress = trainer.train_step()
            if writes:
                log.write(json.dumps(dataclasses.asdict(progress)) + "\n")
                log.flush()
                report(progress)
            if time.monotonic() - saved > save_every:
                trainer.save(folder)
                saved = time.monotonic()
    trainer.save(folder)
