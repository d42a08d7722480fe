"""Prompts longer than the budget that are read whole, or stay on top of it."""

from __future__ import annotations

from typing import Any

import pytest

import kvkeep
from kvkeep.core.budget import Budget
from tests.serving.engine.conftest import prompts
from tests.serving.engine.reference import CLEAR, noise, overlap, read
from tests.serving.engine.running import engine

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm has an environment for it")

BUDGET, BUFFER, NEW = 48, 32, 116
#: Whole blocks: vLLM keeps prompts rounded up to these, transformers as they are.
LENGTHS = (32, 160, 96)


@pytest.mark.parametrize(("mode", "name"), [("defer", "vase-dkv"), ("kept", "snapkv")])
def test_prompts_are_handled_as_in_transformers(mode: str, name: str, model: Any) -> None:
    """An operator would choose a handling of prompts and get another one."""
    extra = {"prefill": "defer"} if mode == "defer" else {"prompt": "kept"}
    setting = {"policy": name, "budget": BUDGET, "buffer": BUFFER, **extra}
    with engine(setting, max_num_batched_tokens=48) as bounded:
        answers = bounded.answer(prompts(*LENGTHS), NEW, look=True)
        assert bounded.empty
    amount = Budget(entries=BUDGET, prompt="kept" if mode == "kept" else "counts")
    policy = kvkeep.policy(name, budget=amount, buffer=BUFFER)
    readings = [read(model, policy, answer) for answer in answers]
    assert [reading.mismatches for reading in readings] == [0] * len(answers)
    assert [noise(*pair) < CLEAR for pair in zip(answers, readings, strict=True)] == [True] * len(answers)
    assert [overlap(mine.held, its.held) for mine, its in zip(answers, readings, strict=True)] == [1] * 3
    assert min(len(answer.tokens) for answer in answers) > BUDGET + 2 * BUFFER  # kept prompts: two evictions
    prompt = [set(range(len(answer.prompt))) for answer in answers]
    whole = [
        all(tokens <= set(head) for layer in answer.held for head in layer)
        for tokens, answer in zip(prompt, answers, strict=True)
    ]
    assert whole == ([True] * 3 if mode == "kept" else [False] * 3)
    wrong = kvkeep.policy("key-norm", budget=amount, buffer=BUFFER)
    assert max(noise(answer, read(model, wrong, answer)) for answer in answers[:2]) > 10 * CLEAR
