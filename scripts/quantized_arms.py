"""The arms of docs/results/quantized.md: policies, bits and rules at equal bytes."""

from dataclasses import dataclass
from typing import Any

from kvkeep.core.policy import Policy
from kvkeep.core.precision import Precision
from kvkeep.evaluation.design_space.mechanisms import precision_flags
from kvkeep.kernels.few_bits import row_bytes
from kvkeep.policies.compose import policy as make_policy

DIM, GROUP = 64, 32  # channels of a key and of a value, in SmolLM2 and in trace-1 alike
FULL_BYTES = 2 * 2 * DIM  # key and value in 16 bits
BUFFER, SINKS, RECENT, RESERVE = 32, 4, 16, 32
RULES = ("range", "attention", "random", "recent", "policy")
WINDOW = 768  # tokens of a chapter that are read
PLAIN = 128  # entries in full precision whose bytes all bounded arms take


def few_bytes(bits: int, group: int = GROUP, key_bits: int | None = None) -> int:
    """Bytes of key and value of an entry in few bits."""
    return row_bytes(DIM, key_bits or bits, group) + row_bytes(DIM, bits, group)


def entry_bytes(precision: Precision) -> int:
    """The same, in this precision."""
    return few_bytes(precision.bits, precision.group, precision.key_bits)


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A policy, its budget (``None``: everything stays), and the precision of its entries.

    ``on_top``: entries of a prompt that is kept on top of the budget; 0 if it counts.
    """

    name: str
    budget: int | None = None
    precision: Precision | None = None
    buffer: int = BUFFER
    on_top: int = 0

    def policy(self, **options: Any) -> Policy:
        """The policy."""
        amount = {} if self.budget is None else {"budget": self.budget}
        return make_policy(self.name, buffer=self.buffer, **amount, **options)

    def bytes_at(self, entries: float | None = None, new: float | None = None) -> float:
        """Bytes per head with ``entries`` stored after an eviction, or a rounding, and ``new`` behind them.

        ``None``: the budget, and half a period.
        """
        kept = self.budget if entries is None else entries
        if kept is None:
            raise ValueError("everything stays: say how many entries there are")
        young = self.buffer / 2 if new is None else new
        if self.precision is None:
            return (kept + young) * FULL_BYTES
        full = min(kept, self.precision.settled(buffer=self.buffer, budget=self.budget).full)
        few = entry_bytes(self.precision)
        # What is new has full precision until the next rounding.
        return (full + young) * FULL_BYTES + max(0.0, kept - full) * few

    def flags(self) -> list[str]:
        """For `kvkeep eval`."""
        mode = "kept" if self.on_top else "counts"
        words = [] if self.budget is None else ["--budget", str(self.budget), "--prompt-mode", mode]
        return words + " ".join(precision_flags(self.precision)).split()

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        precision = None if self.precision is None else self.precision.as_dict()
        return {"policy": self.name, "budget": self.budget, "buffer": self.buffer, "precision": precision}


def protecting(bits: int, rule: str, reserve: int = RESERVE, group: int = GROUP) -> Precision:
    """A precision of these arms."""
    if rule == "none":
        return Precision(bits=bits, protect="none", group=group)
    return Precision(
        bits=bits,
        protect=rule,
        group=group,
        sinks=SINKS,
        recent=RECENT,
        reserve=reserve,  # type: ignore[arg-type]
    )


#: Keys in 4 bits, values in 2.
KEYS_4 = Precision(bits=2, key_bits=4, protect="none", group=GROUP)


def same_bytes(name: str, precision: Precision, plain: int = PLAIN) -> Arm:
    """The budget at which a policy in two precisions takes the bytes of ``plain`` entries in one."""
    target = Arm(name=name, budget=plain).bytes_at()
    full = precision.settled(buffer=BUFFER, budget=plain).full
    rest = target - (full + BUFFER / 2) * FULL_BYTES
    return Arm(name=name, budget=full + int(rest / entry_bytes(precision)), precision=precision)


def bounded(name: str = "snapkv") -> dict[str, Arm]:
    """A policy at the bytes of 128 full entries: fewer bits and more entries, protected or not."""
    arms = {"bounded, 16 bits": Arm(name=name, budget=PLAIN)}
    # The rules in turns, so that a run that is stopped has them at either width.
    for rule in ("none", "range", "random", "policy", "attention", "recent"):
        for bits in (4, 2):
            arms[f"bounded, {bits} bits, {rule}"] = same_bytes(name, protecting(bits, rule))
    arms["bounded, 8 bits, none"] = same_bytes(name, protecting(8, "none"))
    arms["bounded, K4 V2, none"] = same_bytes(name, KEYS_4)
    return arms


def unbounded() -> dict[str, Arm]:
    """Everything stays; 2 bits and a reserve against 4 bits, and against finer groups, for all."""
    arms = {"full": Arm(name="full")}
    for bits, group in ((8, 32), (4, 32), (2, 32), (2, 8)):
        precision = protecting(bits, "none", group=group)
        arms[f"full, {bits} bits in groups of {group}"] = Arm(name="full", precision=precision)
    arms["full, K4 V2 in groups of 32"] = Arm(name="full", precision=KEYS_4)
    for rule in ("range", "attention", "random", "recent"):
        arms[f"full, 2 bits, {rule}"] = Arm(name="full", precision=protecting(2, rule, reserve=64))
    return arms


BOUNDED, UNBOUNDED = bounded(), unbounded()
#: transformers' own quantized cache: keys by channel as KIVI does it, and by token.
STOCK = {
    f"stock-{way}-{bits}-bits": {
        "backend": "quanto",
        "nbits": bits,
        "axis_key": axis,
        "axis_value": 0,
        "q_group_size": GROUP,
        "residual_length": BUFFER,
    }
    for bits in (4, 2)
    for way, axis in (("channel", -1), ("token", 0))
}


def needle_arms() -> dict[str, Arm]:
    """KeyDiff, which finds needles, at the bytes of 128 full entries."""
    arms = {"full": Arm(name="full"), "full, 2 bits, none": Arm(name="full", precision=protecting(2, "none"))}
    arms["16 bits"] = Arm(name="keydiff", budget=PLAIN)
    for bits in (4, 2):
        for rule in ("none", *RULES):
            arms[f"{bits} bits, {rule}"] = same_bytes("keydiff", protecting(bits, rule))
    arms["K4 V2, none"] = same_bytes("keydiff", KEYS_4)
    return arms


NEEDLE = needle_arms()
