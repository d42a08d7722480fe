"""What is to be written and what came of it, and a protocol, so that a script can stand in for a model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvkeep.evaluation.tasks.base import Problem


@dataclass(frozen=True, kw_only=True)
class Job:
    """One text to write.

    Parameters
    ----------
    problem
        What is asked.
    draw
        Which of the problem's samples this is, from 0.
    seed
        Decides the draw's random numbers, together with the problem's id.
    """

    problem: Problem
    draw: int
    seed: int

    @property
    def key(self) -> tuple[str, int]:
        """Problem and draw."""
        return self.problem.id, self.draw

    @property
    def sequence_id(self) -> int:
        """The sample's name for all random numbers: 63 bits of a hash of problem and seed."""
        digest = hashlib.sha256(f"{self.seed}\n{self.problem.id}".encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 1


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One text, and what was measured while it was written.

    Parameters
    ----------
    job
        What was asked for.
    text, tokens
        The answer, as text and as tokens.
    ended
        By itself, not at the length limit.
    prompt_tokens
        Tokens of the prompt.
    steps, mean_cache, peak_cache, prefill_cache, mean_read, peak_read, evictions, mean_memory, peak_memory,
    prefill_memory
        As in :class:`~kvkeep.engine.row_trace.RowTrace`.
    seconds, write_seconds
        Its share of the batch's time: all of it, and without reading the prompt.
    extra
        Further measurements, JSON-ready.
    """

    job: Job
    text: str
    tokens: Sequence[Any]
    ended: bool
    prompt_tokens: int
    steps: int
    mean_cache: float
    peak_cache: float
    prefill_cache: float
    mean_read: float | None = None
    peak_read: float | None = None
    mean_memory: float | None = None
    peak_memory: float | None = None
    prefill_memory: float | None = None
    evictions: int = 0
    seconds: float = 0.0
    write_seconds: float = 0.0
    extra: dict[str, Any] = field(default_factory=dict)


class Generator(Protocol):
    """Writes texts. A text must depend on its own job alone, not on the others of its batch."""

    @property
    def random(self) -> bool:
        """Whether two draws of one problem can differ."""
        ...

    def count_tokens(self, text: str) -> int:
        """Tokens of a text, as the model counts them."""
        ...

    def facts(self) -> dict[str, Any]:
        """The fields of a :class:`~kvkeep.evaluation.records.RunHeader` that are the generator's to say."""
        ...

    def generate(self, jobs: Sequence[Job]) -> Iterator[Completion]:
        """Write the texts of one batch, each handed out when it is done."""
        ...
