"""Putting a cache on disk and back: a long conversation survives the process."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvkeep.cache.paged import PagedStore
from kvkeep.cache.quantized import MixedStore
from kvkeep.core.budget import Budget
from kvkeep.core.errors import DataFileError, UnsupportedError
from kvkeep.core.files import read_tensors, write_tensors
from kvkeep.core.policy import Policy
from kvkeep.engine.mixed_layer import MixedLayer
from kvkeep.engine.recording import MomentSums, QueryRing
from kvkeep.engine.rows import Rows
from kvkeep.engine.trace import Counter

if TYPE_CHECKING:
    from kvkeep.engine.layer import RetentionLayer
    from kvkeep.engine.retention_cache import RetentionCache

_KIND = "cache"
_FORMAT = 3


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
        "store": cache.store_kind,
        "precision": _precision(cache),
        "gates": _gates(cache),
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
        "store": cache.store_kind,
        "precision": _precision(cache),
        "gates": _gates(cache),
    }
    differing = [
        f"{name} {header.get(name)!r} instead of {value!r}"
        for name, value in expected.items()
        if header.get(name) != value
    ]
    if differing:
        raise DataFileError(f"{path} does not fit this cache: it has " + "; ".join(differing) + ".")
    placed = {name: tensor.to(device) for name, tensor in tensors.items()}
    # First of all: how much memory a store lays out depends on the rows.
    cache.restore_state(Rows(**header["rows"]), Counter.from_dict(header["counter"]))
    for index, layer in enumerate(cache.layers):
        state = header["layers"].get(str(index))
        if state is None:
            continue
        if index in cache.spec.managed:
            _load_layer(layer, f"{index}.", placed, state)
        else:
            _load_native(layer, f"{index}.", placed, state)
    cache.seed = header["seed"]


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


def _precision(cache: RetentionCache) -> dict[str, Any] | None:
    return None if cache.precision is None else cache.precision.as_dict()


def _gates(cache: RetentionCache) -> str | None:
    """Hash of the gates: entries that other gates have weighed cannot be ranked with new ones."""
    gates = cache.gates if cache.block_gates is None else cache.block_gates
    return None if gates is None else str(gates.sha256)


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
    store, recorder = layer.store, layer.recorder
    if store is None:
        return None
    layer.settle()
    for part, content in _parts(store).items():
        # Copied: slices of one storage would be written whole.
        entries = content.packed() if isinstance(content, PagedStore) else content.padded()
        tensors |= {prefix + part + name: tensor.clone() for name, tensor in entries.items()}
    if recorder.ring is not None:
        queries, positions = recorder.ring.ordered()
        tensors |= {prefix + "queries": queries.clone(), prefix + "query_positions": positions.clone()}
    if recorder.sums is not None:
        tensors |= {prefix + f"sums.{name}": getattr(recorder.sums, name) for name in MomentSums.STATE}
    return {
        "held": {part: content.held.tolist() for part, content in _parts(store).items()},
        "extras": list(store.extras),
        "evictions": layer.evictions,
        "unsummed": recorder.unsummed,
    }


def _load_layer(
    layer: RetentionLayer, prefix: str, tensors: dict[str, Tensor], state: dict[str, Any]
) -> None:
    names = ("keys", "values", "positions", *(f"extra.{name}" for name in state["extras"]))
    parts = {part: {name: tensors[prefix + part + name] for name in names} for part in state["held"]}
    if isinstance(layer, MixedLayer):
        layer.restore_parts(*({part[:-1]: each[part] for part in parts} for each in (parts, state["held"])))
    else:
        layer.restore_store(parts[""], state["held"][""])
    recorder = layer.recorder
    layer.evictions, recorder.unsummed = state["evictions"], state["unsummed"]
    if prefix + "queries" in tensors:
        queries = tensors[prefix + "queries"]
        recorder.ring = QueryRing(queries, queries.shape[2])
        recorder.ring.push(queries, tensors[prefix + "query_positions"])
    rope = layer.cache.rope
    if prefix + "sums.count" in tensors and rope is not None:
        recorder.sums = MomentSums(tensors[prefix + "sums.total"][:, :, None], rope)
        for name in MomentSums.STATE:
            setattr(recorder.sums, name, tensors[prefix + f"sums.{name}"])


def _parts(store: Any) -> dict[str, Any]:
    """The stores of a layer by the prefix of their names in a file: one, or both parts of a mixed one."""
    return {"full.": store.full, "low.": store.low} if isinstance(store, MixedStore) else {"": store}


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
