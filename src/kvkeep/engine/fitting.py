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
from kvkeep.gates.block_gates import BlockGates
from kvkeep.gates.modules import RetentionGates

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
    if traits.gated:
        reasons.extend(_gate_reasons(policy, spec, gates))
    if traits.log_retention and gates is not None:
        reasons.extend(tap_reasons(model, spec))
    if traits.calibration and calibration is None:
        reasons.append(
            "the policy needs calibration statistics of this model: run `kvkeep calibrate` and pass "
            "calibration=kvkeep.calibration.load(path)"
        )
    block_gates = traits.reads is not None and traits.reads.gates
    if traits.rope or traits.query_moments or block_gates:
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


def _gate_reasons(policy: Policy, spec: ModelSpec, gates: Any) -> list[str]:
    """Why gates do not serve a policy that asks for some."""
    reads = policy.traits.reads
    wanted, kind = ("retention gates", RetentionGates) if reads is None else ("block gates", BlockGates)
    if gates is None:
        return [
            f"the policy needs {wanted} that were trained for this model: pass gates=kvkeep.gates.load(path)"
        ]
    blocks: Any = getattr(gates, "shape", None)
    if not isinstance(gates, kind) and isinstance(gates, RetentionGates | BlockGates):
        other = "block gates" if isinstance(gates, BlockGates) else "retention gates"
        return [f"the policy needs {wanted}, and these are {other}: pass the ones made for it"]
    reasons: list[str] = gates.check(spec)
    if reads is not None and blocks.block != reads.block:
        reasons = [
            *reasons,
            f"the gates were trained for blocks of {blocks.block} entries, and the policy reads blocks of "
            f"{reads.block}: give it block={blocks.block}",
        ]
    return reasons


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
