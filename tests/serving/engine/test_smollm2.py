"""The real SmolLM2-135M-Instruct through both engines: grouped queries of 9 heads over 3, 30 layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvkeep
from tests.serving.engine.reference import CLEAR, noise, overlap, read
from tests.serving.engine.running import engine

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm has an environment for it")

TEXT = """Water boils at a lower temperature on a mountain than by the sea. The air above a mountain is
thin, and presses less on the water, so that bubbles of steam form earlier. Who cooks rice has to wait."""


@pytest.mark.model
def test_a_real_model_keeps_the_same_entries(demo_model: Path) -> None:
    """What holds for a model of three layers might not hold for one that people use."""
    tokens = AutoTokenizer.from_pretrained(demo_model)(TEXT)["input_ids"]
    asked, shared = [tokens[:30], tokens[:45]], {"budget": 32, "buffer": 16}
    options = {"model": str(demo_model), "max_model_len": 256}
    with engine({"policy": "snapkv", **shared}, blocks=64, **options) as bounded:
        answers = bounded.answer(asked, 33, look=True)
        assert bounded.empty
    model = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32).eval()
    policy = kvkeep.policy("snapkv", prefill="chunk", **shared)
    readings = [read(model, policy, answer) for answer in answers]
    assert [reading.mismatches for reading in readings] == [0, 0]
    shares = [overlap(mine.held, its.held) for mine, its in zip(answers, readings, strict=True)]
    assert min(shares) > 0.99
    assert max(noise(answer, read(model, None, answer)) for answer in answers) > 10 * CLEAR
