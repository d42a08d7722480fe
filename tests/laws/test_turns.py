"""Several turns on one cache, cropping, reordering rows, and forwards that fail half-way."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvkeep
from kvkeep.core.errors import CacheError, UnsupportedError
from kvkeep.core.policy import Policy
from kvkeep.testing.models import FAMILIES, PAD, left_padded, tiny_model, tokens
from kvkeep.testing.oracle import replay
from kvkeep.testing.watching import WatchedCache, feed

pytestmark = pytest.mark.usefixtures("either_store")

TIGHT = 1e-9
POLICIES: dict[str, Policy] = {
    "vase-attnv": kvkeep.VaSEAttnV(budget=24, buffer=8),
    "vase-dkv, chunk": kvkeep.VaSEDKV(budget=24, buffer=8, prefill="chunk"),
    "h2o": kvkeep.H2O(budget=24, buffer=8),
    "snapkv": kvkeep.SnapKV(budget=24, buffer=8),
}

CASES = [*((family, "vase-attnv") for family in FAMILIES), *(("llama", name) for name in POLICIES)]


def positions(cache: kvkeep.RetentionCache) -> list[list[list[list[int]]]]:
    return [
        [[head.tolist() for head in row] for row in cache.kept_positions(layer)]
        for layer in cache.spec.managed
    ]


def two_turns() -> tuple[Tensor, Tensor, list[int]]:
    """Ragged prompts, an answer, ragged second messages, an answer: padding stands in the middle."""
    ids, mask = left_padded((5, 30, 17))
    more, more_mask = left_padded((9, 3, 6), seed=2)
    ones = torch.ones(3, 20, dtype=torch.int64)
    ids = torch.cat([ids, tokens(3, 20, seed=1), more, tokens(3, 20, seed=3)], 1)
    return ids, torch.cat([mask, ones, more_mask, ones], 1), [30, *[1] * 20, 9, *[1] * 20]


@pytest.mark.parametrize(("family", "name"), CASES)
def test_a_second_turn_continues_on_what_is_left(family: str, name: str) -> None:
    """In a chat the second question would be read against wrong entries or wrong positions."""
    model, policy = tiny_model(family, dtype=torch.float64), POLICIES[name]
    ids, mask, lengths = two_turns()
    cache = WatchedCache(model, policy)
    ours = torch.cat(feed(model, cache, ids, mask, lengths), 1)
    kvkeep.restore(model)
    theirs = torch.cat(replay(model, cache.seen, ids, mask, lengths), 1)
    assert (ours - theirs)[mask.bool()].abs().max() < TIGHT
    assert cache.trace.tokens == tuple(mask.sum(-1).tolist())
    assert cache.trace.evictions >= 9


def test_tokens_that_were_stored_cannot_be_masked_later() -> None:
    """A row that ended early is filled up with padding; masking it in the second turn shifts positions."""
    model = tiny_model()
    cache = kvkeep.RetentionCache(model, POLICIES["vase-attnv"])
    ids, mask = tokens(2, 30), torch.ones(2, 30, dtype=torch.int64)
    feed(model, cache, ids[:, :20], mask[:, :20], [16, 1, 1, 1, 1])
    mask[1, 17:20] = 0
    with pytest.raises(UnsupportedError, match="row 1: 20 tokens were stored, and the mask now shows 17"):
        feed(model, cache, ids, mask, [10])


@pytest.mark.parametrize(("steps", "removed"), [(2, 3), (7, 3), (12, 1)])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_crop_forgets_as_if_the_tokens_had_never_come(policy: Policy, steps: int, removed: int) -> None:
    """Speculative decoding takes tokens back; what they leave behind would steer later evictions."""
    model = tiny_model(dtype=torch.float64)
    ids, mask = left_padded((9, 18))
    ids = torch.cat([ids, tokens(2, 34, seed=1)], 1)
    mask = torch.cat([mask, torch.ones(2, 34, dtype=torch.int64)], 1)
    straight = kvkeep.RetentionCache(model, policy)
    expected = feed(model, straight, ids, mask, [18, *[1] * 34])
    cache = kvkeep.RetentionCache(model, policy)
    feed(model, cache, ids, mask, [18, *[1] * steps])
    detour = torch.cat([ids[:, : 18 + steps], tokens(2, removed, seed=9)], 1)
    feed(model, cache, detour, mask[:, : 18 + steps + removed], [1] * removed)
    cache.crop(-removed)
    assert cache.get_seq_length() == 18 + steps
    logits = feed(model, cache, ids, mask, [1] * (34 - steps))
    assert (logits[-1] - expected[-1]).abs().max() < TIGHT
    assert positions(cache) == positions(straight)
    assert straight.trace.evictions >= 2
    for ours, theirs in zip(cache.managed_layers, straight.managed_layers, strict=True):
        length = int(theirs.stored.held.min())
        for name in theirs.stored.extras:
            sums = [each.stored.padded(None, f"extra.{name}") for each in (ours, theirs)]
            mine, other = (each[f"extra.{name}"][..., :length] for each in sums)
            torch.testing.assert_close(mine, other)


def test_crop_takes_a_length_as_well() -> None:
    """Older code says how much to keep, newer code how much to remove."""
    model = tiny_model("gemma3")
    cache = kvkeep.RetentionCache(model, POLICIES["vase-attnv"])
    feed(model, cache, tokens(1, 10), torch.ones(1, 10, dtype=torch.int64), [10])
    cache.crop(7)
    assert cache.get_seq_length() == 7
    assert [layer.get_seq_length() for layer in cache.layers] == [7, 7, 7]


def test_crop_past_an_eviction_is_refused_and_changes_nothing() -> None:
    """Entries that are gone cannot come back: going on would answer from a past with holes."""
    model = tiny_model()
    ids, mask = tokens(1, 60), torch.ones(1, 60, dtype=torch.int64)
    cache = kvkeep.RetentionCache(model, POLICIES["vase-attnv"])
    feed(model, cache, ids, mask, [20, *[1] * 15])
    assert cache.trace.evictions == 1
    before = positions(cache)
    with pytest.raises(CacheError, match=r"cannot crop 4 tokens: the last eviction happened after 32"):
        cache.crop(-4)
    assert positions(cache) == before
    cache.crop(-3)
    assert cache.get_seq_length() == 32
    feed(model, cache, ids, mask, [1] * 10)
    cache.check_integrity()


def test_a_sliding_layer_that_cannot_crop_leaves_the_cache_whole() -> None:
    """transformers raises for its own layers; ours must not be cropped by then."""
    model = tiny_model("gemma3")
    cache = kvkeep.RetentionCache(model, kvkeep.Full())
    feed(model, cache, tokens(1, 20), torch.ones(1, 20, dtype=torch.int64), [20])
    with pytest.raises(RuntimeError, match="past"):
        cache.crop(-2)
    assert cache.get_seq_length() == 20
    assert cache.trace.tokens == (20,)
    assert all(len(head) == 20 for head in cache.kept_positions(1)[0])


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_reordered_rows_carry_their_whole_past(family: str, policy: Policy) -> None:
    """Beam search moves rows at every step; each beam must keep what its own tokens would keep alone."""
    model = tiny_model(family, dtype=torch.float64)
    ids = tokens(1, 20).repeat(3, 1)
    cache = kvkeep.RetentionCache(model, policy, sequence_ids=[4, 4, 4])
    logits = feed(model, cache, ids, torch.ones_like(ids), [20])
    for step in range(30):
        new = tokens(3, 1, seed=step)
        ids = torch.cat([ids, new], 1)
        logits = feed(model, cache, ids, torch.ones_like(ids), [1])
        order = torch.tensor([[0, 1, 2], [1, 1, 0], [2, 0, 0]][step % 3])
        cache.reorder_cache(order)
        ids, last = ids[order], logits[-1][order]
    kept = positions(cache)
    for row in range(3):
        alone = kvkeep.RetentionCache(model, policy, sequence_ids=[4])
        mask = torch.ones_like(ids[:1])
        expected = feed(model, alone, ids[row : row + 1], mask, [20, *[1] * 30])
        assert (expected[-1][0] - last[row]).abs().max() < TIGHT
        assert [layer[row] for layer in kept] == [layer[0] for layer in positions(alone)]
    assert cache.trace.evictions >= 6


def test_a_forward_that_failed_half_way_cannot_be_continued(either_store: str) -> None:
    """Some layers hold the token and some do not: going on would be silently wrong."""

    class Failing(WatchedCache):
        armed = True

        def after_attention(self, layer: object, step: object) -> None:
            super().after_attention(layer, step)  # type: ignore[arg-type]
            if self.armed and len(self.seen) == 2:
                raise KeyboardInterrupt

    model = tiny_model()
    ids, mask = tokens(1, 20), torch.ones(1, 20, dtype=torch.int64)
    cache = Failing(model, POLICIES["vase-attnv"])
    with pytest.raises(KeyboardInterrupt):
        feed(model, cache, ids, mask, [10, 1])
    cache.armed = False
    with pytest.raises(CacheError, match=r"an earlier forward stopped half-way.*cache\.reset\(\)"):
        feed(model, cache, ids, mask, [1])
    cache.reset()
    again = feed(model, cache, ids, mask, [10, 1])
    kvkeep.restore(model)
    stock = feed(model, DynamicCache(config=model.config), ids, mask, [10, 1])
    if either_store == "dense":
        assert torch.equal(again[-1], stock[-1])
    torch.testing.assert_close(again[-1], stock[-1])  # pages are attended by a kernel of their own


def test_the_number_of_sequences_cannot_change() -> None:
    """A cache used for another batch would mix two conversations."""
    model = tiny_model()
    cache = kvkeep.RetentionCache(model, POLICIES["vase-attnv"])
    feed(model, cache, tokens(2, 5), torch.ones(2, 5, dtype=torch.int64), [5])
    with pytest.raises(CacheError, match=r"holds 2 sequences and was given 3.*cache\.reset"):
        feed(model, cache, tokens(3, 6), torch.ones(3, 6, dtype=torch.int64), [1])


def test_padding_is_never_stored() -> None:
    """A pad token in the cache would be attended to, kept, and counted."""
    model = tiny_model()
    ids, mask = left_padded((2, 9))
    cache = kvkeep.RetentionCache(model, kvkeep.Full())
    feed(model, cache, ids, mask, [9])
    assert ids[0, 0] == PAD
    assert [len(row[0]) for row in cache.kept_positions(0)] == [2, 9]
    assert cache.trace.tokens == (2, 9)


@pytest.mark.parametrize("index", [[], [0, 2], [-1]])
def test_rows_that_are_not_there_are_refused_and_nothing_changes(index: list[int]) -> None:
    """A selection that fails half-way would leave layers with different rows."""
    model = tiny_model()
    cache = kvkeep.RetentionCache(model, POLICIES["vase-attnv"])
    ids, mask = tokens(2, 20), torch.ones(2, 20, dtype=torch.int64)
    feed(model, cache, ids, mask, [18])
    before = positions(cache)
    with pytest.raises(CacheError, match=r"cannot be kept of a cache of 2 sequences.*from 0 to 1"):
        cache.batch_select_indices(torch.tensor(index, dtype=torch.int64))
    assert positions(cache) == before
    feed(model, cache, ids, mask, [1, 1])
