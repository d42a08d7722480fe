"""What all tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvkeep.cli.demo_model import demo_model_folder, demo_model_ready
from kvkeep.core.policy import Policy
from kvkeep.engine.retention_cache import RetentionCache
from tests.stores import PAGE


@pytest.fixture(params=["dense", "paged"])
def either_store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test once on each store."""
    kind = str(request.param)

    def chosen(store: str, policy: Policy) -> str:
        return "paged" if policy.traits.ragged else kind

    monkeypatch.setattr("kvkeep.engine.retention_cache.store_kind", chosen)
    keywords = RetentionCache.__init__.__kwdefaults__
    monkeypatch.setitem(keywords, "page_size", PAGE)
    return kind


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Folder of the real SmolLM2-135M-Instruct that `make setup` converts."""
    if not demo_model_ready():
        pytest.skip("the demo model has not been converted: run `make setup`")
    return demo_model_folder()
