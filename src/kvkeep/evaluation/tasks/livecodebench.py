"""LiveCodeBench v6: programming contests, graded by running the programs.

VaSE runs the problems of medium difficulty only, 383 of 1,055; so does this task.
"""

from __future__ import annotations

import base64
import io
import json
import os
import pickle
import zlib
from collections.abc import Sequence
from typing import Any, ClassVar

from kvkeep.core.errors import DataFileError
from kvkeep.evaluation.grading.code import DEFAULT_LIMITS, CodeLimits, CodeTest, check_sandbox, run_tests
from kvkeep.evaluation.grading.extract import after_thinking, last_code_block
from kvkeep.evaluation.tasks.base import Grade, Problem, Task, check_unique
from kvkeep.evaluation.tasks.data_files import hub_rows, local_or_hub

_MEDIUM = 383
# The benchmark's own words, which VaSE uses too; they change accuracies.
_PROMPT = (
    "You will be given a question (problem specification) and will generate a correct Python program "
    "that matches the specification and passes all tests.\n\n"
    "Question: {content}\n\n{how}\n```python\n{start}\n```\n\n"
)
_STDIN = (
    "Read the inputs from stdin solve the problem and write the answer to stdout (do not directly test on "
    "the sample inputs). Enclose your code within delimiters as follows. Ensure that when the python "
    "program runs, it reads the inputs, runs the algorithm and writes output to STDOUT."
)
_FUNCTION = (
    "You will use the following starter code to write the solution to the problem and enclose your code "
    "within delimiters."
)


class LiveCodeBench(Task):
    """The tests are larger than a gigabyte and stay outside the problems.

    Parameters
    ----------
    data
        A JSON Lines file with the columns of the hub set; default: the hub.
    """

    name: ClassVar[str] = "livecodebench"
    version: ClassVar[str] = "2"
    template: ClassVar[str] = "chat"
    grader: ClassVar[str] = "code"
    grading_threads: ClassVar[int] = max(1, (os.cpu_count() or 2) // 2)
    rows_expected: ClassVar[int] = _MEDIUM

    def __init__(
        self, data: str | os.PathLike[str] | None = None, *, limits: CodeLimits = DEFAULT_LIMITS
    ) -> None:
        self._data, self._limits = data, limits
        self._loaded: tuple[list[Problem], str] | None = None
        self._rows: dict[str, dict[str, Any]] = {}

    def _load(self) -> tuple[list[Problem], str]:
        if self._loaded is None:
            rows, digest = local_or_hub(
                self._data,
                "livecodebench/test.jsonl",
                lambda: hub_rows("livecodebench/code_generation_lite", split="train", files="test*.jsonl"),
            )
            rows = [row for row in rows if row["difficulty"] == "medium"]
            if len(rows) != self.rows_expected:
                raise DataFileError(
                    f"release v6 of LiveCodeBench has {self.rows_expected} problems of medium difficulty, "
                    f"{len(rows)} were found."
                )
            problems = [problem(row) for row in rows]
            check_unique(self.name, problems)
            self._rows = {p.id: row for p, row in zip(problems, rows, strict=True)}
            self._loaded = problems, digest
        return self._loaded

    def all_problems(self) -> Sequence[Problem]:
        check_sandbox()  # before hours of generation, not after
        return self._load()[0]

    def fingerprint(self) -> str:
        return self._load()[1]

    def grade(self, problem: Problem, text: str) -> Grade:
        program = last_code_block(after_thinking(text))
        if program is None:
            return Grade.missing()
        row = self._rows[problem.id]
        function = json.loads(row.get("metadata") or "{}").get("func_name")
        outcome = run_tests(program, read_tests(row), function=function, limits=self._limits)
        # A program that is too slow fails its task; only a grader that was stopped would be "timed out".
        return Grade.of(outcome == "passed", program[:4000], outcome=outcome)

    def grader_facts(self) -> dict[str, Any]:
        return super().grader_facts() | {"seconds": self._limits.seconds, "memory": self._limits.memory}


def problem(row: dict[str, Any]) -> Problem:
    """The question of a row, with its starting code if it has some."""
    start = row.get("starter_code") or ""
    return Problem(
        id=f"livecodebench/{row['question_id']}",
        question=_PROMPT.format(
            content=row["question_content"].strip(),
            how=_FUNCTION if start else _STDIN,
            start=start or "# YOUR CODE HERE",
        ),
        reference="",
        meta={"platform": row.get("platform"), "date": str(row.get("contest_date"))},
    )


def read_tests(row: dict[str, Any]) -> list[CodeTest]:
    """Public and private tests of a row."""
    tests = json.loads(row["public_test_cases"]) + _private(row["private_test_cases"])
    return [CodeTest(given=test["input"], expected=test["output"]) for test in tests]


def _private(text: str) -> list[dict[str, str]]:
    try:
        found: list[dict[str, str]] = json.loads(text)
    except ValueError:
        packed = zlib.decompress(base64.b64decode(text))
        found = json.loads(_TextOnly(io.BytesIO(packed)).load())
    return found


class _TextOnly(pickle.Unpickler):
    """The publisher pickles a text; anything but plain data is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise DataFileError(f"a test of LiveCodeBench wants to load {module}.{name}: refused.")
