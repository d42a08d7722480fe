"""What the engine knows of a model before it runs: layers, heads, sizes. No tensors of weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One decoder layer.

    Parameters
    ----------
    index
        Place in the model.
    kind
        ``"full_attention"`` (kvkeep manages it), or another kind that keeps its own cache.
    window
        Tokens a sliding-window layer keeps; ``None`` for the others.
    """

    index: int
    kind: str
    window: int | None = None


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Shape of a model as its config states it.

    Parameters
    ----------
    model_type
        The config's own name, for example ``"llama"``.
    layers
        Every decoder layer.
    heads, kv_heads
        Query heads and key-value heads.
    head_dim, value_dim
        Channels of a key and of a value.
    max_positions
        Longest sequence that the positions allow, or ``None``.
    rope_type
        The config's rotary scaling type, for example ``"default"``, ``"yarn"``; ``None`` without rotary.
    rotary_dim
        Channels that rotate.
    config
        The text config itself (read-only by convention).
    """

    model_type: str
    layers: tuple[LayerSpec, ...]
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    max_positions: int | None
    rope_type: str | None
    rotary_dim: int
    config: Any = field(repr=False, default=None)

    @cached_property
    def managed(self) -> tuple[int, ...]:
        """Indices of the full-attention layers."""
        return tuple(layer.index for layer in self.layers if layer.kind == "full_attention")

    def bytes_per_entry(self, element_size: int) -> int:
        """Bytes of one entry in all managed layers and KV heads of one sequence (keys and values)."""
        per_head = (self.head_dim + self.value_dim) * element_size
        return per_head * self.kv_heads * len(self.managed)
