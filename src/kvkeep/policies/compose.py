"""Policies by text, also those that nobody has published: one method's score, another's selection.

    vase-attnv
    vase-attnv(reserve=128, pool=1)
    triattention + sample + reserve
    snapkv(window=32) + sample(temperature=0.5) + reserve(slots=128, magnitude=l2)
    snapkv + adaptive-heads(floor=0.2)
    vase-attnv + whole-model(calibrate=rank, floor=4)
    triattention + norm-weighted + shared-layers(every=2)

The first part is a registered policy; each part after it changes one thing: the score, how the entries are
chosen, which layers share a selection, how the budget is shared out, when evictions happen, what becomes of
evicted values. Parts may stand in any order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from kvkeep.core.errors import ConfigError, UnknownNameError
from kvkeep.core.policy import Policy
from kvkeep.core.registry import available_policies
from kvkeep.policies.allocated import SHARES, Allocated
from kvkeep.policies.cadence import CADENCES, Surprise
from kvkeep.policies.composed import CHOICES, Composed
from kvkeep.policies.merged import STATES, CaM, Merge
from kvkeep.policies.rescored import SCORES, NormWeighted, Recency
from kvkeep.policies.shared_layers import ROUTES, SharedLayers
from kvkeep.policies.text import read_parts

# What may stand after a "+": what the parts change, and the options that each of them takes.
PART_GROUPS: dict[str, dict[str, tuple[str, ...]]] = {
    "What changes the score": SCORES,
    "How entries are chosen": CHOICES,
    "Which layers share a selection": ROUTES,
    "How the budget is shared out": SHARES,
    "What becomes of evicted values": STATES,
    "When evictions happen": CADENCES,
}
PARTS: dict[str, tuple[str, ...]] = {
    part: options for group in PART_GROUPS.values() for part, options in group.items()
}

_Wrap = Callable[..., Policy]
_SIMPLE: dict[str, _Wrap] = {
    "norm-weighted": NormWeighted,
    "recency": Recency,
    "shared-layers": SharedLayers,
    "merge": Merge,
    "cam": CaM,
    "surprise": Surprise,
}


def policy(text: str, /, **options: Any) -> Policy:
    """Build a policy from its name, or from a composition of parts.

    Parameters
    ----------
    text
        A name of ``kvkeep policies``, with options in brackets if you like, and parts after it, each behind
        a ``+``; ``kvkeep policies`` lists them.
    options
        Hyper-parameters of the first part, for example ``budget=1024``; they win over those in brackets.

    Raises
    ------
    UnknownNameError
        For a policy, a part or an option that does not exist; the message names the nearest.
    ConfigError
        If the text cannot be read, or a value is out of range.

    Examples
    --------
    >>> policy("vase-attnv", budget=1024).name
    'vase-attnv'
    >>> policy("vase-dkv(rank=8) + sample + reserve(slots=64)", budget=512).base.rank
    8
    """
    (name, given), *parts = read_parts(text)
    known = available_policies()
    if name not in known:
        raise UnknownNameError("policy", name, known)
    made = _build(known[name], given | options)
    chosen: dict[str, Any] = {}
    shares: list[tuple[str, dict[str, Any]]] = []
    simple: dict[str, dict[str, Any]] = {}
    for place, (part, settings) in enumerate(parts):
        _check(part, settings)
        if part in (before for before, _ in parts[:place]):
            raise ConfigError(f"{text!r} names {part} twice: leave one out.")
        if part in SHARES:
            shares.append((part, settings))
        elif part in _SIMPLE:
            simple[part] = settings
        elif part == "reserve":
            chosen |= {"magnitude": "range"} | settings
        elif "choose" in chosen:
            raise ConfigError(f"{text!r} chooses twice, by {chosen['choose']} and {part}: leave one out.")
        else:
            chosen |= {"choose": part} | settings
    if len(shares) > 1:
        raise ConfigError(
            f"{text!r} shares the budget out twice, by {shares[0][0]} and {shares[1][0]}: leave one out."
        )
    if len(simple.keys() & STATES.keys()) > 1:
        raise ConfigError(f"{text!r} merges evicted values twice, by {' and '.join(STATES)}: leave one out.")
    # Whatever the order of the text: the score first, then what is chosen by it, then who gets how much.
    made = _wrap(made, SCORES, simple)
    made = Composed(base=made, **chosen) if chosen else made
    made = _wrap(made, ROUTES, simple)
    for share, settings in shares:
        made = Allocated(base=made, share=share, **settings)  # type: ignore[arg-type]  # checked above
    return _wrap(_wrap(made, STATES, simple), CADENCES, simple)


def _wrap(made: Policy, parts: dict[str, tuple[str, ...]], given: dict[str, dict[str, Any]]) -> Policy:
    for part in parts:
        if part in given:
            made = _SIMPLE[part](base=made, **given[part])
    return made


def _check(part: str, settings: dict[str, Any]) -> None:
    if part not in PARTS:
        raise UnknownNameError("part of a policy", part, PARTS)
    for setting in settings:
        if setting not in PARTS[part]:
            raise UnknownNameError(f"option of {part}", setting, PARTS[part] or ("none",))


def _build(kind: type[Policy], options: dict[str, Any]) -> Policy:
    fields = {f.name for f in dataclasses.fields(kind) if f.init}
    for option in options:
        if option not in fields:
            raise UnknownNameError(f"option of {kind.name}", option, fields)
    required = {
        f.name
        for f in dataclasses.fields(kind)
        if f.init and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    }
    missing = sorted(required - options.keys())
    if missing:
        raise ConfigError(f"{kind.name} needs {', '.join(missing)}: for example {missing[0]}=1024.")
    return kind(**options)
