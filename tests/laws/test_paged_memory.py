"""What the page pool lays out: the peak is that of the dense store, and decoding does not move it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import kvkeep
from kvkeep.cache.pages import PagePool
from kvkeep.engine.fitting import StoreKind
from kvkeep.testing.models import tiny_model, tokens
from kvkeep.testing.watching import feed, pieces

SIZE = 8


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Pages before and after, each time that a pool is laid out anew."""
    noted: list[tuple[int, int]] = []
    stock = PagePool._replace

    def noting(self: PagePool, capacity: int, source: slice | torch.Tensor) -> None:
        noted.append((self.capacity, capacity))
        stock(self, capacity, source)

    monkeypatch.setattr(PagePool, "_replace", noting)
    return noted


def run(
    text: str, store: StoreKind, *, prompt: int, chunk: int | None = None, context: int | None = None
) -> kvkeep.Trace:
    """A prompt, and tokens after it until two evictions have happened."""
    settings = {} if text == "full" else {"budget": 64, "buffer": 8}
    policy = kvkeep.policy(text, **settings)
    model, ids = tiny_model(), tokens(1, prompt + 17)
    cache = kvkeep.RetentionCache(model, policy, store=store, page_size=SIZE, context=context)
    feed(model, cache, ids, torch.ones_like(ids), [*pieces(prompt, chunk), *[1] * 17])
    return cache.trace


def page_bytes() -> int:
    """A page of the tiny model: keys and values of one head, float32."""
    return SIZE * 2 * 16 * 4


@pytest.mark.parametrize("prefill", ["defer", "after"])
def test_a_long_prompt_is_laid_out_once(moves: list[tuple[int, int]], prefill: str) -> None:
    """Growing by a quarter for one token more than the prompt is gigabytes, just when memory is fullest."""
    trace = run(f"snapkv(prefill={prefill})", "paged", prompt=160)
    dense = run(f"snapkv(prefill={prefill})", "dense", prompt=160)
    assert len(moves) == 2  # laid out, and shrunk after the first eviction
    assert trace.peak_kv_bytes <= dense.peak_kv_bytes + page_bytes()  # the empty page


@pytest.mark.parametrize("text", ["snapkv(prefill=chunk)", "snapkv(prefill=chunk) + whole-model"])
def test_chunks_take_what_they_need(text: str) -> None:
    """Reading in chunks is how memory stays bounded: one chunk, in all layers if they decide together."""
    trace = run(text, "paged", prompt=160, chunk=16)
    heads, layers, chunk = 2, 2, 16 // SIZE
    ragged = "whole-model" in text
    steady = (64 + 8) // SIZE * heads * layers + ragged * heads * layers
    kept = -(-64 // SIZE) * heads * layers + ragged * heads * layers  # at most
    needed = kept + chunk * heads * layers if ragged else steady + chunk * heads
    assert trace.peak_kv_bytes <= (needed + 1) * page_bytes()


def test_a_known_length_is_laid_out_in_advance(moves: list[tuple[int, int]]) -> None:
    """`context` preallocates a cache without a bound, on pages as in one block."""
    run("full", "paged", prompt=20, context=40)
    assert moves == [(0, 40 // SIZE * 4)]


def test_a_saved_cache_comes_back_in_as_much_memory(tmp_path: Path) -> None:
    """One long head in a file must not make room for as many entries in every other head."""
    model, ids = tiny_model(), tokens(1, 180)
    policy = kvkeep.policy("key-norm + whole-model", budget=64, buffer=8)
    cache = kvkeep.RetentionCache(model, policy, page_size=1)
    feed(model, cache, ids, torch.ones_like(ids), [160, *[1] * 20])
    lens = [len(head) for layer in (0, 1) for head in cache.kept_positions(layer)[0]]
    assert max(lens) > 64 + 8 + 1  # as long in all four heads would be more than is ever laid out
    cache.save(tmp_path / "cache")
    loaded = kvkeep.RetentionCache.load(tmp_path / "cache", model, policy, page_size=1)
    assert loaded.trace.kv_bytes == cache.trace.kv_bytes


@pytest.mark.parametrize("text", ["snapkv", "snapkv + whole-model"])
def test_a_size_in_bytes_holds_the_pages(text: str) -> None:
    """Someone who gives a size means the memory that is taken, half-empty pages included."""
    model, ids = tiny_model(), tokens(2, 60)
    policy = kvkeep.policy(text, budget=kvkeep.Budget.from_bytes("96KiB"), buffer=8)
    cache = kvkeep.RetentionCache(model, policy, rows=2, store="paged", page_size=32)
    feed(model, cache, ids, torch.ones_like(ids), [20, *[1] * 40])
    assert 64 * 1024 < cache.trace.peak_kv_bytes <= 96 * 1024
