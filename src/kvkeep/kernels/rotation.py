"""The rotary embedding, applied and undone (half-split layout)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvkeep.core.view import Rope


def rotate(vectors: Tensor, positions: Tensor, rope: Rope) -> Tensor:
    """Turn vectors to their positions, without the factor that some scalings put on top.

    Parameters
    ----------
    vectors
        ``[batch, heads, entries, dim]``; channels beyond ``rotary_dim`` stay.
    positions
        int64 ``[batch, entries]``.
    """
    cos, sin = _turn(vectors, positions, rope)
    half = rope.rotary_dim // 2
    first, second, rest = vectors.split([half, half, vectors.shape[-1] - 2 * half], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def unrotate(vectors: Tensor, positions: Tensor, rope: Rope) -> Tensor:
    """Undo the rotary embedding, its factor included.

    Parameters
    ----------
    vectors
        float32 ``[batch, heads, entries, head_dim]``, rotated.
    positions
        int64 ``[batch, entries]``.
    """
    cos, sin = _turn(vectors, positions, rope, rope.scaling)
    half = rope.rotary_dim // 2
    first, second, rest = vectors.split([half, half, vectors.shape[-1] - 2 * half], dim=-1)
    return torch.cat([first * cos + second * sin, second * cos - first * sin, rest], dim=-1)


def _turn(vectors: Tensor, positions: Tensor, rope: Rope, divisor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Cosine and sine over a divisor, ``[batch, 1, entries, rotary_dim / 2]``."""
    # The product is rounded to float32 as models round it (an angle of 1e5 radians is off by 0.004 then):
    # only the very same angle undoes the rotation.
    angles = (positions[:, None, :, None].float() * rope.inv_freq.to(vectors.device)).double()
    return (angles.cos() / divisor).to(vectors.dtype), (angles.sin() / divisor).to(vectors.dtype)
