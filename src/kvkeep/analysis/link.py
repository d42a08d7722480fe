"""Does the range of a value tell the error of its round trip? Correlations, shares and slopes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from kvkeep.core.errors import ConfigError

#: Parts of the entries, largest ranges first, whose share of the error is given.
TOPS = (0.01, 0.05, 0.10)


@dataclass(frozen=True, kw_only=True)
class Link:
    """Range against error over a set of entries.

    Parameters
    ----------
    pearson, spearman
        Of range and error.
    spearman_norm
        Of L2 norm and error: what range is to be held against.
    slope
        Of log error on log range, least squares: 2 where the quadratic law holds.
    shares
        Share of the whole error that the largest ranges carry, by the part of the entries that they are.
    square_shares
        The same of the squared ranges: what the law expects.
    over_law
        Whole error over the whole that the law expects of the groups' own ranges.
    entries
        How many.
    """

    pearson: float
    spearman: float
    spearman_norm: float
    slope: float
    shares: Mapping[str, float]
    square_shares: Mapping[str, float]
    over_law: float
    entries: int


def link(
    ranges: Tensor, norms: Tensor, errors: Tensor, expected: Tensor, tops: Sequence[float] = TOPS
) -> Link:
    """Hold errors against ranges.

    Parameters
    ----------
    ranges, norms, errors, expected
        Same shape, not negative; all their entries are one set. ``expected`` is what
        :func:`kvkeep.analysis.round_trip.law` says.

    Raises
    ------
    ConfigError
        If there are fewer than three entries.
    """
    x, size, y, law = (each.flatten().double() for each in (ranges, norms, errors, expected))
    if len(x) < 3:
        raise ConfigError(f"{len(x)} entries show no correlation: give a longer text.")
    seen = (x > 0) & (y > 0)
    return Link(
        pearson=pearson(x, y),
        spearman=pearson(ranks(x), ranks(y)),
        spearman_norm=pearson(ranks(size), ranks(y)),
        slope=slope(x[seen].log(), y[seen].log()),
        shares={f"{top:g}": share_of_top(x, y, top) for top in tops},
        square_shares={f"{top:g}": share_of_top(x, x.square(), top) for top in tops},
        over_law=float(y.sum() / law.sum()) if float(law.sum()) > 0 else 0.0,
        entries=len(x),
    )


def pearson(x: Tensor, y: Tensor) -> float:
    """Correlation of two vectors; 0 where one of them does not vary."""
    x, y = x.double() - x.double().mean(), y.double() - y.double().mean()
    scale = float(x.norm() * y.norm())
    return float(x @ y) / scale if scale > 0 else 0.0


def slope(x: Tensor, y: Tensor) -> float:
    """Least-squares slope of ``y`` on ``x``; 0 where ``x`` does not vary."""
    if len(x) < 2:
        return 0.0
    away = x.double() - x.double().mean()
    weight = float(away.square().sum())
    return float(away @ y.double()) / weight if weight > 0 else 0.0


def ranks(x: Tensor) -> Tensor:
    """Places in ascending order, from 1; equal numbers share the mean of theirs. float64, one dimension.

    Examples
    --------
    >>> import torch
    >>> ranks(torch.tensor([5.0, 1.0, 5.0])).tolist()
    [2.5, 1.0, 2.5]
    """
    _, place, counts = x.unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts.double() - 1) / 2)[place]


def share_of_top(by: Tensor, amount: Tensor, top: float) -> float:
    """Share of the whole ``amount`` that the ``top`` part of the entries holds, largest ``by`` first.

    At least one entry counts; 0 if there is nothing to share.
    """
    count = max(1, round(top * len(by)))
    whole = float(amount.sum())
    return float(amount[by.topk(count).indices].sum()) / whole if whole > 0 else 0.0
