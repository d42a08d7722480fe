"""The log of a run: JSON Lines, only ever appended to, readable after a kill at any moment.

    {"kind": "header", …}      once, first
    {"kind": "sample", …}      one per sample, as it is graded
    {"kind": "footer", …}      once, when the run is complete

A line is written with one call; what a kill tears off is a last line without its end, which is dropped
when the run is resumed.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvkeep.core.errors import ConfigError, DataFileError
from kvkeep.evaluation.records import Run, RunHeader, SampleRecord

FILE = "run.jsonl"

# What may differ between the sessions of one run: none of it decides a result.
_FREE = ("run", "created", "command", "hardware", "extra")
_SYNC_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Log:
    """A log that was read.

    Parameters
    ----------
    run
        Header and samples.
    footer
        Totals of a complete run, ``None`` if it was stopped.
    torn
        Bytes of a last line that was never finished.
    """

    run: Run
    footer: Mapping[str, Any] | None
    torn: int


def log_path(place: str | os.PathLike[str]) -> Path:
    """The log of a run, given its folder or the file itself."""
    path = Path(place)
    return path if path.suffix == ".jsonl" else path / FILE


def read_log(place: str | os.PathLike[str]) -> Log:
    """Read a log, complete or not.

    Raises
    ------
    DataFileError
        If it is missing, damaged before its last line, or holds a sample twice.
    """
    path = log_path(place)
    if not path.is_file():
        raise DataFileError(f"there is no run log at {path}: name a folder that `kvkeep eval --out` wrote.")
    whole, _, rest = path.read_bytes().rpartition(b"\n")
    header, footer, samples, seen = None, None, [], set()
    for number, line in enumerate(whole.split(b"\n") if whole else [], start=1):
        try:
            entry = json.loads(line)
            kind = entry.pop("kind")
        except (ValueError, KeyError, AttributeError) as error:
            raise DataFileError(f"{path}, line {number}: not a line of a run log ({error}).") from error
        if kind == "header" and header is None:
            header = RunHeader.from_dict(entry)
        elif kind == "sample" and header is not None:
            sample = SampleRecord.from_dict(entry)
            if sample.key in seen:
                raise DataFileError(f"{path}, line {number}: sample {sample.key} stands twice.")
            seen.add(sample.key)
            samples.append(sample)
        elif kind == "footer":
            footer = entry
        else:
            raise DataFileError(f"{path}, line {number}: a {kind!r} line does not belong here.")
    if header is None:
        raise DataFileError(f"{path} has no header: the run was stopped before its first line was written.")
    return Log(run=Run(header=header, samples=tuple(samples)), footer=footer, torn=len(rest))


def read_run(place: str | os.PathLike[str]) -> Run:
    """Read header and samples of a run, complete or not (see :func:`read_log`)."""
    return read_log(place).run


class RunLog:
    """Writes the log of one run.

    Parameters
    ----------
    place
        Folder of the run, made if need be, or the file.
    header
        What decides the results.
    resume
        Go on with the log that is there.

    Raises
    ------
    ConfigError
        If there is a log and ``resume`` is not asked for, or it belongs to another run.
    """

    def __init__(self, place: str | os.PathLike[str], header: RunHeader, *, resume: bool = False) -> None:
        self.path = log_path(place)
        self.header = header
        self.done: dict[tuple[str, int], SampleRecord] = {}
        self.complete = False
        self._synced = time.monotonic()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        started = self.path.exists() and b"\n" in self.path.read_bytes()
        if started and not resume:
            raise ConfigError(f"{self.path} exists: add --resume to go on with it, or choose another --out.")
        if started:
            self._take_up()
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | (os.O_APPEND if started else os.O_TRUNC))
        if not started:
            self._write("header", header.as_dict())

    def _take_up(self) -> None:
        log = read_log(self.path)
        differ = differences(log.run.header, self.header)
        if differ:
            raise ConfigError(
                f"{self.path} was written under other settings, and results must not be mixed: "
                f"{'; '.join(differ)}. Choose another --out."
            )
        if log.torn:
            os.truncate(self.path, self.path.stat().st_size - log.torn)
        self.header = log.run.header
        self.done = {sample.key: sample for sample in log.run.samples}
        self.complete = log.footer is not None

    def append(self, sample: SampleRecord) -> None:
        """Write one sample.

        Raises
        ------
        DataFileError
            If it is in the log already.
        """
        if sample.key in self.done:
            raise DataFileError(f"sample {sample.key} is in {self.path} already.")
        self._write("sample", sample.as_dict())
        self.done[sample.key] = sample

    def finish(self, totals: Mapping[str, Any]) -> None:
        """Write the footer of a complete run; does nothing if it is there."""
        if not self.complete:
            digest = hashlib.sha256(self.path.read_bytes()).hexdigest()
            self._write("footer", {"samples": len(self.done), "sha256_of_lines": digest, **totals})
            self.complete = True

    def close(self) -> None:
        """Make sure that everything is on the disk."""
        os.fsync(self._file)
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, kind: str, entry: Mapping[str, Any]) -> None:
        line = json.dumps({"kind": kind, **entry}, ensure_ascii=False).encode(errors="replace") + b"\n"
        left = memoryview(line)
        while left:
            left = left[os.write(self._file, left) :]
        # A killed process loses nothing; a machine that loses its power loses these seconds.
        if time.monotonic() - self._synced > _SYNC_SECONDS:
            os.fsync(self._file)
            self._synced = time.monotonic()


def differences(one: RunHeader, other: RunHeader) -> list[str]:
    """Fields that decide results and differ, each with both values."""
    found = []
    for field in fields(RunHeader):
        if field.name in _FREE:
            continue
        values = (getattr(one, field.name), getattr(other, field.name))
        if json.dumps(values[0], sort_keys=True, default=list) != json.dumps(
            values[1], sort_keys=True, default=list
        ):
            found.append(f"{field.name} was {_short(values[0])} and is {_short(values[1])}")
    return found


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "…"
