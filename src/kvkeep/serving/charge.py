"""Whether kvkeep is really in charge of an engine that has its setting.

vLLM lets any plug-in register an attention back end, and the last one to do so wins without a word. An
engine that lost kvkeep that way serves the full cache and looks healthy. So we look at what the process would
use and, once the engine has started, at the memory that the engine itself says a request can own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvkeep.core.errors import UnsupportedError
from kvkeep.serving import plugin
from kvkeep.serving.deployment import Deployment

if TYPE_CHECKING:
    from vllm.config import VllmConfig

WAY_OUT = (
    "set VLLM_PLUGINS=kvkeep, so that no other plug-in is loaded (or VLLM_PLUGINS=kvkeep,NAME "
    "with plug-ins that leave the attention back end alone), or uninstall the other one"
)


def objections(config: VllmConfig) -> list[str]:
    """Everything that speaks against kvkeep being in charge; empty without the setting, or if it is."""
    deployment = Deployment.of(config)
    if deployment is None:
        return []
    reasons = []
    if plugin.STATE.failure is not None:
        reasons.append(f"its plug-in could not register with this vLLM: {plugin.STATE.failure}")
    elif not plugin.STATE.registered:
        reasons.append(
            "its plug-in was not loaded in this process: install kvkeep here, and name it in VLLM_PLUGINS "
            "if that is set"
        )
    else:
        reasons += _backend_reasons(config)
    measured, due = _blocks_of_a_request(config, deployment)
    if measured is not None and measured != due:
        reasons.append(
            f"in this engine a request of {config.model_config.max_model_len} tokens owns {measured} blocks, "
            f"and under {deployment.policy.name} it should own {due}"
            + ("" if reasons else f"; if another plug-in had a hand in that: {WAY_OUT}")
        )
    return reasons


def _backend_reasons(config: VllmConfig) -> list[str]:
    """Objections to the attention back end that this process would take."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():  # which takes its own, whatever is asked for
        name, ours = "CPU_ATTN", plugin.BACKEND
    elif current_platform.is_cuda():
        name, ours = "CUSTOM", plugin.CUDA_BACKEND
        chosen = getattr(config.attention_config.backend, "name", None)
        if chosen != name:
            return [
                f"the attention back end is {chosen or 'left to vLLM'}, which keeps everything: start with "
                f"--attention-backend {name}"
            ]
    else:
        return [
            f"it has attention back ends for CPU and CUDA, and this is {current_platform.device_type}: leave "
            "the setting out to serve the full cache"
        ]
    found = plugin.registered_backend(name)
    if found != ours:
        return [f"another plug-in registered {found} as the attention back end after it: {WAY_OUT}"]
    return []


def require_charge(config: VllmConfig) -> None:
    """Nothing if kvkeep is in charge, or not set.

    Raises
    ------
    UnsupportedError
        With every reason why it is not.
    """
    if reasons := objections(config):
        raise UnsupportedError("kvkeep is set, but it is not in charge of this engine", reasons)


def check(engine: Any) -> bool:
    """Ask a running engine whether its cache is bounded by kvkeep.

    ``vllm serve`` asks by itself at start. An engine made in Python (``LLM``) loads no metrics plug-in, which
    leaves nobody to ask; call this once after making it.

    Parameters
    ----------
    engine
        An ``LLM``, or another engine of vLLM that has a ``vllm_config``.

    Returns
    -------
    bool
        ``True`` if kvkeep bounds the cache, ``False`` if its setting is not there.

    Raises
    ------
    UnsupportedError
        If the setting is there and kvkeep is not in charge.
    """
    config = getattr(engine, "llm_engine", engine).vllm_config
    require_charge(config)
    return Deployment.of(config) is not None


def _blocks_of_a_request(config: VllmConfig, deployment: Deployment) -> tuple[int | None, int]:
    """Blocks of a request of the largest length, as the started engine counts them, and as they should be."""
    schedule = deployment.schedule_in(config)
    due = schedule.longest(config.model_config.max_model_len)
    cache, model = config.cache_config, deployment.model
    concurrency = getattr(cache, "kv_cache_max_concurrency", None)
    # The sum over data-parallel engines cannot be taken apart, and other kinds of layers own other blocks.
    alone = config.parallel_config.data_parallel_size == 1 and len(model.managed) == len(model.layers)
    if not concurrency or not cache.num_gpu_blocks or not alone:
        return None, due
    return round(cache.num_gpu_blocks / concurrency), due
