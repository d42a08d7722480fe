"""TRACE: run a small register program step by step. Solved by the built-in reasoner, without any download."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import ClassVar, Literal

from kvkeep.core.errors import ConfigError
from kvkeep.evaluation.tasks.base import Grade, Problem, Task
from kvkeep.testbed import trace_grade, trace_task

# A chain may be so much longer than the longest right one, in tokens; beyond that it has lost its way.
_SLACK = 1.25
_MEASURED = 200
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
    registers, hot, dormant, steps, answers, stale, fresh, verbose
        Dials of :class:`~kvkeep.testbed.trace_task.Dials` that replace those of the size.
    """

    name: ClassVar[str] = "trace"
    version: ClassVar[str] = "1"
    template: ClassVar[str] = "plain"
    sampling: ClassVar[str] = "trace"
    default_model: ClassVar[str] = "trace-1"
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
    ) -> None:
        dials = {name: value for name, value in locals().items() if name in _DIALS and value is not None}
        if count < 1:
            raise ConfigError(f"task trace: {count} problems are too few: give at least 1.")
        try:
            self.dials = trace_task.size(size, **dials)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"task trace: {error}") from error
        self.count, self.seed = count, seed
        self._programs: dict[str, trace_task.Problem] = {}
        self.max_new = self._limit()

    def _draw(self, part: Literal["dev", "confirm"], count: int) -> list[trace_task.Problem]:
        return list(itertools.islice(trace_task.problems(self.dials, part, seed=self.seed), count))

    def _limit(self) -> int:
        return int(_SLACK * max(len(problem.chain) for problem in self._draw("dev", _MEASURED)))

    def all_problems(self) -> Sequence[Problem]:
        if not self._programs:
            both = zip(self._draw("dev", self.count), self._draw("confirm", self.count), strict=True)
            self._programs = {program.id: program for pair in both for program in pair}
        return [
            Problem(
                id=name,
                question=" ".join(program.prompt),
                reference=" ".join(program.answers),
                meta={"roles": list(program.roles)},
            )
            for name, program in self._programs.items()
        ]

    def grade(self, problem: Problem, text: str) -> Grade:
        if problem.id not in self._programs:
            self.all_problems()
        program = self._programs[problem.id]
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
        settings = [self.name, self.version, asdict(self.dials), self.count, self.seed]
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
