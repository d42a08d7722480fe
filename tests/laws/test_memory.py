"""Allocated bytes are a function of the budget alone, and decoding allocates nothing that grows."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig

import kvkeep
from kvkeep.benchmarking.memory import retention_bytes
from kvkeep.core.policy import Policy
from kvkeep.core.view import Rope
from kvkeep.engine.retention_cache import RetentionCache
from kvkeep.testing.models import FAMILIES, tiny_model, tokens
from kvkeep.testing.watching import feed

POLICIES: dict[str, Policy] = {
    "vase-attnv": kvkeep.VaSEAttnV(budget=24, buffer=8),
    "vase-dkv": kvkeep.VaSEDKV(budget=24, buffer=8),
    "h2o": kvkeep.H2O(budget=24, buffer=8),
    "snapkv, slack": kvkeep.SnapKV(budget=24, buffer=8, trigger="slack"),
    "r-kv": kvkeep.RKV(budget=24, buffer=8),
}


def expected_bytes(cache: kvkeep.RetentionCache, rows: int, element: int, slots: int = 24 + 8) -> int:
    spec = cache.spec
    return rows * slots * spec.kv_heads * (spec.head_dim + spec.value_dim) * element * len(spec.managed)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("prompt", [3, 24, 90])
def test_bytes_are_those_of_budget_and_buffer(family: str, prompt: int) -> None:
    """A user plans the machine's memory with this number; the prompt's length must not show in it."""
    model = tiny_model(family)
    ids, mask = tokens(2, prompt + 40), torch.ones(2, prompt + 40, dtype=torch.int64)
    cache = kvkeep.RetentionCache(model, POLICIES["vase-attnv"])
    feed(model, cache, ids, mask, [prompt, *[1] * 40])
    wanted = expected_bytes(cache, rows=2, element=4)
    assert cache.trace.kv_bytes == wanted
    held = sum(each.stored.keys.nbytes + each.stored.values.nbytes for each in cache.managed_layers)
    assert held == wanted
    storages = [
        tensor.untyped_storage().nbytes()
        for each in cache.managed_layers
        for tensor in (each.stored.keys, each.stored.values)
    ]
    assert sum(storages) == wanted  # not a view into something larger


def tensors_of(thing: Any) -> list[torch.Tensor]:
    """Every tensor in an object's attributes, lists and dicts; the model's rotary embedding left out."""
    if isinstance(thing, torch.Tensor):
        return [thing]
    if isinstance(thing, dict | list):
        values = list(thing.values()) if isinstance(thing, dict) else thing
        return [tensor for value in values for tensor in tensors_of(value)]
    if isinstance(thing, Rope | RetentionCache) or not hasattr(thing, "__dict__"):
        return []
    return tensors_of(vars(thing))


@pytest.mark.parametrize(
    ("policy", "recorders"),
    [
        (kvkeep.VaSEDKV(budget=24, buffer=8), []),
        (kvkeep.VaSEAttnV(budget=24, buffer=8), ["ring"]),
        (kvkeep.H2O(budget=24, buffer=8), ["ring"]),
        (kvkeep.ExpectedAttention(budget=24, buffer=8), ["sums"]),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_metadata_is_everything_held_beside_keys_and_values(policy: Policy, recorders: list[str]) -> None:
    """At small budgets the query ring is as large as the cache itself: leaving it out flatters a policy."""
    model = tiny_model()
    cache = kvkeep.RetentionCache(model, policy)
    assert cache.trace.metadata_bytes == 0
    feed(model, cache, tokens(2, 70), torch.ones(2, 70, dtype=torch.int64), [30, *[1] * 40])
    held = 0
    for layer in cache.managed_layers:
        assert [name for name in ("ring", "sums") if getattr(layer.recorder, name) is not None] == recorders
        entries = (layer.stored.keys, layer.stored.values)
        held += sum(tensor.untyped_storage().nbytes() for tensor in tensors_of(layer))
        held -= sum(tensor.untyped_storage().nbytes() for tensor in entries)
    assert cache.trace.metadata_bytes == held > 0
    assert retention_bytes(cache) == (cache.trace.kv_bytes, held)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_bytes_follow_the_type(dtype: torch.dtype) -> None:
    """Half the bits, half the bytes."""
    model = tiny_model(dtype=dtype)
    cache = kvkeep.RetentionCache(model, POLICIES["vase-dkv"])
    feed(model, cache, tokens(1, 60), torch.ones(1, 60, dtype=torch.int64), [30, *[1] * 30])
    assert cache.trace.kv_bytes == expected_bytes(cache, rows=1, element=dtype.itemsize)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_decoding_stays_in_the_memory_it_has(policy: Policy) -> None:
    """A cache that reallocates fragments the device, and doubles its memory for a moment."""
    model = tiny_model()
    ids, mask = tokens(2, 150), torch.ones(2, 150, dtype=torch.int64)
    cache = kvkeep.RetentionCache(model, policy)
    feed(model, cache, ids, mask, [30, *[1] * 20])

    def addresses() -> list[int]:
        return [
            tensor.data_ptr()
            for each in cache.managed_layers
            for tensor in (
                each.stored.keys,
                each.stored.values,
                each.stored.positions,
                *each.stored.extras.values(),
                *((each.recorder.ring.queries, each.recorder.ring.positions) if each.recorder.ring else ()),
            )
        ]

    before, evictions = addresses(), cache.trace.evictions
    for _ in range(100):
        feed(model, cache, ids, mask, [1])
        assert addresses() == before
    assert cache.trace.evictions > evictions
    assert cache.trace.peak_entries <= 32


def tensors_alive() -> tuple[int, int]:
    """Number and bytes of the tensors that exist in this process."""
    gc.collect()
    found = {}
    for each in gc.get_objects():
        if type(each) is torch.Tensor:
            storage = each.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return len(found), sum(found.values())


def objects_held(start: object) -> int:
    """Objects reachable from a cache through attributes and containers, the model's config left out."""
    seen: set[int] = set()
    queue = [start]
    while queue:
        each = queue.pop()
        if id(each) in seen or isinstance(each, (type, PreTrainedConfig)):
            continue
        seen.add(id(each))
        if isinstance(each, dict):
            queue += [*each.keys(), *each.values()]
        elif isinstance(each, (list, tuple, set)):
            queue += each
        elif hasattr(each, "__dict__"):
            queue += vars(each).values()
    return len(seen)


@pytest.mark.parametrize("policy", [POLICIES["vase-attnv"], POLICIES["h2o"]], ids=["vase-attnv", "h2o"])
def test_nothing_grows_with_the_number_of_steps(policy: Policy) -> None:
    """Over 100,000 tokens a list that gains one number a step is a leak too."""
    model = tiny_model()
    ids, mask = tokens(1, 400), torch.ones(1, 400, dtype=torch.int64)
    cache = kvkeep.RetentionCache(model, policy, trace_rows=True, profile=True)
    feed(model, cache, ids, mask, [30, *[1] * 50])
    measured = []
    for _ in range(2):
        feed(model, cache, ids, mask, [1] * 80)  # ten evictions: back at the same place of the cycle
        measured.append((*tensors_alive(), objects_held(cache)))
    assert measured[0][:2] == measured[1][:2]
    assert abs(measured[1][2] - measured[0][2]) < 10  # equal numbers may be one object or two
