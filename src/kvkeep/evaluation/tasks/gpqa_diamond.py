"""GPQA-Diamond: 198 multiple choice questions in biology, chemistry and physics, for experts.

Its authors ask that the questions are not spread as plain text: they come from the gated hub set, or
from a file that the user has.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Sequence
from typing import Any, ClassVar

from kvkeep.core.errors import DataFileError
from kvkeep.evaluation.grading.extract import after_thinking, last_choice
from kvkeep.evaluation.tasks.base import Grade, Problem, Task, check_unique
from kvkeep.evaluation.tasks.data_files import hub_rows, local_or_hub

_ROWS = 198
_LETTERS = "ABCD"
_INSTRUCTION = "Think step by step, then end with the letter of the right choice as \\boxed{letter}."


class GPQADiamond(Task):
    """The four choices are shuffled by a hash of the record: always the same order, noted in ``meta``.

    Parameters
    ----------
    data
        A JSON Lines file with the columns of the hub set; default: the hub.
    """

    name: ClassVar[str] = "gpqa_diamond"
    version: ClassVar[str] = "1"
    template: ClassVar[str] = "chat"
    grader: ClassVar[str] = "choice"

    def __init__(self, data: str | os.PathLike[str] | None = None) -> None:
        self._data = data
        self._loaded: tuple[list[Problem], str] | None = None

    def _load(self) -> tuple[list[Problem], str]:
        if self._loaded is None:
            rows, digest = local_or_hub(
                self._data,
                "gpqa_diamond/test.jsonl",
                lambda: hub_rows("Idavidrein/gpqa", config="gpqa_diamond", split="train"),
            )
            if len(rows) != _ROWS:
                raise DataFileError(f"GPQA-Diamond has {_ROWS} questions, {len(rows)} were found.")
            problems = [shuffled(row) for row in rows]
            check_unique(self.name, problems)
            self._loaded = problems, digest
        return self._loaded

    def all_problems(self) -> Sequence[Problem]:
        return self._load()[0]

    def fingerprint(self) -> str:
        return self._load()[1]

    def grade(self, problem: Problem, text: str) -> Grade:
        given = last_choice(after_thinking(text), _LETTERS)
        return Grade.missing() if given is None else Grade.of(given == problem.reference, given)


def shuffled(row: dict[str, Any]) -> Problem:
    """A question with its choices in the order that its record id decides."""
    name = str(row["Record ID"])
    choices = [row["Correct Answer"], *(row[f"Incorrect Answer {i}"] for i in (1, 2, 3))]
    order = list(range(len(choices)))
    random.Random(int(hashlib.sha256(name.encode()).hexdigest(), 16)).shuffle(order)
    lines = [f"{letter}) {str(choices[i]).strip()}" for letter, i in zip(_LETTERS, order, strict=True)]
    return Problem(
        id=f"gpqa_diamond/{name}",
        question="\n".join([str(row["Question"]).strip(), "", *lines, "", _INSTRUCTION]),
        reference=_LETTERS[order.index(0)],
        meta={"order": order},
    )
