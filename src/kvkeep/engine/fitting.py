"""Whether a policy can run on a model at all: every reason against it, at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from transformers import PreTrainedModel

from kvkeep.core.errors import ConfigError, UnsupportedError
from kvkeep.core.policy import Policy
from kvkeep.core.spec import ModelSpec
from kvkeep.core.view import Rope
from kvkeep.engine.rotary import rope_of
from kvkeep.engine.tap import tap_reasons

StoreKind = Literal["auto", "dense", "paged"]


def fit(
    policy: Policy, model: PreTrainedModel, spec: ModelSpec, calibration: Any, gates: Any = None
) -> tuple[Rope | None, Mapping[int, Any]]:
    """Check that a policy has what it needs, and collect it.

    Returns
    -------
    tuple
        Rotary embedding and calibration statistics by layer, where the traits ask for them.

    Raises
    ------
    UnsupportedError
        With every reason, if the policy cannot run here.
    """
    traits, reasons = policy.traits, list(policy.check(spec))
    rope: Rope | None = None
    layers: Mapping[int, Any] = {}
    if traits.log_retention and gates is None:
        reasons.append(
            "the policy needs retention gates that were trained for this model: pass "
            "gates=kvkeep.gates.load(path)"
        )
    elif traits.log_retention:
        reasons.extend(gates.check(spec))
        reasons.extend(tap_reasons(model, spec))
    if traits.calibration and calibration is None:
        reasons.append(
            "the policy needs calibration statistics of this model: run `kvkeep calibrate` and pass "
            "calibration=kvkeep.calibration.load(path)"
        )
    if traits.rope or traits.query_moments:
        try:
            rope = rope_of(model, spec)
        except UnsupportedError as error:
            reasons.extend(error.reasons)
    if traits.calibration and calibration is not None and rope is not None:
        reasons.extend(calibration.check(spec, rope))
        layers = calibration.layers
    if reasons:
        raise UnsupportedError(f"{policy.name} cannot run on {spec.model_type!r} here", reasons)
    return rope, layers


def store_kind(store: str, policy: Policy) -> Literal["dense", "paged"]:
    """The store that a policy runs on.

    Raises
    ------
    ConfigError
        If there is no such store, or the policy cannot work on it.
    """
    if store not in ("auto", "dense", "paged"):
        raise ConfigError(f"store {store!r} is unknown: use 'auto', 'dense' or 'paged'.")
    if store == "paged" and policy.traits.reads is not None:
        raise ConfigError(
            f"{policy.name} keeps every entry of every head, and reads blocks of the dense store: pages of a "
            "pool would gain nothing. Use store='dense', or leave store out."
        )
    if store == "dense" and policy.traits.ragged:
        raise ConfigError(
            f"{policy.name} keeps different numbers of entries per head, which the dense store cannot hold: "
            "use store='paged', or leave store out."
        )
    return "paged" if store == "paged" or policy.traits.ragged else "dense"
