"""Five thousand tokens of one sequence on pages: memory stands still, and the books stay in order."""

from __future__ import annotations

import pytest
import torch

import kvkeep
from kvkeep.engine.generation import cache_argument
from kvkeep.testing.models import tiny_model, tokens


def test_five_thousand_tokens() -> None:
    """A page lost at every eviction, or a length that drifts, would show after some hundred rounds."""
    model = tiny_model()
    cache = kvkeep.RetentionCache(
        model, kvkeep.policy("snapkv + whole-model", budget=40, buffer=16), page_size=4
    )
    token, keyword, seen = tokens(1, 50), cache_argument(model), set()
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        for step in range(5000):
            logits = model(input_ids=token, **{keyword: cache}).logits[:, -1]
            token = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            if step >= 100:
                seen.add(cache.trace.kv_bytes)
            if step % 500 == 99:
                assert bool(logits.isfinite().all())
                cache.check_integrity()
    assert len(seen) == 1, "the pool changed its size while decoding inside the budget"
    trace = cache.trace
    assert trace.evictions == pytest.approx(5000 / 16, abs=2)
    assert 40 <= trace.mean_entries <= 40 + 16
    lengths = [len(head) for layer in cache.spec.managed for head in cache.kept_positions(layer)[0]]
    assert len(set(lengths)) > 1, "the heads are all alike: nothing was ragged"
