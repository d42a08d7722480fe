"""MATH-500: competition mathematics, 500 problems in seven subjects and five levels."""

from __future__ import annotations

from typing import Any, ClassVar

from kvkeep.evaluation.tasks.base import Problem
from kvkeep.evaluation.tasks.data_files import DataFile
from kvkeep.evaluation.tasks.maths import MathsTask


class MATH500(MathsTask):
    """The ids are those of the publisher; the frozen split has 201 dev and 299 confirm problems."""

    name: ClassVar[str] = "math500"
    version: ClassVar[str] = "1"
    file: ClassVar[DataFile] = DataFile(
        path="math500/test.jsonl",
        editions={"35dc41080a3680858b27fa7e0533d2d547825316fc5dafe5d316f4ccc5a06132": 500},
        origin="github.com/openai/prm800k, prm800k/math_splits/test.jsonl (MIT)",
    )

    def problem(self, row: dict[str, Any]) -> Problem:
        return Problem(
            id=row["unique_id"],
            question=row["problem"],
            reference=row["answer"],
            meta={"subject": row["subject"], "level": row["level"]},
        )
