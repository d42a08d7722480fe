"""What all tests with an engine share."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.serving.engine.running import ENVIRONMENT, MODEL


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """vLLM's own warnings are not ours to mend."""
    for item in items:
        if "tests/serving/engine" in item.path.as_posix():
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture(autouse=True, scope="module")
def environment() -> Iterator[None]:
    """vLLM in this process, quiet and without the network."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def model() -> Any:
    """The same model in transformers."""
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Random token ids."""
    source = random.Random(seed)
    return [[source.randrange(5, 169) for _ in range(length)] for length in lengths]
