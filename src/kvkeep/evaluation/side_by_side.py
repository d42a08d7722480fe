"""Rows of one batch on different caches: many policies decode in the same forwards.

A decode step of a small batch spends its time on reading the weights. Here they are read once for all
policies; only attention, recording and evictions are done cache by cache. A row gets what it would get
alone, but for the rounding of matrix products of another shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from kvkeep.core.errors import ConfigError
from kvkeep.engine.attention import HIDDEN
from kvkeep.engine.handle import LayerHandle
from kvkeep.engine.retention_cache import RetentionCache


class SideBySide(Cache):
    """A cache whose rows are the rows of several caches, one cache after another.

    Parameters
    ----------
    caches
        Filled caches for one model. Forwards name positions themselves and have no padding.

    Raises
    ------
    ConfigError
        If there is none, one is empty, or a layer of the model keeps a cache of its own (sliding window).
    """

    def __init__(self, caches: Sequence[RetentionCache]) -> None:
        if not caches or not all(cache.rows.seq_lens for cache in caches):
            raise ConfigError("caches decode side by side once each has read its prompt: give filled caches.")
        if any(len(cache.managed_layers) != len(cache.layers) for cache in caches):
            raise ConfigError(
                "caches decode side by side only where all layers are full attention: decode one by one."
            )
        rows = [len(cache.rows.seq_lens) for cache in caches]
        columns = zip(*(cache.layers for cache in caches), strict=True)
        super().__init__(layers=[_Layer(layers, rows) for layers in columns])


class _Layer(CacheLayerMixin):
    """The same layer of several caches."""

    supports_early_init = False
    is_sliding = False

    def __init__(self, layers: Sequence[Any], rows: Sequence[int]) -> None:
        super().__init__()
        self.each, self.rows = layers, rows

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Give each cache the new tokens of its rows."""
        parts = zip(self.each, key_states.split(self.rows), value_states.split(self.rows), strict=True)
        handle = _Handle([layer.update(keys, values)[0] for layer, keys, values in parts], self.rows)
        return handle, handle

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the caches are filled."""

    def get_seq_length(self) -> int:
        """Columns of the first cache; each counts its own."""
        return int(self.each[0].get_seq_length())

    def get_mask_sizes(self, query_length: int, *args: Any) -> tuple[int, int]:
        """Of the first cache; without padding no mask is ever built from it."""
        sizes: tuple[int, int] = self.each[0].get_mask_sizes(query_length)
        return sizes

    def get_max_length(self) -> int:
        """No limit on tokens seen."""
        return -1

    get_max_cache_shape = get_max_length


class _Handle(LayerHandle):
    """Handles of the same layer of several caches, and how many rows each has."""

    __slots__ = ("each", "rows")

    def __init__(self, handles: Sequence[LayerHandle], rows: Sequence[int]) -> None:
        super().__init__(handles[0].layer, handles[0].keys, handles[0].values)
        self.each, self.rows = handles, rows

    def attend(
        self,
        attend: Callable[..., tuple[Tensor, Any]],
        backend: str,
        module: Any,
        query: Tensor,
        mask: Any,
        options: dict[str, Any],
    ) -> tuple[Tensor, Any]:
        # Gates read the input of their own rows.
        hidden = options.pop(HIDDEN, None)
        inputs = [None] * len(self.rows) if hidden is None else hidden.split(self.rows)
        outputs = []
        for handle, part, own in zip(self.each, query.split(self.rows), inputs, strict=True):
            given = options if own is None else options | {HIDDEN: own}
            outputs.append(handle.attend(attend, backend, module, part, mask, given)[0])
        return torch.cat(outputs), None
