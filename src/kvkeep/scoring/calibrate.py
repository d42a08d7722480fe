"""Make the scores of different heads comparable, before entries of several heads are ranked on one scale."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from kvkeep.scoring.standardize import standardize

Calibration = Literal["raw", "rank", "z-score", "softmax"]
CALIBRATIONS: tuple[str, ...] = ("raw", "rank", "z-score", "softmax")


def calibrate(scores: Tensor, among: Tensor, by: Calibration, *, mass: bool = False) -> Tensor:
    """Rescale the scores of each head by themselves; the order inside a head does not change.

    Parameters
    ----------
    scores
        float32 ``[batch, kv_heads, entries]``, larger = keep.
    among
        bool, same shape: the entries that compete; what comes out at the others means nothing.
    by
        ``"raw"``: as they are. ``"rank"``: the share of a head's entries that do not score above it, from
        1 / n to 1; the oldest of equal ones is the best. ``"z-score"``: mean 0 and deviation 1 in every
        head. ``"softmax"``: the share of an entry in its head's mass.
    mass
        Scores are shares already, not negative (attention, leverage): their mass is their sum. Otherwise
        the mass is ``exp`` of the z-score, so that the unit of a score does not matter.

    Returns
    -------
    Tensor
        float32, same shape. Sums run in float64: empty slots at the end of a row must not move a score
        by a rounding, or a sequence would keep other entries in a batch than alone.
    """
    if by == "raw":
        return scores
    if by == "rank":
        return _rank(scores, among)
    if by == "z-score":
        return standardize(scores.double(), among).float()
    weights = scores.double() if mass else standardize(scores.double(), among).exp()
    weights = weights.masked_fill(~among, 0.0)
    total = weights.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    return (weights / total).float()


def _rank(scores: Tensor, among: Tensor) -> Tensor:
    ranked = scores.masked_fill(~among, float("-inf"))
    order = ranked.sort(dim=-1, descending=True, stable=True).indices
    place = torch.empty_like(order)
    place.scatter_(-1, order, torch.arange(scores.shape[-1], device=scores.device).expand_as(order))
    count = among.sum(-1, keepdim=True).clamp(min=1)
    return (count - place).float() / count.float()
