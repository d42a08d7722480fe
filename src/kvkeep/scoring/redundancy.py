"""How much a key repeats the others: the penalty of R-KV."""

from __future__ import annotations

import torch
from torch import Tensor

# Columns of the similarity matrix that exist at a time.
_BLOCK = 64


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

    Walks back from the newest entries a block at a time. A block is compared with everything older than
    it, which serves both sides of each pair, and the walk ends when every entry has found its duplicate.

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
    entries = units.shape[2]
    flat = units.flatten(0, 1)
    newest = torch.full(flat.shape[:2], -1, device=units.device)
    searching = among.flatten(0, 1)
    narrow = torch.int16 if entries < 2**15 else torch.int32  # half the bytes of the usual case
    place = torch.arange(1, entries + 1, dtype=narrow, device=units.device)
    for stop in range(entries, 0, -_BLOCK):
        start = max(0, stop - _BLOCK)
        near = torch.bmm(flat[:, :stop], flat[:, start:stop].transpose(1, 2)) > threshold
        near[:, start:].diagonal(dim1=1, dim2=2).fill_(False)
        # Seen from all entries up to here: the newest of this block.
        found = (near * place[start:stop]).amax(2).long() - 1
        newest[:, :stop] = torch.where(newest[:, :stop] < 0, found, newest[:, :stop])
        # Seen from the block: what is older than it, for those that still have nothing.
        if start:
            found = (near[:, :start] * place[:start, None]).amax(1).long() - 1
            newest[:, start:stop] = torch.where(newest[:, start:stop] < 0, found, newest[:, start:stop])
        if not bool(((newest < 0) & searching).any()):
            break
    return newest.view(among.shape)
