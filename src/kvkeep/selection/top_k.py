"""Keep the entries of highest score."""

from __future__ import annotations

import torch
from torch import Tensor

from kvkeep.core.decision import KeepCounts, KeepDecision

_LOWEST = float("-inf")


def top_k_mask(scores: Tensor, wanted: Tensor, largest: int, among: Tensor) -> Tensor:
    """Mark the ``wanted`` highest scores of each head; ties go to the lowest index.

    ``torch.topk`` leaves the order of ties open, and it may change with the length of the row, so a
    sequence could keep other entries alone than in a batch. Here only the threshold comes from it.

    Parameters
    ----------
    scores
        float32 ``[batch, kv_heads, entries]``.
    wanted
        int64 ``[batch, kv_heads]``: how many to mark, at most the entries that ``among`` admits.
    largest
        An upper bound of ``wanted``, known on the host.
    among
        bool, shape of ``scores``: only these may be marked.

    Returns
    -------
    Tensor
        bool, shape of ``scores``.
    """
    largest = min(largest, scores.shape[-1])
    if largest <= 0:
        return torch.zeros_like(among)
    ranked = scores.masked_fill(~among, _LOWEST)
    threshold = _threshold(ranked, wanted, largest)
    above = (ranked > threshold) & among
    tied = (ranked == threshold) & among
    missing = wanted[..., None] - above.sum(-1, keepdim=True)
    marked = above | (tied & (tied.cumsum(-1) <= missing))
    return marked & (wanted[..., None] > 0)


def _threshold(ranked: Tensor, wanted: Tensor, largest: int) -> Tensor:
    """The lowest score that is still among the ``wanted`` highest, ``[batch, kv_heads, 1]``."""
    if wanted.device.type == "cpu":
        fewest, most = int(wanted.min()), int(wanted.max())
        if fewest == most > 0:  # one quickselect, ten times faster than sorting
            return ranked.kthvalue(ranked.shape[-1] - most + 1, dim=-1, keepdim=True).values
    best = torch.topk(ranked, largest, dim=-1).values
    return best.gather(-1, (wanted[..., None] - 1).clamp(min=0, max=largest - 1))


def top_k(scores: Tensor, counts: KeepCounts, *, candidates: Tensor, kept: Tensor) -> KeepDecision:
    """Keep what is already ``kept``, then the best candidates until each head has its count.

    Parameters
    ----------
    scores
        float32 ``[batch, kv_heads, entries]``, larger = keep.
    counts
        Entries per head, those in ``kept`` included.
    candidates, kept
        bool masks of the shape of ``scores``, disjoint; protection is a mask, never a score.
    """
    wanted = (counts.per_head - kept.sum(-1)).clamp(min=0)
    chosen = top_k_mask(scores, wanted, counts.largest, candidates)
    return KeepDecision.from_mask(kept | chosen, counts)
