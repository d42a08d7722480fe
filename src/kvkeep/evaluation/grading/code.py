"""Running programs that a model wrote against tests, isolated and limited."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvkeep.core.errors import UnsupportedError
from kvkeep.evaluation.grading.isolation import child_command, child_environment, isolation_prefix, kill

Outcome = Literal["passed", "wrong", "error", "timed_out"]

_CHILD = Path(__file__).with_name("code_child.py")
# Set to "limits" by people who accept that a program could reach the network (a container without one).
_SETTING = "KVKEEP_CODE_SANDBOX"
_GRACE_SECONDS = 5.0  # to start an interpreter


@dataclass(frozen=True, kw_only=True)
class CodeTest:
    """One input and what should come out.

    Parameters
    ----------
    given
        Standard input; for a function, one JSON argument a line.
    expected
        Standard output; for a function, its result as JSON.
    """

    given: str
    expected: str


@dataclass(frozen=True, kw_only=True)
class CodeLimits:
    """What a program may use, per test.

    Parameters
    ----------
    seconds
        Of processor time, and (a little more) of the clock.
    memory
        Bytes of address space.
    file_size
        Bytes of the largest file it writes, standard output included.
    """

    seconds: int = 30
    memory: int = 4 * 2**30
    file_size: int = 16 * 2**20


DEFAULT_LIMITS = CodeLimits()


def check_sandbox() -> None:
    """Refuse to run foreign programs where they cannot be cut off from the network.

    Raises
    ------
    UnsupportedError
        With the ways out.
    """
    if not isolation_prefix() and os.environ.get(_SETTING) != "limits":
        raise UnsupportedError(
            "running programs that a model wrote",
            [
                "this system offers no way to cut a process off from the network (`unshare --user --net` "
                f"fails): use a Linux machine that allows it, or set {_SETTING}=limits if this machine has "
                "nothing to reach (limits on time, memory and files are kept)"
            ],
        )


def run_tests(
    program: str,
    tests: Sequence[CodeTest],
    *,
    function: str | None = None,
    limits: CodeLimits = DEFAULT_LIMITS,
) -> Outcome:
    """Run a program against its tests, until one fails.

    Parameters
    ----------
    program
        Python source.
    function
        Call this function (or method of ``Solution``) instead of running the file.

    Raises
    ------
    UnsupportedError
        If it cannot be isolated here.
    """
    check_sandbox()
    with tempfile.TemporaryDirectory(prefix="kvkeep-code-") as folder:
        path = Path(folder) / "program.py"
        path.write_text(program, encoding="utf-8", errors="replace")
        for test in tests:
            outcome = _run(path, test, function, limits)
            if outcome != "passed":
                return outcome
    return "passed"


def _run(program: Path, test: CodeTest, function: str | None, limits: CodeLimits) -> Outcome:
    arguments = [str(program), str(limits.memory), str(limits.seconds), str(limits.file_size)]
    begin = time.monotonic()
    # The output goes to a file, so that the limit on files holds for it too.
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            child_command(_CHILD, *arguments, *([function] if function else [])),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.DEVNULL,
            cwd=program.parent,
            env=child_environment(),
            start_new_session=True,
        )
        try:
            process.communicate(test.given.encode(), timeout=limits.seconds + _GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            return "timed_out"
        finally:
            kill(process)
        if process.returncode != 0:
            # A kill at the limit on processor time looks like any other failure from out here.
            return "timed_out" if time.monotonic() - begin >= limits.seconds else "error"
        output.seek(0)
        return "passed" if same_output(output.read().decode(errors="replace"), test.expected) else "wrong"


def same_output(written: str, expected: str) -> bool:
    """Whether two outputs agree: line by line, trailing space ignored, numbers by value.

    Examples
    --------
    >>> same_output("1 2.50\\n\\n", "1 2.5"), same_output("1\\n2", "1 2")
    (True, False)
    """
    lines = [[line.split() for line in text.strip().splitlines()] for text in (written, expected)]
    return len(lines[0]) == len(lines[1]) and all(
        len(left) == len(right) and all(_same_word(a, b) for a, b in zip(left, right, strict=True))
        for left, right in zip(*lines, strict=True)
    )


def _same_word(left: str, right: str) -> bool:
    if left == right:
        return True
    try:
        return ("." in left + right or "e" in left + right) and abs(float(left) - float(right)) <= 1e-9 * max(
            1.0, abs(float(right))
        )
    except ValueError:
        return False
