"""Nothing evicted: the plug-in is vLLM, token for token."""

from __future__ import annotations

import random

import pytest

from tests.serving.engine.conftest import prompts
from tests.serving.engine.running import engine

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm has an environment for it")


def test_a_budget_above_all_lengths_changes_nothing() -> None:
    """Users would pay with other answers for memory that they did not even save."""
    source = random.Random(1)
    asked = prompts(*(source.choice((3, 40, 90, 200, 300)) for _ in range(32)))
    new = [source.randrange(20, 120) for _ in asked]
    with engine(None, max_num_batched_tokens=256) as plain:
        wanted = [answer.tokens for answer in plain.answer(asked, new)]
    # Prompts come in pieces and join others that are already answered.
    with engine({"policy": "snapkv", "budget": 900, "buffer": 32}, max_num_batched_tokens=256) as bounded:
        found = [answer.tokens for answer in bounded.answer(asked, new)]
        assert bounded.empty
    assert [len(tokens) for tokens in found] == new
    assert len({tuple(tokens) for tokens in found}) > 16  # not one answer to everything
    assert found == wanted
