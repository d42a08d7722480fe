"""The grammar of policies as text: ``name(option=value) + part(option=value)``."""

from __future__ import annotations

import ast
import re
from typing import Any

from kvkeep.core.errors import ConfigError

_PART = re.compile(r"\s*([A-Za-z0-9_.-]+)\s*(?:\((.*)\))?\s*", re.DOTALL)


def read_parts(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Every part with its options, in order.

    Raises
    ------
    ConfigError
        If the text cannot be read.

    Examples
    --------
    >>> read_parts("snapkv(pool=7) + sample")
    [('snapkv', {'pool': 7}), ('sample', {})]
    """
    return [_read_part(part, text) for part in _split(text)]


def _split(text: str) -> list[str]:
    """Cut at every ``+`` outside brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == "+" and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _read_part(text: str, whole: str) -> tuple[str, dict[str, Any]]:
    match = _PART.fullmatch(text)
    if match is None:
        where = "" if text.strip() == whole.strip() else f" in {whole.strip()!r}"
        raise ConfigError(
            f"cannot read {text.strip()!r}{where} as a policy: write name, or name(option=value), joined by "
            "'+'."
        )
    options: dict[str, Any] = {}
    for setting in filter(None, (piece.strip() for piece in (match.group(2) or "").split(","))):
        key, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"cannot read {setting!r} in {text.strip()!r}: write option=value.")
        if key.strip() in options:
            raise ConfigError(f"{text.strip()!r} sets {key.strip()} twice: leave one out.")
        options[key.strip()] = read_value(value.strip())
    return match.group(1), options


def read_value(text: str) -> Any:
    """Read an option's value: number, true/false, none, or a word as it stands.

    Examples
    --------
    >>> read_value("64"), read_value("0.5"), read_value("false"), read_value("l2")
    (64, 0.5, False, 'l2')
    """
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return value if isinstance(value, int | float | str) else text
