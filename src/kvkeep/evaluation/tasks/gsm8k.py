"""GSM8K: grade school word problems, 1,319 of them."""

from __future__ import annotations

from typing import Any, ClassVar

from kvkeep.evaluation.grading.extract import after_thinking, last_boxed, last_hash_answer
from kvkeep.evaluation.tasks.base import Problem
from kvkeep.evaluation.tasks.data_files import DataFile, content_id
from kvkeep.evaluation.tasks.maths import MathsTask


class GSM8K(MathsTask):
    """Answers are numbers; ``#### 18`` counts as an answer beside a box."""

    name: ClassVar[str] = "gsm8k"
    version: ClassVar[str] = "1"
    template: ClassVar[str] = "vase-gsm8k"
    file: ClassVar[DataFile] = DataFile(
        path="gsm8k/test.jsonl",
        editions={"3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14": 1319},
        origin="github.com/openai/grade-school-math, grade_school_math/data/test.jsonl (MIT)",
    )

    def problem(self, row: dict[str, Any]) -> Problem:
        return Problem(
            id=content_id("gsm8k", row["question"]),
            question=row["question"].strip(),
            reference=row["answer"].rsplit("####", 1)[-1].strip(),
        )

    def extract(self, text: str) -> str | None:
        answer = after_thinking(text)
        return last_boxed(answer) or last_hash_answer(answer)
