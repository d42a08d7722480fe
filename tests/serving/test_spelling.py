"""A policy written down for vLLM must be the same policy when the plug-in has read it."""

from __future__ import annotations

import json

import pytest

import kvkeep
from kvkeep.core.budget import Budget
from kvkeep.core.errors import ConfigError
from kvkeep.serving.settings import KEY, Settings
from kvkeep.serving.spelling import spelled

TEXTS = (
    "streaming-llm",
    "key-norm",
    "keydiff",
    "snapkv(window=8, pool=3)",
    "vase-attnv(reserve=12)",
    "vase-dkv(rank=8) + sample(temperature=0.5) + reserve(slots=12, magnitude=l2)",
    "triattention",
    "set-diversity(lam=0.25)",
    "snapkv + adaptive-heads(floor=0.2)",
)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("prompt", ["counts", "kept"])
@pytest.mark.parametrize("prefill", ["chunk", "defer"])
def test_a_policy_survives_being_written_down(text: str, prompt: str, prefill: str) -> None:
    """Else a run under vLLM would be that of another policy than its header says."""
    budget = Budget(entries=96, prompt="kept" if prompt == "kept" else "counts")
    policy = kvkeep.policy(text, budget=budget, buffer=16, prefill=prefill)
    read = Settings.read(json.loads(json.dumps({KEY: spelled(policy, calibration="x.safetensors")})))
    assert read is not None
    assert read.make_policy() == policy.per_layer()
    assert (read.calibration is None) == (not policy.traits.calibration)
    assert read.prefill == prefill


def test_a_number_that_text_cannot_hold_is_refused() -> None:
    """Names of compositions round their numbers."""
    policy = kvkeep.policy("snapkv + sample(temperature=0.12345678)", budget=96, buffer=16)
    with pytest.raises(ConfigError, match="round its settings"):
        spelled(policy)
