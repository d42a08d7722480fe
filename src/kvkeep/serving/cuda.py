"""Bounded caches on vLLM's FlashAttention, for ``--attention-backend CUSTOM``.

Attention runs between the pieces of CUDA graphs (vLLM's piecewise mode): rounds and evictions change from
step to step, so they stay outside, and the rest of a decode step stays inside.

Written from vLLM's sources and run against a twin of its kernel on a CPU; nobody has run it on a GPU yet.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import KVCacheLayout

from kvkeep.serving.bounded import ENGINE, BoundedBackend, BoundedBuilder, BoundedImpl


class BoundedFlashImpl(BoundedImpl, FlashAttentionImpl):  # type: ignore[misc]
    """FlashAttention of a layer."""


class BoundedFlashBuilder(BoundedBuilder, FlashAttentionMetadataBuilder):  # type: ignore[misc]
    """What FlashAttention prepares once a step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self._planner is not None:
            # The plan of a kernel call is kept in one buffer for graphs, and a step may have several rounds.
            self.use_full_cuda_graph = self.aot_schedule = False

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Not inside graphs; without the setting, as FlashAttention has it."""
        if ENGINE.of(vllm_config) is None:
            return FlashAttentionMetadataBuilder.get_cudagraph_support(vllm_config, kv_cache_spec)
        return AttentionCGSupport.NEVER


class BoundedFlashBackend(BoundedBackend, FlashAttentionBackend):  # type: ignore[misc]
    """The FlashAttention back end that bounds full-attention layers where kvkeep is set."""

    @staticmethod
    def get_name() -> str:
        """The name that ``--attention-backend`` takes."""
        return "CUSTOM"

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Head-major blocks: the page of a block and a head in one piece."""
        return (KVCacheLayout.LBHNC,)

    @staticmethod
    def get_impl_cls() -> type[BoundedFlashImpl]:
        """The attention of a layer."""
        return BoundedFlashImpl

    @staticmethod
    def get_builder_cls() -> type[BoundedFlashBuilder]:
        """What is prepared once a step."""
        return BoundedFlashBuilder
