"""Every registered policy against every check of the public suite."""

from __future__ import annotations

import pytest

import kvkeep
import kvkeep.testing


@pytest.mark.parametrize("check", kvkeep.testing.checks(), ids=str)
@pytest.mark.parametrize("name", kvkeep.available_policies())
def test_conformance(check: kvkeep.testing.Check, name: str) -> None:
    """The promises that make policies interchangeable; each check says what would break."""
    check(kvkeep.available_policies()[name])
