"""Options of the wrong kind, and combinations that promise what they do not keep."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import kvkeep
from kvkeep.core.errors import ConfigError, DataFileError
from kvkeep.core.files import read_tensors, write_tensors
from kvkeep.engine.generation import generate
from kvkeep.testing.models import tiny_model


@pytest.mark.parametrize(
    ("text", "option"),
    [
        ("vase-attnv(reserve=abc)", "reserve"),
        ("vase-attnv(temperature=1e999)", "temperature"),
        ("vase-attnv(sample=maybe)", "sample"),
        ("vase-attnv(sinks=true)", "sinks"),
        ("snapkv(window=2.5)", "window"),
        ("r-kv(lam=abc)", "lam"),
        ("r-kv(threshold=none)", "threshold"),
        ("vase-dkv(rank=1.5)", "rank"),
        ("random + reserve(slots=abc)", "slots"),
        ("random + sample(temperature=abc)", "temperature"),
    ],
)
def test_a_value_of_the_wrong_kind_is_named(text: str, option: str) -> None:
    """A typing slip on the command line would crash minutes later, or silently switch something on."""
    with pytest.raises(ConfigError, match=f"{option} .* is not "):
        kvkeep.policy(text, budget=512)


def test_constructors_check_kinds_too() -> None:
    """Python users make the same slips."""
    with pytest.raises(ConfigError, match="rank 'a' is not a whole number"):
        kvkeep.VaSEDKV(budget=512, rank="a")
    assert kvkeep.VaSEAttnV(budget=512, temperature=2).temperature == 2


def test_choosing_from_everything_is_refused() -> None:
    """`full + sample` would report a budget and keep everything."""
    with pytest.raises(ConfigError, match="keeps everything"):
        kvkeep.policy("full + sample", budget=64)
    assert not kvkeep.policy("full", budget=10).bounded


@pytest.mark.parametrize("chunk", [1, 13, 39])
def test_the_last_prompt_token_is_kept_with_the_prompt(chunk: int) -> None:
    """A last chunk of one token looked like the first generated one, and was evicted."""
    model = tiny_model("llama")
    policy = kvkeep.policy("random", budget=kvkeep.Budget(entries=16, prompt="kept"), buffer=8)
    inputs = {"input_ids": torch.randint(3, 90, (1, 40))}
    _, cache = generate(model, policy, inputs, max_new_tokens=40, prefill_chunk_size=chunk, do_sample=False)
    assert cache.rows.prompt_lens == [40]
    assert set(range(40)) <= set(cache.kept_positions(0)[0][0].tolist())


def test_a_flipped_byte_is_noticed(tmp_path: Path) -> None:
    """Damage that leaves the length alone would be used as if it were data."""
    path = tmp_path / "numbers.safetensors"
    write_tensors(path, "thing", {"a": torch.arange(64.0)}, {})
    read_tensors(path, "thing")
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 0xFF
    path.write_bytes(bytes(raw))
    with pytest.raises(DataFileError, match="checksum"):
        read_tensors(path, "thing")


def test_a_cache_of_another_type_of_number_is_refused(tmp_path: Path) -> None:
    """Loading float32 entries into a bfloat16 model failed later, inside attention."""
    policy = kvkeep.VaSEDKV(budget=16, buffer=4)
    inputs = {"input_ids": torch.randint(3, 90, (1, 20))}
    _, cache = generate(tiny_model("llama"), policy, inputs, max_new_tokens=4, do_sample=False)
    cache.save(tmp_path / "cache")
    with pytest.raises(DataFileError, match="float32"):
        kvkeep.RetentionCache.load(tmp_path / "cache", tiny_model("llama", dtype=torch.bfloat16), policy)
