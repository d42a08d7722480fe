"""Policies with parts behind them in real caches: the laws that a part can break."""

from __future__ import annotations

import pytest

import kvkeep
import kvkeep.testing

TEXTS = [
    "snapkv + norm-weighted",
    "keydiff + norm-weighted + recency",
    "vase-attnv + shared-layers(every=2)",
]
CHECKS = {
    str(check): check
    for check in kvkeep.testing.checks()
    if str(check)
    in (
        "documented",
        "frozen",
        "rebuilt-from-options",
        "decisions-are-sound",
        "protection-survives-ties",
        "protection-survives-large-float16",
        "scores-are-finite",
        "inputs-are-left-alone",
        "reads-only-what-it-declares",
        "empty-slots-do-not-count",
        "oracle-llama",
        "alone-as-in-a-batch",
        "nothing-to-evict-nothing-changed",
        "nothing-leaks",
    )
}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("text", TEXTS)
def test_conformance(text: str, check: str) -> None:
    """Each check says what would break."""
    CHECKS[check](kvkeep.policy(text, budget=24, buffer=8))


@pytest.mark.parametrize("check", ["oracle-llama", "alone-as-in-a-batch", "nothing-leaks"])
@pytest.mark.parametrize("text", TEXTS)
def test_conformance_on_pages(text: str, check: str) -> None:
    """Whole runs again, on the paged store."""
    CHECKS[check](kvkeep.policy(text, budget=24, buffer=8), store="paged")
