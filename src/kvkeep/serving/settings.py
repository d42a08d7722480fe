"""What an operator writes after ``--additional-config``, checked before a model is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from kvkeep.core.budget import Budget
from kvkeep.core.errors import ConfigError, KvkeepError
from kvkeep.core.policy import Policy
from kvkeep.policies.compose import policy as make_policy
from kvkeep.serving.plugin import KEY as KEY

EXAMPLE = """--additional-config '{"kvkeep": {"policy": "vase-attnv", "budget": 2048, "buffer": 128}}'"""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One policy for all requests of an engine.

    Parameters
    ----------
    policy
        By name or composition, as everywhere: ``"vase-attnv"``, ``"snapkv + reserve"``.
    budget
        Entries that each KV head of a layer keeps after an eviction.
    buffer
        Tokens between evictions.
    prefill
        ``"chunk"`` evicts while a long prompt is read, so that a request never owns more than budget and
        buffer; ``"defer"`` reads it whole first.
    prompt
        ``"counts"``, or ``"kept"``: the prompt stays, on top of the budget.
    options
        Further options of the policy.
    seed
        Of the policy's random numbers.
    calibration
        File of ``kvkeep calibrate``, for policies that need it.
    reserve
        A request owns all its blocks from its first token on, so that it can never be preempted for want of
        memory. Without it short requests own less, and long ones may be preempted.
    log_requests
        A log line for each finished request: entries held on average and at most, entries dropped.
    allow_untested
        Start under a version of vLLM that kvkeep was not tested with.
    """

    policy: str
    budget: int
    buffer: int | None = None
    prefill: Literal["chunk", "defer"] = "chunk"
    prompt: Literal["counts", "kept"] = "counts"
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    calibration: str | None = None
    reserve: bool = True
    log_requests: bool = True
    allow_untested: bool = False

    @classmethod
    def read(cls, additional: Any) -> Settings | None:
        """Read vLLM's ``additional_config``; ``None`` without a part for kvkeep.

        Raises
        ------
        ConfigError
            If that part is not what :class:`Settings` takes.
        """
        given = additional.get(KEY) if isinstance(additional, Mapping) else None
        if given is None:
            return None
        if not isinstance(given, Mapping):
            raise ConfigError(f"the setting {KEY!r} is {given!r}, not an object: write {EXAMPLE}.")
        known = {each.name for each in fields(cls)}
        problems = [f"{name!r} is unknown (known: {', '.join(sorted(known))})" for name in set(given) - known]
        problems += [f"{name!r} is missing" for name in ("policy", "budget") if name not in given]
        problems += [
            f"{name} {given[name]!r} is not {words}"
            for name, (fits, words) in _KINDS.items()
            if name in given and not fits(given[name])
        ]
        if problems:
            raise ConfigError(f"the setting {KEY!r} cannot be read: {'; '.join(problems)}. Write {EXAMPLE}.")
        return cls(**given)

    def make_policy(self) -> Policy:
        """The policy, in the form in which every layer decides alone.

        Raises
        ------
        ConfigError
            With what the policy objects to.
        """
        options = dict(self.options)
        if self.buffer is not None:
            options["buffer"] = self.buffer
        options.setdefault("prefill", self.prefill)
        try:
            made = make_policy(self.policy, budget=Budget(entries=self.budget, prompt=self.prompt), **options)
        except KvkeepError:
            raise
        except TypeError as error:
            raise ConfigError(f"policy {self.policy!r} does not take these options: {error}.") from error
        return made.per_layer()


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_KINDS: dict[str, tuple[Any, str]] = {
    "policy": (lambda value: isinstance(value, str), "a policy by text"),
    "budget": (lambda value: _whole(value) and value >= 1, "a whole number of at least 1"),
    "buffer": (lambda value: value is None or (_whole(value) and value >= 1), "a whole number of at least 1"),
    "prefill": (lambda value: value in ("chunk", "defer"), "'chunk' or 'defer'"),
    "prompt": (lambda value: value in ("counts", "kept"), "'counts' or 'kept'"),
    "options": (lambda value: isinstance(value, Mapping), "an object of options"),
    "seed": (_whole, "a whole number"),
    "calibration": (lambda value: value is None or isinstance(value, str), "the path of a file"),
    "reserve": (lambda value: isinstance(value, bool), "true or false"),
    "log_requests": (lambda value: isinstance(value, bool), "true or false"),
    "allow_untested": (lambda value: isinstance(value, bool), "true or false"),
}
