"""Selectors in real caches: what is read is exact, what is not read is not seen, and both are counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import kvkeep
import kvkeep.testing
from kvkeep.core.errors import ConfigError, UnsupportedError
from kvkeep.core.selector import Selector
from kvkeep.engine.sparse_layer import SparseLayer
from kvkeep.testing.models import left_padded, tiny_model, tokens
from kvkeep.testing.oracle import oracle_gap
from kvkeep.testing.watching import WatchedCache, feed, pieces

PROMPTS, NEW = (40, 2, 13), 40
QUEST = kvkeep.Quest(token_budget=12, page=4, dense_layers=0)


def inputs(prompts: tuple[int, ...] = PROMPTS, new: int = NEW) -> tuple[Tensor, Tensor]:
    """Random prompts, padded on the left, and random tokens after them."""
    ids, mask = left_padded(prompts)
    more = tokens(len(prompts), new, seed=1)
    return torch.cat([ids, more], dim=1), torch.cat([mask, torch.ones_like(more)], dim=1)


def run(
    model: PreTrainedModel, policy: Selector, *, chunk: int | None = None, **options: Any
) -> WatchedCache:
    """Feed the inputs."""
    ids, mask = inputs()
    cache = WatchedCache(model, policy, **options)
    feed(model, cache, ids, mask, pieces(max(PROMPTS), chunk) + [1] * NEW)
    return cache


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """Tiny, in float64."""
    return tiny_model("llama", dtype=torch.float64)


@pytest.mark.parametrize("check", kvkeep.testing.checks(), ids=str)
def test_conformance(check: kvkeep.testing.Check) -> None:
    """The public suite, with blocks small enough that most of a sequence is not read."""
    check(QUEST)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "phi3"])
@pytest.mark.parametrize("dense", [0, 1])
def test_oracle(family: str, dense: int) -> None:
    """Logits equal those of a full cache in which the entries not read are masked, step by step."""
    policy = kvkeep.Quest(token_budget=12, page=4, dense_layers=dense)
    gap = oracle_gap(tiny_model(family, dtype=torch.float64), policy, prompts=PROMPTS, new=NEW, chunk=9)
    assert gap.largest < 1e-9


def test_the_oracle_would_notice(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A law that holds whatever is read proves nothing."""
    told = SparseLayer.positions_read

    def wrong(layer: SparseLayer) -> list[list[Tensor]]:
        found = told(layer)
        return found if layer.decision is None else [[head[1:] for head in row] for row in found]

    monkeypatch.setattr(SparseLayer, "positions_read", wrong)
    assert oracle_gap(model, QUEST, prompts=PROMPTS, new=NEW).largest > 0.1


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_budget_of_everything_is_the_full_cache(attention: str) -> None:
    """Bit for bit, on the same back end."""
    model = tiny_model("llama", attention=attention)
    ids, mask = inputs((21, 21))
    policy = kvkeep.Quest(token_budget=64, page=4, dense_layers=0)
    lengths = [21, *[1] * 30, 10]
    ours = feed(model, kvkeep.RetentionCache(model, policy), ids, mask, lengths)
    kvkeep.restore(model)
    theirs = feed(model, DynamicCache(config=model.config), ids, mask, lengths)
    assert all(torch.equal(one, two) for one, two in zip(ours, theirs, strict=True))


