"""A cache on disk and back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Gemma3TextConfig, Qwen3Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

import kvkeep
from kvkeep.core.errors import DataFileError

pytestmark = pytest.mark.usefixtures("either_store")

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def build(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config = (
        Qwen3Config(**SHAPE, max_position_embeddings=256)
        if kind == "qwen3"
        else Gemma3TextConfig(**SHAPE, sliding_window=8, layer_types=["sliding_attention", "full_attention"])
    )
    return AutoModelForCausalLM.from_config(config).eval()


def feed(model: torch.nn.Module, cache: kvkeep.RetentionCache, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat(
            [model(input_ids=token[:, None], past_key_values=cache).logits for token in tokens.T], 1
        )


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
@pytest.mark.parametrize("name", ["vase-attnv", "vase-dkv"])
def test_generation_goes_on_after_loading(kind: str, name: str, tmp_path: Path) -> None:
    """A conversation resumed in a new process would otherwise evict or answer differently."""
    model = build(kind)
    policy = kvkeep.policy(name, budget=16, buffer=4)
    tokens = torch.randint(0, 61, (2, 60))
    whole = kvkeep.RetentionCache(model, policy, seed=7, sequence_ids=[5, 9])
    feed(model, whole, tokens[:, :40])
    whole.save(tmp_path / "cache.safetensors")
    expected = feed(model, whole, tokens[:, 40:])

    resumed = kvkeep.RetentionCache.load(tmp_path / "cache.safetensors", model, policy)
    assert torch.equal(feed(model, resumed, tokens[:, 40:]), expected)
    assert resumed.trace == whole.trace
    resumed.check_integrity()


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
def test_wrong_and_damaged_files_are_refused(tmp_path: Path) -> None:
    """Loading entries under another policy would silently mix two methods."""
    model, policy = build("qwen3"), kvkeep.VaSEDKV(budget=16, buffer=4)
    cache = kvkeep.RetentionCache(model, policy)
    feed(model, cache, torch.randint(0, 61, (1, 20)))
    path = tmp_path / "cache.safetensors"
    cache.save(path)
    with pytest.raises(DataFileError, match="policy 'vase-dkv' instead of 'vase-attnv'"):
        kvkeep.RetentionCache.load(path, model, kvkeep.VaSEAttnV(budget=16, buffer=4))
    with pytest.raises(DataFileError, match="no cache file at"):
        kvkeep.RetentionCache.load(tmp_path / "none", model, policy)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataFileError, match="damaged or truncated"):
        kvkeep.RetentionCache.load(path, model, policy)
    with pytest.raises(DataFileError, match="does not exist"):
        cache.save(tmp_path / "no" / "cache")
    assert [each.name for each in tmp_path.iterdir()] == ["cache.safetensors"]
