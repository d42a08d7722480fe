"""Find the budget at which a policy really holds as much as another.

The number in a policy's name says little: papers count the prompt or not, the buffer or not, and let
the cache grow between evictions. What is comparable is the measured mean cache over the whole
generation. Only development problems are used, and no accuracy is looked at.

Entries of different width are matched by their memory: bytes of keys and values, written down as the entries
in 16 bits that would take them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

from kvkeep.core.errors import ConfigError, EvidenceError
from kvkeep.core.precision import widths
from kvkeep.evaluation.records import Run

MatchOn = Literal["mean_cache", "prefill_cache", "mean_memory"]

#: What counts entries as if all were of one width.
ENTRIES = ("mean_cache", "prefill_cache")

TOLERANCE = 0.02


class Measured(Protocol):
    """What a run shows of its memory; :class:`~kvkeep.evaluation.records.Run` does.

    ``mean_memory`` is asked for only where it is to be matched.
    """

    @property
    def mean_cache(self) -> float: ...
    @property
    def prefill_cache(self) -> float: ...


@dataclass(frozen=True, kw_only=True)
class Try:
    """One budget that was measured; ``matched`` is what was to be equal."""

    budget: int
    mean_cache: float
    prefill_cache: float
    matched: float


@dataclass(frozen=True, kw_only=True)
class Match:
    """The budget that was found.

    Parameters
    ----------
    budget
        Entries to ask for.
    on
        What was matched: ``"mean_cache"``, ``"mean_memory"`` where entries differ in width, or
        ``"prefill_cache"`` to show how that misleads.
    target, target_prefill
        Mean cache of the reference, and its entries at the end of the prompt.
    mean_cache, prefill_cache
        The same of the policy at that budget.
    matched, ratio
        Matched quantity of the policy, and the same divided by that of the reference.
    tries
        Every budget that was measured, in order.
    """

    budget: int
    on: MatchOn
    target: float
    target_prefill: float
    mean_cache: float
    prefill_cache: float
    matched: float
    ratio: float
    tries: tuple[Try, ...]

    def __str__(self) -> str:
        memory = f" ({self.matched:.1f} entries in 16 bits, {100 * (self.ratio - 1):+.1f} %)"
        return (
            f"budget {self.budget} after {len(self.tries)} tries: mean cache {self.mean_cache:.1f} against "
            f"{self.target:.1f} ({_percent(self.mean_cache, self.target)}), at the end of the prompt "
            f"{self.prefill_cache:.1f} against {self.target_prefill:.1f} "
            f"({_percent(self.prefill_cache, self.target_prefill)}); matched on {self.on}"
            f"{memory if self.on == 'mean_memory' else ''}"
        )


def _percent(value: float, target: float) -> str:
    return f"{100 * (value / target - 1):+.1f} %" if target else "no reference"


def match_budget(
    measure: Callable[[int], Measured],
    reference: Measured,
    *,
    low: int,
    high: int,
    start: int | None = None,
    on: MatchOn = "mean_cache",
    tolerance: float = TOLERANCE,
    allow: Collection[str] = (),
) -> Match:
    """Bisect whole budgets until the measured cache equals the reference's.

    Parameters
    ----------
    measure
        Runs the policy with a budget and returns what was measured, for example a
        :class:`~kvkeep.evaluation.records.Run`. More budget must mean more cache.
    reference
        What is to be equalled.
    low, high
        Smallest and largest budget to try.
    start
        First budget to try (see :func:`~kvkeep.evaluation.expected_cache.budget_for`); the middle
        otherwise.
    on
        What to match.
    tolerance
        Largest relative difference that counts as equal.
    allow
        ``"sampling"`` where the policies are meant to draw differently.

    Raises
    ------
    EvidenceError
        If a run is not a run on development problems, or not on the reference's problems.
    ConfigError
        If no budget in range comes close enough; the message names the nearest.
    """
    target = float(getattr(reference, _check(on)))
    _check_run(reference, on=on)
    if not (1 <= low <= high and target > 0 and tolerance > 0):
        raise ConfigError(
            f"cannot match {on} {target:g} within {tolerance:g} by budgets {low}…{high}: the reference "
            "must have been measured, and the range must not be empty."
        )
    bottom, top = low, high
    budget = (low + high) // 2 if start is None else min(high, max(low, start))
    tries: list[Try] = []
    while bottom <= top:
        result = measure(budget)
        _check_run(result, reference, allow, on)
        value = float(getattr(result, on))
        tries.append(
            Try(
                budget=budget,
                mean_cache=result.mean_cache,
                prefill_cache=result.prefill_cache,
                matched=value,
            )
        )
        if abs(value / target - 1) <= tolerance:
            return Match(
                budget=budget,
                on=on,
                target=reference.mean_cache,
                target_prefill=reference.prefill_cache,
                mean_cache=result.mean_cache,
                prefill_cache=result.prefill_cache,
                matched=value,
                ratio=value / target,
                tries=tuple(tries),
            )
        bottom, top = (budget + 1, top) if value < target else (bottom, budget - 1)
        # A mean cache follows its budget one to one once evictions run: jump by what is missing, and
        # every other time halve the range, which always ends.
        jump = budget + round(target - value)
        budget = jump if bottom <= jump <= top and len(tries) % 2 else (bottom + top) // 2
    near = min(tries, key=lambda each: abs(each.matched - target))
    raise ConfigError(
        f"no budget in {low}…{high} brings {on} within {100 * tolerance:g} % of {target:.1f}: the nearest is "
        f"{near.budget} with {near.matched:.1f}. Widen the range or the tolerance; a policy whose "
        "answers end before its cache fills up cannot reach a larger mean."
    )


def unlike_widths(one: Run, other: Run) -> str:
    """How the entries of two runs differ in width, in words."""
    return (
        f"entries are stored in {width(one.header.precision)} and in {width(other.header.precision)}: equal "
        "entries are not equal bytes"
    )


def width(precision: Mapping[str, Any] | None) -> str:
    """Of the entries of a run, in words."""
    return "full precision" if precision is None else f"{widths(precision)} ({precision['protect']})"


def _check(on: MatchOn) -> MatchOn:
    if on not in get_args(MatchOn):
        raise ConfigError(f"cannot match {on!r}: use one of {', '.join(get_args(MatchOn))}.")
    return on


def _check_run(
    result: Measured,
    reference: Measured | None = None,
    allow: Collection[str] = (),
    on: MatchOn = "mean_cache",
) -> None:
    """Refuse runs that carry knowledge of confirm problems into a choice of budget, or are not alike."""
    if not isinstance(result, Run):
        return
    reasons = []
    if result.header.split != "dev":
        reasons.append(
            f"run {result.header.run!r} is on {result.header.split!r} problems: budgets are matched on dev"
        )
    if isinstance(reference, Run):
        for name in ("task_sha256", "ids_sha256", "draws", "model_sha256", "sampling", "engine"):
            ours, theirs = getattr(result.header, name), getattr(reference.header, name)
            if ours != theirs and name not in allow:
                reasons.append(f"{name} is {ours!r} here and {theirs!r} in the reference")
        if on in ENTRIES and result.header.precision != reference.header.precision:
            reasons.append(f"{unlike_widths(reference, result)}: match on mean_memory")
    if reasons:
        raise EvidenceError("these runs cannot be matched", reasons)
