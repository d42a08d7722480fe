"""A needle in a haystack: one number among plain sentences, asked for at the end."""

from __future__ import annotations

import random
from typing import Any, ClassVar

from kvkeep.core.errors import ConfigError
from kvkeep.evaluation.tasks.base import Grade, Problem
from kvkeep.evaluation.tasks.generated import KEYS, GeneratedTask, share_found


class Needle(GeneratedTask):
    """The depth of the needle runs evenly through the haystack and stands in ``meta``.

    Parameters
    ----------
    length, count, seed
        As in :class:`~kvkeep.evaluation.tasks.generated.GeneratedTask`.
    depth
        Fixed place of the needle, 0 at the beginning to 1 at the end; default: anywhere.
    distractors
        Further needles with other keys and numbers, anywhere in the haystack; nobody asks for them.
    """

    name: ClassVar[str] = "needle"
    version: ClassVar[str] = "1"
    answer_tokens: ClassVar[int] = 32

    def __init__(
        self,
        *,
        length: int = 2048,
        count: int = 200,
        seed: int = 0,
        depth: float | None = None,
        distractors: int = 0,
    ) -> None:
        super().__init__(length=length, count=count, seed=seed)
        if depth is not None and not 0 <= depth <= 1:
            raise ConfigError(f"task needle: depth {depth} is outside 0 (beginning) to 1 (end).")
        if not 0 <= distractors < len(KEYS):
            raise ConfigError(f"task needle: {distractors} distractors; 0 to {len(KEYS) - 1} get a key each.")
        self.depth, self.distractors = depth, distractors

    def options(self) -> dict[str, Any]:
        # Without distractors as before there were any: sealed studies know the task by a hash of this.
        more = {"distractors": self.distractors} if self.distractors else {}
        return super().options() | {"depth": self.depth} | more

    @property
    def label(self) -> str:
        more = f"/x{self.distractors}" if self.distractors else ""
        return super().label + ("" if self.depth is None else f"/{self.depth:g}") + more

    def compose(self, rng: random.Random, sentences: list[str]) -> tuple[str, str, dict[str, Any]]:
        key, number = rng.choice(KEYS), f"{rng.randrange(10**6, 10**7)}"
        depth = rng.random() if self.depth is None else self.depth
        text = list(sentences)
        for other in rng.sample([name for name in KEYS if name != key], self.distractors):
            text.insert(round(rng.random() * len(text)), fact(other, f"{rng.randrange(10**6, 10**7)}"))
        text.insert(round(depth * len(text)), fact(key, number))
        question = " ".join(text) + (
            f"\n\nQuestion: What is the secret number of {key}?\nAnswer: The secret number of {key} is"
        )
        return question, number, {"depth": round(depth, 4)}

    def grade(self, problem: Problem, text: str) -> Grade:
        if not any(character.isdigit() for character in text):
            return Grade.missing()
        return share_found(problem, text, [problem.reference])


def fact(key: str, number: str) -> str:
    """The sentence that hides a number."""
    return f"The secret number of {key} is {number}."
