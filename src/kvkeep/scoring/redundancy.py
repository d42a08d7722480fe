"""How much a key repeats the others: the penalty of R-KV, and the crowd that KeyDiff looks away from."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Entries that one step of the search for duplicates looks at: at first, and at most.
_FIRST_STEP, _LARGEST_STEP = 16, 256


def inverse_lengths(keys: Tensor, among: Tensor) -> Tensor:
    """One over the length of each key, 0 for keys of length zero and where not ``among``.

    Parameters
    ----------
    keys
        float32 ``[batch, kv_heads, entries, head_dim]``.
    among
        bool ``[batch, kv_heads, entries]``.
    """
    length = torch.linalg.vector_norm(keys, dim=-1)
    return length.reciprocal().masked_fill(~among | (length == 0), 0.0)


def cosine_to_crowd(keys: Tensor, among: Tensor) -> Tensor:
    """Cosine between each key and the mean of all unit keys, float32 ``[batch, kv_heads, entries]``."""
    keys = keys.float()
    inverse = inverse_lengths(keys, among)
    crowd = F.normalize(inverse[:, :, None] @ keys, dim=-1)
    return (keys @ crowd.transpose(-1, -2)).squeeze(-1) * inverse


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
    keys = keys.float()
    inverse = inverse_lengths(keys, among)
    # Sums over a matrix of products need no matrix: sum_i cos(k_i, k_j) = u_j . sum_i u_i.
    everyone = (inverse[:, :, None] @ keys).transpose(-1, -2)
    total = (keys @ everyone).squeeze(-1) * inverse - (inverse > 0).float()
    if threshold is not None:
        newest, cosine = newest_duplicate(keys, inverse, threshold)
        first = (keys @ keys[:, :, 0, :, None]).squeeze(-1) * inverse * inverse[..., :1]
        first[..., 0] = 0.0
        cosine = torch.where(newest < 0, first, cosine)
        total = total.scatter_add(2, newest.clamp(min=0), -cosine)
    mean = total / among.sum(-1, keepdim=True).clamp(min=1)
    return mean.masked_fill(~among, float("-inf")).softmax(-1).masked_fill(~among, 0.0)


def newest_duplicate(keys: Tensor, inverse: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """For each entry, the newest other entry whose cosine with it exceeds ``threshold``, and that cosine.

    Walks back from the newest entries, at first in small steps: most keys of a trained model resemble one
    of the last few, and who has found its duplicate leaves the search.

    Parameters
    ----------
    keys
        float32 ``[batch, kv_heads, entries, head_dim]``.
    inverse
        Their :func:`inverse_lengths`; entries at 0 neither search nor are found.
    threshold
        Not negative.

    Returns
    -------
    tuple
        int64 index, -1 where there is none, and float32 cosine, both ``[batch, kv_heads, entries]``.
    """
    flat, scale = keys.flatten(0, 1), inverse.flatten(0, 1)
    newest = torch.full(scale.shape, -1, device=keys.device)
    cosine = torch.zeros_like(scale)
    asking, stop, width = flat, scale.shape[1], _FIRST_STEP
    rows = torch.arange(stop, device=keys.device).expand(scale.shape)
    searching = scale > 0
    bound = threshold / scale  # of a product with a unit vector; infinite for who does not search
    place = torch.arange(_LARGEST_STEP, dtype=torch.int16, device=keys.device)
    while stop > 0:
        start = max(0, stop - width)
        block = flat[:, start:stop] * scale[:, start:stop, None]
        near = torch.bmm(asking, block.transpose(1, 2))
        _forget_self(near, rows - start)
        similar = near.amax(-1) > bound.gather(1, rows)
        head, row = (similar & searching.gather(1, rows)).nonzero(as_tuple=True)
        who, found = rows[head, row], near[head, row]
        last = ((found > bound[head, who, None]) * place[: stop - start]).amax(-1).long()
        newest[head, who] = last + start
        cosine[head, who] = found.gather(1, last[:, None]).squeeze(1) * scale[head, who]
        searching[head, who] = False
        left = int(searching.sum(-1).max())
        if left == 0:
            break
        if left < 0.75 * rows.shape[1]:
            rows = searching.byte().sort(dim=-1, descending=True, stable=True).indices[:, :left]
            asking = flat.gather(1, rows[..., None].expand(-1, -1, flat.shape[2]))
        stop, width = start, min(2 * width, _LARGEST_STEP)
    return newest.view(inverse.shape), cosine.view(inverse.shape)


def _forget_self(near: Tensor, own: Tensor) -> None:
    """Take each entry out of its own row, if its column ``own`` is among those of ``near``."""
    column = own.clamp(0, near.shape[-1] - 1)[..., None]
    value = near.gather(-1, column)
    near.scatter_(-1, column, torch.where(column == own[..., None], float("-inf"), value))
