"""What vLLM calls in each of its processes before it reads its configuration."""

from __future__ import annotations

import logging
from dataclasses import dataclass

BACKEND = "kvkeep.serving.cpu.BoundedCPUBackend"
CUDA_BACKEND = "kvkeep.serving.cuda.BoundedFlashBackend"

logger = logging.getLogger("vllm.kvkeep")


@dataclass
class Registration:
    """What became of :func:`register` in this process.

    Parameters
    ----------
    registered
        It ran to its end.
    failure
        Why it could not.
    """

    registered: bool = False
    failure: str | None = None


STATE = Registration()


def register() -> None:
    """Register the back end and the bounded cache; may run several times.

    Nothing changes for an engine whose ``additional_config`` does not mention kvkeep, not even under a vLLM
    that kvkeep does not fit: what went wrong is logged, and is an error where the setting is given.
    """
    try:
        _register()
    except Exception as error:
        STATE.failure = f"{type(error).__name__}: {error}"
        logger.exception(
            "kvkeep could not register with this vLLM; engines without the setting 'kvkeep' are served as "
            "usual, and one with it would not be bounded"
        )
        return
    STATE.registered = True


def registered_backend(name: str = "CPU_ATTN") -> str:
    """Path of the class that this process would take where kvkeep's should stand."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return str(AttentionBackendEnum[name].get_path())


def _register() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    from kvkeep.serving.manager import BoundedManager
    from kvkeep.serving.spec import BoundedSpec

    # A registry that holds something does not look for vLLM's own specs any more.
    register_all_kvcache_specs(None)
    KVCacheSpecRegistry.register(BoundedSpec, BoundedManager, uniform_type_base_spec=BoundedSpec)
    before = registered_backend()
    if AttentionBackendEnum.CPU_ATTN.is_overridden() and before != BACKEND:
        logger.warning(
            "kvkeep takes the place of %s as the CPU attention back end, also in engines without the setting "
            "'kvkeep'. To use the other one, leave kvkeep out of VLLM_PLUGINS.",
            before,
        )
    register_backend(AttentionBackendEnum.CUSTOM, CUDA_BACKEND)
    # Last: a back end without the rest would be worse than none.
    register_backend(AttentionBackendEnum.CPU_ATTN, BACKEND)
