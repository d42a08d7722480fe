"""What travels in the key's place between a cache's ``update`` and the attention function."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from kvkeep.core.errors import CacheError

if TYPE_CHECKING:
    from kvkeep.engine.layer import RetentionLayer


class LayerHandle:
    """New keys and values of one layer, on their way to the attention function.

    Parameters
    ----------
    layer
        Who stores them and attends.
    keys, values
        ``[batch, kv_heads, new, dim]``, not stored yet: which of them are padding is known only to
        the attention function's mask.
    """

    __slots__ = ("keys", "layer", "values")

    def __init__(self, layer: RetentionLayer, keys: Tensor, values: Tensor) -> None:
        self.layer, self.keys, self.values = layer, keys, values

    def attend(
        self,
        attend: Callable[..., tuple[Tensor, Any]],
        backend: str,
        module: Any,
        query: Tensor,
        mask: Any,
        options: dict[str, Any],
    ) -> tuple[Tensor, Any]:
        """Store, attend, record, evict; returns what a stock attention function returns."""
        return self.layer.forward(self, attend, backend, module, query, mask, options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # asked by Python's own machinery and by torch.compile
        raise CacheError(
            f"the attention function asked a kvkeep handle for {name!r}: it is not kvkeep's. Call "
            "kvkeep.prepare(model) after changing the attention implementation, or build the "
            "RetentionCache after it."
        )
