"""Models that attend in ways of their own: sliding windows, sinks, scales, norms, fused projections."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvkeep
from tests.serving.families import write_model
from tests.serving.short import BUDGET, BUFFER, SETTING, ask, engine, managers, prompts, read

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm has an environment for it")
pytestmark = pytest.mark.filterwarnings("default")  # vLLM's own are not ours to mend

FAMILIES = {
    "phi3": ["BoundedManager"],
    "gemma3": ["BoundedManager", "BoundedManager", "SlidingWindowManager"],
    "gemma3-full-first": ["BoundedManager", "SlidingWindowManager"],
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_text_as_in_transformers(family: str, tmp_path: Path) -> None:
    """A model's own way to attend would be lost between rounds, or its windows get our slots."""
    model = write_model(family, tmp_path)
    mixed = len(FAMILIES[family]) > 1
    with engine(tmp_path, SETTING, enable_prefix_caching=not mixed) as llm:
        assert managers(llm) == FAMILIES[family]
        answers = ask(llm, prompts())
        # Nothing of a prompt is found again.
        again = ask(llm, prompts()[2:], 8)
    assert [answer.tokens for answer in again] == [answer.tokens[:8] for answer in answers[2:]]
    policy = kvkeep.policy("snapkv", budget=BUDGET, buffer=BUFFER, prefill="chunk")
    readings = [read(model, policy, answer) for answer in answers]
    assert [mismatches for mismatches, _ in readings] == [0] * 4
    assert max(difference for _, difference in readings) < 2e-4
    assert sum(read(model, None, answer)[0] for answer in answers) > 20  # the comparison can fail
