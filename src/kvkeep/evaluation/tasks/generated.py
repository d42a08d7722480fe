"""What generated tasks share: numbered problems, a length in tokens, and a haystack of plain sentences."""

from __future__ import annotations

import hashlib
import json
import random
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from kvkeep.core.errors import ConfigError
from kvkeep.evaluation.records import SplitPart
from kvkeep.evaluation.splits import hash_order, part_of
from kvkeep.evaluation.tasks.base import Grade, Problem, Task

_WHO = (
    "gardener",
    "baker",
    "pilot",
    "teacher",
    "carpenter",
    "singer",
    "painter",
    "farmer",
    "sailor",
    "tailor",
)
_DID = (
    "walked past",
    "waited near",
    "looked at",
    "drew a map of",
    "talked about",
    "cleaned",
    "opened",
    "left",
)
_WHAT = ("bridge", "market", "harbour", "library", "station", "orchard", "tower", "museum", "garden", "mill")
_WHEN = ("before noon", "in the rain", "on a Sunday", "after the fair", "at dusk", "all morning", "in spring")

KEYS = tuple(
    f"{first}{last}"
    for first in (
        "bal",
        "cor",
        "den",
        "fir",
        "gal",
        "hom",
        "jun",
        "kel",
        "lom",
        "mar",
        "nor",
        "pel",
        "rin",
        "sol",
    )
    for last in ("ado", "bert", "esk", "ina", "ora", "uth", "wick", "yon")
)


class GeneratedTask(Task):
    """Problems made on the spot, any number and any length.

    Parameters
    ----------
    length
        Prompt and answer together, in tokens of the model under test.
    count
        Problems.
    seed
        Another seed gives other problems.
    """

    template: ClassVar[str] = "plain"
    sampling: ClassVar[str] = "greedy"
    grader: ClassVar[str] = "string"
    answer_tokens: ClassVar[int] = 64

    def __init__(self, *, length: int = 2048, count: int = 200, seed: int = 0) -> None:
        if count < 1 or length <= self.answer_tokens:
            raise ConfigError(
                f"task {self.name}: {count} problems of {length} tokens cannot be made; {self.answer_tokens} "
                "tokens are kept for the answer, so the length must be above that."
            )
        self.length, self.count, self.seed = length, count, seed
        self.max_new = self.answer_tokens
        self._count_tokens: Callable[[str], int] = lambda text: len(text.split())
        self._made: dict[int, Problem] = {}
        self._sentences: int | None = None

    def bind(self, count_tokens: Callable[[str], int]) -> None:
        self._count_tokens, self._made, self._sentences = count_tokens, {}, None

    def options(self) -> dict[str, Any]:
        """What decides the problems."""
        return {"length": self.length, "count": self.count, "seed": self.seed}

    def fingerprint(self) -> str:
        text = json.dumps([self.name, self.version, self.options()], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def label(self) -> str:
        """Prefix of the ids: problems of other settings are other problems."""
        return f"{self.name}/{self.length}/{self.seed}"

    def all_problems(self) -> Sequence[Problem]:
        return [self._problem(index) for index in range(self.count)]

    def problems(self, part: SplitPart, limit: int | None = None) -> list[Problem]:
        """As for every task; only those that are asked for are made, for a long one takes its time."""
        names = {f"{self.label}/{index}": index for index in range(self.count)}
        ordered = hash_order([name for name in names if part_of(name) == part])
        return [self._problem(names[name]) for name in ordered[:limit]]

    def _problem(self, index: int) -> Problem:
        if index not in self._made:
            self._made[index] = self._make(index)
        return self._made[index]

    @abstractmethod
    def compose(self, rng: random.Random, sentences: list[str]) -> tuple[str, str, dict[str, Any]]:
        """Hide the facts among the sentences: question, reference, and facts about the problem."""

    def _make(self, index: int) -> Problem:
        name = f"{self.label}/{index}"
        room = self.length - self.answer_tokens

        def draft(sentences: int) -> tuple[str, str, dict[str, Any]]:
            # A text seed is hashed with sha512: the same everywhere. The facts do not depend on how many
            # sentences the tokenizer leaves room for.
            hay = random.Random(f"{name}/hay")
            return self.compose(random.Random(name), [filler(hay) for _ in range(sentences)])

        def fits(sentences: int) -> bool:
            return self._count_tokens(draft(sentences)[0]) <= room

        if not fits(0):
            raise ConfigError(
                f"task {self.name}: the facts alone take more than {room} tokens: raise length {self.length}."
            )
        self._sentences = most(fits, start=self._sentences or 1)
        question, reference, meta = draft(self._sentences)
        return Problem(id=name, question=question, reference=reference, meta=meta)


def filler(rng: random.Random) -> str:
    """A sentence without any fact that is asked for."""
    return f"The {rng.choice(_WHO)} {rng.choice(_DID)} the {rng.choice(_WHAT)} {rng.choice(_WHEN)}."


def most(fits: Callable[[int], bool], start: int) -> int:
    """The largest number that fits, searched from a guess; 0 is known to fit."""
    low, high = 0, max(1, start)
    while fits(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def share_found(problem: Problem, text: str, wanted: Sequence[str]) -> Grade:
    """Score by the share of the wanted words that stand in the text; all of them is correct."""
    lowered = text.lower()
    found = [word for word in wanted if word.lower() in lowered]
    if not text.strip():
        return Grade.missing()
    return Grade(
        answer_class="correct" if len(found) == len(wanted) else "wrong",
        score=len(found) / len(wanted),
        extracted=text.strip()[:200],
        extra={"found": found},
    )
