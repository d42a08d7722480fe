"""LazyEviction and RaaS (methods 7.13, 7.14), and what both stand on, as plain loops."""

from __future__ import annotations

import math


def times(
    shares: list[list[list[float]]], at: list[int], positions: list[int], threshold: float
) -> tuple[list[float], list[float]]:
    """Last time of attention and longest pause of each entry.

    Parameters
    ----------
    shares
        ``[query][head of the group][entry]``, queries in the order of time.
    at
        Position of each query.
    positions
        Of the entries: where their times begin.
    """
    last, pause = [float(p) for p in positions], [0.0] * len(positions)
    for when, heads in zip(at, shares, strict=True):
        for i in range(len(positions)):
            if max(head[i] for head in heads) > threshold:
                pause[i] = max(pause[i], when - last[i])
                last[i] = max(last[i], float(when))
    return last, pause


def lazy_score(last: list[float], pause: list[float], now: int) -> list[float]:
    """``2 sigmoid(-(t - TS) / MRI) + 2 sigmoid(-1 / MRI)``; 0 where nothing ever came back."""

    def sigmoid(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    return [
        2 * sigmoid(-(now - ts) / mri) + 2 * sigmoid(-1 / mri) if mri > 0 else 0.0
        for ts, mri in zip(last, pause, strict=True)
    ]


def page_score(last: list[float], positions: list[int], page: int) -> list[float]:
    """Latest time in the page of each entry."""
    return [
        max(other for other, q in zip(last, positions, strict=True) if q // page == p // page)
        for p in positions
    ]
