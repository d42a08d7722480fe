"""Six ways in which a gain turns out to be none, each looked for by name.

Three are named in what is public of the paper (equal memory at the end of the prompt, few problems, an
internal number); the other three are ours: memory above what was asked for, answers that cannot be read, and
one model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvkeep.evaluation.comparison import Comparison
from kvkeep.evaluation.statistics.decision import CellDecision
from kvkeep.evaluation.statistics.problem_means import amount

#: Memory that a mechanism may hold above its base at the same request.
_OVERSHOOT = 0.02


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What is known of one mechanism.

    Parameters
    ----------
    screening
        Few problems, equal budgets, on the first model.
    dev
        Matched mean memory on dev problems, by model, the first model first.
    confirmed
        The held-out problems, by model, with what was decided.
    nats
        Change of the internal number (nats a token, below 0 is better) and its interval; ``None`` where it
        was not measured.
    """

    screening: Comparison
    dev: Mapping[str, Comparison]
    confirmed: Mapping[str, tuple[CellDecision, Comparison]]
    nats: tuple[float, tuple[float, float]] | None = None

    @property
    def verdict(self) -> str:
        """``"better"``, ``"worse"`` or ``"undecided"``: any model on which it is worse counts against it."""
        verdicts = {cell.verdict for cell, _ in self.confirmed.values()}
        return next((each for each in ("worse", "better") if each in verdicts), "undecided")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One diagnostic.

    Parameters
    ----------
    name
        Of the failure.
    present
        Whether it was found; ``None`` where it could not be looked for.
    why
        The numbers.
    """

    name: str
    present: bool | None
    why: str


def diagnose(evidence: Evidence) -> tuple[Finding, ...]:
    """All six."""
    return (
        iso_cache(evidence),
        evaporation(evidence),
        proxy_drift(evidence),
        overshoot(evidence),
        extraction(evidence),
        one_model(evidence),
    )


def iso_cache(evidence: Evidence) -> Finding:
    """Equal at the end of the prompt, unequal while writing: less than half is left at an equal mean memory.

    Compared on the same problems: those of the screening.
    """
    screening, dev = evidence.screening, _first(evidence)
    count = screening.difference.n
    small = dev.growth.get(count)
    if small is None:
        return Finding(
            name="iso-cache underperformance",
            present=None,
            why=f"the dev run does not report its first {count} problems",
        )
    gain, matched = screening.difference.estimate, small.estimate
    return Finding(
        name="iso-cache underperformance",
        present=gain > 0 and matched < gain / 2,
        why=f"{_pp(gain)} with {_percent(screening.memory_ratio)} of the base's mean memory, {_pp(matched)} "
        f"with {_percent(dev.memory_ratio)}, on the same {count} problems",
    )


def evaporation(evidence: Evidence) -> Finding:
    """A gain on few problems that is less than half of itself on all of them."""
    dev = _first(evidence)
    if not dev.growth:
        return Finding(name="n-evaporation", present=None, why=f"only {dev.difference.n} problems")
    count = min(dev.growth)
    few, many = dev.growth[count].estimate, dev.difference.estimate
    return Finding(
        name="n-evaporation",
        present=few > 0 and many < few / 2,
        why=f"{_pp(few)} on {count} problems, {_pp(many)} on {dev.difference.n}, at a matched mean memory",
    )


def proxy_drift(evidence: Evidence) -> Finding:
    """The internal number improves beyond chance, and the answers do not."""
    if evidence.nats is None:
        return Finding(
            name="proxy-to-runtime drift", present=None, why="reading given texts says nothing about it"
        )
    change, (low, high) = evidence.nats
    return Finding(
        name="proxy-to-runtime drift",
        present=high < 0 and evidence.verdict != "better",
        why=f"{change:+.3f} nats a token on right answers [{low:+.3f}, {high:+.3f}], answers "
        f"{evidence.verdict}",
    )


def overshoot(evidence: Evidence) -> Finding:
    """More memory than the base at the same request."""
    screening = evidence.screening
    peak = screening.challenger.peak_memory / screening.baseline.peak_memory
    return Finding(
        name="budget overshoot",
        present=max(peak, screening.memory_ratio) > 1 + _OVERSHOOT,
        why=f"at the same budget {_percent(screening.memory_ratio)} of the base's mean memory and "
        f"{_percent(peak)} of its peak",
    )


def extraction(evidence: Evidence) -> Finding:
    """The difference is mostly one in answers that could not be read at all."""
    parts = []
    present = False
    for model, (_, comparison) in evidence.confirmed.items():
        total, unread = comparison.difference.estimate, comparison.beside["not_extracted"]
        low, high = unread.interval
        present |= (low > 0 or high < 0) and abs(unread.estimate) >= abs(total) / 2
        parts.append(f"{model}: {_pp(unread.estimate)} unread answers, {_pp(total)} in all")
    return Finding(name="extraction collapse", present=present, why="; ".join(parts))


def one_model(evidence: Evidence) -> Finding:
    """Better on one model, and not above zero on another."""
    if len(evidence.confirmed) < 2:
        return Finding(name="one model only", present=None, why="confirmed on one model")
    gains = {model: cell.difference.estimate for model, (cell, _) in evidence.confirmed.items()}
    better = any(cell.verdict == "better" for cell, _ in evidence.confirmed.values())
    return Finding(
        name="one model only",
        present=better and min(gains.values()) <= 0,
        why=", ".join(f"{model} {_pp(gain)}" for model, gain in gains.items()),
    )


def _first(evidence: Evidence) -> Comparison:
    return next(iter(evidence.dev.values()))


def _pp(value: float) -> str:
    return amount("score", value)


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.1f} %"
