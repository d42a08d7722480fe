"""Bounded caches on vLLM's FlashAttention, for ``--attention-backend CUSTOM``.

Attention runs between the pieces of CUDA graphs (vLLM's piecewise mode): rounds and evictions change from
step to step, so they stay outside, and the rest of a decode step stays inside.

**No GPU has run this yet.** What is known of vLLM 0.32:

* Run on a CPU, with plain twins in place of the two kernels (``tests/serving/test_cuda_twin.py``): chunks,
  single tokens and evictions of mixed batches, in float32 and bfloat16, against plain lists of entries.
* Asked of vLLM's own code on a CPU (``tests/serving/test_cuda_selection.py``): CUSTOM leads here, for 16-bit
  types only; blocks are not split; pages are contiguous; graphs become piecewise.
* Read only: with asynchronous scheduling all steps queue on one stream, so that none overtakes an eviction.
  A step is prepared from lengths that the host knows, and its arrays are uploaded from pinned memory, so that
  a decode step never waits for the GPU. It is waited for at evictions (once a layer, to check what the
  policy kept) and, where prompts stay whole, once a step, to read the block table. Model runner V2, which
  CUDA takes unless something forbids it, leaves former blocks in that table: those modes are refused there.
* Not known: speed; how much of a step the rounds cost between graphs; several GPUs.

Positions take 4 bytes per slot and KV head beside the cache, 0.8 % of it at 16 bits and 128 channels, and are
allocated at the first step, when vLLM has taken its share: leave room by ``--gpu-memory-utilization``.
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

from kvkeep.serving.attention import BoundedImpl
from kvkeep.serving.bounded import ENGINE, BoundedBackend, BoundedBuilder
from kvkeep.serving.naming import NamedBuilder


class BoundedFlashImpl(BoundedImpl, FlashAttentionImpl):  # type: ignore[misc]
    """FlashAttention of a layer."""


class BoundedFlashBuilder(NamedBuilder, BoundedBuilder, FlashAttentionMetadataBuilder):  # type: ignore[misc]
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
