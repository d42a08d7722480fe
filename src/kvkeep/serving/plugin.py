"""What vLLM calls in each of its processes before it reads its configuration."""

from __future__ import annotations

BACKEND = "kvkeep.serving.cpu.BoundedCPUBackend"


def register() -> None:
    """Register the back end and the bounded cache; may run several times.

    Nothing changes for an engine whose ``additional_config`` does not mention kvkeep.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    from kvkeep.serving.manager import BoundedManager
    from kvkeep.serving.spec import BoundedSpec

    register_backend(AttentionBackendEnum.CPU_ATTN, BACKEND)
    # A registry that holds something does not look for vLLM's own specs any more.
    register_all_kvcache_specs(None)
    KVCacheSpecRegistry.register(BoundedSpec, BoundedManager, uniform_type_base_spec=BoundedSpec)
