"""How far a run has come, while it runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from kvkeep.evaluation.session import Progress

# Lines of progress where there is no terminal.
_NOTE_SECONDS = 30.0


@contextmanager
def progress() -> Iterator[Callable[[Progress], None]]:
    """Samples done, accuracy so far, rate and time left: a bar on a terminal, else a line now and then."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as Bar

    if sys.stderr.isatty():
        columns = (
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
            line = bar.add_task("", total=None)
            yield lambda now: bar.update(line, completed=now.done, total=now.total, description=in_words(now))
        return
    last = time.monotonic()

    def note(now: Progress) -> None:
        nonlocal last
        if time.monotonic() - last > _NOTE_SECONDS:
            last = time.monotonic()
            typer.echo(f"{now.done}/{now.total} samples, {in_words(now)}, {time_left(now)} left", err=True)

    yield note


def in_words(now: Progress) -> str:
    """Accuracy or score so far, and speed."""
    speed = now.tokens / max(now.seconds, 1e-9)
    return f"{now.metric} {100 * now.credit / now.done:.1f} %, {speed:.0f} tokens/s"


def time_left(now: Progress) -> str:
    """Rough, from this session's rate."""
    seconds = now.seconds / max(now.fresh, 1) * (now.total - now.done)
    return f"{seconds / 3600:.1f} h" if seconds > 5400 else f"{seconds / 60:.0f} min"
