"""Several comparisons at once: p values that hold for the whole family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from kvkeep.core.errors import ConfigError
from kvkeep.evaluation.extras import need

Correction = Literal["holm", "bonferroni", "none"]


def corrected(p_values: Mapping[str, float], method: Correction = "holm") -> dict[str, float]:
    """Adjusted p per cell: below α, the cell is significant with the family's error held at α.

    Bonferroni multiplies by the number of cells. Holm multiplies the smallest p by the number of cells,
    the next by one less, and so on, never letting the order turn: it guarantees the same and is
    never weaker.

    Raises
    ------
    ConfigError
        If the method is unknown, there is no cell, or a p is outside 0..1.

    Examples
    --------
    >>> corrected({"a": 0.01, "b": 0.04}, "bonferroni")
    {'a': 0.02, 'b': 0.08}
    """
    if method not in get_args(Correction):
        raise ConfigError(f"correction {method!r} is none of {get_args(Correction)}.")
    if not p_values or not all(0 <= p <= 1 for p in p_values.values()):
        raise ConfigError(f"p values {dict(p_values)} are not at least one number in 0..1.")
    if method == "none":
        return dict(p_values)
    multitest = need("statsmodels.stats.multitest", extra="eval", purpose="a correction for several cells")
    adjusted = multitest.multipletests(list(p_values.values()), method=method)[1]
    return {cell: float(p) for cell, p in zip(p_values, adjusted, strict=True)}
