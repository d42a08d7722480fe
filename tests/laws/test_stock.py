"""A prepared model without a kvkeep cache is the stock model, and restoring puts everything back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache

import kvkeep
from kvkeep.core.errors import CacheError
from kvkeep.engine.attention import attention_name
from kvkeep.testing.models import FAMILIES, left_padded, tiny_model, tokens
from kvkeep.testing.watching import feed


def implementations(config: Any) -> list[tuple[str, str]]:
    """Attention of the model and of each of its parts (text decoder, vision tower)."""
    parts = [(name, getattr(config, name)) for name in config.sub_configs]
    return [("", config._attn_implementation)] + [(name, part._attn_implementation) for name, part in parts]


def outputs(model: PreTrainedModel) -> list[Tensor]:
    """Logits without a cache, from a growing cache, and a generation, all with a padded batch."""
    ids, mask = left_padded((4, 16))
    longer = torch.cat([ids, tokens(2, 6, seed=1)], 1)
    longer_mask = torch.cat([mask, torch.ones(2, 6, dtype=torch.int64)], 1)
    with torch.no_grad():
        plain = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    fed = feed(model, cache, longer, longer_mask, [12, 4, 1, 1, 4])
    written = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
    return [plain, *fed, written]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", [None, "eager"])
def test_a_prepared_model_gives_bit_identical_results(family: str, attention: str | None) -> None:
    """Preparing a model for one generation must not change the next one, which does without kvkeep."""
    model = tiny_model(family, attention=attention)
    stock = outputs(model)
    kvkeep.prepare(model)
    assert attention_name(model).startswith("kvkeep_")
    assert all(torch.equal(a, b) for a, b in zip(stock, outputs(model), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attention", [None, "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_to_evict_nothing_changed(family: str, attention: str | None, dtype: torch.dtype) -> None:
    """With room for everything the logits are DynamicCache's, bit for bit on the same back end."""
    model = tiny_model(family, attention=attention, dtype=dtype)
    ids, mask = tokens(2, 40), torch.ones(2, 40, dtype=torch.int64)
    lengths = [20, *[1] * 12, 8]
    stock = DynamicCache(config=model.config.get_text_config(decoder=True))
    expected = feed(model, stock, ids, mask, lengths)
    ours = feed(
        model, kvkeep.RetentionCache(model, kvkeep.VaSEAttnV(budget=64, buffer=8)), ids, mask, lengths
    )
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_restore_gives_the_old_names_back(family: str) -> None:
    """Whatever reads the config afterwards (saving, compiling, another library) must find what it knows."""
    model = tiny_model(family)
    before = implementations(model.config)
    kvkeep.prepare(model)
    kvkeep.prepare(model)
    assert implementations(model.config) != before
    kvkeep.restore(model)
    assert implementations(model.config) == before
    kvkeep.restore(model)
    assert implementations(model.config) == before


def test_the_vision_tower_keeps_its_attention() -> None:
    """Images are encoded without a cache: their attention is none of kvkeep's business."""
    model = tiny_model("qwen2.5-vl")
    kvkeep.prepare(model)
    names = dict(implementations(model.config))
    assert names["text_config"] == "kvkeep_sdpa"
    assert names["vision_config"] == "sdpa"


def test_a_static_cache_still_works_in_a_prepared_model() -> None:
    """The stock fast path takes a mask of its own shape from the mask function."""
    model = tiny_model("llama")
    ids, mask = left_padded((4, 16))
    mask = torch.cat([mask, torch.ones(2, 3, dtype=torch.int64)], 1)
    ids = torch.cat([ids, tokens(2, 3, seed=1)], 1)

    def run() -> list[Tensor]:
        return feed(model, StaticCache(config=model.config, max_cache_len=32), ids, mask, [16, 1, 1, 1])

    stock = run()
    kvkeep.prepare(model)
    assert all(torch.equal(a, b) for a, b in zip(stock, run(), strict=True))


def test_a_model_can_be_copied_while_prepared() -> None:
    """Trainers and servers copy models; a copy must be restorable by itself."""
    model = tiny_model("llama")
    kvkeep.prepare(model)
    twin = copy.deepcopy(model)
    kvkeep.restore(twin)
    assert (attention_name(twin), attention_name(model)) == ("sdpa", "kvkeep_sdpa")


def test_the_model_is_as_before_after_a_generation_and_an_error() -> None:
    """No hooks, no patched methods, no buffers: nothing in the model remembers the cache."""
    model = tiny_model("llama")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    kvkeep.RetentionCache(model, kvkeep.VaSEAttnV(budget=24, buffer=8))
    _, cache = kvkeep.generate(
        model, kvkeep.VaSEAttnV(budget=24, buffer=8), {"input_ids": tokens(1, 30)}, max_new_tokens=20
    )
    with pytest.raises(CacheError):
        feed(model, cache, tokens(2, 60), torch.ones(2, 60, dtype=torch.int64), [1])
    kvkeep.restore(model)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any("forward" in vars(module) for module in model.modules())
