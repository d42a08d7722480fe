"""A tiny random model for the benchmarks."""

from __future__ import annotations

import pytest
from transformers import PreTrainedModel

from kvkeep.benchmarking.models import random_model


@pytest.fixture
def tiny() -> PreTrainedModel:
    """Two layers, four query heads, two KV heads of eight channels."""
    return random_model("tiny")
