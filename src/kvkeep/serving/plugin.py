"""What vLLM calls in each of its processes before it reads its configuration."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from kvkeep.serving import lastwords

#: Kvkeep's part of vLLM's ``additional_config``.
KEY = "kvkeep"
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
    lastwords.listen()
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


def registered_backend(name: str) -> str | None:
    """Path of the class that this process would take for a name of vLLM's list; ``None`` for its own one."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    backend = AttentionBackendEnum[name]
    return str(backend.get_path()) if backend.is_overridden() else None


def _register() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    from kvkeep.serving.manager import BoundedManager
    from kvkeep.serving.spec import BoundedSpec

    # A registry that holds something does not look for vLLM's own specs any more.
    register_all_kvcache_specs(None)
    KVCacheSpecRegistry.register(BoundedSpec, BoundedManager, uniform_type_base_spec=BoundedSpec)
    # Last: a back end without the rest would be worse than none.
    for name, ours in (("CPU_ATTN", BACKEND), ("CUSTOM", CUDA_BACKEND)):
        if (before := registered_backend(name)) not in (None, ours):
            logger.warning(
                "kvkeep takes the place of %s as the attention back end %s, also in engines without the "
                "setting 'kvkeep'. To use the other one, leave kvkeep out of VLLM_PLUGINS.",
                before,
                name,
            )
        register_backend(AttentionBackendEnum[name], ours)
