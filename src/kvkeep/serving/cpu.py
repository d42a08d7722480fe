"""Bounded caches on vLLM's CPU attention. Registered under the stock name: CPU takes no other."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from kvkeep.serving.attention import BoundedImpl
from kvkeep.serving.bounded import BoundedBackend, BoundedBuilder, narrowed
from kvkeep.serving.naming import NamedBuilder


class BoundedCPUImpl(BoundedImpl, CPUAttentionBackendImpl):  # type: ignore[misc]
    """The CPU attention of a layer."""

    serves_ragged = True


class BoundedCPUBuilder(NamedBuilder, BoundedBuilder, CPUAttentionMetadataBuilder):  # type: ignore[misc]
    """What the CPU attention prepares once a step."""

    def by_head(self) -> Any:
        """One KV head a row, with its group of query heads."""
        return narrowed(self, num_heads=self.num_heads // self.num_kv_heads, num_kv_heads=1)


class BoundedCPUBackend(BoundedBackend, CPUAttentionBackend):  # type: ignore[misc]
    """The CPU back end that bounds full-attention layers where kvkeep is set."""

    @staticmethod
    def get_impl_cls() -> type[BoundedCPUImpl]:
        """The attention of a layer."""
        return BoundedCPUImpl

    @staticmethod
    def get_builder_cls() -> type[BoundedCPUBuilder]:
        """What is prepared once a step."""
        return BoundedCPUBuilder
