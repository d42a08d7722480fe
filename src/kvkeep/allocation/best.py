"""Rank the entries of all heads on one scale, and count how many of each head are among the best."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def count_best(scores: Sequence[Tensor], positions: Sequence[Tensor], wanted: Tensor) -> Tensor:
    """How many of each head's entries are among the ``wanted`` best of the row.

    Equal scores rank by age, the oldest first; of one age the lowest layer and head is the first.

    Parameters
    ----------
    scores
        float32 ``[batch, kv_heads, entries]`` per layer; ``-inf`` does not compete.
    positions
        int64, same shapes.
    wanted
        int64 ``[batch]``, at most the entries that compete.

    Returns
    -------
    Tensor
        int64 ``[batch, all heads]``.
    """
    every = torch.cat([layer.flatten(1) for layer in scores], dim=1)
    size = every.shape[1]
    limits = [
        row.kthvalue(size - count + 1).values if count else row.new_tensor(float("inf"))
        for row, count in zip(every, wanted.tolist(), strict=True)
    ]
    limit = torch.stack(limits)[:, None, None]
    counts = torch.cat([(layer > limit).sum(-1) for layer in scores], dim=1)
    # Entries at the limit: a handful, unless scores tie.
    missing = wanted - counts.sum(-1)
    rows, ages, heads, offset = [], [], [], 0
    for layer, position in zip(scores, positions, strict=True):
        row, head, slot = ((layer == limit) & layer.isfinite()).nonzero(as_tuple=True)
        rows.append(row)
        heads.append(head + offset)
        ages.append(position[row, head, slot])
        offset += layer.shape[1]
    row, head = torch.cat(rows), torch.cat(heads)
    order = torch.cat(ages).argsort(stable=True)  # heads ascend within one age: they did before
    order = order[row[order].argsort(stable=True)]
    row, head = row[order], head[order]
    before = torch.searchsorted(row, torch.arange(len(wanted), device=row.device))
    taken = torch.arange(len(row), device=row.device) - before[row] < missing[row]
    return counts.index_put_((row[taken], head[taken]), counts.new_ones(()), accumulate=True)
