"""What became of a text: fine, cut off, going round in circles, or garbage.

The classes are those by which the authors of VaSE looked at outputs; the numbers beside them see
loops that the classes miss.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvkeep.evaluation.records import FailureClass

_PHRASE = re.compile(r"(.{10,40})\1{4,}", re.DOTALL)
_PHRASE_TAIL = 500
_GARBAGE_TAIL, _GARBAGE_MARKS = 100, 30
_ONE_CHARACTER_TAIL = 200

_LONGEST_PERIOD, _PERIOD_REPEATS = 128, 3
_NOVELTY_GRAM, _NOVELTY_WINDOW = 8, 512
#: Shorter texts fill no window: their novelty says nothing.
NOVELTY_TOKENS = _NOVELTY_WINDOW + _NOVELTY_GRAM - 1
_ONSET_GRAM, _ONSET_ALARM, _ONSET_RELIEF = 6, 15.0, 0.25
_ZLIB_TAIL = 4096


@dataclass(frozen=True, kw_only=True)
class TextFacts:
    """Class and repetition measures of one generated text.

    Parameters
    ----------
    failure_class
        ``"garbage"`` (more than 30 of the last 100 characters are not ASCII, or one character makes up more
        than half of the last 200), ``"phrase_loop"`` (10 to 40 characters five times in a row among the
        last 500), ``"truncated"`` (the length limit, or a thought that never ends), else ``"ok"``.
    novelty_min
        Least share of new 8-grams of tokens in a window of 512: near 0 when a text says nothing new.
    loop_onset
        Token at which repetition of 6-grams piled up to an alarm, or ``None``.
    tail_period
        Length of the cycle, in tokens, in which the text ends (three rounds at least), or ``None``.
    zlib_tail
        Compressed size of the last 4 KiB over their size.
    loop_start
        Token (from 0) at which that cycle begins to repeat what it has said, or ``None``.
    """

    failure_class: FailureClass
    novelty_min: float
    loop_onset: int | None
    tail_period: int | None
    zlib_tail: float
    loop_start: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def text_facts(text: str, tokens: Sequence[Hashable], *, finished: bool, cycles: bool = False) -> TextFacts:
    """Classify a text.

    Parameters
    ----------
    text
        What was generated.
    tokens
        The same as tokens.
    finished
        It ended by itself, not at the length limit.
    cycles
        Call a text that ends in a cycle of tokens a phrase loop too (for vocabularies of words, in which a
        phrase is longer than the characters that the class looks at).
    """
    period = tail_period(tokens)
    name = failure_class(text, finished=finished)
    if cycles and period is not None and name in ("ok", "truncated") and not finished:
        name = "phrase_loop"
    return TextFacts(
        failure_class=name,
        novelty_min=novelty_min(tokens),
        loop_onset=loop_onset(tokens),
        tail_period=period,
        zlib_tail=zlib_ratio(text),
        loop_start=None if period is None else loop_start(tokens, period),
    )


def failure_class(text: str, *, finished: bool) -> FailureClass:
    """One of four classes; the worst that applies.

    Examples
    --------
    >>> failure_class("so x = 5. " + "Wait, let me see. " * 40, finished=False)
    'phrase_loop'
    """
    end = text[-_GARBAGE_TAIL:]
    if sum(not character.isascii() for character in end) > _GARBAGE_MARKS:
        return "garbage"
    tail = text[-_ONE_CHARACTER_TAIL:]
    if tail and max(tail.count(character) for character in set(tail)) > _ONE_CHARACTER_TAIL / 2:
        return "garbage"
    if _PHRASE.search(text[-_PHRASE_TAIL:]):
        return "phrase_loop"
    unclosed = "<think>" in text and "</think>" not in text
    return "ok" if finished and not unclosed else "truncated"


def tail_period(tokens: Sequence[Hashable]) -> int | None:
    """The shortest cycle in which a text ends, or ``None``.

    Examples
    --------
    >>> tail_period([9, 8, 1, 2, 3, 1, 2, 3, 1, 2, 3]), tail_period(range(50)) is None
    (3, True)
    """
    for period in range(1, _LONGEST_PERIOD + 1):
        span = period * _PERIOD_REPEATS
        if span > len(tokens):
            return None
        tail = list(tokens[len(tokens) - span :])
        if tail[period:] == tail[:-period]:
            return period
    return None


def loop_start(tokens: Sequence[Hashable], period: int) -> int:
    """The first token of the last stretch in which every token is the one a period before it.

    Examples
    --------
    >>> loop_start([9, 8, 1, 2, 3, 1, 2, 3, 1, 2, 3], 3)
    5
    """
    start = len(tokens)
    while start > period and tokens[start - 1] == tokens[start - 1 - period]:
        start -= 1
    return start


def novelty_min(tokens: Sequence[Hashable]) -> float:
    """Least share, over windows, of n-grams that the text had not held before; 1 for short texts."""
    seen: set[tuple[Hashable, ...]] = set()
    least, new, count = 1.0, 0, 0
    for gram in _grams(tokens, _NOVELTY_GRAM):
        new += gram not in seen
        seen.add(gram)
        count += 1
        if count == _NOVELTY_WINDOW:
            least, new, count = min(least, new / count), 0, 0
    return least


def loop_onset(tokens: Sequence[Hashable]) -> int | None:
    """Where repetition piles up: a running sum that each known n-gram raises and each new one lowers."""
    seen: set[tuple[Hashable, ...]] = set()
    level = 0.0
    for index, gram in enumerate(_grams(tokens, _ONSET_GRAM)):
        level = level + 1 if gram in seen else max(0.0, level - _ONSET_RELIEF)
        seen.add(gram)
        if level >= _ONSET_ALARM:
            return index + _ONSET_GRAM
    return None


def zlib_ratio(text: str) -> float:
    """Compressed size over size of the end of a text; 1 for an empty one."""
    tail = text.encode()[-_ZLIB_TAIL:]
    return min(1.0, len(zlib.compress(tail, 6)) / len(tail)) if tail else 1.0


def _grams(tokens: Sequence[Hashable], size: int) -> list[tuple[Hashable, ...]]:
    return [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]
