"""Reading one prompt for many policies at once.

As long as nothing is evicted, every cache holds the same entries and attention gives the same output. So the
model runs once: one cache attends, and all others get what they would have computed, store the same entries
and record what their own policies ask for. Afterwards each goes on by itself, as if it had read alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from kvkeep.core.errors import CacheError, ConfigError
from kvkeep.engine.handle import LayerHandle
from kvkeep.engine.retention_cache import RetentionCache


class SharedReading(Cache):
    """A cache for the forwards of a prompt that hands everything on to several caches.

    Parameters
    ----------
    readers
        Empty caches for one model. Read the prompt with this cache, then decode with each of them.

    Raises
    ------
    ConfigError
        If one of them would evict while the prompt is read, is not empty, or there is none.
    """

    def __init__(self, readers: Sequence[RetentionCache]) -> None:
        if not readers:
            raise ConfigError("nobody reads: give at least one cache.")
        for cache in readers:
            if cache.policy.bounded and cache.traits.trigger.prefill == "chunk":
                raise ConfigError(
                    f"{cache.policy.name} with prefill='chunk' evicts while the prompt is read, so it cannot "
                    "share the reading: use prefill='after' or 'defer', or read alone."
                )
            if cache.precision is not None and cache.traits.trigger.prefill != "after":
                raise ConfigError(
                    f"{cache.policy.name} writes a prompt down in few bits while it is read, so it cannot "
                    "share the reading: use prefill='after', or read alone."
                )
            if cache.rows.seq_lens:
                raise ConfigError(f"{cache.policy.name} has read something already: give empty caches.")
        columns = zip(*(cache.layers for cache in readers), strict=True)
        super().__init__(layers=[_SharedLayer(layers) for layers in columns])


class _SharedLayer(CacheLayerMixin):
    """The same layer of several caches."""

    supports_early_init = False
    is_compileable = False

    def __init__(self, layers: Sequence[Any]) -> None:
        super().__init__()
        self.first, self.layers = layers[0], layers
        self.is_sliding = getattr(self.first, "is_sliding", False)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Hand new tokens to all; a layer that keeps its own cache answers for all of them."""
        if key_states.shape[2] == 1 and self.first.get_seq_length():
            raise CacheError(
                "a single token on a filled cache is a generated one, and those are not shared: decode with "
                "each cache by itself (and choose chunks of a prompt that leave no single token)."
            )
        found = [layer.update(key_states, value_states, *args, **kwargs) for layer in self.layers]
        if not isinstance(found[0][0], LayerHandle):
            return found[0]
        handle = _SharedHandle([key for key, _ in found])
        return handle, handle

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: each cache lays out its own memory."""

    def get_seq_length(self) -> int:
        """Columns read."""
        return int(self.first.get_seq_length())

    def get_mask_sizes(self, query_length: int, *args: Any) -> tuple[int, int]:
        """As the first cache says; all hold the same."""
        sizes: tuple[int, int] = self.first.get_mask_sizes(query_length, *args)
        return sizes

    def get_max_length(self) -> int:
        """As the first cache says."""
        return int(self.first.get_max_length())

    def get_max_cache_shape(self) -> int:
        """As the first cache says."""
        return int(self.first.get_max_cache_shape())


class _SharedHandle(LayerHandle):
    """Handles of the same layer of several caches: the first attends, the others are told."""

    __slots__ = ("others",)

    def __init__(self, handles: Sequence[LayerHandle]) -> None:
        first = handles[0]
        super().__init__(first.layer, first.keys, first.values)
        self.others = handles[1:]

    def attend(
        self,
        attend: Callable[..., tuple[Tensor, Any]],
        backend: str,
        module: Any,
        query: Tensor,
        mask: Any,
        options: dict[str, Any],
    ) -> tuple[Tensor, Any]:
        # Each cache takes out of its options what is meant for its gates: every one gets its own.
        output = super().attend(attend, backend, module, query, mask, dict(options))

        def told(*_: Any, **__: Any) -> tuple[Tensor, Any]:
            return output

        for other in self.others:
            # NOTE: always as sdpa: on uneven rows flash attention would be asked again, not told.
            other.attend(told, "sdpa", module, query, mask, dict(options))
        return output
