"""TRACE: run a small register program step by step. Solved by the built-in reasoner, without any download."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, fields
from functools import lru_cache
from typing import ClassVar, Literal

from kvkeep.core.budget import PromptMode
from kvkeep.core.errors import ConfigError
from kvkeep.evaluation.records import SplitPart
from kvkeep.evaluation.splits import Part, hash_order, part_of
from kvkeep.evaluation.tasks.base import Grade, Problem, Task
from kvkeep.testbed import trace_grade, trace_task

# A chain may be so much longer than the longest right one, in tokens; beyond that it has lost its way.
_SLACK = 1.25
_MEASURED = 200
PARTS: tuple[Part, ...] = ("dev", "confirm")
_DIALS = {field.name for field in fields(trace_task.Dials)}


class Trace(Task):
    """Register programs of three sizes; every answer is graded by the role of the register that it reads.

    The score is the share of right answers. A sample is correct if all of them are.

    Parameters
    ----------
    size
        ``"S"``, ``"M"`` (default) or ``"L"``.
    count
        Problems in each part of the split.
    seed
        Another seed gives other problems.
    registers, hot, dormant, steps, answers, stale, fresh, verbose, distractors
        Dials of :class:`~kvkeep.testbed.trace_task.Dials` that replace those of the size.
    """

    name: ClassVar[str] = "trace"
    version: ClassVar[str] = "1"
    template: ClassVar[str] = "plain"
    sampling: ClassVar[str] = "trace"
    default_model: ClassVar[str] = "trace-1"
    # Lines of the program that are still to be run are needed whatever a policy thinks of them.
    prompt_mode: ClassVar[PromptMode] = "kept"
    batch_size: ClassVar[int] = 64  # three times as fast as 16, and a few megabytes
    grader: ClassVar[str] = "trace"
    metric: ClassVar[Literal["accuracy", "score"]] = "score"
    loop_units: ClassVar[Literal["characters", "tokens"]] = "tokens"

    def __init__(
        self,
        *,
        size: str = "M",
        count: int = 500,
        seed: int = 0,
        registers: int | None = None,
        hot: int | None = None,
        dormant: int | None = None,
        steps: int | None = None,
        answers: float | None = None,
        stale: float | None = None,
        fresh: float | None = None,
        verbose: float | None = None,
        distractors: int | None = None,
    ) -> None:
        dials = {name: value for name, value in locals().items() if name in _DIALS and value is not None}
        if count < 1:
            raise ConfigError(f"task trace: {count} problems are too few: give at least 1.")
        try:
            self.dials = trace_task.size(size, **dials)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"task trace: {error}") from error
        self.count, self.seed = count, seed
        self.max_new = self._limit()

    def _limit(self) -> int:
        measured = draw(self.dials, "dev", self.seed, _MEASURED).values()
        return int(_SLACK * max(len(program.chain) for program in measured))

    def programs(self, part: Part) -> dict[str, trace_task.Problem]:
        """The programs of a part, by id."""
        return draw(self.dials, part, self.seed, self.count)

    def all_problems(self) -> Sequence[Problem]:
        return [as_problem(name, program) for part in PARTS for name, program in self.programs(part).items()]

    def problems(self, part: SplitPart, limit: int | None = None) -> list[Problem]:
        programs = self.programs(part)  # making programs takes seconds: only those of the part
        return [as_problem(name, programs[name]) for name in hash_order(programs)[:limit]]

    def training_text(self, number: int) -> tuple[str, str]:
        drawn = trace_task.problems(self.dials, "train", seed=f"gates/{self.seed}/{number}")
        program = next(drawn)
        return " ".join(program.prompt), " ".join(["", *program.chain])

    def grade(self, problem: Problem, text: str) -> Grade:
        program = self.programs(part_of(problem.id))[problem.id]
        words = text.split()
        if words == program.chain[:-1]:
            words.append("END")  # special tokens are not part of a text
        found = trace_grade.grade(program, words)
        answered = [word for word in words if word[:1] == "o" and word[1:].isdigit()]
        faults = Counter(step.fault for step in found.steps if step.fault)
        extra = {
            "parts": {role: [sum(right), len(right)] for role, right in sorted(found.by_role().items())},
            "steps": len(found.steps),
            "faults": dict(sorted(faults.items())),
            "first_error": found.first_error,
        }
        if not answered:
            return Grade.missing(**extra)
        whole = all(found.answers)
        return Grade(
            answer_class="correct" if whole else "wrong",
            score=found.accuracy,
            extracted=" ".join(answered),
            extra=extra,
        )

    def fingerprint(self) -> str:
        dials = asdict(self.dials)
        if not self.dials.distractors:
            del dials["distractors"]  # younger than studies that were sealed without it
        settings = [self.name, self.version, dials, self.count, self.seed]
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


@lru_cache(maxsize=16)
def draw(dials: trace_task.Dials, part: Part, seed: int, count: int) -> dict[str, trace_task.Problem]:
    """The first programs of a part, by id, as they are drawn; a task is made often, its programs once."""
    drawn = itertools.islice(trace_task.problems(dials, part, seed=seed), count)
    return {program.id: program for program in drawn}


def as_problem(name: str, program: trace_task.Problem) -> Problem:
    """What the harness needs to know of a program."""
    return Problem(
        id=name,
        question=" ".join(program.prompt),
        reference=" ".join(program.answers),
        meta={"roles": list(program.roles)},
    )
