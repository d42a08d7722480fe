"""Pick one entry after the other, each time minding what has been picked already (set diversity)."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kvkeep.core.decision import KeepCounts, KeepDecision
from kvkeep.selection.top_k import top_k

Similarity = Literal["max", "mean", "sum"]

_LOWEST = float("-inf")
# Upper bound of the elements of one block of similarities to the entries that are kept anyway.
_BLOCK_ELEMENTS = 1 << 24


def unit_signatures(vectors: Tensor, valid: Tensor) -> Tensor:
    """Scale vectors ``[batch, kv_heads, entries, dim]`` to length 1; empty slots and zeros become zero."""
    return F.normalize(vectors.float(), dim=-1, eps=1e-8).masked_fill(~valid[..., None], 0.0)


def diverse(
    scores: Tensor,
    signatures: Tensor,
    counts: KeepCounts,
    *,
    candidates: Tensor,
    kept: Tensor,
    weight: float,
    similarity: Similarity = "max",
    clamp: bool = True,
    start_from_kept: bool = False,
) -> KeepDecision:
    """Keep what is already ``kept``, then greedily the best candidate that is unlike those picked before.

    Each pick maximises ``score - weight * similarity to the picks so far``; the first has no penalty, and
    ties go to the lowest index. With weight 0 this is :func:`~kvkeep.selection.top_k.top_k` itself.

    Parameters
    ----------
    scores
        float32 ``[batch, kv_heads, entries]``, larger = keep.
    signatures
        float32 ``[batch, kv_heads, entries, dim]`` of length 1 (:func:`unit_signatures`).
    counts
        Entries per head, those in ``kept`` included.
    candidates, kept
        bool masks of the shape of ``scores``, disjoint.
    weight
        Score units that a perfect likeness costs.
    similarity
        Largest, mean or summed cosine to the picks so far.
    clamp
        A negative cosine counts as 0, so that being opposite to a pick is no merit.
    start_from_kept
        Count what is ``kept`` among the picks from the start.

    Returns
    -------
    KeepDecision
        In the order of the entries, not of the picks.

    Notes
    -----
    Time grows with picks x entries x dim, memory with entries; only the picks are sequential.
    """
    if weight == 0:
        return top_k(scores, counts, candidates=candidates, kept=kept)
    wanted = (counts.per_head - kept.sum(-1)).clamp(min=0)[..., None]
    penalty = torch.zeros_like(scores)
    size = torch.zeros_like(wanted)
    if start_from_kept:
        penalty, size = _similarity_to(signatures, kept, similarity, clamp), kept.sum(-1, keepdim=True)
    open_scores = scores.masked_fill(~candidates, _LOWEST)
    chosen = kept.clone()
    for step in range(int(wanted.max())):
        share = weight / size.clamp(min=1) if similarity == "mean" else weight
        pick = (open_scores - share * penalty).argmax(-1, keepdim=True)
        chosen.scatter_(-1, pick, chosen.gather(-1, pick) | (step < wanted))
        open_scores.scatter_(-1, pick, _LOWEST)
        picked = signatures.gather(2, pick[..., None].expand(-1, -1, -1, signatures.shape[-1]))
        likeness = signatures.matmul(picked.transpose(-1, -2)).squeeze(-1)
        if clamp:
            likeness.clamp_(min=0.0)
        if similarity != "max":
            penalty += likeness
        elif step == 0:
            # The penalty before the first pick is "none", not a cosine of 0.
            penalty = torch.where(size > 0, torch.maximum(penalty, likeness), likeness)
        else:
            penalty = torch.maximum(penalty, likeness)
        size = size + 1
    return KeepDecision.from_mask(chosen, counts)


def _similarity_to(signatures: Tensor, members: Tensor, similarity: Similarity, clamp: bool) -> Tensor:
    """Largest or summed cosine of every entry to the members, 0 where there are none."""
    batch, heads, entries, _ = signatures.shape
    block = max(1, _BLOCK_ELEMENTS // (batch * heads * entries))
    largest = similarity == "max"
    total = torch.full(members.shape, _LOWEST if largest else 0.0, device=signatures.device)
    for begin in range(0, entries, block):
        part = slice(begin, begin + block)
        cosines = signatures.matmul(signatures[:, :, part].transpose(-1, -2))
        if clamp:
            cosines.clamp_(min=0.0)
        absent = ~members[:, :, None, part]
        if largest:
            total = torch.maximum(total, cosines.masked_fill_(absent, _LOWEST).amax(-1))
        else:
            total += cosines.masked_fill_(absent, 0.0).sum(-1)
    return total.masked_fill_(~members.any(-1, keepdim=True), 0.0)
