"""Turn ideal counts into whole numbers that fit every head and add up to the total."""

from __future__ import annotations

import torch
from torch import Tensor


def settle(ideal: Tensor, least: Tensor, most: Tensor, total: Tensor) -> Tensor:
    """The whole numbers nearest to ``ideal + shift`` that add up to ``total`` inside their bounds.

    What a full or a protected head cannot take is spread over the others alike: one ``shift`` per row, 0
    where the ideal counts fit and add up. The rest of the rounding goes to the largest remainders
    (Hamilton's method), among equal ones to the lowest head.

    Parameters
    ----------
    ideal
        float64 or int64 ``[batch, heads]``.
    least, most
        int64 ``[batch, heads]``, ``least <= most``.
    total
        int64 ``[batch]``, between the sums of the two.

    Returns
    -------
    Tensor
        int64 ``[batch, heads]``. A row depends on itself alone: only whole numbers are added up.
    """
    whole = ideal.floor().long() if ideal.is_floating_point() else ideal
    remainder = ideal - whole

    def shifted(by: Tensor) -> Tensor:
        return (whole + by[:, None]).clamp(min=least, max=most)

    # The largest shift that does not exceed the total, by bisection.
    low, high = (least - whole).amin(-1), (most - whole).amax(-1)
    for _ in range(int((high - low).max()).bit_length()):
        middle = low + (high - low + 1) // 2
        fits = shifted(middle).sum(-1) <= total
        low, high = torch.where(fits, middle, low), torch.where(fits, high, middle - 1)
    counts = shifted(low)
    can_take = shifted(low + 1) > counts
    order = remainder.masked_fill(~can_take, -1).sort(dim=-1, descending=True, stable=True).indices
    place = order.argsort(dim=-1)
    missing = total - counts.sum(-1)
    return counts + ((place < missing[:, None]) & can_take).long()
