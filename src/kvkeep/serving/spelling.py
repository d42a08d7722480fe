"""A policy object as the setting that makes vLLM's plug-in build the same one."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from kvkeep.core.errors import ConfigError
from kvkeep.core.policy import Policy
from kvkeep.policies.wrapped import Wrapped
from kvkeep.serving.settings import KEY, Settings


def spelled(policy: Policy, *, calibration: str | None = None) -> dict[str, Any]:
    """The object behind ``"kvkeep"`` in vLLM's ``additional_config``.

    Parameters
    ----------
    policy
        Bounded, its budget a count. Inside vLLM every layer decides alone.
    calibration
        File of ``kvkeep calibrate``.

    Raises
    ------
    ConfigError
        If the text of the policy would build another one.

    Examples
    --------
    >>> from kvkeep.policies.snapkv import SnapKV
    >>> spelled(SnapKV(budget=512, buffer=64))
    {'policy': 'snapkv', 'budget': 512, 'buffer': 64, 'prefill': 'defer', 'prompt': 'counts'}
    """
    base = policy
    while isinstance(base, Wrapped):
        base = base.base
    options = {
        each.name: getattr(base, each.name)
        for each in fields(base)
        if each.init and each.name not in ("budget", "buffer", "prefill") and not _default(base, each)
    }
    if base.prefill == "after":  # the plug-in says why not
        options["prefill"] = "after"
    setting: dict[str, Any] = {
        "policy": policy.name,
        "budget": policy.amount.count,
        "buffer": policy.buffer,
        "prefill": "chunk" if base.prefill == "chunk" else "defer",
        "prompt": policy.amount.prompt,
    }
    setting |= {"options": options} if options else {}
    setting |= {"calibration": calibration} if calibration is not None and policy.traits.calibration else {}
    settings = Settings.read({KEY: setting})
    if settings is None or settings.make_policy() != policy.per_layer():
        raise ConfigError(
            f"the policy {policy.name!r} cannot be written down exactly for vLLM: round its settings, or use "
            "--engine transformers."
        )
    return setting


def _default(policy: Policy, field: Any) -> bool:
    default = field.default if field.default is not MISSING else None
    return bool(getattr(policy, field.name) == default)
