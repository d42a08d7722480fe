"""Running what a model wrote: in a process of its own, without network, within limits.

On Linux ``unshare`` (util-linux) gives the process empty network and process tables: nothing to
reach, and everything it started dies with it. The limits on memory, time and files are set by the
child itself before it reads what the model wrote.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

_UNSHARE = ("--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child")


@functools.cache
def isolation_prefix() -> tuple[str, ...]:
    """Words before a command that cut it off from the network; empty where the system has no way."""
    program = shutil.which("unshare")
    if program is None:
        return ()
    prefix = (program, *_UNSHARE)
    try:
        probe = subprocess.run((*prefix, "true"), capture_output=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return prefix if probe.returncode == 0 else ()


def child_command(script: Path, *arguments: str) -> list[str]:
    """The command that runs one of our child scripts, as isolated as this system allows.

    The interpreter ignores environment variables and the user's site packages (``-I``).
    """
    return [*isolation_prefix(), sys.executable, "-I", str(script), *arguments]


def child_environment() -> dict[str, str]:
    """No secrets: only what an interpreter needs to start."""
    kept = {name: os.environ[name] for name in ("PATH", "SYSTEMROOT") if name in os.environ}
    return kept | {"LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a child and everything it started."""
    if process.poll() is None:
        try:
            os.killpg(process.pid, 9)
        except (AttributeError, OSError):  # no process groups here, or gone already
            process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # what was still buffered for a dead child
                pipe.close()
    process.wait()
