"""AIME 2024, 2025 and 2026: thirty problems a year, answers are whole numbers below 1,000.

The problems belong to the Mathematical Association of America and are not part of this package.
"""

from __future__ import annotations

from typing import Any, ClassVar

from kvkeep.evaluation.prompts import BOXED
from kvkeep.evaluation.tasks.base import Problem
from kvkeep.evaluation.tasks.data_files import DataFile, content_id
from kvkeep.evaluation.tasks.maths import MathsTask


class AIME24(MathsTask):
    """No ids in the file: they are made from the text. Each problem ends with the usual instruction."""

    name: ClassVar[str] = "aime24"
    version: ClassVar[str] = "1"
    file: ClassVar[DataFile] = DataFile(
        path="aime24/test.jsonl",
        editions={"5a7a817807c8c2b6b541631deaa6d8c2eb7f0420e0f2373a25878921e920b6da": 30},
        origin="github.com/jianzhnie/LLMEval, data/aime24.jsonl",
    )

    def problem(self, row: dict[str, Any]) -> Problem:
        question = row["prompt"].removesuffix(BOXED)
        return Problem(id=content_id(self.name, question), question=question, reference=str(row["answer"]))


class _NumberedAIME(MathsTask):
    """Later years come with numbers, which are unique within a year."""

    def problem(self, row: dict[str, Any]) -> Problem:
        return Problem(id=f"{self.name}/{row['id']}", question=row["problem"], reference=str(row["answer"]))


class AIME25(_NumberedAIME):
    """The file lacks its last newline: counting newlines finds 29 problems."""

    name: ClassVar[str] = "aime25"
    version: ClassVar[str] = "1"
    file: ClassVar[DataFile] = DataFile(
        path="aime25/test.jsonl",
        editions={"12467eb9bb7423968809cd205c6ed281a6230e4e0fd6de948ff1d6cded259369": 30},
        origin="github.com/terarachang/VaSE, eval/reasoning_tasks/data/aime25/test.jsonl",
    )


class AIME26(_NumberedAIME):
    """Thirty problems of February 2026."""

    name: ClassVar[str] = "aime26"
    version: ClassVar[str] = "1"
    file: ClassVar[DataFile] = DataFile(
        path="aime26/test.jsonl",
        editions={"0f06796196f75df28d8034c77a535436a412950557d37aecbd2b2494d5e53193": 30},
        origin="github.com/terarachang/VaSE, eval/reasoning_tasks/data/aime26/test.jsonl",
    )
