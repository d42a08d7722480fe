"""What the tiny reasoner is trained on: batches of programs that grow once short ones are mastered."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.testbed.tokenizer import IDS, encode
from kvkeep.testbed.trace_task import LABELS, Dials, Problem, execute, make_program

IGNORED = -100


@dataclass(frozen=True)
class Stage:
    """Sizes of the programs of one stage: least and most registers, least and most steps."""

    registers: tuple[int, int]
    steps: tuple[int, int]

    def dials(self, rng: random.Random) -> Dials:
        """Draw the dials of one batch."""
        registers = rng.randint(*self.registers)
        dormant = rng.randint(0, registers // 2)
        return Dials(
            registers=registers,
            hot=rng.randint(1, min(5, registers - dormant - 1)),
            dormant=dormant,
            steps=rng.randint(*self.steps),
            verbose=rng.choice((0.0, 0.5, 1.0)),
            fresh=rng.choice((0.2, 0.4, 0.6)),
        )


STAGES = (
    Stage((3, 4), (2, 4)),
    Stage((3, 6), (3, 9)),
    Stage((4, 9), (6, 16)),
    Stage((6, 12), (10, 30)),
)


def make_rows(stage: Stage, tokens: int, seed: int, step: int) -> list[Problem]:
    """Return the problems of a step, from the arguments alone: at least so many tokens.

    All share their dials, so that little is spent on padding.
    """
    rng = random.Random(f"train/{seed}/{step}")
    dials = stage.dials(rng)
    rows: list[Problem] = []
    drawn = 0
    while drawn < tokens:
        problem = execute(make_program(rng, dials), rng.randrange(LABELS))
        if problem.split == "train":
            rows.append(problem)
            drawn += len(problem.prompt) + len(problem.chain)
    return rows


def make_batch(rows: Sequence[Problem]) -> tuple[Tensor, Tensor]:
    """Return token ids and targets of problems, ``[batch, length]``.

    Padding stands on the right, where a causal model never looks back at it; only chain tokens are targets.
    """
    length = max(len(row.prompt) + len(row.chain) for row in rows)
    ids = torch.full((len(rows), length), IDS["PAD"])
    targets = torch.full((len(rows), length), IGNORED)
    for index, row in enumerate(rows):
        words = torch.tensor(encode(row.prompt + row.chain))
        ids[index, : len(words)] = words
        targets[index, len(row.prompt) : len(words)] = words[len(row.prompt) :]
    return ids, targets
