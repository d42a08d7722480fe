"""What the offline engine refuses, without an engine."""

from __future__ import annotations

from typing import Any

import pytest

import kvkeep
from kvkeep.core.errors import CacheIntegrityError, ConfigError, MissingExtraError
from kvkeep.serving.account import Account, require_agreement
from kvkeep.serving.launching import prepare
from kvkeep.serving.offline import OfflineEngine
from kvkeep.serving.schedule import Schedule

SCHEDULE = Schedule(budget=32, buffer=16, block_size=16)
ACCOUNTS = [Account.of(SCHEDULE, prompt=prompt, generated=90) for prompt in (5, 40, 70)]


def counted() -> dict[str, Any]:
    names = ("steps", "entries", "evictions", "evicted")
    totals = {name: sum(getattr(account, name) for account in ACCOUNTS) for name in names}
    return {**totals, "peak_entries": 48}


def test_equal_counts_pass() -> None:
    """The check must not cry wolf; heads of unequal length may hold more than their share."""
    require_agreement(counted(), ACCOUNTS)
    require_agreement(counted() | {"peak_entries": 60}, ACCOUNTS)


@pytest.mark.parametrize("name", ["steps", "entries", "evictions", "evicted", "peak_entries"])
def test_other_counts_refuse_the_run(name: str) -> None:
    """A mean cache that the workers do not confirm is a guess."""
    measured = counted()
    measured[name] -= 1
    with pytest.raises(CacheIntegrityError, match=name.removesuffix("_entries")):
        require_agreement(measured, ACCOUNTS)


def test_a_missing_vllm_is_told_with_its_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The traceback of an import says neither extra nor purpose."""
    monkeypatch.setattr("kvkeep.serving.launching.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r'pip install "kvkeep\[vllm\]"'):
        prepare()


def test_arguments_that_measurements_rest_on_cannot_be_changed() -> None:
    """With steps in flight, or another logits processor, texts and counts would be others."""
    with pytest.raises(ConfigError, match="'async_scheduling' is decided by kvkeep"):
        OfflineEngine("nowhere", policy=kvkeep.Full(), options={"async_scheduling": True})
