"""The process that runs a program which a model wrote. Run by path; imports nothing of kvkeep.

Arguments: file of the program, bytes of memory, seconds, bytes of a file, function name or nothing. The
program's input is standard input; what it writes, or what the function returns as JSON, is standard
output.
"""

import json
import os
import resource
import runpy
import sys


def limit(memory: int, seconds: int, file_size: int) -> None:
    """Bounded memory, time and files; no further processes."""
    for kind, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, file_size),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (value, value))


def call(program: str, name: str) -> None:
    """Call a function, or a method of ``Solution``, with one JSON argument a line."""
    arguments = [json.loads(line) for line in sys.stdin.read().splitlines() if line.strip()]
    answers, sys.stdout = sys.stdout, sys.stderr  # what the program prints is not its answer
    space = runpy.run_path(program)
    function = getattr(space["Solution"](), name) if "Solution" in space else space[name]
    print(json.dumps(function(*arguments)), file=answers, flush=True)


def main() -> None:
    """Run the program."""
    program, memory, seconds, file_size, *name = sys.argv[1:]
    sys.setrecursionlimit(100_000)
    limit(int(memory), int(seconds), int(file_size))
    sys.argv = [os.path.basename(program)]
    if name:
        call(program, name[0])
    else:
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
