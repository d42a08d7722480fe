"""The same policy, budget and evictions in vLLM and in transformers: the same entries, the same text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import kvkeep
from kvkeep import calibration
from tests.serving.engine.conftest import prompts
from tests.serving.engine.reference import overlap, read
from tests.serving.engine.running import engine

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm has an environment for it")

BUDGET, BUFFER, NEW = 96, 32, 100
#: None ends where an eviction falls due, for then the two engines count it differently.
LENGTHS = (40, 128, 192, 201)
PER_HEAD = {"mode": "per-layer-per-head", "protect_prompt": False}
POLICIES: dict[str, dict[str, Any]] = {
    "streaming-llm": {},
    "key-norm": {},
    "snapkv": {},
    "vase-dkv": {},
    "triattention": PER_HEAD,
    "set-diversity": PER_HEAD,
}
#: Key lengths come close to each other, and the two engines round them differently.
TIES = {"key-norm": 0.99}


@pytest.fixture(scope="session")
def statistics(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `kvkeep calibrate` would write about the model."""
    path = tmp_path_factory.mktemp("calibration") / "trace-1.calibration.safetensors"
    calibration.capture(model, torch.tensor(prompts(1500, seed=9)[0])).save(path)
    return path


@pytest.mark.parametrize("name", POLICIES)
def test_the_same_entries_and_the_same_text(name: str, model: Any, statistics: Path) -> None:
    """A policy served by vLLM would be another one than its name says."""
    options, shared = POLICIES[name], {"budget": BUDGET, "buffer": BUFFER}
    setting: dict[str, Any] = {"policy": name, "options": options, **shared}
    loaded = None
    if options:
        setting["calibration"], loaded = str(statistics), calibration.load(statistics)
    # 48 tokens a step: prompts are cut anywhere, and read beside tokens that are written.
    with engine(setting, max_num_batched_tokens=48) as bounded:
        answers = bounded.answer(prompts(*LENGTHS), NEW, look=True)
        assert bounded.empty
    policy = kvkeep.policy(name, prefill="chunk", **shared, **options)
    readings = [read(model, policy, answer, loaded) for answer in answers]
    assert [reading.mismatches for reading in readings] == [0] * len(answers)
    shares = [overlap(mine.held, its.held) for mine, its in zip(answers, readings, strict=True)]
    assert min(shares) >= TIES.get(name, 1.0)
    # Two controls show that the comparison can fail: everything in sight, and the wrong policy.
    everything = [read(model, None, answer).mismatches for answer in answers]
    assert sum(everything) > 0
    other = "streaming-llm" if name == "key-norm" else "key-norm"
    wrong = read(model, kvkeep.policy(other, prefill="chunk", **shared), answers[-1])
    assert wrong.mismatches > 0
    assert overlap(answers[-1].held, wrong.held) < 0.9
    if name == "streaming-llm":  # no score, so no ties: log-probabilities agree tightly
        for answer, reading in zip(answers, readings, strict=True):
            assert answer.log_probabilities == pytest.approx(reading.log_probabilities, abs=1e-3)
        worst = max(
            abs(mine - its)
            for mine, its in zip(answers[-1].log_probabilities, wrong.log_probabilities, strict=True)
        )
        assert worst > 0.01
