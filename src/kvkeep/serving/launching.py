"""How a vLLM engine for measurements is started: environment and arguments."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from kvkeep.core.errors import ConfigError, MissingExtraError
from kvkeep.core.policy import Policy

# vLLM reads these when it is imported. In one process a run repeats and an interrupt ends it.
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
# Set here, because texts or measurements would be wrong with anything else.
_OWN = (
    "additional_config",
    "async_scheduling",
    "disable_log_stats",
    "dtype",
    "logits_processors",
    "model",
    "skip_tokenizer_init",
    "speculative_config",
    "worker_extension_cls",
)


def prepare() -> None:
    """Set what vLLM reads from the environment, where the user has not.

    Raises
    ------
    MissingExtraError
        If vLLM is not installed.
    """
    if find_spec("vllm") is None:
        raise MissingExtraError("vllm", "vllm", "the engine vllm")
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def own_settings_left_alone(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, if none of them is decided here.

    Raises
    ------
    ConfigError
        Naming the first that is.
    """
    if own := sorted(options.keys() & set(_OWN)):
        raise ConfigError(f"the engine option {own[0]!r} is decided by kvkeep: leave it out.")
    return dict(options)


def arguments_of(policy: Policy, dtype: str, max_len: int | None, setting: dict[str, Any]) -> dict[str, Any]:
    """Arguments of ``vllm.LLM``; imports vLLM, so :func:`prepare` comes first.

    Parameters
    ----------
    policy, dtype, max_len
        As for the engine.
    setting
        ``additional_config``.
    """
    from vllm.platforms import current_platform

    from kvkeep.serving.names import LISTENER
    from kvkeep.serving.sampler import NAME

    arguments: dict[str, Any] = {
        "dtype": dtype,
        "max_model_len": max_len,
        "skip_tokenizer_init": True,
        "seed": 0,
        # A sample must depend on its own prompt alone, and a step in flight is one that nobody asked for.
        "enable_prefix_caching": False,
        "async_scheduling": False,
        "logits_processors": [NAME, *([LISTENER] if policy.traits.random else [])],
        "worker_extension_cls": "kvkeep.serving.contained.WorkerReader",
        "additional_config": setting,
        "disable_log_stats": True,
    }
    if current_platform.is_cpu():
        arguments |= {"enforce_eager": True, "distributed_executor_backend": "uni"}
        # The smallest that CPUs take: kept prompts are rounded up to whole blocks.
        arguments["block_size"] = 32
    elif policy.bounded:
        arguments["attention_backend"] = "CUSTOM"
    return arguments
