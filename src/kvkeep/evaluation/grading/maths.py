"""Comparing mathematical answers: cheap ways first, math-verify in a process that can be killed."""

from __future__ import annotations

import json
import os
import re
import selectors
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Literal

from kvkeep.core.errors import KvkeepError, MissingExtraError
from kvkeep.evaluation.extras import need
from kvkeep.evaluation.grading.exact import normalise, same_exactly
from kvkeep.evaluation.grading.isolation import child_command, child_environment, isolation_prefix, kill

Verdict = Literal["correct", "wrong", "timed_out"]

_CHILD = Path(__file__).with_name("maths_child.py")
_START_SECONDS = 120.0  # importing sympy on a busy machine
_GRACE_SECONDS = 30.0

# Answers that no problem asks for and that would cost seconds, gigabytes or worse.
_LONGEST = 300
_REFUSED = {
    "code": re.compile(r"__|`|\bimport\b|\blambda\b|\beval\b|\bexec\b|\"|(?<![\w)}])'|[\x00-\x08\x0e-\x1f]"),
    "power tower": re.compile(r"(?:(?:\^|\*\*)[\s{(]*[\w.]+[\s})]*){3}"),
    "huge exponent": re.compile(
        r"(?:\^|\*\*)[\s{(]*[+-]?\d{6,}|(?:\^|\*\*)[\s{(]*\d+[\s})]*(?:\^|\*\*)[\s{(]*\d{2,}"
    ),
    "huge factorial": re.compile(r"\d{5,}\s*!"),
}


class MathsGrader:
    """Decides whether two answers are the same number, expression, set …

    Parameters
    ----------
    seconds
        Time for one comparison; then it is killed and the verdict is ``"timed_out"``.
    memory
        Bytes of address space that a comparison may use.

    Notes
    -----
    Safe to use from several threads: comparisons wait for each other.
    """

    def __init__(self, *, seconds: float = 5.0, memory: int = 2 * 2**30) -> None:
        self.seconds, self.memory = seconds, memory
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._lock = threading.Lock()

    def compare(self, given: str, gold: str) -> tuple[Verdict, dict[str, Any]]:
        """Compare an extracted answer with the right one.

        Returns
        -------
        tuple
            The verdict, and how it was reached (JSON-ready).

        Raises
        ------
        MissingExtraError
            If algebra is needed and math-verify is not installed.
        """
        cheap = same_exactly(given, gold) if len(given) <= _LONGEST else None
        if cheap is not None:
            return "correct" if cheap else "wrong", {"by": "text"}
        problem = refusal(given) or bracket_mismatch(given, gold)
        if problem:
            return "wrong", {"by": "text", "refused": problem}
        with self._lock:
            reply = self._ask({"gold": gold, "given": given})
        facts = {"by": "math-verify"} | {k: v for k, v in reply.items() if k in ("error", "stopped")}
        if "stopped" in reply:
            return "timed_out", facts
        return "correct" if reply["equal"] else "wrong", facts

    def facts(self) -> dict[str, Any]:
        """For the header of a run."""
        from importlib.metadata import PackageNotFoundError, version

        try:
            installed = version("math-verify")
        except PackageNotFoundError as error:
            raise MissingExtraError("math-verify", "eval", "grading mathematics") from error
        return {
            "name": "math-verify",
            "version": installed,
            "seconds": self.seconds,
            "memory": self.memory,
            "network": "none" if isolation_prefix() else "not cut off",
        }

    def close(self) -> None:
        """End the process and remove its folder."""
        if self._process is not None:
            kill(self._process)
        if self._folder is not None:
            self._folder.cleanup()
        self._process, self._folder = None, None

    # -- the process ----------------------------------------------------------------------------

    def _ask(self, job: dict[str, Any]) -> dict[str, Any]:
        process = self._process or self._start()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(job).encode() + b"\n")
            process.stdin.flush()
            return self._reply(process, self.seconds + _GRACE_SECONDS)
        except (OSError, TimeoutError) as error:
            self.close()  # the process keeps the time of its forks; if it fails itself, start another
            return {"stopped": type(error).__name__}

    def _start(self) -> subprocess.Popen[bytes]:
        need("math_verify", extra="eval", purpose="grading mathematics")
        self._folder = tempfile.TemporaryDirectory(prefix="kvkeep-grader-")
        self._process = subprocess.Popen(
            child_command(_CHILD, str(self.seconds), str(self.memory)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=self._folder.name,
            env=child_environment(),
            start_new_session=True,
        )
        try:
            self._reply(self._process, _START_SECONDS)
        except (OSError, TimeoutError) as error:
            code = self._process.poll()
            self.close()
            raise KvkeepError(
                f"the grading process did not start (exit status {code}): check that `python -c 'import "
                "math_verify'` works, or raise the memory limit."
            ) from error
        return self._process

    def _reply(self, process: subprocess.Popen[bytes], seconds: float) -> dict[str, Any]:
        assert process.stdout is not None
        deadline, received = time.monotonic() + seconds, b""
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while not received.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError
                part = os.read(process.stdout.fileno(), 4096)
                if not part:
                    raise OSError("the process ended")
                received += part
        return dict(json.loads(received))


def refusal(given: str) -> str | None:
    """Why an answer is not handed to computer algebra, or ``None``.

    Examples
    --------
    >>> refusal("9^{9^{9^9}}"), refusal("x^2+1") is None
    ('power tower', True)
    """
    if len(given) > _LONGEST:
        return "too long"
    for reason, pattern in _REFUSED.items():
        if pattern.search(given):
            return reason
    return None


def bracket_mismatch(given: str, gold: str) -> str | None:
    """Tell tuples and intervals from sets and bare lists, which the symbolic comparison does not.

    Examples
    --------
    >>> bracket_mismatch(r"\\{1,2\\}", "(1,2)"), bracket_mismatch("(1, 2)", "(1,2)") is None
    ('other brackets', True)
    """
    given, gold = normalise(given), normalise(gold)
    if not (re.fullmatch(r"[(\[].*,.*[)\]]", gold) and "\\cup" not in gold):
        return None
    ends = given[:1], given[-1:]
    if ends == (gold[0], gold[-1]) or not re.match(r"[(\[]|\\\{|[^<>=]*,[^<>=]*$", given):
        return None
    return "other brackets"
