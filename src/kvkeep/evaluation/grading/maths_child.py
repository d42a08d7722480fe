"""The process that compares mathematical answers. Run by path; imports nothing of kvkeep.

Reads ``{"gold": …, "given": …}`` lines, writes ``{"equal": …}`` lines. Each comparison runs in a fork of
its own that is killed when its time is over: what it read is model output, and sympy evaluates text as
code, loops for hours, or takes gigabytes.
"""

import json
import logging
import os
import resource
import select
import signal
import sys
import warnings
from typing import Any


def limit(seconds: float, memory: int) -> None:
    """No files, no further processes, bounded time and memory."""
    cpu = int(seconds) + 2
    for kind, value in (
        (resource.RLIMIT_CPU, cpu),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (value, value))


def compare(job: dict[str, str]) -> dict[str, Any]:
    """Read both answers and compare them, gold first: the comparison is not symmetric."""
    from math_verify import LatexExtractionConfig, parse, verify

    config = [LatexExtractionConfig(boxed_match_priority=0)]
    try:
        # Time is kept outside: the signals that the library would use fail in many ways.
        gold = parse("$" + job["gold"] + "$", extraction_config=config, parsing_timeout=None)
        given = parse("$\\boxed{" + job["given"] + "}$", extraction_config=config, parsing_timeout=None)
        return {"equal": bool(gold and given and verify(gold, given, timeout_seconds=None))}
    except MemoryError:
        return {"stopped": "memory"}
    except Exception as error:
        return {"equal": False, "error": type(error).__name__}


def in_a_fork(job: dict[str, str], seconds: float, memory: int) -> dict[str, Any]:
    """Compare in a process that may be killed."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        for stream in (0, 1, reader):
            os.close(stream)
        limit(seconds, memory)
        os.write(writer, json.dumps(compare(job)).encode())
        os._exit(0)
    os.close(writer)
    try:
        ready, _, _ = select.select([reader], [], [], seconds)
        found = os.read(reader, 4096) if ready else None
    finally:
        os.close(reader)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if found is None:
        return {"stopped": "time"}
    # Nothing was written: it died of a limit.
    reply: dict[str, Any] = json.loads(found) if found else {"stopped": "limits"}
    return reply


def main() -> None:
    """Answer until the input ends."""
    seconds, memory = float(sys.argv[1]), int(sys.argv[2])
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    answers = os.dup(1)
    os.dup2(2, 1)  # what a library prints must not be taken for an answer
    compare({"gold": "x+1", "given": "1+x"})  # imports what every fork needs
    os.write(answers, b'{"ready": true}\n')
    for line in sys.stdin:
        os.write(answers, json.dumps(in_a_fork(json.loads(line), seconds, memory)).encode() + b"\n")


if __name__ == "__main__":
    main()
