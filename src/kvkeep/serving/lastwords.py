"""A refusal as the last words of the program that started the engine.

What is wrong with a setting shows in a worker, two processes away from the server, and stands above two more
tracebacks that say nothing. So the worker also leaves its reasons in a file whose name it inherited, and the
first process repeats them when it ends.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import secrets
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kvkeep.core.errors import KvkeepError

#: Inherited by the processes that vLLM starts.
VARIABLE = "KVKEEP_LAST_WORDS"


def listen() -> None:
    """Begin to listen, in the first process of a program; nothing in its children, or the second time."""
    # A program that another one started may inherit the name of that one's file: it listens for itself.
    if multiprocessing.parent_process() is not None or f"-{os.getpid()}-" in os.environ.get(VARIABLE, ""):
        return
    path = Path(tempfile.gettempdir()) / f"kvkeep-{os.getpid()}-{secrets.token_hex(4)}.txt"
    os.environ[VARIABLE] = str(path)
    atexit.register(_repeat, path, os.getpid())


@contextlib.contextmanager
def left() -> Iterator[None]:
    """Leave what kvkeep refuses in this block for the first process, and let it pass."""
    try:
        yield
    except KvkeepError as error:
        if path := os.environ.get(VARIABLE):
            with contextlib.suppress(OSError):
                Path(path).write_text(str(error))
        raise


def forget() -> None:
    """Take them back: an engine has started after all."""
    if path := os.environ.get(VARIABLE):
        Path(path).unlink(missing_ok=True)


def _repeat(path: Path, listener: int) -> None:
    # A forked child inherits the handler, not the duty.
    if os.getpid() == listener and path.exists():
        sys.stderr.write(f"\nThe engine did not start: {path.read_text()}\n")
        path.unlink(missing_ok=True)
