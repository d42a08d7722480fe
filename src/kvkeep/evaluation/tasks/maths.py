"""What tasks in mathematics share: a boxed answer, compared by MathsGrader, from a verified file."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from kvkeep.evaluation.grading.extract import after_thinking, last_boxed
from kvkeep.evaluation.grading.maths import MathsGrader
from kvkeep.evaluation.tasks.base import Grade, Problem, Task, check_unique
from kvkeep.evaluation.tasks.data_files import DataFile, read_rows


class MathsTask(Task):
    """A file of problems with one short answer each.

    Parameters
    ----------
    data
        The file, or the folder that holds it; default: the folder named by ``KVKEEP_DATA``.
    """

    template: ClassVar[str] = "vase"
    grader: ClassVar[str] = "math-verify"
    file: ClassVar[DataFile]

    def __init__(self, data: str | os.PathLike[str] | None = None) -> None:
        self._data = data
        self._loaded: tuple[list[Problem], str] | None = None
        self._maths = MathsGrader()

    @abstractmethod
    def problem(self, row: dict[str, Any]) -> Problem:
        """Read one row of the file."""

    def extract(self, text: str) -> str | None:
        """The answer that a text gives: its last box after the thinking."""
        return last_boxed(after_thinking(text))

    def rows(self) -> tuple[list[dict[str, Any]], str]:
        """Rows of the data and their sha256."""
        return read_rows(self.file, self._data)

    def _load(self) -> tuple[list[Problem], str]:
        if self._loaded is None:
            rows, digest = self.rows()
            problems = [self.problem(row) for row in rows]
            check_unique(self.name, problems)
            self._loaded = problems, digest
        return self._loaded

    def all_problems(self) -> Sequence[Problem]:
        return self._load()[0]

    def fingerprint(self) -> str:
        return self._load()[1]

    def grade(self, problem: Problem, text: str) -> Grade:
        given = self.extract(text)
        if not given:
            return Grade.missing()
        verdict, how = self._maths.compare(given, problem.reference)
        return Grade(
            answer_class=verdict, score=float(verdict == "correct"), extracted=given[:500], extra=how
        )

    def grader_facts(self) -> dict[str, Any]:
        return self._maths.facts()

    def close(self) -> None:
        self._maths.close()
