"""Measured cache of each sequence: the number on the x axis of every figure."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvkeep
from kvkeep.core.errors import CacheError
from kvkeep.engine.cache_state import CacheState
from kvkeep.engine.generation import cache_argument
from tests.evaluation.models import tiny_model

pytestmark = pytest.mark.usefixtures("either_store")


def saw_tooth(prompt: int, steps: int, budget: int, buffer: int) -> list[int]:
    """Entries held during each decode step, written down from the rule alone."""
    held, now = [], prompt
    for _ in range(steps):
        now += 1
        held.append(now)
        if now > budget and (now - budget) % buffer == 0:
            now = budget
    return held


def run(cache: kvkeep.RetentionCache, model: torch.nn.Module, mask: torch.Tensor, steps: int) -> None:
    ids = torch.randint(2, 32, mask.shape, generator=torch.Generator().manual_seed(0))
    for step in range(steps + 1):
        inputs = ids if step == 0 else ids[:, :1]
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -inputs.shape[1] :]
        with torch.no_grad():
            model(
                input_ids=inputs,
                attention_mask=mask,
                position_ids=positions,
                use_cache=True,
                **{cache_argument(model): cache},
            )
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=-1)


def test_each_sequence_has_the_mean_of_its_own_saw_tooth() -> None:
    """Arms that are matched on a wrong mean cache are not matched at all."""
    model = tiny_model()
    policy = kvkeep.RandomEviction(budget=12, buffer=4)
    cache = kvkeep.RetentionCache(model, policy, trace_rows=True, sequence_ids=[7, 9])
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[1, :6] = 0
    run(cache, model, mask, steps=30)
    for trace, name, prompt in zip(cache.row_traces, (7, 9), (10, 4), strict=True):
        expected = saw_tooth(prompt, 30, 12, 4)
        assert trace.sequence_id == name
        assert trace.steps == 30
        assert trace.mean_entries == sum(expected) / 30
        assert trace.peak_entries == max(expected) == 16
        assert trace.prefill_entries == prompt
        assert trace.evictions == expected.count(16)


def test_steady_state_is_budget_plus_half_a_buffer() -> None:
    """The closed form that budgets are planned with: C + (B + 1) / 2."""
    model = tiny_model()
    cache = kvkeep.RetentionCache(model, kvkeep.RandomEviction(budget=12, buffer=4), trace_rows=True)
    run(cache, model, torch.ones(1, 12, dtype=torch.long), steps=40)
    assert cache.row_traces[0].mean_entries == 12 + 2.5


def test_a_prompt_that_is_evicted_at_once_counts_what_is_left() -> None:
    """Matching at the end of the prompt must see the eviction that ends the prompt."""
    model = tiny_model()
    policy = kvkeep.RandomEviction(budget=8, buffer=4, prefill="after")
    cache = kvkeep.RetentionCache(model, policy, trace_rows=True)
    run(cache, model, torch.ones(1, 20, dtype=torch.long), steps=1)
    assert cache.row_traces[0].prefill_entries == 8
    assert cache.row_traces[0].mean_entries == 9


def test_rows_are_followed_when_the_batch_shrinks() -> None:
    """Finished sequences leave the batch; the others must keep their own sums."""
    model = tiny_model()
    cache = kvkeep.RetentionCache(model, kvkeep.Full(), trace_rows=True, sequence_ids=[3, 4])
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[0, :2] = 0
    run(cache, model, mask, steps=3)
    before = cache.row_traces
    cache.batch_select_indices(torch.tensor([1]))
    assert cache.row_traces == before[1:]
    assert before[0].prefill_entries == 4


def test_without_being_asked_nothing_is_measured_per_row() -> None:
    """Reading numbers that were never taken would print zeros as a result."""
    cache = kvkeep.RetentionCache(tiny_model(), kvkeep.Full())
    with pytest.raises(CacheError, match="trace_rows=True"):
        _ = cache.row_traces


def test_reading_a_prompt_of_one_token_is_no_decode_step() -> None:
    """The same prompt would have another mean alone than in a batch with longer ones."""
    model = tiny_model()
    cache = kvkeep.RetentionCache(model, kvkeep.Full(), trace_rows=True)
    run(cache, model, torch.ones(1, 1, dtype=torch.long), steps=2)
    assert cache.row_traces[0].steps == cache.trace.steps == 2
    assert cache.row_traces[0].prefill_entries == 1
    assert cache.row_traces[0].mean_entries == 2.5


def bytes_per_head(store: Any, row: int, head: int) -> int:
    """Bytes of the entries of one head, one by one: two a channel in full precision, codes as they are."""
    total = 0
    for part, a_channel in ((store.full, 2), (store.low, 1)):
        entries = part.padded([row])
        for slot in range(entries["keys"].shape[2]):
            if part.valid(entries["keys"].shape[2], [row])[0, head, slot]:
                channels = [len(entries[name][0, head, slot].tolist()) for name in ("keys", "values")]
                total += a_channel * sum(channels)
    return total


def test_memory_is_the_bytes_of_the_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a sealed study matches on: one entry in few bits miscounted, and an arm has more than another."""
    model = tiny_model()
    precision = kvkeep.Precision(bits=4, protect="policy", group=8, sinks=1, recent=2, reserve=2)
    policy = kvkeep.SnapKV(budget=12, buffer=4, window=4)
    cache = kvkeep.RetentionCache(model, policy, trace_rows=True, precision=precision)
    seen: list[list[float]] = []
    after = CacheState.after_attention

    def watched(self: Any, layer: Any, step: Any) -> None:
        store = layer.stored
        of_full = 2 * 2 * 8  # key and value of 8 channels, two bytes each
        seen.append(
            [
                sum(bytes_per_head(store, row, head) for head in range(store.heads)) / store.heads / of_full
                for row in range(store.batch)
            ]
        )
        after(self, layer, step)

    monkeypatch.setattr(CacheState, "after_attention", watched)
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[1, :6] = 0
    run(cache, model, mask, steps=30)
    by_step = torch.tensor(seen).view(31, 2, 2).mean(1)  # steps, layers, rows
    for row, trace in enumerate(cache.row_traces):
        # What the prompt left, rounded where it was: the first step without its own token.
        assert trace.prefill_memory == pytest.approx(float(by_step[1, row]) - 1)
        assert trace.mean_memory == pytest.approx(float(by_step[1:, row].mean()))
        assert trace.peak_memory == pytest.approx(float(by_step[1:, row].max()))
        assert trace.mean_memory < 0.9 * trace.mean_entries


def test_without_few_bits_memory_is_entries() -> None:
    """Every older number stays what it was."""
    model = tiny_model()
    cache = kvkeep.RetentionCache(model, kvkeep.RandomEviction(budget=12, buffer=4), trace_rows=True)
    run(cache, model, torch.ones(2, 10, dtype=torch.long), steps=20)
    for trace in cache.row_traces:
        assert trace.mean_memory == trace.mean_entries
        assert trace.peak_memory == trace.peak_entries
        assert trace.prefill_memory == trace.prefill_entries
