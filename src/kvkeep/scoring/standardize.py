"""Bring scores of any scale to mean 0 and standard deviation 1."""

from __future__ import annotations

from torch import Tensor


def standardize(scores: Tensor, among: Tensor) -> Tensor:
    """Subtract the mean and divide by the (population) standard deviation, per head.

    Parameters
    ----------
    scores
        float32 ``[batch, kv_heads, entries]``.
    among
        bool, same shape: the entries that mean and deviation are taken over; the others get 0.
    """
    centred, deviation = _moments(scores, among)
    return centred / deviation


def deviations(scores: Tensor, among: Tensor) -> Tensor:
    """What :func:`standardize` divides by, ``[batch, kv_heads, 1]``."""
    return _moments(scores, among)[1]


def _moments(scores: Tensor, among: Tensor) -> tuple[Tensor, Tensor]:
    count = among.sum(-1, keepdim=True).clamp(min=1)
    mean = scores.masked_fill(~among, 0.0).sum(-1, keepdim=True) / count
    centred = (scores - mean).masked_fill(~among, 0.0)
    deviation = (centred.square().sum(-1, keepdim=True) / count).sqrt()
    return centred, deviation.clamp(min=1e-6)
