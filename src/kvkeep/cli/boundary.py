"""Every error leaves the command here: one sentence on stderr and an exit code, never a traceback.

Exit codes: 0 done; 2 ask for something else (a flag, a setting, a name or a budget that cannot be right, or a
policy, model and engine that do not fit each other); 1 all other failures, of what was asked for rightly (a
file, a missing package, evidence that is none, a defect of ours); 130 stopped from the keyboard.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import typer
from typer.core import TyperGroup

from kvkeep.core.errors import ConfigError, KvkeepError, UnsupportedError


class BoundaryGroup(TyperGroup):
    """The top of the command tree, with the error boundary around it."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command; as a program (``standalone_mode``) errors become exit codes."""
        run = partial(super().main, args, prog_name, complete_var, False, windows_expand_args, **extra)
        if standalone_mode:
            sys.exit(guard(run))
        return run()


def guard(run: Callable[[], Any]) -> int:
    """Call ``run`` and turn whatever happens into an exit code."""
    try:
        result = run()
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except KvkeepError as error:
        return _fail(one_sentence(str(error)), 2 if isinstance(error, (ConfigError, UnsupportedError)) else 1)
    except (typer.Abort, KeyboardInterrupt):
        return _fail("stopped.", 130)
    except BrokenPipeError:
        # The reader of a pipe (head, less) has seen enough; keep Python from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _fail(f"{where}{error.strerror or error}.", 1)
    except Exception as error:
        if hasattr(error, "format_message"):  # what typer raises for wrong usage
            return _usage(error)
        return _defect(error)


def one_sentence(message: str) -> str:
    """Fold a message with a list of reasons into one line."""
    first, *reasons = message.split("\n  - ")
    return f"{first} {'; '.join(reasons)}." if reasons else " ".join(message.split())


def _usage(error: Any) -> int:
    message, code = error.format_message(), int(getattr(error, "exit_code", 2))
    if type(error).__name__ == "NoArgsIsHelpError":
        typer.echo(message)
        return 0
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "kvkeep"
    return _fail(f"{' '.join(message.split())} (see {command} --help)", code)


def _defect(error: Exception) -> int:
    if os.environ.get("KVKEEP_DEBUG"):
        traceback.print_exc()
    lines = str(error).strip().splitlines() or [""]
    return _fail(
        f"unexpected {type(error).__name__}: {lines[0]} This is probably a defect of kvkeep; set "
        "KVKEEP_DEBUG=1 for the details and report them.",
        1,
    )


def _fail(sentence: str, code: int) -> int:
    typer.echo(f"kvkeep: {sentence}", err=True)
    return code
