"""Tables of the pages under docs/results."""

from collections.abc import Sequence


def rows(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table, and an empty one.

    Examples
    --------
    >>> rows(["arm", "score"], [["full", "98.4"]])
    ['| arm | score |', '|---|---|', '| full | 98.4 |', '']
    """
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return [*lines, *("| " + " | ".join(line) + " |" for line in body), ""]
