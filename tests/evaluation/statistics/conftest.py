"""Thousands of corrections in reasonable time."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def _no_collection() -> Iterator[None]:
    """statsmodels collects all garbage of the process in every call of ``multipletests``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "collect", lambda *_: 0)
        yield
