"""Simulated studies: problems of known difficulty, answered by two arms."""

from __future__ import annotations

import numpy as np

from kvkeep.evaluation.statistics.problem_means import ProblemMeans


def draw_arms(
    rng: np.random.Generator, studies: int, problems: int, draws: int, effect: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Mean over draws of two arms on the same problems, each ``[studies, problems]``.

    Difficulties are Beta(0.6, 0.6): many easy and many hard problems, as in real benchmarks. The
    second arm solves a share ``effect`` of what the first would miss.
    """
    chance = rng.beta(0.6, 0.6, (studies, problems))
    better = chance + effect * (1 - chance)
    return rng.binomial(draws, chance) / draws, rng.binomial(draws, better) / draws


def as_problems(means: list[float] | np.ndarray, draws: int = 3, groups: str | None = None) -> ProblemMeans:
    """Problems p000, p001, … with these means; ``groups`` names a cluster by one letter each."""
    ids = tuple(f"p{place:03d}" for place in range(len(means)))
    values = np.asarray(means, dtype=np.float64)
    return ProblemMeans(
        ids=ids,
        groups=ids if groups is None else tuple(groups),
        means=values,
        draws=np.full(len(values), draws),
        first=(values >= 0.5).astype(np.float64),
        share=True,
    )
