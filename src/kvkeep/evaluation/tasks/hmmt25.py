"""HMMT 2025: thirty problems of February, or sixty with those of November.

Papers differ: most report the thirty of February, VaSE the sixty. The number of problems stands in every
header; runs over different numbers cannot be compared. The text is CC BY-NC-SA 4.0 (MathArena).
"""

from __future__ import annotations

from typing import Any, ClassVar

from kvkeep.core.errors import DataFileError
from kvkeep.evaluation.prompts import BOXED
from kvkeep.evaluation.tasks.base import Problem
from kvkeep.evaluation.tasks.data_files import DataFile, content_id, hub_rows, read_rows, rows_fingerprint
from kvkeep.evaluation.tasks.maths import MathsTask

_HUB = "hub:"


class HMMT25(MathsTask):
    """``--data hub:feb`` loads the thirty of February, ``hub:both`` all sixty, a path loads a local file."""

    name: ClassVar[str] = "hmmt25"
    version: ClassVar[str] = "1"
    file: ClassVar[DataFile] = DataFile(
        path="hmmt25/test.jsonl",
        editions={
            "76ab92434e4121103a54056a451eb3507ab1e03e7d263e7ef14cdf4ea365c099": 30,
            "045ad97877139ae221dcb951e6d11a5096b7b65ebabcc00179b72df3dd8abcff": 60,
        },
        origin="the hub (--data hub:feb or hub:both; sets MathArena/hmmt_feb_2025 and hmmt_nov_2025)",
    )
    _SETS: ClassVar[dict[str, tuple[str, ...]]] = {
        "feb": ("MathArena/hmmt_feb_2025",),
        "both": ("MathArena/hmmt_feb_2025", "MathArena/hmmt_nov_2025"),
    }

    def rows(self) -> tuple[list[dict[str, Any]], str]:
        data = str(self._data or "")
        if not data.startswith(_HUB):
            return read_rows(self.file, self._data)
        part = data.removeprefix(_HUB)
        if part not in self._SETS:
            raise DataFileError(f"{data!r} is unknown: use hub:feb (30 problems) or hub:both (60).")
        rows = [row for name in self._SETS[part] for row in hub_rows(name, split="train")]
        expected = 30 * len(self._SETS[part])
        if len(rows) != expected:
            raise DataFileError(f"{data} has {len(rows)} problems, expected {expected}: it has changed.")
        return rows, rows_fingerprint(rows)

    def problem(self, row: dict[str, Any]) -> Problem:
        question = str(row.get("problem") or row["prompt"]).removesuffix(BOXED)
        return Problem(id=content_id(self.name, question), question=question, reference=str(row["answer"]))
