"""One budget for all heads of all layers: the best entries stay, wherever they are."""

from __future__ import annotations

import torch
from torch import Tensor

from kvkeep.allocation.best import count_best
from kvkeep.allocation.pool import Pool
from kvkeep.allocation.settle import settle
from kvkeep.selection.top_k import top_k_mask


def whole_model(pool: Pool, *, floor: int | Tensor = 0) -> Tensor:
    """Rank all entries of all heads on one scale; the total decides how many stay.

    Parameters
    ----------
    pool
        The heads that share one budget: of a model, or of one layer.
    floor
        Entries that every head keeps at least, protected ones included: a number, or int64
        ``[batch, all heads]``, not above the share. They are the head's own best, and count
        towards the total.

    Returns
    -------
    Tensor
        int64 ``[batch, all heads]``.
    """
    scores = pool.scores
    if isinstance(floor, Tensor) or floor:
        scores = _secured(pool, torch.as_tensor(floor, device=pool.least.device).expand_as(pool.least))
    return pool.least + count_best(scores, pool.positions, pool.total - pool.least.sum(-1))


def _secured(pool: Pool, floor: Tensor) -> tuple[Tensor, ...]:
    """Scores in which each head's own best stand above all others, as many as its floor asks for."""
    wanted = (torch.minimum(floor, pool.most) - pool.least).clamp(min=0)
    answer = []
    for score, count in zip(pool.scores, wanted.split(pool.heads, dim=1), strict=True):
        first = top_k_mask(score, count, int(count.max()), score.isfinite())
        answer.append(score.masked_fill(first, torch.finfo(score.dtype).max))
    return tuple(answer)


def whole_model_plus(pool: Pool, *, added: int) -> Tensor:
    """Rank all entries for the budget less ``added`` per head, then add these to every head.

    A head that does not hold so many leaves the rest to the others alike.

    Source
    ------
    DBTrimKV's ``min_tokens_per_head`` (there the rest is left unused).
    """
    heads = pool.shares.shape[1]
    competing = pool.most.sum(-1) - pool.least.sum(-1)
    free = pool.total - pool.least.sum(-1) - added * heads
    best = count_best(pool.scores, pool.positions, torch.minimum(free.clamp(min=0), competing))
    return settle(pool.least + best + added, pool.least, pool.most, pool.total)
