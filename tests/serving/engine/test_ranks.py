"""Heads on several ranks: worker processes that each have a part of the cache."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import pytest

from kvkeep.serving.names import LISTENER
from tests.serving.engine.conftest import prompts
from tests.serving.engine.running import MODEL, engine

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm has an environment for it")

LENGTHS, NEW = (40, 128, 201, 17), 100
#: Draws for each head, scores by queries of each head, and evicts while it reads and while it writes.
SETTING = {"policy": "vase-attnv", "budget": 64, "buffer": 32}
NOISE = 1e-4  # of log-probabilities, from sums in another order
OPTIONS: dict[str, Any] = {"max_num_batched_tokens": 64, "max_model_len": 512}


@dataclass
class Written:
    """Tokens of all answers, and their log-probabilities."""

    tokens: list[int]
    chances: list[float]

    @classmethod
    def alone(cls, setting: dict[str, Any]) -> Written:
        """By one process."""
        with engine(setting, **OPTIONS) as running:
            answers = running.answer(prompts(*LENGTHS), NEW)
        return cls(
            [token for answer in answers for token in answer.tokens],
            [chance for answer in answers for chance in answer.log_probabilities],
        )

    def gap(self, other: Written) -> float:
        """Largest difference of log-probabilities."""
        return max(abs(mine - yours) for mine, yours in zip(self.chances, other.chances, strict=True))


@pytest.fixture(scope="module")
def alone() -> Written:
    """What one process writes; what its policy draws shows in the log-probabilities."""
    found = Written.alone(SETTING)
    assert found.gap(Written.alone({**SETTING, "seed": 1})) > 100 * NOISE
    return found


def by_several(setting: dict[str, Any], **parallel: int) -> tuple[Written, list[Any]]:
    """What worker processes write together, and what each of them counted."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=MODEL,
        dtype="float32",
        enforce_eager=True,
        block_size=32,
        max_num_seqs=8,
        skip_tokenizer_init=True,
        distributed_executor_backend="mp",
        logits_processors=[LISTENER],
        worker_extension_cls="kvkeep.serving.contained.WorkerReader",
        additional_config={"kvkeep": setting},
        **OPTIONS,
        **parallel,
    )
    try:
        asked = [{"prompt_token_ids": prompt} for prompt in prompts(*LENGTHS)]
        params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False, logprobs=0)
        answers = [each.outputs[0] for each in llm.generate(asked, params, use_tqdm=False)]
        found = Written([token for answer in answers for token in answer.token_ids], [])
        for answer in answers:
            pairs = zip(answer.token_ids, answer.logprobs, strict=True)
            found.chances += [chances[token].logprob for token, chances in pairs]
        return found, llm.collective_rpc("kvkeep_ledger")
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


@pytest.mark.slow
def test_heads_on_two_ranks(alone: Written) -> None:
    """The first head of each rank would draw as the layer's first, and keep other entries than alone."""
    found, counted = by_several(SETTING, tensor_parallel_size=2)
    assert found.tokens == alone.tokens
    assert found.gap(alone) < NOISE
    assert counted[0] == counted[1]
    assert counted[0]["evictions"] > 10
