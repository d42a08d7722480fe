"""What both trainings of gates say and refuse around a run that may be stopped and continued."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kvkeep.core.errors import ConfigError

if TYPE_CHECKING:
    from kvkeep.training.loop import Progress, Training

_QUIET = 60.0  # seconds between two lines at most


def require_free(out: Path, resume: bool, ends: Sequence[str]) -> None:
    """Refuse a folder in which training would overwrite what it did not write.

    Parameters
    ----------
    ends
        Files that the training writes at its end.

    Raises
    ------
    ConfigError
        Naming what is there.
    """
    from kvkeep.gates.files import CHECKPOINT
    from kvkeep.training.checkpoint import LOG

    here = next(place for place in (out, *out.absolute().parents) if place.exists())
    if not here.is_dir():
        raise ConfigError(f"--out {out}: {here} is a file; give a folder.")
    found = [name for name in (CHECKPOINT, LOG, *ends) if (out / name).exists()]
    begun = CHECKPOINT in found or found == [LOG]
    if begun and not resume:
        raise ConfigError(
            f"{out} holds a training already: continue it with --resume, or give another --out."
        )
    if found and not begun:
        raise ConfigError(
            f"{out} holds {' and '.join(found)} but no checkpoint of a training, and training would write "
            "over what is there: give another --out."
        )


@contextmanager
def saying_how_to_go_on(training: Training, out: Path) -> Iterator[None]:
    """After an interrupt: what is left of the work."""
    from kvkeep.cli import report
    from kvkeep.gates.files import CHECKPOINT

    try:
        yield
    except KeyboardInterrupt:
        done = f"step {training.step} of {training.steps}"
        if (out / CHECKPOINT).exists():
            report.note(f"{done}: --resume goes on from {out / CHECKPOINT}.")
        else:
            report.note(f"{done}, before the first checkpoint.")
        raise


def lines(steps: int) -> Callable[[Progress], None]:
    """Report the first step of a run, the last, about every hundredth, and one a minute at least."""
    from kvkeep.cli import report

    every, said = max(1, steps // 100), -math.inf

    def show(progress: Progress) -> None:
        nonlocal said
        if progress.step % every == 0 or progress.step == steps or time.monotonic() - said > _QUIET:
            report.note(progress.line)
            said = time.monotonic()

    return show
