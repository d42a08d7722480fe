"""Putting a cache on disk and back: a long conversation survives the process."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvkeep.cache.dense import DenseStore
from kvkeep.core.budget import Budget
from kvkeep.core.errors import DataFileError, UnsupportedError
from kvkeep.core.files import read_tensors, write_tensors
from kvkeep.core.policy import Policy
from kvkeep.engine.recording import MomentSums, QueryRing
from kvkeep.engine.rows import Rows
from kvkeep.engine.trace import Counter

if TYPE_CHECKING:
    from kvkeep.engine.layer import RetentionLayer
    from kvkeep.engine.retention_cache import RetentionCache

_KIND = "cache"
_FORMAT = 1


def save_cache(cache: RetentionCache, path: str | os.PathLike[str]) -> None:
    """Write a cache: entries, positions, recordings, counters (see :meth:`RetentionCache.save`)."""
    tensors: dict[str, Tensor] = {}
    layers: dict[str, Any] = {}
    for index, layer in enumerate(cache.layers):
        if index in cache.spec.managed:
            layers[str(index)] = _save_layer(layer, f"{index}.", tensors)
        else:
            _save_native(layer, index, tensors, layers)
    header = {
        "format": _FORMAT,
        "model": _shape(cache),
        "policy": cache.policy.name,
        "options": _plain_options(cache.policy),
        "seed": cache.seed,
        "layers": layers,
        "rows": cache.rows.as_dict(),
        "counter": cache.counter.as_dict(),
    }
    write_tensors(path, _KIND, tensors, header)


def load_cache(cache: RetentionCache, path: str | os.PathLike[str], device: torch.device) -> None:
    """Fill an empty cache from a file (see :meth:`RetentionCache.load`).

    Raises
    ------
    DataFileError
        If the file is damaged, or was written for another model, policy or format.
    """
    tensors, header = read_tensors(path, _KIND)
    expected = {
        "format": _FORMAT,
        "model": _shape(cache),
        "policy": cache.policy.name,
        "options": _plain_options(cache.policy),
    }
    differing = [
        f"{name} {header.get(name)!r} instead of {value!r}"
        for name, value in expected.items()
        if header.get(name) != value
    ]
    if differing:
        raise DataFileError(f"{path} does not fit this cache: it has " + "; ".join(differing) + ".")
    placed = {name: tensor.to(device) for name, tensor in tensors.items()}
    for index, layer in enumerate(cache.layers):
        state = header["layers"].get(str(index))
        if state is None:
            continue
        if index in cache.spec.managed:
            _load_layer(layer, f"{index}.", placed, state)
        else:
            _load_native(layer, f"{index}.", placed, state)
    cache.seed = header["seed"]
    cache.restore_state(Rows(**header["rows"]), Counter.from_dict(header["counter"]))


def _shape(cache: RetentionCache) -> dict[str, Any]:
    spec = cache.spec
    return {
        "type": spec.model_type,
        "layers": len(spec.layers),
        "heads": spec.heads,
        "kv_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "dtype": str(cache.dtype).removeprefix("torch."),
    }


def _plain_options(policy: Policy) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for name, value in policy.options().items():
        if isinstance(value, Budget):
            value = dataclasses.asdict(value)
        elif isinstance(value, Policy):
            value = {"name": value.name, **_plain_options(value)}
        plain[name] = value
    return plain


def _save_layer(layer: RetentionLayer, prefix: str, tensors: dict[str, Tensor]) -> dict[str, Any] | None:
    store = layer.store
    if store is None:
        return None
    entries = store.longest
    named = {"keys": store.keys, "values": store.values, "positions": store.positions}
    named |= {f"extra.{name}": extra for name, extra in store.extras.items()}
    # Cloned: slices of one storage would be written whole.
    tensors |= {prefix + name: tensor[:, :, :entries].clone() for name, tensor in named.items()}
    if layer.ring is not None:
        queries, positions = layer.ring.ordered()
        tensors |= {prefix + "queries": queries.clone(), prefix + "query_positions": positions.clone()}
    if layer.sums is not None:
        tensors |= {prefix + f"sums.{name}": getattr(layer.sums, name) for name in MomentSums.STATE}
    return {
        "capacity": store.capacity,
        "lens": store.lens,
        "extras": list(store.extras),
        "evictions": layer.evictions,
        "unsummed": layer.unsummed,
    }


def _load_layer(
    layer: RetentionLayer, prefix: str, tensors: dict[str, Tensor], state: dict[str, Any]
) -> None:
    keys, values = tensors[prefix + "keys"], tensors[prefix + "values"]
    store = DenseStore(keys, values, state["capacity"], state["extras"])
    entries = keys.shape[2]
    store.keys[:, :, :entries], store.values[:, :, :entries] = keys, values
    store.positions[:, :, :entries] = tensors[prefix + "positions"]
    for name in state["extras"]:
        store.extras[name][:, :, :entries] = tensors[prefix + f"extra.{name}"]
    store.lens = state["lens"]
    layer.store, layer.is_initialized = store, True
    layer.evictions, layer.unsummed = state["evictions"], state["unsummed"]
    if prefix + "queries" in tensors:
        queries = tensors[prefix + "queries"]
        layer.ring = QueryRing(queries, queries.shape[2])
        layer.ring.push(queries, tensors[prefix + "query_positions"])
    rope = layer.cache.rope
    if prefix + "sums.count" in tensors and rope is not None:
        layer.sums = MomentSums(tensors[prefix + "sums.total"][:, :, None], rope)
        for name in MomentSums.STATE:
            setattr(layer.sums, name, tensors[prefix + f"sums.{name}"])


def _save_native(layer: Any, index: int, tensors: dict[str, Tensor], layers: dict[str, Any]) -> None:
    if not hasattr(layer, "keys"):
        raise UnsupportedError(
            "this cache cannot be saved",
            [f"layer {index} is recurrent ({type(layer).__name__}), whose state kvkeep does not know"],
        )
    if layer.keys is None or not layer.is_initialized:
        return
    tensors |= {f"{index}.keys": layer.keys.clone(), f"{index}.values": layer.values.clone()}
    layers[str(index)] = {"cumulative_length": layer.get_seq_length()}


def _load_native(layer: Any, prefix: str, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    keys, values = tensors[prefix + "keys"], tensors[prefix + "values"]
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values
    if hasattr(layer, "cumulative_length"):
        layer.cumulative_length = state["cumulative_length"]
