"""Euclidean lengths of keys and values, whatever type they are stored in."""

from __future__ import annotations

import torch
from torch import Tensor


def lengths(vectors: Tensor) -> Tensor:
    """Length of each vector of ``[..., dim]``, float32.

    Squares are summed in float32 at least, so that long float16 vectors do not overflow; no copy of the
    vectors in that type is made.

    Examples
    --------
    >>> lengths(torch.tensor([[300.0, 400.0]], dtype=torch.float16))
    tensor([500.])
    """
    wide = torch.promote_types(vectors.dtype, torch.float32)
    return torch.linalg.vector_norm(vectors, dim=-1, dtype=wide).float()
