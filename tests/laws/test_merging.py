"""Merged values in real caches: they reach the attention, move with their entries, and survive files."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import kvkeep
import kvkeep.testing
from kvkeep.cache.dense import DenseStore
from kvkeep.cache.paged import PagedStore
from kvkeep.cache.pages import PagePool
from kvkeep.core.decision import KeepDecision
from kvkeep.core.errors import CacheIntegrityError
from kvkeep.core.traits import Traits
from kvkeep.core.view import LayerView
from kvkeep.testing.models import left_padded, tiny_model, tokens
from kvkeep.testing.oracle import oracle_gap, replay
from kvkeep.testing.watching import WatchedCache, feed, pieces

TEXTS = [
    "snapkv + merge",
    "vase-attnv + cam(window=5)",
    "keydiff + adaptive-heads + merge",
    "snapkv + whole-model + cam",
]
LAWS = (
    "documented",
    "rebuilt-from-options",
    "merged-values-fit",
    "inputs-are-left-alone",
    "reads-only-what-it-declares",
    "oracle-llama",
    "oracle-qwen3",
    "short-prompts",
    "alone-as-in-a-batch",
    "nothing-to-evict-nothing-changed",
    "nothing-leaks",
)
CHECKS = {str(check): check for check in kvkeep.testing.checks() if str(check) in LAWS}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("text", TEXTS)
def test_conformance(text: str, check: str) -> None:
    """The first law reads here: a full cache, evicted entries masked, kept values replaced."""
    CHECKS[check](kvkeep.policy(text, budget=24, buffer=8))


@pytest.mark.parametrize("check", ["oracle-llama", "alone-as-in-a-batch"])
@pytest.mark.parametrize("text", TEXTS[:2])
def test_conformance_on_pages(text: str, check: str) -> None:
    """Equal heads on pages: the same values in other places."""
    CHECKS[check](kvkeep.policy(text, budget=24, buffer=8), store="paged")


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("prefill", ["defer", "after", "chunk"])
def test_the_law_holds_whatever_the_prefill_does(text: str, prefill: Any) -> None:
    """Evictions between chunks and before the first token merge, too."""
    base, *rest = text.split(" + ")
    policy = kvkeep.policy(" + ".join([f"{base}(prefill={prefill})", *rest]), budget=24, buffer=8)
    model = tiny_model("llama", dtype=torch.float64)
    chunk = 7 if prefill == "chunk" else None
    gap = oracle_gap(model, policy, prompts=(48, 3, 31), new=30, chunk=chunk, page_size=5)
    assert gap.largest < 1e-9
    assert gap.evictions > 6


@pytest.mark.parametrize("text", TEXTS)
def test_the_oracle_notices_a_value_that_was_not_replaced(text: str) -> None:
    """An oracle that is blind to values would agree with a cache that never merged."""
    model = tiny_model("llama", dtype=torch.float64)
    ids, mask = left_padded((40,))
    ids, mask = torch.cat([ids, tokens(1, 24)], 1), torch.ones(1, 64, dtype=torch.int64)
    lengths = [*pieces(40), *[1] * 24]
    cache = WatchedCache(model, kvkeep.policy(text, budget=24, buffer=8), page_size=5)
    ours = feed(model, cache, ids, mask, lengths)
    (*_, late, last) = sorted({each.since for each in cache.replaced})
    assert last == len(lengths)  # the last eviction has nobody left to attend to it
    for forgotten in ({late}, {each.since for each in cache.replaced}):
        known = [each for each in cache.replaced if each.since not in forgotten]
        theirs = replay(model, cache.seen, ids, mask, lengths, known)
        gap = max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))
        assert gap > 1e-6


def test_files_hold_merged_values(tmp_path: Path) -> None:
    """A cache that is read back must answer as it would have."""
    model = tiny_model("llama", dtype=torch.float64)
    policy = kvkeep.policy("vase-attnv + cam", budget=24, buffer=8)
    ids = tokens(2, 90)
    mask = torch.ones_like(ids)
    whole = feed(model, kvkeep.RetentionCache(model, policy), ids, mask, [40, *[1] * 50])
    cache = kvkeep.RetentionCache(model, policy)
    feed(model, cache, ids, mask, [40, *[1] * 30])
    cache.save(tmp_path / "cache.safetensors")
    again = kvkeep.RetentionCache.load(tmp_path / "cache.safetensors", model, policy)
    rest = feed(model, again, ids, mask, [1] * 20)
    assert torch.equal(torch.cat(rest, 1), torch.cat(whole[31:], 1))


@pytest.mark.parametrize("kind", ["dense", "paged"])
def test_stores_take_values_for_the_rows_that_are_named(kind: str) -> None:
    """Rows of other lengths, and what lies behind a row's entries, must be left alone."""
    keys, positions = torch.randn(3, 2, 9, 4), torch.arange(9).expand(3, -1)
    store: Any
    if kind == "dense":
        store = DenseStore(keys, keys, 12)
    else:
        pool = PagePool(keys, keys, 5, ())
        pool.grow(20)
        store = PagedStore(pool, 3, 2)
    store.append(keys, keys, positions, [9, 4, 7])
    before = store.padded(None, "values")["values"].clone()
    new = torch.randn(2, 2, 9, 4)
    store.set_values([2, 1], new)
    after = store.padded(None, "values")["values"]
    assert torch.equal(after[0], before[0])
    assert torch.equal(after[2, :, :7], new[0, :, :7])
    assert torch.equal(after[1, :, :4], new[1, :, :4])
    assert torch.equal(store.padded(None, "keys")["keys"][0], keys[0])
    assert torch.equal(after[1, :, 4:], before[1, :, 4:])


def test_values_of_the_wrong_kind_are_refused() -> None:
    """Written to the store they would be cast or broadcast without a word."""

    class Wrong(kvkeep.SnapKV):
        @property
        def traits(self) -> Traits:
            return dataclasses.replace(super().traits, merges=True)

        def merge(self, view: LayerView, decision: KeepDecision) -> torch.Tensor:
            return view.values[:, :, :1]

    model, ids = tiny_model("llama"), tokens(1, 60)
    cache = kvkeep.RetentionCache(model, Wrong(budget=24, buffer=8))
    with pytest.raises(CacheIntegrityError, match="merged the values of layer 0"):
        feed(model, cache, ids, torch.ones_like(ids), [40, *[1] * 20])


def test_merging_changes_the_answer() -> None:
    """A part that does nothing passes every law above."""
    model = tiny_model("llama", dtype=torch.float64)
    ids = tokens(1, 80)
    logits = []
    for text in ("snapkv", "snapkv + merge", "snapkv + cam"):
        cache = kvkeep.RetentionCache(model, kvkeep.policy(text, budget=24, buffer=8))
        logits.append(torch.cat(feed(model, cache, ids, torch.ones_like(ids), [40, *[1] * 40]), 1))
    before = slice(0, 40)
    assert torch.equal(logits[0][:, before], logits[1][:, before])
    assert torch.equal(logits[0][:, before], logits[2][:, before])
    assert len({float(each[0, -1, 0]) for each in logits}) == 3
