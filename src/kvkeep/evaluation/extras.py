"""Packages that only some commands need, imported where they are used."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from kvkeep.core.errors import MissingExtraError


def need(package: str, *, extra: str, purpose: str) -> Any:
    """Import an optional package.

    Raises
    ------
    MissingExtraError
        With the pip line, if it is not installed.
    """
    try:
        return import_module(package)
    except ImportError as error:
        raise MissingExtraError(package, extra, purpose) from error
