"""Every registered policy against every check of the public suite, on both stores."""

from __future__ import annotations

import pytest

import kvkeep
import kvkeep.testing
from kvkeep.testing import laws

RUNS = {check.__name__.replace("_", "-") for check in laws.CHECKS}


@pytest.mark.parametrize("check", kvkeep.testing.checks(), ids=str)
@pytest.mark.parametrize("name", kvkeep.available_policies())
def test_conformance(check: kvkeep.testing.Check, name: str) -> None:
    """The promises that make policies interchangeable; each check says what would break."""
    check(kvkeep.available_policies()[name])


@pytest.mark.parametrize("check", [each for each in kvkeep.testing.checks() if each.name in RUNS], ids=str)
@pytest.mark.parametrize("name", kvkeep.available_policies())
def test_conformance_on_pages(check: kvkeep.testing.Check, name: str) -> None:
    """Whole runs again, on the paged store."""
    check(kvkeep.available_policies()[name], store="paged")
