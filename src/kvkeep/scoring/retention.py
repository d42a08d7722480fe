"""How much of an entry a learned retention has left by now: log beta, per token of age."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def retention(log_beta: Tensor, positions: Tensor, seq_lens: Tensor, *, ahead: int = 1) -> Tensor:
    """Log of the retention weight of each entry, at the next query or summed over the next ``ahead`` ones.

    Parameters
    ----------
    log_beta
        float32 ``[batch, kv_heads, entries]``, not positive.
    positions
        int64, same shape.
    seq_lens
        int64 ``[batch]``: tokens seen.
    ahead
        1: ``log beta (seen + 1 - position)``. Above: ``log sum_m beta^(a + m)`` over ``m < ahead``, with
        ``a = seen + 2 - position``.

    Returns
    -------
    Tensor
        float32, same shape.

    Source
    ------
    TrimKV and DBTrimKV, official code at ed920f36. Its age is one above that of the training attention, and
    two above it when it looks ahead; that changes the order of entries next to never.
    """
    log_beta = log_beta.float()
    age = seq_lens[:, None, None] + 1 - positions
    if ahead == 1:
        return log_beta * age
    return (age + 1) * log_beta + _log_of_sum(log_beta, ahead)


def _log_of_sum(log_beta: Tensor, ahead: int) -> Tensor:
    """``log(1 + beta + ... + beta^(ahead - 1)) = log(1 - beta^ahead) - log(1 - beta)``."""
    # Where beta rounds to 1 both logarithms are infinite; just below it they differ by log(ahead).
    below_one = log_beta.clamp(max=-torch.finfo(torch.float32).tiny)
    return log1mexp(ahead * below_one) - log1mexp(below_one)


def log1mexp(x: Tensor) -> Tensor:
    """``log(1 - e^x)`` for negative ``x``, without cancellation on either side of ``log 0.5``."""
    small = x < math.log(0.5)
    # Both branches are evaluated everywhere: each gets arguments that keep it finite.
    return torch.where(
        small,
        torch.log1p(-torch.exp(torch.where(small, x, -1.0))),
        torch.log(-torch.expm1(torch.where(small, -1.0, x))),
    )
