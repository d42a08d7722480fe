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
    best = torch.topk(ranked, largest, dim=-1).values
    threshold = best.gather(-1, (wanted[..., None] - 1).clamp(min=0, max=largest - 1))
    above = (ranked > threshold) & among
    tied = (ranked == threshold) & among
    missing = wanted[..., None] - above.sum(-1, keepdim=True)
    marked = above | (tied & (tied.cumsum(-1) <= missing))
    return marked & (wanted[..., None] > 0)


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
