"""TRACE: run a small register program step by step, and remember what was written long ago.

The prompt is a program, one line an instruction; the chain of thought is its execution. All sums are modulo
10.

============================  ================================================  ==============================
prompt line                   chain line                                        meaning
============================  ================================================  ==============================
``L0 LD k4 k8 r3``            ``L0 LD k4 k8 r3 w2``                             r3 becomes 4 + 8
``L5 ADD r2 r4 r1``           ``L5 ADD r2 c1 r4 c5 r1 w6``                      r1 becomes r2 + r4
``L6 ADDV r2 r4 r1``          ``L6 ADDV well r2 c1 plus r4 c5 so r1 w6 ok``     the same in more words
``L7 OUT r3 k9``              ``L7 OUT r3 c2 k9 o1``                            graded answer: r3 + 9
============================  ================================================  ==============================

Every step writes what it reads (``c`` is a copy of a register, ``k`` of a constant) before what it computes
(``w`` a
register's new value, ``o`` an answer), so that one token never asks for a look-up and a sum at once. The
words of an
instruction come in the same order in the prompt and in the chain.

Registers have roles. *Hot* ones are read and overwritten all the time, so that their old values become
distractors;
*warm* ones now and then; *dormant* ones are computed once, early, and read once, late.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import md5
from typing import Literal

Role = Literal["hot", "warm", "dormant"]
Split = Literal["dev", "confirm", "train"]

REGISTERS = 16
LABELS = 100
FILLER = ("well", "plus", "so", "ok")
OPERATIONS = ("LD", "ADD", "ADDV", "OUT")
SPLITS: tuple[Split, ...] = ("dev", "dev", "confirm", "train", "train")


@dataclass(frozen=True, kw_only=True)
class Dials:
    """How hard a problem is.

    Parameters
    ----------
    registers, hot, dormant : int
        Registers in use, and how many of them are hot and dormant; the others are warm.
    steps : int
        Instructions after every register has its first value.
    answers : float
        Share of these instructions that ask for a graded answer.
    stale : float
        Share of the writes that overwrite a hot register and so leave a distractor behind.
    fresh : float
        Share of the writes that load constants: they stop an earlier error from spreading.
    verbose : float
        Share of the sums that are written in more words.
    distractors : int
        Loads added to a program that was made without them, each right before a line that overwrites the
        register without reading it. Answers stay as they are; only the stale values grow in number.
    """

    registers: int = 12
    hot: int = 4
    dormant: int = 6
    steps: int = 30
    answers: float = 0.35
    stale: float = 0.8
    fresh: float = 0.4
    verbose: float = 0.5
    distractors: int = 0

    def __post_init__(self) -> None:
        if not (
            self.hot >= 1 and self.dormant >= 0 and self.hot + self.dormant < self.registers <= REGISTERS
        ):
            raise ValueError(
                f"registers={self.registers}, hot={self.hot}, dormant={self.dormant}: at least one hot "
                f"and one warm "
                f"register are needed, and at most {REGISTERS} in all: change the registers."
            )
        if self.distractors < 0:
            raise ValueError(f"distractors={self.distractors} is negative: give 0 or more.")
        lines = self.registers + self.dormant + self.steps + self.distractors
        if lines > LABELS:
            more = f" and {self.distractors} distractors" if self.distractors else ""
            raise ValueError(
                f"{self.steps} steps{more} need more than the {LABELS} labels there are. Lower "
                f"{'them' if more else 'steps'}."
            )


SIZES = {
    "S": Dials(registers=8, hot=3, dormant=3, steps=14),
    "M": Dials(),
    "L": Dials(registers=16, hot=5, dormant=8, steps=60),
}


@dataclass(frozen=True)
class Instruction:
    """One line of a program: its operands (``r2`` reads a register, ``k7`` is a constant) and its target."""

    operation: str
    operands: tuple[str, str]
    target: str = ""
    role: Role | None = None

    def tokens(self, label: str) -> list[str]:
        """Return the line as it stands in the prompt."""
        return [label, self.operation, *self.operands, *([self.target] if self.target else [])]


@dataclass(frozen=True)
class Problem:
    """A program and its one right execution.

    ``lines`` are the lines of the chain, label first; ``roles`` and ``answers`` have one element for each
    OUT.
    """

    program: tuple[Instruction, ...]
    offset: int
    lines: tuple[tuple[str, ...], ...]
    answers: tuple[str, ...]
    roles: tuple[Role, ...]

    @property
    def id(self) -> str:
        """The program's text with labels that count from zero: renumbering makes no new problem."""
        return " ".join(program_tokens(self.program, 0))

    @property
    def split(self) -> Split:
        """The part that this problem belongs to, decided by its text alone."""
        return split_of(self.id)

    @property
    def prompt(self) -> list[str]:
        """Tokens of the prompt, ``BOS`` to ``GO``."""
        return program_tokens(self.program, self.offset)

    @property
    def chain(self) -> list[str]:
        """Tokens of the right execution, ending with ``END``."""
        return [token for line in self.lines for token in line] + ["END"]


