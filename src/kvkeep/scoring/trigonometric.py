"""Logit that a head's typical query will give a key in the future, from calibrated queries (TriAttention)."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from kvkeep.core.view import Rope

OffsetReduce = Literal["mean", "max"]


def pair_channels(vectors: Tensor, rotary_dim: int) -> tuple[Tensor, Tensor]:
    """Split channels into the two sides of their pairs, real and imaginary.

    Channel ``f`` turns with ``f + rotary_dim / 2``. Channels beyond ``rotary_dim`` do not turn; they are
    paired in the same way among themselves, as pairs of frequency 0, so that a sum over all pairs is
    the whole dot product.

    Parameters
    ----------
    vectors
        ``[..., head_dim]``.

    Returns
    -------
    tuple
        Two tensors ``[..., head_dim / 2]``.
    """
    turning, still = vectors[..., :rotary_dim], vectors[..., rotary_dim:]
    sides = [torch.cat(pair, dim=-1) for pair in zip(turning.chunk(2, -1), still.chunk(2, -1), strict=True)]
    return sides[0], sides[1]


def unpair_channels(first: Tensor, second: Tensor, rotary_dim: int) -> Tensor:
    """Undo :func:`pair_channels`."""
    half = rotary_dim // 2
    return torch.cat([first[..., :half], second[..., :half], first[..., half:], second[..., half:]], dim=-1)


def future_turns(seq_lens: Tensor, offsets: Tensor, rope: Rope, pairs: int, *, mean: bool = False) -> Tensor:
    """Rotation of every pair at some positions ahead of each sequence, scaling included.

    Parameters
    ----------
    seq_lens
        int64 ``[batch]``: the next position.
    offsets
        int64 ``[offsets]``, added to it.
    pairs
        Pairs in all; those that do not turn have rotation 1.
    mean
        Average over the offsets; the result has one in their place.

    Returns
    -------
    Tensor
        complex128 ``[batch, offsets, pairs]``: float32 would lose the fraction of an angle of 1e5 radians.
    """
    frequencies = rope.inv_freq.to(seq_lens.device).double()

    def turns(positions: Tensor, length: float) -> Tensor:
        angles = positions[:, None].double() * frequencies
        turning = torch.polar(torch.full_like(angles, length), angles)
        return torch.cat([turning, turning.new_ones(len(positions), pairs - len(frequencies))], dim=-1)

    ahead = turns(offsets, rope.scaling)
    if mean:
        ahead = ahead.mean(0, keepdim=True)
    return turns(seq_lens, 1.0)[:, None] * ahead


def trigonometric(
    keys: Tensor,
    seq_lens: Tensor,
    statistics: Any,
    rope: Rope,
    *,
    offset_max: int = 65536,
    offset_reduce: OffsetReduce = "mean",
    use_direction: bool = True,
    use_concentration: bool = True,
) -> Tensor:
    """Expected logit of each entry, for the mean calibrated query of each head placed in the future.

    With the head's mean query ``E``, its mean magnitude ``A`` and the key ``k``, summed over the pairs
    ``f`` as complex numbers and reduced over the offsets ``o`` = 1, 2, 4 … ``offset_max``::

        s^2 sum_f |E_f| |k_f| cos(w_f (t - p + o) + arg(E_f conj k_f))  +  s^2 sum_f (A_f - |E_f|) |k_f|

    A stored key is turned by its own position and scaled by ``s`` already, and turning ``E`` ahead
    instead gives the same angle: the first sum is a plain dot product with the stored key. The mean
    over the offsets can be taken of the turned query, so it costs one product per head.

    Parameters
    ----------
    keys
        ``[batch, kv_heads, entries, head_dim]``, rotated.
    seq_lens
        int64 ``[batch]``: the next position ``t``.
    statistics
        Of this layer: ``mean`` (``E``, complex64 ``[heads, head_dim / 2]``) and ``magnitude`` (``A``,
        float32 of the same shape), pairs as in :func:`pair_channels`.
    offset_reduce
        ``"mean"`` or ``"max"`` over the offsets.
    use_direction
        Without it the first sum is dropped.
    use_concentration
        Without it the second sum weighs norms with ``A_f`` instead of ``A_f - |E_f|``.

    Returns
    -------
    Tensor
        float32 ``[batch, heads, entries]``; not divided by sqrt(head_dim).
    """
    keys = keys.float()
    batch, kv_heads, entries, _ = keys.shape
    mean = statistics.mean.to(keys.device)
    magnitude = statistics.magnitude.to(keys.device)
    heads, pairs = mean.shape
    split = (batch, kv_heads, heads // kv_heads)

    real, imaginary = pair_channels(keys, rope.rotary_dim)
    lengths = (real.square() + imaginary.square()).sqrt_()
    scale = torch.ones(pairs, device=keys.device)
    scale[: rope.rotary_dim // 2] = rope.scaling
    weights = scale * ((magnitude - mean.abs()) if use_concentration else magnitude)
    norm_term = weights.view(1, *split[1:], pairs).matmul(lengths.transpose(-1, -2))
    if not use_direction:
        return norm_term.reshape(batch, heads, entries)

    offsets = 2 ** torch.arange(offset_max.bit_length(), device=keys.device)
    turns = future_turns(seq_lens, offsets, rope, pairs, mean=offset_reduce == "mean")
    queries = turns[:, None] * mean[None, :, None]
    plain = unpair_channels(queries.real, queries.imag, rope.rotary_dim).float()
    logits = plain.view(batch, kv_heads, -1, plain.shape[-1]).matmul(keys.transpose(-1, -2))
    return (logits.view(*split, -1, entries).amax(3) + norm_term).reshape(batch, heads, entries)
