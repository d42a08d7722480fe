"""Short engines on tiny models, and the same tokens read by transformers."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import kvkeep
from kvkeep.core.policy import Policy
from kvkeep.engine.generation import cache_argument
from tests.serving.families import VOCABULARY

BUDGET, BUFFER, NEW = 48, 16, 40
SETTING = {"policy": "snapkv", "budget": BUDGET, "buffer": BUFFER}
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


@dataclass
class Answer:
    """A prompt, the tokens that were written, and their log-probabilities."""

    prompt: list[int]
    tokens: list[int]
    chances: list[float]


def prompts() -> list[list[int]]:
    """Within the budget, above it, and long."""
    source = random.Random(0)
    return [[source.randrange(1, VOCABULARY) for _ in range(length)] for length in (5, 64, 97, 201)]


@contextmanager
def engine(folder: Path, setting: dict[str, Any] | None, **options: Any) -> Iterator[Any]:
    """Start an engine in this process; at its end every block must be free."""
    from vllm import LLM

    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        given: dict[str, Any] = {"dtype": "float32", "block_size": 32, "enforce_eager": True, **options}
        llm = LLM(
            model=str(folder),
            max_model_len=512,
            max_num_seqs=8,
            max_num_batched_tokens=48,  # prompts in pieces, beside tokens that are written
            distributed_executor_backend="uni",
            skip_tokenizer_init=True,
            seed=0,
            additional_config={"kvkeep": setting} if setting else {},
            **given,
        )
        core = llm.llm_engine.engine_core.engine_core
        try:
            yield llm
            pool = core.scheduler.kv_cache_manager.block_pool
            assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        finally:
            llm.llm_engine.engine_core.shutdown()
            del llm
            gc.collect()


def ask(llm: Any, asked: list[list[int]], new: int = NEW, **sampling: Any) -> list[Answer]:
    """Greedy answers, unless ``sampling`` says otherwise."""
    from vllm import SamplingParams

    given = {"temperature": 0, "logprobs": 0, "ignore_eos": True, "detokenize": False, **sampling}
    found = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in asked],
        SamplingParams(max_tokens=new, **given),
        use_tqdm=False,
    )
    return [
        Answer(
            prompt,
            list(one.token_ids),
            [each[token].logprob for token, each in zip(one.token_ids, one.logprobs, strict=True)],
        )
        for prompt, output in zip(asked, found, strict=True)
        for one in output.outputs
    ]


def managers(llm: Any) -> list[str]:
    """What manages the blocks of each group of layers."""
    coordinator = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.coordinator
    return sorted(type(each).__name__ for each in coordinator.single_type_managers)


@torch.inference_mode()
def read(model: Any, policy: Policy | None, answer: Answer) -> tuple[int, float]:
    """Tokens that transformers would not have written, and the largest difference of log-probabilities."""
    tokens = torch.tensor([answer.prompt + answer.tokens[:-1]])
    start, total = len(answer.prompt), tokens.shape[1]
    if policy is None:
        logits = model(input_ids=tokens).logits[0]
    else:
        # Evictions that fall into the prompt end a piece; what follows the last comes token by token.
        ends = [*range(BUDGET + BUFFER, start + 1, BUFFER)] if start > BUDGET else [start]
        ends += [*range((ends or [0])[-1] + 1, total + 1)]
        cache, parts, begin = kvkeep.RetentionCache(model, policy, sequence_ids=[0]), [], 0
        for end in ends:
            piece = {"input_ids": tokens[:, begin:end], cache_argument(model): cache}
            parts.append(model(**piece).logits[0])
            begin = end
        logits = torch.cat(parts)
    chances = logits[start - 1 :].float().log_softmax(-1)
    written = torch.tensor(answer.tokens)
    own = chances.gather(1, written[:, None])[:, 0]
    return int((chances.argmax(-1) != written).sum()), float((own - torch.tensor(answer.chances)).abs().max())
