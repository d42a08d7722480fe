"""Which stored entries keep the model's own precision, and in how many bits the others are written down."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from kvkeep.core.errors import ConfigError, UnknownNameError

Protect = Literal["range", "recent", "attention", "policy", "random", "none"]
PromptBits = Literal["few", "full"]

PROTECT: dict[str, str] = {
    "range": "largest value ranges: the entries that few bits distort most",
    "recent": "newest entries",
    "attention": "entries that the newest queries attend to most",
    "policy": "entries that the policy ranks highest",
    "random": "entries drawn once, each with the same chance",
    "none": "no entries, sinks and newest ones neither",
}
_BITS, _LEAST_GROUP = (2, 4, 8), 8

#: Bits of a channel in full precision, wherever memory is counted: those of the models in use, whatever
#: type a test computes in.
FULL_BITS = 16

#: Newest queries that the rule ``attention`` looks through.
WINDOW = 32


@dataclass(frozen=True, kw_only=True)
class Precision:
    """How a mixed-precision store deals out full precision, per KV head and layer.

    An entry is stored in full precision when it is new. Once in a period (the policy's buffer), ``sinks``
    first tokens, ``recent`` newest ones and ``reserve`` entries by the rule ``protect`` stay so; the others
    are *demoted* to few bits. Lost bits do not come back: a demoted entry competes for the reserve only after
    all that still have theirs. Where too few of those are left, because the policy has evicted some, it is
    *promoted*: it takes a full slot that is free anyway, with the value it has.

    Parameters
    ----------
    bits
        Of a code: 2, 4 or 8. Scales are counted on top (:meth:`bits_per_channel`).
    key_bits
        Of a key's codes, if not as many: an error in a key moves attention to other entries, one in a value
        only changes what is read there. ``None``, or as many: ``bits``.
    protect
        Rule by which the reserve is filled; ``"none"`` protects nothing, sinks and newest entries neither.
    group
        Channels that share a scale; a divisor of the head dimension.
    reserve
        Entries that the rule chooses; ``None``: a quarter of the budget, or 64 without a budget.
    sinks, recent
        First and newest tokens that stay in full precision; ``recent=None``: the policy's buffer.
    prompt
        ``"full"``: the whole prompt stays in full precision, on top of all these numbers; for a policy that
        keeps the prompt on top of its budget. ``"few"``: its entries are like any others.

    Raises
    ------
    ConfigError
        If a number cannot be right.

    Examples
    --------
    >>> Precision(bits=4).bits_per_channel
    5.0
    >>> Precision(bits=4, group=16).weight
    0.375
    >>> Precision(bits=2, key_bits=4).bits_per_channel
    4.0
    """

    bits: int
    key_bits: int | None = None
    protect: Protect = "range"
    group: int = 32
    reserve: int | None = None
    sinks: int = 4
    recent: int | None = None
    prompt: PromptBits = "few"

    def __post_init__(self) -> None:
        for name, value in (("bits", self.bits), ("key_bits", self.key_bits)):
            if (type(value) is not int or value not in _BITS) and (name, value) != ("key_bits", None):
                raise ConfigError(f"{name}={value!r} is not offered: use 8, 4 or 2, or leave it out.")
        if self.key_bits == self.bits:  # one way to say it: headers, seals and saved caches are compared
            object.__setattr__(self, "key_bits", None)
        if self.protect not in PROTECT:
            raise UnknownNameError("protect rule", str(self.protect), PROTECT)
        for name, least in (("group", _LEAST_GROUP), ("reserve", 0), ("sinks", 0), ("recent", 0)):
            value = getattr(self, name)
            optional = name in ("reserve", "recent")
            if (value is None and optional) or (type(value) is int and value >= least):
                continue
            raise ConfigError(f"{name}={value!r} is not a whole number of at least {least}.")
        if self.prompt not in get_args(PromptBits):
            raise ConfigError(
                f"prompt={self.prompt!r} is not offered: use {' or '.join(get_args(PromptBits))}."
            )
        if self.protect == "none" and (self.reserve or self.recent or self.prompt == "full"):
            raise ConfigError(
                "protect='none' stores everything in few bits, so reserve, recent and prompt='full' have no "
                "meaning: leave them out, or use protect='recent'."
            )

    def width(self, kind: str) -> int:
        """Bits of a code of ``"keys"`` or ``"values"``."""
        return self.key_bits if kind == "keys" and self.key_bits is not None else self.bits

    @property
    def bits_per_channel(self) -> float:
        """Bits that a channel takes, a low and a step of 16 bits for each group included.

        The mean over as many channels of keys as of values.
        """
        return (self.width("keys") + self.width("values")) / 2 + 2 * 16 / self.group

    @property
    def weight(self) -> float:
        """Bytes of an entry in few bits, scales included, divided by those of an entry in 16 bits."""
        return self.bits_per_channel / FULL_BITS

    def settled(self, *, buffer: int, budget: int | None) -> Precision:
        """With the numbers that were left open filled in.

        Parameters
        ----------
        buffer
            Of the policy.
        budget
            Entries that the policy keeps; ``None`` without a bound.
        """
        if self.protect == "none":
            return dataclasses.replace(self, reserve=0, sinks=0, recent=0)
        reserve = (64 if budget is None else budget // 4) if self.reserve is None else self.reserve
        recent = buffer if self.recent is None else self.recent
        return dataclasses.replace(self, reserve=reserve, recent=recent)

    @property
    def full(self) -> int:
        """Entries per head that stay in full precision, once settled; a prompt in full comes on top."""
        return self.sinks + (self.recent or 0) + (self.reserve or 0)

    def full_of(self, prompt: int) -> int:
        """Entries per head that stay in full precision after a prompt of so many tokens, once settled."""
        return self.full + (prompt if self.prompt == "full" else 0)

    def check(self, head_dim: int, value_dim: int) -> list[str]:
        """Reasons why heads of so many channels cannot be stored like this; empty if they can."""
        reasons = []
        if self.key_bits is not None and head_dim != value_dim:
            reasons.append(
                f"keys have {head_dim} channels and values {value_dim}, so the mean of both widths is not "
                "what an entry takes: leave key_bits out"
            )
        for kind, dim in (("keys", head_dim), ("values", value_dim)):
            if dim % self.group:
                fits = next((size for size in (64, 32, 16, 8) if dim % size == 0), dim)
                reasons.append(
                    f"{kind} have {dim} channels, which groups of {self.group} do not fill: use group={fits}"
                )
            elif dim * self.width(kind) % 8:
                name = "key_bits" if kind == "keys" and self.key_bits is not None else "bits"
                reasons.append(
                    f"{kind} have {dim} channels, whose codes of {self.width(kind)} bits do not fill whole "
                    f"bytes: use {name}=8"
                )
        return reasons

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        plain = dataclasses.asdict(self)
        # Younger than logs and caches that were written without them.
        for name, default in (("prompt", "few"), ("key_bits", None)):
            if plain[name] == default:
                del plain[name]
        return plain

    def __str__(self) -> str:
        amount = f" {self.full}" if self.recent is not None and self.reserve is not None else ""
        prompt = ", prompt in full" if self.prompt == "full" else ""
        return f"{widths(self.as_dict())}, groups of {self.group}, protect {self.protect}{amount}{prompt}"


def widths(precision: Mapping[str, Any]) -> str:
    """Bits of a precision, as it stands in a run's header, in words.

    Examples
    --------
    >>> widths({"bits": 2, "key_bits": 4})
    '2 bits, keys 4'
    """
    keys = precision.get("key_bits")
    return f"{precision['bits']} bits" + ("" if keys is None else f", keys {keys}")


def flag(name: str) -> str:
    """What commands call a field of a precision.

    Examples
    --------
    >>> flag("key_bits"), flag("protect")
    ('--kv-key-bits', '--protect')
    """
    return "--protect" if name == "protect" else f"--kv-{name.replace('_', '-')}"
