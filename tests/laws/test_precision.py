"""Laws of a cache with entries in few bits: whole runs on tiny models, on both stores."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import SkipTest

import pytest
import torch

import kvkeep
from kvkeep.cache.quantized import MixedStore
from kvkeep.core.errors import CacheError, ConfigError, DataFileError, UnknownNameError, UnsupportedError
from kvkeep.core.policy import Policy
from kvkeep.core.precision import PROTECT, Precision
from kvkeep.kernels.few_bits import row_bytes
from kvkeep.testing import laws
from kvkeep.testing.models import left_padded, tiny_model, tokens
from kvkeep.testing.oracle import oracle_gap, replay
from kvkeep.testing.subject import Subject
from kvkeep.testing.watching import WatchedCache, feed
from tests.reference import few_bits as reference

TIGHT = 1e-9
POLICIES: dict[str, Policy] = {
    "full": kvkeep.Full(buffer=8),
    "vase-attnv": kvkeep.VaSEAttnV(budget=24, buffer=8),
    "h2o": kvkeep.H2O(budget=24, buffer=8),
    "whole-model": kvkeep.policy("snapkv + whole-model", budget=24, buffer=8),
    "snapkv, after": kvkeep.SnapKV(budget=24, buffer=8, prefill="after"),
    "adaptive-heads": kvkeep.policy("snapkv + adaptive-heads", budget=24, buffer=8),
}
LAWS = [check for check in laws.CHECKS if check.__name__ != "nothing_to_evict_nothing_changed"]


def some(bits: int = 4, protect: str = "range", **options: Any) -> Precision:
    """Twelve entries and fewer in full precision, so that the tiny runs demote."""
    given = {"reserve": 6, "recent": 4} if protect != "none" else {}
    return Precision(bits=bits, protect=protect, group=8, sinks=2, **(given | options))  # type: ignore[arg-type]


@pytest.fixture(params=["dense", "paged"])
def store(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def on(policy: Policy, store: str) -> str:
    return "paged" if policy.traits.ragged else store


@pytest.mark.parametrize("protect", PROTECT)
@pytest.mark.parametrize("name", POLICIES)
def test_logits_are_those_of_a_full_cache_with_rounded_entries(name: str, protect: str, store: str) -> None:
    """An entry of another token, a scale of another group, a mask one off: the answer would be wrong."""
    policy = POLICIES[name]
    if protect == "policy" and (not policy.bounded or policy.traits.scope == "model"):
        pytest.skip("refused: no ranking of a layer's entries alone")
    gap = oracle_gap(
        tiny_model("llama", dtype=torch.float64),
        policy,
        prompts=(31, 2, 12),
        new=45,
        store=on(policy, store),
        page_size=5,
        precision=some(
            bits=2 if protect in ("random", "recent") else 4,
            key_bits=8 if protect == "recent" else None,
            protect=protect,
        ),
    )
    assert gap.largest < TIGHT
    assert gap.rounded > 100
    assert not policy.bounded or gap.evictions > 3


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt-oss", "phi3", "llama-yarn"])
def test_families(family: str, store: str) -> None:
    """Sliding layers beside, learned sinks, other scales: the mixed part must reach the same back end."""
    model = tiny_model(family, dtype=torch.float64)
    precision = some(8)
    gap = oracle_gap(
        model,
        POLICIES["vase-attnv"],
        prompts=(26, 5),
        new=30,
        chunk=7,
        store=store,
        page_size=5,
        precision=precision,
    )
    assert gap.largest < TIGHT
    assert gap.rounded > 50


@pytest.mark.parametrize("check", LAWS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", ["vase-attnv", "full", "h2o"])
def test_conformance(check: Callable[[Subject], None], name: str, store: str) -> None:
    """Batches, chunks, short prompts, leaks: what every policy promises holds in two precisions, too."""
    try:
        check(Subject.of(POLICIES[name], store=store, precision=some(protect="attention")))
    except SkipTest as reason:
        pytest.skip(str(reason))


MERGING = [
    "snapkv + merge",
    "vase-attnv + cam(window=5)",
    "snapkv + whole-model + cam",
    "keydiff + adaptive-heads + merge",
]


@pytest.mark.parametrize("protect", ["range", "random", "none"])
@pytest.mark.parametrize("text", MERGING)
def test_merged_values_are_written_down_as_they_were_given(text: str, protect: str, store: str) -> None:
    """The law of the full cache: kept values replaced by what the policy gave, and rounded once, if low."""
    policy = kvkeep.policy(text, budget=24, buffer=8)
    gap = oracle_gap(
        tiny_model("llama", dtype=torch.float64),
        policy,
        prompts=(31, 2, 12),
        new=45,
        store=on(policy, store),
        page_size=5,
        precision=some(bits=2, protect=protect),
    )
    assert gap.largest < TIGHT
    assert gap.rounded > 100
    assert gap.evictions > 3


@pytest.mark.parametrize("prefill", ["after", "chunk"])
def test_merges_before_the_first_token_and_between_chunks(prefill: str, store: str) -> None:
    policy = kvkeep.policy(f"snapkv(prefill={prefill}) + merge", budget=24, buffer=8)
    gap = oracle_gap(
        tiny_model("llama", dtype=torch.float64),
        policy,
        prompts=(48, 3, 31),
        new=30,
        chunk=7 if prefill == "chunk" else None,
        store=store,
        page_size=5,
        precision=some(),
    )
    assert gap.largest < TIGHT
    assert gap.rounded > 100


def test_the_oracle_sees_whether_a_merged_value_was_rounded() -> None:
    """Blind to where values are in few bits, it would agree with a store that never writes them down."""
    model = tiny_model("llama", dtype=torch.float64)
    ids = tokens(1, 70)
    mask, lengths = torch.ones_like(ids), [40, *[1] * 30]
    cache = WatchedCache(
        model, kvkeep.policy("snapkv + merge", budget=24, buffer=8), precision=some(2, protect="random")
    )
    ours = torch.cat(feed(model, cache, ids, mask, lengths), 1)
    gaps = []
    for values in (cache.rounded_values, [{} for _ in lengths]):
        theirs = replay(
            model, cache.seen, ids, mask, lengths, cache.replaced, (cache.rounded, values), cache.precision
        )
        gaps.append(float((ours - torch.cat(theirs, 1)).abs().max()))
    assert gaps[0] < TIGHT
    assert gaps[1] > 1e-4


@pytest.mark.parametrize("check", LAWS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("text", MERGING[:2])
def test_conformance_of_policies_that_merge(check: Callable[[Subject], None], text: str, store: str) -> None:
    policy = kvkeep.policy(text, budget=24, buffer=8)
    try:
        check(Subject.of(policy, store=store, precision=some(protect="attention")))
    except SkipTest as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("name", ["full", "vase-attnv", "h2o"])
def test_everything_protected_is_the_plain_store_bit_for_bit(name: str, store: str) -> None:
    policy, model = POLICIES[name], tiny_model()
    ids, mask = left_padded((30, 11))
    ids = torch.cat([ids, tokens(2, 40, seed=1)], 1)
    mask = torch.cat([mask, torch.ones(2, 40, dtype=torch.int64)], 1)
    lengths = [20, 10, *[1] * 30, 10]
    runs = []
    for precision in (None, some(2, reserve=500)):
        cache = kvkeep.RetentionCache(model, policy, store=store, page_size=5, precision=precision)
        runs.append((torch.cat(feed(model, cache, ids, mask, lengths), 1), cache))
    assert torch.equal(runs[0][0], runs[1][0])
    assert runs[1][1].trace.few_bits_entries == 0
    if store == "dense":  # the paged one has one empty page of few bits
        assert runs[0][1].trace.kv_bytes == runs[1][1].trace.kv_bytes


@pytest.mark.parametrize("protect", ["range", "policy"])
def test_policies_see_what_attention_sees(protect: str, store: str) -> None:
    """Ranked by values that are no longer there, entries would be kept for what they have lost."""
    model = tiny_model(dtype=torch.float64)
    ids = tokens(1, 56)  # the last of them makes 24 + 8 entries, and an eviction
    mask = torch.ones_like(ids)
    plain = WatchedCache(model, kvkeep.Full(), store=store)
    feed(model, plain, ids, mask, [56])
    first = plain.managed_layers[0].stored.padded(None, "values")["values"]
    cache = WatchedCache(model, POLICIES["vase-attnv"], store=store, precision=some(2, protect=protect))
    feed(model, cache, ids, mask, [8, *[1] * 48])
    noted = cache.noted[-len(cache.managed_layers)]
    view = noted.views[0]  # of the first layer, whose values depend on their tokens alone
    low = {int(position) for position in cache.rounded[-1][0][0][0]}
    seen = {True: 0, False: 0}
    for slot, position in enumerate(view.positions[0, 0].tolist()):
        exact = first[0, 0, position].tolist()
        expected = reference.row(exact, 2, 8)[1] if position in low else exact
        assert view.values[0, 0, slot].tolist() == pytest.approx(expected, abs=TIGHT)
        seen[position in low] += 1
    assert seen[True] > 5
    assert seen[False] > 5


@pytest.mark.parametrize(("bits", "keys"), [(2, None), (4, None), (8, None), (2, 4)])
def test_bytes_are_those_of_the_formula(bits: int, keys: int | None) -> None:
    """A user plans memory with this number: full entries and a buffer, the rest in few bits with scales."""
    model, precision = tiny_model(), some(bits, key_bits=keys)
    cache = kvkeep.RetentionCache(model, POLICIES["vase-attnv"], precision=precision)
    ids = tokens(2, 130)
    feed(model, cache, ids, torch.ones_like(ids), [90, *[1] * 40])
    spec = cache.spec
    few = row_bytes(spec.head_dim, keys or bits, 8) + row_bytes(spec.value_dim, bits, 8)
    assert few == precision.weight * 2 * (spec.head_dim + spec.value_dim)
    heads = 2 * spec.kv_heads * len(spec.managed)
    full = (precision.full + 8) * 4 * (spec.head_dim + spec.value_dim)
    assert cache.trace.kv_bytes == heads * (full + (24 - precision.full) * few)
    assert cache.trace.few_bits_entries == 24 - precision.full
    slots = precision.full + 8 + 24 - precision.full
    assert (
        sum(layer.stored.full.positions.nbytes for layer in cache.managed_layers)
        + sum(layer.stored.low.positions.nbytes for layer in cache.managed_layers)
        == heads * slots * 4
    )


def test_a_prompt_in_full_comes_on_top(store: str) -> None:
    """A kept prompt must not lose a bit; the numbers of the precision are for the rest."""
    policy = kvkeep.SnapKV(budget=kvkeep.Budget(entries=24, prompt="kept"), buffer=8, window=8)
    precision = some(protect="policy", prompt="full")
    gap = oracle_gap(
        tiny_model("llama", dtype=torch.float64),
        policy,
        prompts=(31, 2, 12),
        new=60,
        store=store,
        page_size=5,
        precision=precision,
    )
    assert gap.largest < TIGHT
    assert gap.rounded > 100
    assert gap.evictions > 3
    model, ids = tiny_model(), tokens(2, 91)
    cache = kvkeep.RetentionCache(model, policy, store=store, precision=precision)
    mask = torch.ones_like(ids)
    mask[1, :15] = 0
    feed(model, cache, ids, mask, [31, *[1] * 60])
    for layer in cache.managed_layers:
        for row, prompt in ((0, 31), (1, 16)):
            low = layer.stored.low.padded([row], "positions")["positions"][0]
            full = layer.stored.full.padded([row], "positions")["positions"][0]
            for head in range(cache.spec.kv_heads):
                here = low[head, : layer.stored.low.held[row, head]].tolist()
                exact = full[head, : layer.stored.full.held[row, head]].tolist()
                assert min(here) >= prompt
                assert set(range(prompt)) <= set(exact)
                assert len(here) == 24 - precision.full


def test_no_token_is_written_down_by_itself(monkeypatch: pytest.MonkeyPatch, store: str) -> None:
    """Once in a period: a rounding per token would cost more than the attention."""
    calls: list[int] = []
    rearrange = MixedStore.rearrange

    def counted(self: MixedStore, *args: object) -> None:  # type: ignore[type-arg]
        calls.append(1)
        rearrange(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(MixedStore, "rearrange", counted)
    model = tiny_model()
    for name in ("full", "vase-attnv"):
        calls.clear()
        cache = kvkeep.RetentionCache(model, POLICIES[name], store=store, precision=some())
        ids = tokens(1, 84)
        feed(model, cache, ids, torch.ones_like(ids), [4, *[1] * 80])
        assert 0 < len(calls) <= len(cache.managed_layers) * (80 // 8)


def test_a_saved_cache_goes_on_as_if_it_had_never_stopped(tmp_path: Path, store: str) -> None:
    model, policy = tiny_model(), POLICIES["h2o"]
    options = {"store": store, "page_size": 5, "precision": some(protect="attention")}
    ids, mask = left_padded((30, 9))
    ids = torch.cat([ids, tokens(2, 50, seed=1)], 1)
    mask = torch.cat([mask, torch.ones(2, 50, dtype=torch.int64)], 1)
    cache = kvkeep.RetentionCache(model, policy, **options)
    feed(model, cache, ids, mask, [30, *[1] * 17])
    cache.save(tmp_path / "cache")
    again = kvkeep.RetentionCache.load(tmp_path / "cache", model, policy, **options)
    again.check_integrity()
    ours, theirs = (torch.cat(feed(model, each, ids, mask, [1] * 33), 1) for each in (cache, again))
    assert torch.equal(ours, theirs)
    assert cache.trace.few_bits_entries > 0
    with pytest.raises(DataFileError, match="precision"):
        kvkeep.RetentionCache.load(tmp_path / "cache", model, policy, store=store)


def test_beams_follow_their_own_entries(store: str) -> None:
    """Row by row what each beam would hold alone."""
    model, policy = tiny_model(dtype=torch.float64), POLICIES["vase-attnv"]
    ids = torch.cat([tokens(3, 20), tokens(3, 20, seed=1)], 1)
    mask = torch.ones_like(ids)
    order = [2, 0, 2]
    cache = kvkeep.RetentionCache(model, policy, store=store, page_size=5, precision=some())
    feed(model, cache, ids, mask, [20, *[1] * 10])
    cache.reorder_cache(torch.tensor(order))
    cache.check_integrity()
    more = ids.clone()
    more[:, :30] = ids[order, :30]
    logits = feed(model, cache, more, mask, [1] * 10)[-1]
    for row, source in enumerate(order):
        alone = kvkeep.RetentionCache(
            model, policy, store=store, page_size=5, precision=some(), sequence_ids=[source]
        )
        expected = feed(model, alone, more[row : row + 1], mask[:1], [20, *[1] * 20])[-1]
        assert (logits[row] - expected[0]).abs().max() < TIGHT


def test_generate_writes_with_beams(store: str) -> None:
    model = tiny_model()
    ids, mask = left_padded((30, 9))
    inputs = {"input_ids": ids, "attention_mask": mask}
    options = {"max_new_tokens": 20, "num_beams": 2, "pad_token_id": 0}
    first, cache = kvkeep.generate(
        model, POLICIES["vase-attnv"], inputs, store=store, precision=some(8), **options
    )
    again, _ = kvkeep.generate(
        model, POLICIES["vase-attnv"], inputs, store=store, precision=some(8), **options
    )
    assert torch.equal(first, again)
    assert cache.trace.few_bits_entries > 0
    assert "8 bits" in cache.trace.precision


@pytest.mark.parametrize("name", ["lazy-eviction", "raas", "h2o"])
def test_attention_is_noted_of_keys_as_they_were_attended_to(name: str, store: str) -> None:
    """Worked out after a rounding, it would be that of keys which these queries never saw."""
    model = tiny_model(dtype=torch.float64)
    options = {} if name == "h2o" else {"threshold": 0.03}
    policy = kvkeep.policy(name, budget=64, buffer=8, **options)
    ids = tokens(2, 20)
    mask = torch.ones_like(ids)
    noted = []
    for precision in (None, some(2)):
        cache = kvkeep.RetentionCache(model, policy, store=store, page_size=5, precision=precision)
        feed(model, cache, ids, mask, [12, *[1] * 8])
        assert (cache.trace.few_bits_entries > 0) == (precision is not None)
        for layer in cache.managed_layers:
            layer.recorder.sum_attention(layer.stored)
        names = [f"extra.{each}" for each in cache.extras]
        noted.append([layer.stored.padded(None, *names) for layer in cache.managed_layers])
    for plain, mixed in zip(*noted, strict=True):
        for each, numbers in plain.items():
            assert torch.allclose(numbers, mixed[each], atol=1e-6), each


def test_crop_takes_back_what_still_has_its_bits(store: str) -> None:
    """Cropping past a rounding would leave other entries rounded than if the tokens had never come."""
    model, policy = tiny_model(dtype=torch.float64), kvkeep.Full(buffer=8)
    ids = tokens(2, 60)
    mask = torch.ones_like(ids)
    straight, cache = (
        kvkeep.RetentionCache(model, policy, store=store, page_size=5, precision=some()) for _ in range(2)
    )
    expected = feed(model, straight, ids, mask, [20, *[1] * 40])
    feed(model, cache, ids, mask, [20, *[1] * 5])
    other = torch.cat([ids[:, :25], tokens(2, 2, seed=9)], 1)
    feed(model, cache, other, mask[:, :27], [1] * 2)
    cache.crop(-2)
    cache.check_integrity()
    assert (feed(model, cache, ids, mask, [1] * 35)[-1] - expected[-1]).abs().max() < TIGHT
    before = cache.kept_positions(0)
    with pytest.raises(CacheError, match="entries were written down in few bits"):
        cache.crop(-20)
    assert all(
        torch.equal(a, b)
        for ours, theirs in zip(before, cache.kept_positions(0), strict=True)
        for a, b in zip(ours, theirs, strict=True)
    )


def test_a_low_entry_competes_only_after_those_with_all_their_bits() -> None:
    """Twelve slots, and entries with all bits enough: no slot may go to what has lost its own."""
    model = tiny_model()
    cache = WatchedCache(model, kvkeep.Full(buffer=8), precision=some())
    ids = tokens(1, 90)
    feed(model, cache, ids, torch.ones_like(ids), [10, *[1] * 80])
    for forward, layers in enumerate(cache.rounded[1:], 1):
        for layer, rows in layers.items():
            was = cache.rounded[forward - 1].get(layer, [[torch.zeros(0)] * 2])
            assert all(
                set(old.tolist()) <= set(new.tolist()) for old, new in zip(was[0], rows[0], strict=True)
            )
    low = cache.managed_layers[0].stored.low
    final = low.padded(None, "positions")["positions"][0]
    assert all(
        sorted(final[head].tolist()) == cache.rounded[-1][0][0][head].tolist() for head in range(low.heads)
    )


def test_the_reserve_holds_the_largest_ranges() -> None:
    """Among all that ever were: an entry with a larger range never has to make way for a smaller one."""
    model = tiny_model()
    ids = tokens(1, 80)
    mask = torch.ones_like(ids)
    plain = kvkeep.RetentionCache(model, kvkeep.Full())
    feed(model, plain, ids, mask, [80])
    values = plain.managed_layers[0].stored.padded(None, "values")["values"][0]
    ranges = values.amax(-1) - values.amin(-1)
    cache = kvkeep.RetentionCache(model, kvkeep.Full(buffer=8), precision=some())
    feed(model, cache, ids, mask, [80])
    full = cache.managed_layers[0].stored.full.padded(None, "positions")["positions"][0]
    for head, held in enumerate(full.tolist()):
        between = ranges[head, 2:76].topk(6).indices + 2
        assert sorted(held) == sorted([0, 1, *between.tolist(), *range(76, 80)])


def test_what_cannot_work_is_refused_with_reasons() -> None:
    model, policy = tiny_model(), POLICIES["vase-attnv"]
    make = kvkeep.RetentionCache
    with pytest.raises(UnsupportedError, match="which groups of 32 do not fill: use group=16"):
        make(model, policy, bits=4)
    with pytest.raises(UnsupportedError, match="it ranks nothing"):
        make(model, kvkeep.Full(), precision=some(protect="policy"))
    with pytest.raises(UnsupportedError, match="of all layers together"):
        make(model, POLICIES["whole-model"], precision=some(protect="policy"))
    bytes_budget = kvkeep.VaSEAttnV(budget=kvkeep.Budget.from_bytes("2MiB"), buffer=8)
    with pytest.raises(UnsupportedError, match="budget in bytes"):
        make(model, bytes_budget, rows=1, precision=some())
    with pytest.raises(UnsupportedError, match="quest reads blocks of entries"):
        make(model, kvkeep.Quest(token_budget=64), precision=some())
    with pytest.raises(UnsupportedError, match="this budget counts the prompt"):
        make(model, policy, precision=some(prompt="full"))
    with pytest.raises(ConfigError, match="say the same thing"):
        make(model, policy, bits=4, precision=some())
    with pytest.raises(ConfigError, match=r"few bits: give bits=4"):
        make(model, policy, protect="recent")
    with pytest.raises(ConfigError, match=r"give precision=Precision\(bits=4, protect='recent'\)"):
        make(model, policy, protect="recent", precision=some())
    assert not some(4).check(36 * 2, 8)
    assert not some(2, key_bits=4).check(16, 16)
    assert "leave key_bits out" in some(2, key_bits=4).check(16, 24)[0]
    assert (
        "2 bits do not fill whole bytes: use key_bits=8"
        in Precision(bits=8, key_bits=2, group=9).check(9, 9)[0]
    )
    assert "do not fill whole bytes: use bits=8" in Precision(bits=2, group=9).check(18, 8 * 9)[0]
    with pytest.raises(ConfigError, match=r"is no kvkeep\.Precision"):
        make(model, policy, precision=4)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 3}, "bits=3 is not offered: use 8, 4 or 2"),
        ({"bits": 4.0}, "bits=4.0 is not offered"),
        ({"bits": None}, "bits=None is not offered"),
        ({"bits": 4, "key_bits": 3}, "key_bits=3 is not offered: use 8, 4 or 2"),
        ({"bits": 4, "group": 4}, "group=4 is not a whole number of at least 8"),
        ({"bits": 4, "reserve": -1}, "reserve=-1"),
        ({"bits": 4, "protect": "none", "reserve": 4}, "reserve, recent and prompt='full' have no meaning"),
        ({"bits": 4, "protect": "none", "prompt": "full"}, "have no meaning"),
        ({"bits": 4, "prompt": "some"}, "prompt='some' is not offered: use few or full"),
    ],
)
def test_numbers_that_cannot_be_right(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Precision(**options)  # type: ignore[arg-type]


def test_as_many_bits_for_keys_are_no_other_precision() -> None:
    """A saved cache, a log and a sealed plan would be refused for a word too many."""
    assert Precision(bits=4, key_bits=4) == Precision(bits=4)
    assert "key_bits" not in Precision(bits=4, key_bits=4).as_dict()


def test_an_unknown_rule_names_the_others() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'range'"):
        Precision(bits=4, protect="rang")  # type: ignore[arg-type]