def split_of(text: str) -> Split:
    """Return the part of a problem: dev 2/5, confirm 1/5, train 2/5, by the md5 of its text."""
    return SPLITS[int(md5(text.encode()).hexdigest(), 16) % len(SPLITS)]


def kind(word: str) -> str:
    """Return the kind of a word: ``L r k c w o`` for words with a number, else the word."""
    return word[0] if word[1:].isdigit() else word


def label(index: int) -> str:
    """Return the label of a line; labels start anywhere and wrap around."""
    return f"L{index % LABELS}"


def program_tokens(program: tuple[Instruction, ...], offset: int) -> list[str]:
    """Return a program as prompt tokens."""
    body = [token for index, line in enumerate(program) for token in line.tokens(label(index + offset))]
    return ["BOS", *body, "GO"]


def make_program(rng: random.Random, dials: Dials) -> tuple[Instruction, ...]:
    """Draw a program."""
    names = rng.sample(range(REGISTERS), dials.registers)
    hot, dormant = names[: dials.hot], names[dials.hot : dials.hot + dials.dormant]
    warm = names[dials.hot + dials.dormant :]
    live = hot + warm

    def constant() -> str:
        return f"k{rng.randrange(10)}"

    def load(register: int) -> Instruction:
        return Instruction("LD", (constant(), constant()), f"r{register}")

    def add(register: int, first: int, second: int) -> Instruction:
        operation = "ADDV" if rng.random() < dials.verbose else "ADD"
        return Instruction(operation, (f"r{first}", f"r{second}"), f"r{register}")

    def out(register: int, role: Role) -> Instruction:
        return Instruction("OUT", (f"r{register}", constant()), role=role)

    program = [load(register) for register in rng.sample(live, len(live))]
    program += [add(register, rng.choice(live), rng.choice(live)) for register in dormant]
    late: dict[int, list[int]] = {}
    for register in dormant:
        late.setdefault(rng.randrange(dials.steps // 3, dials.steps), []).append(register)
    for step in range(dials.steps):
        program += [out(register, "dormant") for register in late.get(step, [])]
        if rng.random() < dials.answers:
            is_hot = rng.random() < 0.7
            program.append(out(rng.choice(hot if is_hot else warm), "hot" if is_hot else "warm"))
        else:
            target = rng.choice(hot if rng.random() < dials.stale else warm)
            is_fresh = rng.random() < dials.fresh
            program.append(load(target) if is_fresh else add(target, rng.choice(hot), rng.choice(live)))
    # Drawn last, so that the program around them is the same for any number of them.
    places = [place for place, line in enumerate(program) if line.target and line.target not in line.operands]
    for place in sorted((rng.choice(places) for _ in range(dials.distractors)), reverse=True):
        program.insert(place, load(int(program[place].target[1:])))
    return tuple(program)


def execute(program: tuple[Instruction, ...], offset: int = 0) -> Problem:
    """Run a program and write down every step."""
    value: dict[str, int] = {}
    lines, answers, roles = [], [], []
    for index, line in enumerate(program):
        numbers = [value[x[1:]] if x[0] == "r" else int(x[1:]) for x in line.operands]
        shown = [(x, f"c{n}") if x[0] == "r" else (x,) for x, n in zip(line.operands, numbers, strict=True)]
        total = sum(numbers) % 10
        if line.role is not None:
            tail: tuple[str, ...] = (f"o{total}",)
            answers.append(tail[0])
            roles.append(line.role)
        else:
            value[line.target[1:]] = total
            tail = (line.target, f"w{total}")
        if line.operation == "ADDV":
            well, plus, so, ok = FILLER
            body = (well, *shown[0], plus, *shown[1], so, *tail, ok)
        else:
            body = (*shown[0], *shown[1], *tail)
        lines.append((label(index + offset), line.operation, *body))
    return Problem(program, offset, tuple(lines), tuple(answers), tuple(roles))


def problems(dials: Dials, split: Split, *, seed: int | str = 0) -> Iterator[Problem]:
    """Yield problems of one split without end; the same seed yields the same ones."""
    rng = random.Random(f"trace/{seed}")
    while True:
        problem = execute(make_program(rng, dials), rng.randrange(LABELS))
        if problem.split == split:
            yield problem


def size(name: str, **changes: float) -> Dials:
    """Return a named size, S, M or L, with some dials changed."""
    if name not in SIZES:
        raise ValueError(f"{name!r} is not a size of trace. Choose one of {', '.join(SIZES)}.")
    return replace(SIZES[name], **changes)  # type: ignore[arg-type]
