"""Grade a TRACE chain: every answer, every step, and where it first went wrong."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from kvkeep.testbed.trace_task import FILLER, Problem, Role, kind

StepFault = Literal["", "missing", "form", "read", "sum"]


@dataclass(frozen=True)
class StepGrade:
    """One line of a chain.

    ``right`` says that the line is the one of the right execution. ``fault`` judges the line by the chain's
    own earlier
    values, so that one error is not counted again in every line that builds on it: ``""`` locally right,
    ``missing`` no
    line with this label, ``form`` other words than the instruction asks for, ``read`` a value read other
    than the one
    last written (a lost value), ``sum`` wrong arithmetic.
    """

    label: str
    right: bool
    fault: StepFault


@dataclass(frozen=True)
class Grade:
    """The grade of one chain; ``first_error`` is the index of the first wrong token, or None."""

    answers: tuple[bool, ...]
    roles: tuple[Role, ...]
    steps: tuple[StepGrade, ...]
    first_error: int | None
    ended: bool

    @property
    def accuracy(self) -> float:
        """Share of the answers that are right."""
        return sum(self.answers) / len(self.answers)

    def by_role(self) -> dict[Role, list[bool]]:
        """Return the answers of each role."""
        found: dict[Role, list[bool]] = {}
        for role, right in zip(self.roles, self.answers, strict=True):
            found.setdefault(role, []).append(right)
        return found


def interpret(prompt: Sequence[str]) -> list[int]:
    """Return the answers of a program, read from its prompt alone: the slow twin of the generator."""
    value: dict[str, int] = {}
    words, answers = list(prompt[1:-1]), []
    while words:
        _, operation, first, second = words[:4]
        total = sum(value[x[1:]] if x.startswith("r") else int(x[1:]) for x in (first, second)) % 10
        if operation == "OUT":
            answers.append(total)
        else:
            value[words[4][1:]] = total
        words = words[4 if operation == "OUT" else 5 :]
    return answers


def split_lines(chain: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the lines of a chain by their label; of two lines with one label the first counts."""
    starts = [i for i, word in enumerate(chain) if word.startswith("L") and word != "LD"]
    ends = [i for i, word in enumerate(chain) if word == "END"][:1] or [len(chain)]
    lines: dict[str, tuple[str, ...]] = {}
    for start, stop in pairwise([*starts, ends[0]]):
        lines.setdefault(chain[start], tuple(chain[start:stop]))
    return lines


def form(word: str) -> str:
    """Return a word without its digit if the digit was read or computed."""
    return word[0] if kind(word) in ("c", "w", "o") else word


def fault_of(line: Sequence[str], expected: Sequence[str], written: dict[str, str]) -> StepFault:
    """Judge a line by the values that the chain itself wrote before it."""
    if [form(word) for word in line] != [form(word) for word in expected]:
        return "form"
    words = [x for x in line if x not in FILLER]
    digits = [int(x[1:]) for x in words if x[0] in "ck"]
    reads = [(a[1:], b[1:]) for a, b in pairwise(words) if kind(a) == "r" and kind(b) == "c"]
    if any(written.get(register) != digit for register, digit in reads):
        return "read"
    return "" if int(words[-1][1:]) == sum(digits) % 10 else "sum"


def grade(problem: Problem, chain: Sequence[str]) -> Grade:
    """Grade the words that a model wrote after the prompt."""
    found = split_lines(chain)
    written: dict[str, str] = {}
    steps, answers = [], []
    for instruction, expected in zip(problem.program, problem.lines, strict=True):
        line = found.get(expected[0])
        steps.append(
            StepGrade(expected[0], line == expected, fault_of(line, expected, written) if line else "missing")
        )
        if instruction.role is not None:
            answers.append(line is not None and expected[-1] in line)
        for register, value in pairwise(line or ()):
            if register[0] == "r" and value[0] == "w":
                written[register[1:]] = value[1:]
    right = problem.chain
    first = next((i for i, word in enumerate(chain) if i >= len(right) or word != right[i]), None)
    if first is None and len(chain) < len(right):
        first = len(chain)
    return Grade(tuple(answers), problem.roles, tuple(steps), first, "END" in chain)
