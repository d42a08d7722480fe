"""Precision as a cache is asked for it: read, refused with reasons, or filled in."""

from __future__ import annotations

import dataclasses
from typing import cast

from kvkeep.core.errors import ConfigError, UnsupportedError
from kvkeep.core.policy import Policy
from kvkeep.core.precision import WINDOW, Precision, Protect, widths
from kvkeep.core.spec import ModelSpec
from kvkeep.core.traits import Traits


def wanted_precision(bits: int | None, protect: str, precision: Precision | None) -> Precision | None:
    """What a cache was asked for, in whichever way.

    Raises
    ------
    ConfigError
        If it was said in two ways, or something is no precision.
    """
    if protect != "range" and bits is None:
        where = "bits=4" if precision is None else f"precision=Precision(bits=4, protect={protect!r})"
        raise ConfigError(
            f"protect={protect!r} says which entries stay beside those in few bits: give {where}."
        )
    if precision is None:
        return None if bits is None else Precision(bits=bits, protect=cast(Protect, protect))
    if not isinstance(precision, Precision):
        raise ConfigError(f"precision={precision!r} is no kvkeep.Precision: write kvkeep.Precision(bits=4).")
    if bits is not None:
        raise ConfigError(
            "bits and precision say the same thing: give bits=4, or precision=Precision(bits=4)."
        )
    return precision


def refuse_precision(precision: Precision | None, policy: Policy, spec: ModelSpec) -> None:
    """Refuse what cannot work, with every reason.

    Raises
    ------
    UnsupportedError
        Heads that groups do not fill, ranks that a policy does not have, budgets whose meaning would change.
    """
    if precision is None:
        return
    reasons = precision.check(spec.head_dim, spec.value_dim) + policy_reasons(precision, policy)
    if reasons:
        raise UnsupportedError(f"storing entries in {widths(precision.as_dict())}", reasons)


def policy_reasons(precision: Precision, policy: Policy) -> list[str]:
    """Reasons why a policy cannot work with it, whatever the model; empty if it can."""
    reasons = []
    if precision.protect == "policy" and not policy.bounded:
        reasons.append(
            f"protect='policy' asks {policy.name} for a ranking, and it ranks nothing: use another rule"
        )
    elif precision.protect == "policy" and policy.traits.scope == "model":
        reasons.append(
            f"protect='policy' ranks the entries of one layer alone, and {policy.name} ranks those of all "
            "layers together: use another rule, or a policy that decides by layer"
        )
    if policy.traits.reads is not None:
        reasons.append(
            f"{policy.name} reads blocks of entries where they lie in full precision: use full, or a policy "
            "that evicts"
        )
    if precision.prompt == "full" and policy.bounded and policy.amount.prompt != "kept":
        reasons.append(
            "a prompt in full precision comes on top of the budget, and this budget counts the prompt: use "
            "prompt='kept' (--prompt-mode kept), or leave --kv-prompt out"
        )
    if policy.amount.kv_bytes is not None and not policy.amount.resolved:
        reasons.append(
            "a budget in bytes does not say how many entries of either precision it holds: give entries, and "
            "read cache.trace.kv_bytes for the bytes that were allocated"
        )
    return reasons


def settled_precision(precision: Precision | None, policy: Policy) -> Precision | None:
    """With the numbers that were left open filled in from the policy."""
    if precision is None:
        return None
    budget = policy.amount.count if policy.bounded else None
    return precision.settled(buffer=policy.buffer, budget=budget)


def recorded_traits(traits: Traits, precision: Precision | None) -> Traits:
    """What layers have to record for a policy and for the rule that fills the reserve."""
    if precision is None or precision.protect != "attention":
        return traits
    return dataclasses.replace(traits, queries=max(traits.queries, WINDOW))
