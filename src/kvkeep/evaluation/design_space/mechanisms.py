"""The mechanisms that the study adds to a policy, by the five families of the paper.

The paper rejected seven mechanisms of these families and names none of them in what we could read. The ones
here are stand-ins of ours; each is a switch that any command takes, so that a reader can try it alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

from kvkeep.core.budget import Budget
from kvkeep.core.errors import ConfigError, UnknownNameError
from kvkeep.core.policy import Policy
from kvkeep.core.precision import FULL_BITS, Precision, flag
from kvkeep.policies.compose import policy

Family = Literal["state", "routing", "cadence", "decoding", "scoring"]
FAMILIES: tuple[Family, ...] = get_args(Family)


@dataclass(frozen=True, kw_only=True)
class Arm:
    """What a run needs beside task and model.

    Parameters
    ----------
    policy
        With its budget.
    sampling
        What differs from the task's sampling, by the names of
        :class:`~kvkeep.evaluation.sampling.Sampling`.
    precision
        Of the stored entries; ``None``: all in full precision.
    """

    policy: Policy
    sampling: Mapping[str, Any] = field(default_factory=dict)
    precision: Precision | None = None

    def with_entries(self, entries: int) -> Arm:
        """The same with another number of entries."""
        amount = Budget(entries=entries, prompt=self.policy.amount.prompt)
        return replace(self, policy=self.policy.with_budget(amount))

    def weighing(self, weight: float | None = None) -> Arm:
        """The same with as many entries as take the bytes of its budget in full precision, or just less.

        Parameters
        ----------
        weight
            Bytes of an entry in few bits over those of one in full precision; ``None``: the real one
            (:attr:`~kvkeep.Precision.weight`).
        """
        precision = self.precision
        if precision is None:
            return self
        each = precision.weight if weight is None else weight
        budget, buffer = self.policy.amount.count, self.policy.buffer

        def size(entries: int) -> float:
            """Memory of so many entries after an eviction, in entries of full precision."""
            full = min(entries, precision.settled(buffer=buffer, budget=entries).full)
            return full + (entries - full) * each

        entries = budget
        while size(entries + 1) <= budget:
            entries += 1
        return self.with_entries(entries)

    @property
    def nominal(self) -> float | None:
        """What few bits weigh by their name alone, scales forgotten: 4 of 16 are a quarter."""
        return None if self.precision is None else self.precision.bits / FULL_BITS

    @property
    def flags(self) -> list[str]:
        """For any command, beside the policy."""
        words = [f"--{name.replace('_', '-')} {value}" for name, value in self.sampling.items()]
        return [*words, *precision_flags(self.precision)]


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """One change to a policy or to how it writes.

    Parameters
    ----------
    name, family, does
        What it is, in a word and in a sentence.
    part
        What stands behind the ``+`` of the policy's text.
    options
        Settings of the policy that replace those of the base.
    sampling
        Settings of the writing.
    precision
        How entries are stored.

    Source
    ------
    Ours: stand-ins for the mechanisms of the paper, whose names are not public.
    """

    name: str
    family: Family
    does: str
    part: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    precision: Precision | None = None

    @property
    def switch(self) -> str:
        """How any command turns it on."""
        flags = [f"--option {name}={value}" for name, value in self.options.items()]
        flags += [f"--{name.replace('_', '-')} {value}" for name, value in self.sampling.items()]
        flags += precision_flags(self.precision)
        return " ".join([f"+ {self.part}" if self.part else "", *flags]).strip()

    def arm(self, base: str, budget: Budget, **options: Any) -> Arm:
        """The mechanism on a policy, at the same budget.

        Where it stores entries in few bits, the same budget is as many bits as the base's entries have by the
        name of the width: an entry in 4 bits counts as a quarter, as one would reckon at first, and scales
        are forgotten.

        Parameters
        ----------
        base
            A policy as text.
        budget
            Of the base.
        options
            Settings of the base, for example ``buffer=16``.
        """
        text = f"{base} + {self.part}" if self.part else base
        precision = self.precision
        if precision is not None and budget.prompt != "kept":  # a prompt that counts is like other entries
            precision = replace(precision, prompt="few")
        arm = Arm(
            policy=policy(text, budget=budget, **{**options, **self.options}),
            sampling=self.sampling,
            precision=precision,
        )
        return arm.weighing(arm.nominal)


def precision_flags(precision: Precision | None) -> list[str]:
    """How any command is told of a precision, defaults left out."""
    if precision is None:
        return []
    default = Precision(bits=precision.bits)
    return [f"--kv-bits {precision.bits}"] + [
        f"{flag(each.name)} {getattr(precision, each.name)}"
        for each in fields(Precision)
        if getattr(precision, each.name) != getattr(default, each.name)
    ]


MECHANISMS: tuple[Mechanism, ...] = (
    Mechanism(
        name="merge",
        family="state",
        does="an evicted entry joins the kept entry of its head with the nearest key",
        part="merge",
    ),
    Mechanism(
        name="cam",
        family="state",
        does="an evicted entry is spread over the next kept ones, with a chance given by its attention",
        part="cam",
    ),
    Mechanism(
        name="second-chance",
        family="state",
        does="the highest ranks stay in full precision, what would have gone lives on in 4 bits",
        # Groups of 16 fill the heads of both built-in reasoners.
        precision=Precision(bits=4, protect="policy", group=16, prompt="full"),
    ),
    Mechanism(
        name="adaptive-heads",
        family="routing",
        does="the heads of a layer compete for its budget",
        part="adaptive-heads",
    ),
    Mechanism(
        name="whole-model",
        family="routing",
        does="all heads of all layers compete for one budget",
        part="whole-model",
    ),
    Mechanism(
        name="pyramid",
        family="routing",
        does="early layers get more of the budget, late ones less",
        part="pyramid",
    ),
    Mechanism(
        name="shared-layers",
        family="routing",
        does="neighbouring layers, two by two, keep one selection, by the mean of their scores",
        part="shared-layers",
    ),
    Mechanism(
        name="period-32",
        family="cadence",
        does="evict every 32 tokens",
        options={"buffer": 32},
    ),
    Mechanism(
        name="period-128",
        family="cadence",
        does="evict every 128 tokens",
        options={"buffer": 128},
    ),
    Mechanism(
        name="surprise",
        family="cadence",
        does="evict at a token at which the model is unsure, not on the clock",
        part="surprise",
    ),
    Mechanism(
        name="repetition-heat",
        family="decoding",
        does="the temperature rises with the share of repeated n-grams",
        sampling={"repetition_rise": 0.6},
    ),
    Mechanism(
        name="refeed",
        family="decoding",
        does="the prompt is read again after every 128 tokens",
        sampling={"refeed_every": 128},
    ),
    Mechanism(
        name="norm-weighted",
        family="scoring",
        does="scores are weighed by the norm of the value",
        part="norm-weighted",
    ),
    Mechanism(
        name="recency",
        family="scoring",
        does="younger entries get a bonus",
        part="recency",
    ),
)


def chosen(names: Iterable[str] = ()) -> tuple[Mechanism, ...]:
    """Mechanisms by name; all of them if none is named.

    Raises
    ------
    UnknownNameError
        Naming what there is.
    ConfigError
        If one is named twice.
    """
    known = {each.name: each for each in MECHANISMS}
    wanted = list(names)
    for name in wanted:
        if name not in known:
            raise UnknownNameError("mechanism", name, tuple(known))
    if len(set(wanted)) < len(wanted):
        raise ConfigError(f"mechanisms {wanted}: name each once.")
    return tuple(known[name] for name in wanted) or MECHANISMS
