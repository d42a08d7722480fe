"""The frozen split: a problem's own name says whether it is for tuning or for confirming.

Two fifths of the problems are for development, the rest stay untouched until a claim is confirmed.
The MD5 hash of the id decides, so the split needs no list, no seed and no order of rows, and cannot
be drawn again until it pleases. Sets of thirty problems are too small to be parted: one year of a
contest is for development, the later ones are for confirming.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from kvkeep.core.errors import ConfigError

RULE: Final = "md5-mod5"
Part = Literal["dev", "confirm"]


WHOLE: Final[Mapping[str, Part]] = {
    "aime24": "dev",
    "aime25": "confirm",
    "aime26": "confirm",
    "hmmt25": "confirm",
}


def _digest(problem: str) -> int:
    return int(hashlib.md5(problem.encode(), usedforsecurity=False).hexdigest(), 16)


def part_of(problem: str) -> Part:
    """Where a problem belongs: ``"dev"`` if the MD5 of its id, modulo 5, is below 2.

    Ids that begin with a name of :data:`WHOLE` belong where their set belongs.

    Examples
    --------
    >>> part_of("test/precalculus/807.json"), part_of("aime25/7")
    ('dev', 'confirm')
    """
    whole = WHOLE.get(problem.partition("/")[0])
    if whole is not None:
        return whole
    return "dev" if _digest(problem) % 5 < 2 else "confirm"


def hash_order(problems: Iterable[str]) -> list[str]:
    """The ids in the order of their hashes: a shuffle that is the same for everybody.

    The first so many of them are a fair sample, unlike the first rows of a file.
    """
    return sorted(problems, key=lambda problem: (_digest(problem), problem))


def ids_sha256(problems: Iterable[str]) -> str:
    """SHA-256 of the sorted ids, one a line: the fingerprint of a list of problems."""
    return hashlib.sha256("\n".join(sorted(problems)).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Split:
    """The two parts of a task, in the order in which the problems came.

    Parameters
    ----------
    dev, confirm
        Ids for tuning; ids for the final test.
    """

    dev: tuple[str, ...]
    confirm: tuple[str, ...]

    def as_dict(self) -> dict[str, object]:
        """Counts and fingerprints, JSON-ready."""
        return {
            "rule": RULE,
            "dev": {"problems": len(self.dev), "ids_sha256": ids_sha256(self.dev)},
            "confirm": {"problems": len(self.confirm), "ids_sha256": ids_sha256(self.confirm)},
        }


def split(problems: Iterable[str]) -> Split:
    """Part problems by their ids.

    Raises
    ------
    ConfigError
        If an id occurs twice: two problems with one name cannot be told apart in a log.
    """
    ids = list(problems)
    twice = [problem for problem, times in Counter(ids).items() if times > 1]
    if twice:
        raise ConfigError(
            f"{len(twice)} problem ids occur more than once, the first is {twice[0]!r}: ids must be unique."
        )
    parts = [(problem, part_of(problem)) for problem in ids]
    return Split(
        dev=tuple(problem for problem, part in parts if part == "dev"),
        confirm=tuple(problem for problem, part in parts if part == "confirm"),
    )
