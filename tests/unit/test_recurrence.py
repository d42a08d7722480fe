"""When entries are attended to again: recorded exactly, and what LazyEviction and RaaS make of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import kvkeep
from kvkeep.core.errors import CacheError, ConfigError
from kvkeep.core.policy import Policy
from kvkeep.core.view import LayerView
from kvkeep.scoring.recurrence import recurrence
from kvkeep.testing.models import left_padded, tiny_model, tokens
from kvkeep.testing.views import decide, kept, make_view
from kvkeep.testing.watching import WatchedCache, feed
from tests.reference import recurrence as reference
from tests.reference.heads import keep_top

THRESHOLD = 0.02
POLICIES: tuple[Policy, ...] = (
    kvkeep.LazyEviction(budget=24, buffer=8, threshold=THRESHOLD),
    kvkeep.RaaS(budget=24, buffer=8, page=4, threshold=THRESHOLD, protect_prompt=False),
)


def test_times_and_pauses_step_by_step() -> None:
    """In blocks of queries or all at once: what a loop over steps finds."""
    source = torch.Generator().manual_seed(0)
    attended = torch.rand(2, 3, 12, 7, generator=source) < 0.3
    at = torch.stack([torch.arange(20, 32), torch.arange(9, 21)])
    positions = torch.tensor([5, 11, 12, 15, 16, 18, 19])
    first = positions.float().clamp(max=8).expand(2, 3, 7)
    for cuts in ([12], [5, 7], [1] * 12):
        last, pause, start = first, torch.zeros(2, 3, 7), 0
        for size in cuts:
            part = slice(start, start + size)
            last, pause = recurrence(attended[:, :, part], at[:, part], last, pause)
            start += size
        for row in range(2):
            for head in range(3):
                shares = [[step] for step in attended[row, head].float().tolist()]
                begin = [int(each) for each in first[row, head].tolist()]
                expected = reference.times(shares, at[row].tolist(), begin, 0.5)
                assert (last[row, head].tolist(), pause[row, head].tolist()) == expected


@pytest.mark.parametrize("store", ["dense", "paged"])
@pytest.mark.parametrize("chunk", [None, 9])
def test_a_cache_records_them_exactly(store: Any, chunk: int | None) -> None:
    """Over prompts, chunks, padding and evictions: the attention that the model really paid."""
    model = tiny_model("llama", dtype=torch.float64, attention="eager")
    policy = POLICIES[0]
    lengths, new = (30, 11), 26
    ids, mask = left_padded(lengths)
    ids, mask = torch.cat([ids, tokens(2, new, seed=1)], 1), torch.cat([mask, mask.new_ones(2, new)], 1)
    cache = WatchedCache(model, policy, store=store, page_size=5)
    shares = _told(model, cache)
    prompt = [30] if chunk is None else [9, 9, 9, 3]
    feed(model, cache, ids, mask, prompt + [1] * new)
    assert len(cache.noted) > 4
    checked = 0
    for eviction in cache.noted:
        (view,) = eviction.views
        for row, seen in enumerate(view.seq_lens.tolist()):
            name = _row_of(seen, lengths, cache, view, row)
            for head in range(view.shape[1]):
                size = int(view.valid[row, head].sum())
                where = view.positions[row, head, :size].tolist()
                rows = [shares[view.layer][name][head][t] for t in range(seen)]
                found = [[[group.get(p, 0.0) for p in where] for group in rows[t]] for t in range(seen)]
                last, pause = reference.times(found, list(range(seen)), where, THRESHOLD)
                assert view.last_attended[row, head, :size].tolist() == last
                assert view.longest_pause[row, head, :size].tolist() == pause
                checked += size
    assert checked > 500


def _told(model: Any, cache: WatchedCache) -> Any:
    """Attention of every query: ``[layer][row][kv_head][query][head of the group] -> {position: share}``."""
    shares: dict[int, list[list[list[list[dict[int, float]]]]]] = {}
    record = WatchedCache.after_attention

    def after(layer: Any, step: Any) -> None:
        store = layer.stored
        keys = store.padded(None, "keys", "positions")
        valid, query = store.valid(store.longest), after.query  # type: ignore[attr-defined]
        group = query.shape[1] // store.heads
        rows = shares.setdefault(layer.index, [[[] for _ in range(store.heads)] for _ in range(store.batch)])
        times = step.positions(query.device)
        for row in range(store.batch):
            for column, time in enumerate(times[row].tolist()):
                if time < 0:
                    continue
                for head in range(store.heads):
                    visible = valid[row, head] & (keys["positions"][row, head] <= time)
                    where = keys["positions"][row, head][visible].tolist()
                    told = []
                    for member in range(group):
                        q = query[row, head * group + member, column]
                        logits = keys["keys"][row, head][visible] @ q / math.sqrt(q.shape[-1])
                        told.append(dict(zip(where, logits.softmax(-1).tolist(), strict=True)))
                    rows[row][head].append(told)
        record(cache, layer, step)

    cache.after_attention = after  # type: ignore[method-assign]
    for layer in cache.managed_layers:
        note = layer.recorder.record

        def noting(query: Tensor, *args: Any, _note: Any = note, **options: Any) -> None:
            after.query = query  # type: ignore[attr-defined]
            _note(query, *args, **options)

        layer.recorder.record = noting  # type: ignore[method-assign]
    return shares


def _row_of(seen: int, lengths: tuple[int, ...], cache: WatchedCache, view: LayerView, row: int) -> int:
    """Which sequence a row of a view is: the prompt lengths tell."""
    return lengths.index(int(view.prompt_lens[row]))


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_what_stays(policy: Policy) -> None:
    """The newest, and the best scores of the reference."""
    view = make_view(policy, lengths=(40, 33), kv_heads=2, group=2, evicted=7)
    found = kept(decide(policy, view))
    for row in range(2):
        for head in range(2):
            size = int(view.valid[row, head].sum())
            last = view.last_attended[row, head, :size].tolist()
            positions = view.positions[row, head, :size].tolist()
            if isinstance(policy, kvkeep.RaaS):
                score = reference.page_score(last, positions, policy.page)
            else:
                pause = view.longest_pause[row, head, :size].tolist()
                score = reference.lazy_score(last, pause, int(view.seq_lens[row]) - 1)
            expected = keep_top(score, 24, list(range(size - 8, size)), range(size - 8))
            assert found[row][head] == expected


def test_patience_goes_with_the_pauses() -> None:
    """An entry that has come back from long pauses outlives one that came back from short ones."""
    policy = kvkeep.LazyEviction(budget=4, buffer=2)
    last = torch.tensor([[[60.0, 60.0, 60.0, 98.0, 99.0]]])
    pause = torch.tensor([[[50.0, 3.0, 0.0, 0.0, 0.0]]])
    view = make_view(
        policy, keys=torch.randn(1, 1, 5, 4), seq_lens=[100], last_attended=last, longest_pause=pause
    )
    long, short, never = policy.score(view)[0, 0, :3].tolist()
    assert long > short > never == 0.0


def test_no_crop_past_what_was_worked_out() -> None:
    """A pause cannot be undone; nothing may have changed when that is said."""
    model = tiny_model("llama", dtype=torch.float64)
    cache = kvkeep.RetentionCache(model, POLICIES[0])
    ids = tokens(1, 40)
    feed(model, cache, ids, torch.ones_like(ids), [12, 1, 1])
    with pytest.raises(CacheError, match="cannot be taken back"):
        cache.crop(-5)
    assert cache.trace.tokens == (14,)
    cache.crop(-2)
    assert cache.trace.tokens == (12,)


@pytest.mark.parametrize("kind", [kvkeep.LazyEviction, kvkeep.RaaS])
def test_thresholds(kind: Any) -> None:
    """A share of attention."""
    for threshold in (0.0, 1.0, 2.0):
        with pytest.raises(ConfigError, match="outside"):
            kind(budget=400, threshold=threshold)
    with pytest.raises(ConfigError, match="page 0 is below 1"):
        kvkeep.RaaS(budget=400, page=0)
