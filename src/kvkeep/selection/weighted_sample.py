"""Keep a random sample, drawn with probability proportional to the weights."""

from __future__ import annotations

import torch
from torch import Tensor

from kvkeep.core.decision import KeepCounts, KeepDecision
from kvkeep.core.random import RandomStream
from kvkeep.selection.top_k import top_k

# Weight of an entry whose attention underflowed to zero, relative to the largest of its head: it is
# drawn only when nothing else is left, but it can be drawn, so a sample always fills its count.
_FLOOR = 1e-20


def weighted_sample(
    weights: Tensor,
    counts: KeepCounts,
    *,
    candidates: Tensor,
    kept: Tensor,
    positions: Tensor,
    random: RandomStream,
) -> KeepDecision:
    """Keep what is already ``kept``, then draw candidates without replacement.

    Successive draws proportional to the remaining weights have the distribution of the largest
    ``log w + Gumbel noise`` (methods: Gumbel-top-k), so one vectorised pass replaces the loop.

    Parameters
    ----------
    weights
        float32 ``[batch, kv_heads, entries]``, not negative.
    counts
        Entries per head, those in ``kept`` included.
    candidates, kept
        bool masks, disjoint.
    positions
        int64, shape of ``weights``: an entry's noise depends on its position.
    random
        The rows' own random source.
    """
    admissible = weights.masked_fill(~candidates, 0.0)
    peak = admissible.amax(-1, keepdim=True)
    floor = torch.where(peak > 0, peak * _FLOOR, 1.0).clamp(min=torch.finfo(torch.float32).tiny)
    keys = admissible.clamp(min=floor).log() + random.gumbel(positions)
    return top_k(keys, counts, candidates=candidates, kept=kept)
