"""Finding the answer in a text. Each way is explicit; none falls back to "some last number"."""

from __future__ import annotations

import re

# How close to the end an answer without its box must stand to be called present.
_TAIL = 200

# A box that opens, an escaped character (an escaped brace does not count), or a brace. One pass over the
# text: model output may hold a hundred thousand boxes that never close.
_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)


def after_thinking(text: str) -> str:
    """What follows the last ``</think>``; the whole text if there is none."""
    return text.rpartition("</think>")[2]


def last_boxed(text: str) -> str | None:
    r"""The content of the last complete ``\boxed{…}`` or ``\fbox{…}``, braces matched.

    Boxes that never close (a text cut off inside one) are passed over.

    Examples
    --------
    >>> last_boxed(r"\boxed{70} is wrong, so \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'
    >>> last_boxed(r"\boxed{12") is None
    True
    """
    found, open_braces = (-1, ""), []
    for mark in _BRACES.finditer(text):
        if mark.group() == "{" or len(mark.group()) > 2:
            open_braces.append(mark)
        elif mark.group() == "}" and open_braces:
            opened = open_braces.pop()
            if len(opened.group()) > 1 and opened.end() > found[0]:
                found = opened.end(), text[opened.end() : mark.start()]
    return found[1].strip() if found[0] >= 0 else None


def last_hash_answer(text: str) -> str | None:
    """What follows the last ``####``, as the solutions of GSM8K write their answer.

    Examples
    --------
    >>> last_hash_answer("so 5 + 13 = 18\\n#### 18")
    '18'
    """
    found = re.findall(r"####[ \t]*([^\n]+)", text)
    return found[-1].strip() if found else None


def last_choice(text: str, letters: str = "ABCD") -> str | None:
    r"""The last letter that is given as the answer to a multiple choice question.

    Accepted are a box, ``Answer: B`` and ``the answer is (B)``.

    Examples
    --------
    >>> last_choice("A looks right, but no.\nAnswer: (C)")
    'C'
    >>> last_choice(r"\boxed{\text{B}}")
    'B'
    >>> last_choice("Both A and B could be.") is None
    True
    """
    boxed = last_boxed(text)
    if boxed is not None:
        bare = re.sub(r"\\(?:text|mathrm|mathbf|textbf)\s*\{([^{}]*)\}", r"\1", boxed)
        inside = re.fullmatch(rf"[\s(\[{{]*([{letters}])[\s)\]}}.:]*.*", bare, re.DOTALL)
        if inside and not re.match(r"[A-Za-z]", bare.strip("([{ ")[1:]):
            return inside.group(1)
    stated = re.findall(rf"(?i:answer)(?:\s+(?i:is))?[\s:*_(]{{0,20}}([{letters}])\b", text)
    return stated[-1] if stated else None


def last_code_block(text: str) -> str | None:
    """The last fenced block of code that is complete.

    Examples
    --------
    >>> last_code_block("First:\\n```python\\nprint(1)\\n```\\nor\\n```python\\nprint(2)\\n```\\n")
    'print(2)'
    """
    blocks = re.findall(r"```[^\n`]*\n(.*?)\n?```", text, re.DOTALL)
    return blocks[-1] if blocks else None


def present_unextracted(text: str, reference: str, *, finished: bool) -> bool:
    """Whether an answer that was not extracted stands in the text all the same.

    Looked for with word boundaries in the end of the answer, or in the whole of a text that was cut off
    (there it says what the text would have come to).
    """
    answer = after_thinking(text)
    where = answer[-_TAIL:] if finished else text
    return bool(reference) and bool(re.search(rf"(?<![\w.]){re.escape(reference)}(?![\w]|\.\d)", where))
