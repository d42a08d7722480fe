"""Small changes of a score: longer values count more, younger entries count more."""

from __future__ import annotations

import torch
from torch import Tensor

from kvkeep.scoring.lengths import lengths
from kvkeep.scoring.standardize import deviations, standardize

# Length of a value of zeros, relative to the mean: small, and with a finite logarithm.
_SHORTEST = 1e-12


def relative_lengths(values: Tensor, among: Tensor, *, one_set: bool = False) -> Tensor:
    """Length of every value over the mean length of its head, float32 ``[batch, kv_heads, entries]``.

    Parameters
    ----------
    values
        ``[batch, kv_heads, entries, value_dim]``.
    among
        bool ``[batch, kv_heads, entries]``: the entries that the mean is taken over.
    one_set
        Heads hold the same tokens: every head gets the mean of all.
    """
    # Sums run in float64: empty slots behind a row must not move a score by a rounding.
    norms = lengths(values).double().masked_fill(~among, 0.0)
    mean = norms.sum(-1, keepdim=True) / among.sum(-1, keepdim=True).clamp(min=1)
    ratio = (norms / mean.clamp(min=_SHORTEST)).clamp(min=_SHORTEST).float()
    return ratio.mean(1, keepdim=True).expand_as(ratio) if one_set else ratio


def norm_weighted(scores: Tensor, ratio: Tensor, among: Tensor, *, mass: bool) -> Tensor:
    """Attention-like score times relative length of the value.

    Parameters
    ----------
    scores
        float32 ``[batch, kv_heads, entries]``, larger = keep.
    ratio
        Of :func:`relative_lengths`.
    among
        bool, same shape: the entries that compete.
    mass
        The scores are shares, not negative (attention, leverage): the product is a share again. Otherwise
        ``exp(z)`` of the standardised score ``z`` stands for the share, and its logarithm
        ``z + log(ratio)`` is returned, so that the score stays of the kind that it was.
    """
    if mass:
        return scores * ratio
    return standardize(scores.double(), among).float() + ratio.log()


def with_recency(
    scores: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    among: Tensor,
    *,
    weight: float,
    half_life: float,
) -> Tensor:
    """Add ``weight * deviation * 2 ** (-age / half_life)``, age in tokens, 0 for the newest.

    Parameters
    ----------
    scores
        float32 ``[batch, kv_heads, entries]``, larger = keep.
    positions, seq_lens
        int64, same shape; int64 ``[batch]``.
    among
        bool, same shape: the entries whose standard deviation is the unit of the bonus, head by head.
    weight, half_life
        Bonus of the newest entry in deviations, and the tokens after which half of it is left.
    """
    unit = deviations(scores.double(), among).float()
    age = (seq_lens[:, None, None] - 1 - positions).float()
    return scores + weight * unit * torch.exp2(-age / half_life)
