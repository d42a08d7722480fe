"""Features of vLLM that nothing refuses, with evictions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import kvkeep
from kvkeep.engine.generation import cache_argument
from tests.serving.families import write_model
from tests.serving.short import BUDGET, BUFFER, SETTING, ask, engine, prompts, read

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm has an environment for it")
pytestmark = pytest.mark.filterwarnings("default")  # vLLM's own are not ours to mend

STREAM = {"policy": "streaming-llm", "budget": BUDGET, "buffer": BUFFER}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the model is."""
    return tmp_path_factory.mktemp("qwen3")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    """A model in transformers; its folder is for vLLM."""
    return write_model("qwen3", folder)


@pytest.fixture(scope="module")
def served(model: Any, folder: Path) -> Iterator[Any]:
    """One engine for what only requests differ in."""
    with engine(folder, SETTING) as llm:
        yield llm


def test_several_answers_to_one_prompt(served: Any) -> None:
    """They share a prompt, and must not share its cache."""
    asked = prompts()[1:]
    wanted = [answer.tokens for answer in ask(served, asked)]
    found = ask(served, asked, n=3, temperature=1.0, top_k=1)
    assert [answer.tokens for answer in found] == [tokens for tokens in wanted for _ in range(3)]


def test_log_probabilities_of_the_prompt(served: Any, model: Any) -> None:
    """They come from the pieces in which a prompt was read, evictions included."""
    from vllm import SamplingParams

    prompt = prompts()[3]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    (output,) = served.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    chances = zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
    found = torch.tensor([each[token].logprob for token, each in chances])
    policy = kvkeep.policy("snapkv", budget=BUDGET, buffer=BUFFER, prefill="chunk")
    cache, tokens, parts = kvkeep.RetentionCache(model, policy, sequence_ids=[0]), torch.tensor([prompt]), []
    ends = [*range(BUDGET + BUFFER, len(prompt), BUFFER)]
    with torch.inference_mode():
        for begin, end in zip([0, *ends], [*ends, len(prompt)], strict=True):
            piece = {"input_ids": tokens[:, begin:end], cache_argument(model): cache}
            parts.append(model(**piece).logits[0])
        full = model(input_ids=tokens).logits[0]
    wanted, other = (
        logits[:-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
        for logits in (torch.cat(parts), full)
    )
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=0)
    assert float((found - other).abs().max()) > 0.1


@pytest.mark.parametrize("size", [64, 128])
def test_sizes_of_blocks(size: int, model: Any, folder: Path) -> None:
    """Slots and pages are counted in blocks all over."""
    policy = kvkeep.policy("snapkv", budget=BUDGET, buffer=BUFFER, prefill="chunk")
    with engine(folder, SETTING, block_size=size) as llm:
        answers = ask(llm, prompts())
    assert [read(model, policy, answer)[0] for answer in answers] == [0] * 4


def test_sixteen_bits(model: Any, folder: Path) -> None:
    """Where the CPU has instructions for matrices of bfloat16, keys and values are stored in their order."""
    policy = kvkeep.policy("streaming-llm", budget=BUDGET, buffer=BUFFER, prefill="chunk")
    with engine(folder, STREAM, dtype="bfloat16") as llm:
        answers = ask(llm, prompts())
    near = max(read(model, policy, answer)[1] for answer in answers)
    far = max(read(model, None, answer)[1] for answer in answers)
    assert near < 1.0 < 3.0 < far


def test_split_attention(model: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU kernel may split long caches by the lengths that it is told."""
    monkeypatch.setenv("VLLM_CPU_ATTN_SPLIT_KV", "0")
    policy = kvkeep.policy("snapkv", budget=BUDGET, buffer=BUFFER, prefill="chunk")
    with engine(folder, SETTING) as llm:
        answers = ask(llm, prompts())
    assert [read(model, policy, answer)[0] for answer in answers] == [0] * 4
