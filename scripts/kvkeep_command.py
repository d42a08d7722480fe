"""Commands of kvkeep in a script: called as a user types them, so that logs name what a reader can type."""

import contextlib
import io
import sys

from kvkeep.cli.app import app


def kvkeep(*words: str) -> str:
    """Run a command in this process; what it printed.

    Headers of logs hold the command line of their process: for this while that of kvkeep, not of the script.
    """
    printed = io.StringIO()
    before, sys.argv = sys.argv, ["kvkeep", *words]
    try:
        with contextlib.redirect_stdout(printed):
            app(list(words), standalone_mode=False)
    finally:
        sys.argv = before
    return printed.getvalue()
