"""How much a key repeats the others: the penalty of R-KV."""

from __future__ import annotations

import torch
from torch import Tensor

# Entries that one step of the search for duplicates looks at: at first, and at most.
_FIRST_STEP, _LARGEST_STEP = 16, 256


def unit_vectors(vectors: Tensor, among: Tensor | None = None) -> Tensor:
    """Scale vectors ``[..., entries, dim]`` to length one, float32; zero where not ``among``."""
    vectors = vectors.float()
    if among is not None:
        vectors = vectors.masked_fill(~among[..., None], 0.0)
    length = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    return vectors / length.clamp(min=torch.finfo(torch.float32).tiny)


def redundancy(keys: Tensor, among: Tensor, *, threshold: float | None = None) -> Tensor:
    """Softmax over the entries of the mean cosine between each key and the others.

    Parameters
    ----------
    keys
        ``[batch, kv_heads, entries, head_dim]``.
    among
        bool ``[batch, kv_heads, entries]``: the entries compared; the others score 0.
    threshold
        Let off, in every row of the similarity matrix, the newest entry whose cosine exceeds it (the first
        entry where there is none). ``None``: nobody is let off.

    Returns
    -------
    Tensor
        float32 ``[batch, kv_heads, entries]``, summing to one over ``among``.
    """
    units = unit_vectors(keys, among)
    # Row sums of a matrix of products need no matrix: sum_i cos(k_i, k_j) = k_j . sum_i k_i.
    own = units.square().sum(-1)
    total = (units @ units.sum(2)[..., None]).squeeze(-1) - own
    if threshold is not None:
        newest = newest_duplicate(units, among, threshold).clamp(min=0)
        partner = units.gather(2, newest[..., None].expand_as(units))
        excused = (units * partner).sum(-1)
        itself = newest == torch.arange(newest.shape[-1], device=newest.device)
        total = total.scatter_add(2, newest, -excused.masked_fill(itself, 0.0))
    mean = total / among.sum(-1, keepdim=True).clamp(min=1)
    return mean.masked_fill(~among, float("-inf")).softmax(-1).masked_fill(~among, 0.0)


def newest_duplicate(units: Tensor, among: Tensor, threshold: float) -> Tensor:
    """For each entry, the newest other entry whose cosine with it exceeds ``threshold``.

    Walks back from the newest entries, at first in small steps: most keys of a trained model resemble one
    of the last few, and who has found its duplicate leaves the search.

    Parameters
    ----------
    units
        float32 unit vectors ``[batch, kv_heads, entries, dim]``, zero where not ``among``.
    among
        bool ``[batch, kv_heads, entries]``.
    threshold
        Not negative.

    Returns
    -------
    Tensor
        int64 ``[batch, kv_heads, entries]``, -1 where there is none.
    """
    flat, wanted = units.flatten(0, 1), among.flatten(0, 1)
    newest = torch.full(wanted.shape, -1, device=units.device)
    rows = torch.arange(wanted.shape[1], device=units.device).expand(wanted.shape)
    asking, stop, width = flat, wanted.shape[1], _FIRST_STEP
    while stop > 0:
        start = max(0, stop - width)
        near = torch.bmm(asking, flat[:, start:stop].transpose(1, 2))
        _forget_self(near, rows - start)
        head, row = ((near.amax(-1) > threshold) & (newest.gather(1, rows) < 0)).nonzero(as_tuple=True)
        place = torch.arange(start, stop, dtype=torch.int32, device=units.device)
        newest[head, rows[head, row]] = ((near[head, row] > threshold) * place).amax(-1).long()
        searching = (newest < 0) & wanted
        left = int(searching.sum(-1).max())
        if left == 0:
            break
        if left < 0.75 * rows.shape[1]:
            first = searching.to(torch.uint8).sort(dim=-1, descending=True, stable=True)
            rows = first.indices[:, :left]
            asking = flat.gather(1, rows[..., None].expand(-1, -1, flat.shape[2]))
        stop, width = start, min(2 * width, _LARGEST_STEP)
    return newest.view(among.shape)


def _forget_self(near: Tensor, own: Tensor) -> None:
    """Take each entry out of its own row, if its column ``own`` is among those of ``near``."""
    column = own.clamp(0, near.shape[-1] - 1)[..., None]
    value = near.gather(-1, column)
    near.scatter_(-1, column, torch.where(column == own[..., None], -1.0, value))
