"""What all tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvkeep.cli.demo_model import demo_model_folder, demo_model_ready


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Folder of the real SmolLM2-135M-Instruct that `make setup` converts."""
    if not demo_model_ready():
        pytest.skip("the demo model has not been converted: run `make setup`")
    return demo_model_folder()
