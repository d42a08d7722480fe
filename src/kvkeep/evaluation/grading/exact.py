"""Comparing short answers without computer algebra: text, integers, decimals, plain fractions.

Serves all of GSM8K and AIME and three quarters of MATH, at no risk.
"""

from __future__ import annotations

import re
from fractions import Fraction

_WRAPPERS = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
# Thin spaces, sizes of brackets and dollar signs carry no meaning.
_DECORATION = re.compile(r"\\left(?![a-zA-Z])|\\right(?![a-zA-Z])|\\[,!;: ]|\\\$|\$|~")
_GROUPED = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)")
# \frac{-3}{12}, \frac12 and 3/12.
_PART = r"(?:\{([+-]?\d+)\}|(\d))"
_RATIO = re.compile(rf"([+-]?)(?:\\frac{_PART}{_PART}|([+-]?\d+)/([+-]?\d+))")
_LONGEST_NUMBER = 60
# Decimals are compared as the symbolic grader does: 0.333333 is a third, 0.33 is not.
_PLACES = 6


def normalise(answer: str) -> str:
    r"""Drop what carries no meaning.

    Examples
    --------
    >>> normalise(r"$\left( 3, \dfrac{\pi}{2} \right)$.")
    '(3,\\frac{\\pi}{2})'
    """
    text = _DECORATION.sub("", answer.strip())
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    return re.sub(r"\s+", "", text).rstrip(".")


def as_number(answer: str) -> Fraction | None:
    r"""Read an integer, a decimal or a plain fraction; ``None`` for anything else.

    Examples
    --------
    >>> as_number("1,234"), as_number(r"-\frac{1}{2}"), as_number("x") is None
    (Fraction(1234, 1), Fraction(-1, 2), True)
    """
    text = normalise(answer)
    if len(text) > _LONGEST_NUMBER:
        return None
    if _GROUPED.fullmatch(text):
        text = text.replace(",", "")
    if _NUMBER.fullmatch(text):
        return Fraction(text)
    ratio = _RATIO.fullmatch(text)
    if ratio is None:
        return None
    sign, *parts = (part for part in ratio.groups() if part is not None)
    if int(parts[1]) == 0:
        return None
    return Fraction(int(parts[0]), int(parts[1])) * (-1 if sign == "-" else 1)


def as_words(answer: str) -> str | None:
    r"""Read an answer that is a word or a letter in brackets, case folded; ``None`` for anything else.

    Examples
    --------
    >>> as_words(r"\text{(C)}"), as_words("Evelyn"), as_words(r"x + \text{cm}") is None
    ('c', 'evelyn', True)
    """
    bare = _WRAPPERS.sub(r"\1", answer)
    text = re.sub(r"\s+", " ", _DECORATION.sub("", bare)).strip(" .()").casefold()
    wrapped = bare != answer
    if re.fullmatch(r"[^\W\d_]+(?:[ -][^\W\d_]+)*", text) and (wrapped or len(text) > 1):
        return text
    return None


def same_exactly(given: str, gold: str) -> bool | None:
    """Whether two answers are equal, as far as that can be told without algebra.

    Parameters
    ----------
    given, gold
        Short answers, without their boxes.

    Returns
    -------
    bool | None
        ``None``: undecided, ask the symbolic grader.

    Examples
    --------
    >>> same_exactly("0.5", "1/2"), same_exactly("seat", "east"), same_exactly("2x", "x+x") is None
    (True, False, True)
    """
    if normalise(given) == normalise(gold):
        return True
    numbers = as_number(given), as_number(gold)
    if numbers[0] is not None and numbers[1] is not None:
        return numbers[0] == numbers[1] or (
            "." in given + gold and round(numbers[0], _PLACES) == round(numbers[1], _PLACES)
        )
    words = as_words(given), as_words(gold)
    if words[0] is not None and words[1] is not None:
        return words[0] == words[1]
    if words[1] is not None and _WRAPPERS.fullmatch(gold.strip()):
        # The gold is a word. A letter alone may stand for a choice, "C" for "(C)"; anything else is wrong.
        return given.strip(" .()").casefold() == words[1]
    if words[0] is not None and not _WRAPPERS.search(given):
        # A bare word would be read as a product of letters, in which "seat" equals "east".
        return False
    return None
