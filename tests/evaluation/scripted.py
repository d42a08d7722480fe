"""A task and a generator of a few lines, so that the harness runs without a model."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

from kvkeep.evaluation.jobs import Completion, Job
from kvkeep.evaluation.splits import part_of
from kvkeep.evaluation.tasks.base import Grade, Problem, Task


class Sums(Task):
    """What is a + b? So many dev problems, and the held-out ones between them."""

    name: ClassVar[str] = "sums"
    version: ClassVar[str] = "1"
    template: ClassVar[str] = "plain"

    def __init__(self, count: int = 20) -> None:
        self.count = count
        self.closed = 0

    def all_problems(self) -> Sequence[Problem]:
        problems: list[Problem] = []
        while sum(part_of(problem.id) == "dev" for problem in problems) < self.count:
            i = len(problems)
            problems.append(Problem(id=f"sums/{i}", question=f"{i} + {i}", reference=str(2 * i)))
        return problems

    def grade(self, problem: Problem, text: str) -> Grade:
        answer = text.rpartition("=")[2].strip()
        return Grade.of(answer == problem.reference, answer) if answer else Grade.missing()

    def fingerprint(self) -> str:
        return "f" * 64

    def close(self) -> None:
        self.closed += 1


class Script:
    """Answers by a rule: right with probability ``skill``, decided by the sample alone.

    Parameters
    ----------
    skill
        Probability of a right answer.
    random
        What the generator says about itself.
    on_text
        Called before each text is handed out; may raise.
    """

    def __init__(
        self, skill: float = 0.7, *, random: bool = True, on_text: Callable[[Job], None] | None = None
    ) -> None:
        self.skill, self.random, self.on_text = skill, random, on_text
        self.batches: list[list[tuple[str, int]]] = []

    def count_tokens(self, text: str) -> int:
        return len(text.split())

    def facts(self) -> dict[str, Any]:
        return {
            "policy": "script",
            "policy_options": {"skill": self.skill},
            "budget": {"entries": 64},
            "model": "script",
            "model_sha256": "0" * 64,
            "prompt_sha256": "1" * 64,
            "sampling": {"preset": "custom", "temperature": 1.0},
        }

    def generate(self, jobs: Sequence[Job]) -> Iterator[Completion]:
        self.batches.append([job.key for job in jobs])
        for job in jobs:
            if self.on_text is not None:
                self.on_text(job)
            right = random.Random(job.sequence_id).random() < self.skill
            text = f"{job.problem.question} = {job.problem.reference if right else '?'}"
            yield Completion(
                job=job,
                text=text,
                tokens=text.split(),
                ended=True,
                prompt_tokens=3,
                steps=4,
                mean_cache=60.0,
                peak_cache=64.0,
                prefill_cache=3.0,
                seconds=0.01,
                write_seconds=0.01,
            )