def test_what_is_read_is_measured(model: PreTrainedModel) -> None:
    """Trace, rows and the positions themselves agree, step by step."""
    cache = run(model, QUEST, trace_rows=True)
    steps = cache.seen[1:]
    kv_heads, group = cache.spec.kv_heads, cache.spec.heads // cache.spec.kv_heads
    distinct = np.zeros((len(steps), 2, len(PROMPTS), kv_heads))
    single = np.zeros_like(distinct)
    for step, layers in enumerate(steps):
        for layer, rows in layers.items():
            for row, heads in enumerate(rows):
                for head in range(kv_heads):
                    each = len(heads) // kv_heads  # one per KV head where all was read
                    own = [set(one.tolist()) for one in heads[head * each : (head + 1) * each]]
                    distinct[step, layer, row, head] = len(set().union(*own))
                    single[step, layer, row, head] = np.mean([len(one) for one in own])
    assert group > 1
    trace = cache.trace
    assert trace.mean_read == pytest.approx(distinct.mean())
    assert trace.peak_read == distinct.max()
    assert trace.mean_read_by_query == pytest.approx(single.mean())
    assert trace.mean_read_by_query < trace.mean_read < 0.6 * trace.mean_entries
    for row, found in enumerate(cache.row_traces):
        assert found.mean_read == pytest.approx(distinct[:, :, row].mean())
        assert found.peak_read == pytest.approx(distinct[:, :, row].mean(axis=(1, 2)).max())
        assert found.mean_read_by_query == pytest.approx(single[:, :, row].mean())
        assert found.mean_entries == PROMPTS[row] + (NEW + 1) / 2
    assert "read: mean" in str(trace)


def test_a_policy_that_evicts_reads_all_it_stores(model: PreTrainedModel) -> None:
    """The two columns of a table are then the same number."""
    cache = WatchedCache(model, kvkeep.SnapKV(budget=24, buffer=8), trace_rows=True)
    ids, mask = inputs()
    feed(model, cache, ids, mask, [max(PROMPTS)] + [1] * NEW)
    for found in cache.row_traces:
        assert found.mean_read == found.mean_read_by_query == found.mean_entries
        assert found.peak_read == found.peak_entries
    assert cache.trace.mean_read >= cache.trace.mean_entries
    assert "read" not in str(cache.trace)


def test_memory_is_that_of_the_full_cache(model: PreTrainedModel) -> None:
    """A selector saves reading, not memory; its bounds are counted beside."""
    cache, full = run(model, QUEST), run(model, kvkeep.Full())  # type: ignore[arg-type]
    assert cache.trace.kv_bytes == full.trace.kv_bytes
    pages = -(-(max(PROMPTS) + NEW) // 4)
    entry = cache.spec.kv_heads * cache.spec.head_dim * 8
    more = cache.trace.metadata_bytes - full.trace.metadata_bytes
    assert 2 * len(PROMPTS) * 2 * pages * entry <= more <= 2 * len(PROMPTS) * 2 * (pages + 16) * entry


def test_rows_taken_back_beams_and_files(model: PreTrainedModel, tmp_path: Path) -> None:
    """After a crop, a choice of rows, and a trip to disk, the same pages are read as without."""
    ids, mask = inputs()
    lengths = [max(PROMPTS)] + [1] * 20
    straight = kvkeep.RetentionCache(model, QUEST)
    feed(model, straight, ids, mask, lengths)
    detour = kvkeep.RetentionCache(model, QUEST)
    wrong = torch.cat([ids[:, : sum(lengths)], tokens(3, 6, seed=9)], dim=1)
    feed(
        model,
        detour,
        wrong,
        torch.cat([mask[:, : sum(lengths)], mask.new_ones(3, 6)], 1),
        [*lengths, *[1] * 6],
    )
    detour.crop(-6)
    detour.reorder_cache(torch.tensor([2, 0, 1]))
    detour.save(tmp_path / "cache")
    loaded = kvkeep.RetentionCache.load(tmp_path / "cache", model, QUEST)
    assert loaded.trace.mean_read == detour.trace.mean_read
    order = [2, 0, 1]
    for cache in (detour, loaded):
        expected = feed(model, straight, ids, mask, [1])[0]
        found = feed(model, cache, ids[order], mask[order], [1])[0]
        torch.testing.assert_close(found, expected[order])
        straight.crop(-1)


def test_stores_and_engines_that_cannot(model: PreTrainedModel) -> None:
    """No silent full cache under the name of a selector."""
    with pytest.raises(ConfigError, match="reads blocks of the dense store"):
        kvkeep.RetentionCache(model, QUEST, store="paged")
    sinks = tiny_model("gpt-oss", dtype=torch.float64)
    ids, mask = inputs((30,))
    with pytest.raises(UnsupportedError, match="learned sinks"):
        feed(sinks, kvkeep.RetentionCache(sinks, QUEST), ids, mask, [30, 1])
