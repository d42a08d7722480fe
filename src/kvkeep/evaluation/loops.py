"""Texts that go round in circles: which ones, since when, and what had been evicted just before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvkeep.evaluation.records import SampleRecord

#: A cycle at the end of a text is a loop when it has said so many tokens again.
LEAST_REPEATED = 16

#: What is told of the entries that an eviction takes (:class:`kvkeep.analysis.departures.Departures`).
FEATURES = ("range", "large", "large_lost", "age", "prompt", "sinks")


def looped(sample: SampleRecord) -> bool:
    """Whether a text is a loop.

    A phrase loop, or a text that was cut off while a cycle of tokens had repeated at least
    :data:`LEAST_REPEATED` of them. Three zeros at the end of a number are a cycle, too, and no loop.
    """
    if sample.failure_class == "phrase_loop":
        return True
    return sample.extra.get("finish") == "length" and _repeated(sample) >= LEAST_REPEATED


def _repeated(sample: SampleRecord) -> int:
    """Tokens of the cycle at the end that had been said before; 0 without a cycle."""
    start, period = sample.extra.get("loop_start"), sample.extra.get("tail_period")
    if start is not None:
        return sample.tokens - int(start)
    # Logs without the start: three rounds are certain, of which two repeat the first.
    return 0 if period is None else 2 * int(period)


def start_of(sample: SampleRecord) -> int | None:
    """Token at which a loop begins to repeat, from 0; ``None`` for other texts, and where nobody noted it.

    A phrase loop that the text left again has no cycle at its end, and so no start.
    """
    start = sample.extra.get("loop_start")
    return int(start) if start is not None and looped(sample) else None


def metric(sample: SampleRecord) -> float:
    """1 for a loop, 0 for any other text: what ``kvkeep compare --metric loop`` averages."""
    return float(looped(sample))


@dataclass(frozen=True, kw_only=True)
class Lead:
    """The evictions of one text that looped, up to the start of its loop.

    Parameters
    ----------
    start
        The first token that repeats.
    before
        The last evictions whose effect can show at that token, oldest first.
    earlier
        Those that came before them.
    gap
        Tokens from the last eviction to the start, 1 at least.
    chance
        The mean of the same over all tokens from the first eviction to the start: what the gap would be on
        average if loops began anywhere.
    """

    start: int
    before: tuple[Mapping[str, float], ...]
    earlier: tuple[Mapping[str, float], ...]
    gap: int
    chance: float


def lead(sample: SampleRecord, count: int) -> Lead | None:
    """What was evicted before the loop of a text began; ``None`` without a start, a log or an eviction.

    Parameters
    ----------
    count
        Evictions that are "just before".
    """
    start, log = start_of(sample), evictions(sample)
    if start is None or not log:
        return None
    # An eviction after token ``at - 1`` was read shows from token ``at + 1`` on.
    times = [int(one["at"]) for one in log if one["at"] < start]
    if not times:
        return None
    known = log[: len(times)]
    gaps = [token - max(at for at in times if at < token) for token in range(times[0] + 1, start + 1)]
    return Lead(
        start=start,
        before=tuple(known[-count:]),
        earlier=tuple(known[:-count]),
        gap=start - times[-1],
        chance=sum(gaps) / len(gaps),
    )


def evictions(sample: SampleRecord) -> Sequence[Mapping[str, float]]:
    """The evictions that took something, in order of time; empty where none was logged."""
    log: Sequence[Mapping[str, float]] = sample.extra.get("evicted", ())
    return [one for one in log if one["entries"]]


def mean_of(log: Sequence[Mapping[str, float]], feature: str) -> float | None:
    """Mean of a feature over some evictions; ``None`` if there is none."""
    return sum(one[feature] for one in log) / len(log) if log else None
