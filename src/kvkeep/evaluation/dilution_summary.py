"""From single queries to a table: means over queries, then over problems, with an interval over problems."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvkeep.evaluation.dilution_run import Measured
from kvkeep.evaluation.statistics.accuracy import accuracy
from kvkeep.evaluation.statistics.problem_means import ProblemMeans

#: A layer among the managed ones, and a query head of it.
Head = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Mean:
    """A mean over problems; the 95 % interval is Student's t over problems, ``None`` for a single one."""

    value: float
    interval: tuple[float, float] | None


@dataclass(frozen=True, kw_only=True)
class Dilution:
    """One setting of the dial, one head or the mean of all.

    Parameters
    ----------
    head
        ``"1.0"``: layer and query head, both from 0; ``"all"``: mean over layers and heads.
    mass_full, mass_evicted, mass_predicted
        Share of attention on the evidence: with the full cache; in the run under the policy; and what the
        odds form makes of the full cache's share and of what the policy keeps.
    bound
        Mean of the bound on the full cache's mass with each query's own largest gap.
    gap
        Mean gap between the log-means of evidence and distractors, in nats; queries with an infinite gap
        are left out.
    rivals
        Share of attention on named distractors with the full cache.
    rho_useful, rho_distracting
        Mean fractions of unnormalised mass that are kept.
    preferential
        Share of the queries with ``rho_useful > rho_distracting``: by the odds form, and all else being
        equal, exactly those whose mass on the evidence grows.
    """

    head: str
    mass_full: Mean
    mass_evicted: Mean
    mass_predicted: Mean
    bound: float
    gap: float
    rivals: float
    rho_useful: float
    rho_distracting: float
    preferential: float


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Everything about one setting of the dial.

    Parameters
    ----------
    dial
        The setting.
    problems, queries, tokens
        Problems; queries in all; tokens of a text on average.
    evidence, distractors
        Entries of each kind that a query can see with the full cache, on average.
    mean_cache
        Under the policy, entries per KV head.
    right_full, right_evicted, right_difference
        Share of queries whose likeliest next token is right, teacher-forced; the difference is paired.
    heads
        The reading head, and the mean of all.
    masses
        Mean mass on the evidence with the full cache of every head, ``[layers][heads]``.
    """

    dial: float
    problems: int
    queries: int
    tokens: float
    evidence: float
    distractors: float
    mean_cache: float
    right_full: Mean
    right_evicted: Mean
    right_difference: Mean
    heads: tuple[Dilution, ...]
    masses: list[list[float]]

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def reading_head(found: Sequence[Measured]) -> Head:
    """The head with the most mass on the evidence with the full cache, mean over all queries."""
    masses = torch.cat([one.full.mass for one in found], -1).mean(-1)
    best = int(masses.argmax())
    return best // masses.shape[1], best % masses.shape[1]


def summarise(dial: float, found: Sequence[Measured], tokens: Sequence[int], head: Head) -> Setting:
    """Figures of one setting of the dial.

    Parameters
    ----------
    tokens
        Length of each text.
    head
        The reading head; choose it once, at the first setting, so that settings speak of the same head.
    """
    layer, place = head
    right = [
        mean([float(part(one).double().mean()) for one in found])
        for part in (
            lambda one: one.right_full,
            lambda one: one.right_evicted,
            lambda one: one.right_evicted.double() - one.right_full.double(),
        )
    ]
    return Setting(
        dial=dial,
        problems=len(found),
        queries=sum(one.full.mass.shape[-1] for one in found),
        tokens=float(np.mean(tokens)),
        evidence=float(torch.cat([one.evidence for one in found]).double().mean()),
        distractors=float(torch.cat([one.distractors for one in found]).double().mean()),
        mean_cache=float(np.mean([one.mean_cache for one in found])),
        right_full=right[0],
        right_evicted=right[1],
        right_difference=right[2],
        heads=(
            _dilution(f"{layer}.{place}", found, lambda each: each[layer, place]),
            _dilution("all", found, lambda each: each.flatten(0, -2)),
        ),
        masses=torch.cat([one.full.mass for one in found], -1).mean(-1).tolist(),
    )


def _dilution(name: str, found: Sequence[Measured], pick: Callable[[Tensor], Tensor]) -> Dilution:
    def over_problems(part: Callable[[Measured], Tensor]) -> Mean:
        return mean([float(pick(part(one)).mean()) for one in found])

    def finite(part: Callable[[Measured], Tensor]) -> float:
        values = torch.cat([pick(part(one)).flatten() for one in found])
        return float(values[values.isfinite()].mean())

    return Dilution(
        head=name,
        mass_full=over_problems(lambda one: one.full.mass),
        mass_evicted=over_problems(lambda one: one.evicted.mass),
        mass_predicted=over_problems(lambda one: one.retained.mass),
        bound=over_problems(lambda one: one.full.bound).value,
        gap=finite(lambda one: one.full.gap),
        rivals=over_problems(lambda one: one.full.rivals).value,
        rho_useful=over_problems(lambda one: one.retained.useful).value,
        rho_distracting=over_problems(lambda one: one.retained.distracting).value,
        preferential=over_problems(
            lambda one: (one.retained.useful > one.retained.distracting).double()
        ).value,
    )


def mean(values: Sequence[float]) -> Mean:
    """A mean over problems with its interval."""
    array, ones = np.array(values, dtype=float), np.ones(len(values), dtype=np.int64)
    if len(values) < 2:
        return Mean(value=float(array.mean()), interval=None)
    names = tuple(str(place) for place in range(len(values)))
    found = accuracy(ProblemMeans(ids=names, groups=names, means=array, draws=ones, first=array))
    return Mean(value=float(array.mean()), interval=found.interval)
