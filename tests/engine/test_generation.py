"""kvkeep.generate: the cache built, named and passed for the caller."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvkeep
from kvkeep.core.errors import ConfigError
from kvkeep.engine.generation import cache_argument


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def prompt(tokens: int, rows: int = 1) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 64, (rows, tokens), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def test_the_cache_is_passed_under_the_name_that_transformers_knows(model: LlamaForCausalLM) -> None:
    """Under the wrong name the cache is ignored, or a deprecation warning fails the call."""
    cache = kvkeep.RetentionCache(model, kvkeep.Full())
    model.generate(**prompt(5), max_new_tokens=3, **{cache_argument(model): cache})
    assert cache.trace.tokens == (7,)  # the last token written is not fed back


def test_a_ratio_refers_to_prompt_and_new_tokens(model: LlamaForCausalLM) -> None:
    """A user who asks for half of the memory gets half of prompt plus answer, without counting."""
    policy = kvkeep.VaSEDKV(budget=kvkeep.Budget.from_keep_ratio(0.5), buffer=4, sinks=1)
    output, cache = kvkeep.generate(model, policy, prompt(40), max_new_tokens=20)
    assert output.shape == (1, 60)
    assert cache.policy.amount.count == 30
    assert cache.trace.evictions > 0


def test_bytes_are_shared_by_all_beams(model: LlamaForCausalLM) -> None:
    """Every beam has its own entries; counting one sequence would hold twice the bytes asked for."""
    policy = kvkeep.VaSEDKV(budget=kvkeep.Budget.from_bytes("32KiB"), buffer=4, sinks=1)
    _, one = kvkeep.generate(model, policy, prompt(40), max_new_tokens=20)
    _, two = kvkeep.generate(model, policy, prompt(40), max_new_tokens=20, num_beams=2)
    assert two.policy.amount.count == (one.policy.amount.count + 4) // 2 - 4
    assert two.trace.kv_bytes <= 32 * 1024


@pytest.mark.parametrize(
    ("tokens", "problem"),
    [(0, "the prompt is empty"), (128, "the prompt has 128 tokens, but the model has 128 positions")],
)
def test_impossible_prompts_are_refused(model: LlamaForCausalLM, tokens: int, problem: str) -> None:
    """Without the check transformers fails deep inside, or answers from positions it never learned."""
    with pytest.raises(ConfigError, match=problem):
        kvkeep.generate(model, kvkeep.Full(), prompt(tokens), max_new_tokens=1)


def test_the_prompt_at_fault_is_named(model: LlamaForCausalLM) -> None:
    """In a file of a hundred prompts, "a prompt is empty" does not help."""
    inputs = prompt(6, rows=2)
    inputs["attention_mask"][1] = 0
    with pytest.raises(ConfigError, match="prompt 2 of 2 is empty"):
        kvkeep.generate(model, kvkeep.Full(), inputs, max_new_tokens=1)


def test_public_names_are_listed_once_and_lead_somewhere() -> None:
    """A name in __all__ that cannot be imported breaks `from kvkeep import *` and the docs."""
    assert sorted(kvkeep._HOMES) == sorted(kvkeep.__all__)
    for name in kvkeep.__all__:
        assert getattr(kvkeep, name).__module__ == kvkeep._HOMES[name]


def test_importing_kvkeep_does_not_import_torch() -> None:
    """`kvkeep --help` would take ten seconds."""
    code = "import kvkeep, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
