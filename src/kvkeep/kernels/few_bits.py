"""Vectors in few bits: even steps between the extremes of each group, packed with their scales into bytes.

    vector    [ group of channels | group | ... ]
    bytes     [ codes, 8 / bits of them a byte | low of each group, float16 | step of each group, float16 ]

A channel comes back as ``low + code * step``. Codes are chosen against the low and step that are written
down, not against the exact ones. Byte ``j`` holds the codes of channels ``j``, ``j + width``, ``j + 2 *
width`` ..., lowest bits first, ``width`` being the bytes of codes: unpacking is a shift each, and no
interleaving.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Bits of a code that fill a byte without a rest.
WIDTHS = (2, 4, 8)

# Largest size of a float16: a group beyond it would come back as infinity.
_LARGEST = 65504.0


def row_bytes(dim: int, bits: int, group: int) -> int:
    """Bytes of a vector of ``dim`` channels, a low and a step of 2 bytes for each group included.

    Examples
    --------
    >>> row_bytes(64, 4, 32), row_bytes(128, 2, 64)
    (40, 40)
    """
    return dim * bits // 8 + 2 * 2 * (dim // group)


def round_groups(
    vectors: Tensor, bits: int, group: int, scales: torch.dtype | None = torch.float16
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, lows and steps of plain rounding between the smallest and the largest channel of each group.

    Parameters
    ----------
    vectors
        Floats ``[..., dim]``; ``dim`` is a multiple of ``group``.
    bits, group
        Bits of a code; channels that share low and step.
    scales
        Type of low and step; ``None``: as exact as the calculation (float32, or float64 of float64).

    Returns
    -------
    tuple
        Codes uint8 ``[..., groups, group]``, low and step ``[..., groups, 1]``. A group of equal channels has
        step 0.

    Source: asymmetric min-max rounding as KIVI (arXiv 2402.02750) does it along the channels of a value.

    Deviations: codes are chosen against the rounded low and step. In float16 a step below 6e-5 has few digits
    left: 8 bits of a group whose range is below 0.01 err by more than half a step.
    """
    groups = vectors.unflatten(-1, (-1, group))
    groups = groups if groups.dtype == torch.float64 else groups.float()
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    if scales is not None:
        low = low.clamp(-_LARGEST, _LARGEST).to(scales)
    step = (high - low) / (2**bits - 1)
    if scales is not None:
        step = step.clamp(0, _LARGEST).to(scales)
    exact = step.to(groups.dtype)
    codes = (groups - low.to(groups.dtype)) / torch.where(exact > 0, exact, 1.0)
    return codes.round_().clamp_(0, 2**bits - 1).to(torch.uint8), low, step


def encode(vectors: Tensor, bits: int, group: int) -> Tensor:
    """Write vectors down: floats ``[..., dim]`` in, uint8 ``[..., row_bytes(dim, bits, group)]`` out."""
    codes, low, step = round_groups(vectors, bits, group)
    scales = torch.cat([low.squeeze(-1), step.squeeze(-1)], -1).view(torch.uint8)
    return torch.cat([pack(codes.flatten(-2), bits), scales], -1)


def decode(
    rows: Tensor, bits: int, group: int, dim: int, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """Read vectors back: uint8 ``[..., bytes]`` in, ``dtype [..., dim]`` out.

    Parameters
    ----------
    out
        Where to write them; laid out anew if ``None``.
    """
    groups, width = dim // group, dim * bits // 8
    # Half precision has too few digits for the sum of low and steps: it is made in float32 at least.
    wide = torch.promote_types(dtype, torch.float32)
    # Always a copy: a lone row is contiguous as it is, and behind an odd width not aligned for a view.
    scales = rows[..., width:].clone(memory_format=torch.contiguous_format).view(torch.float16).to(wide)
    values = rows.new_empty((*rows.shape[:-1], dim), dtype=wide) if out is None or wide != dtype else out
    packed, mask = rows[..., :width], 2**bits - 1
    for place in range(8 // bits):  # straight to where they belong: no array of codes in between
        part = packed if bits == 8 else (packed >> (bits * place)).bitwise_and_(mask)
        values[..., place * width : (place + 1) * width].copy_(part)
    split = values.unflatten(-1, (groups, group))
    split.mul_(scales[..., groups:, None]).add_(scales[..., :groups, None])
    if out is None or wide == dtype:
        return values.to(dtype)
    return out.copy_(values)


def pack(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes ``[..., dim]``, each below ``2 ** bits``, into uint8 ``[..., dim * bits / 8]``."""
    if bits == 8:
        return codes
    parts = codes.chunk(8 // bits, -1)
    packed = parts[0].clone()
    for place, part in enumerate(parts[1:], 1):
        packed |= part << (bits * place)
    return packed


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Undo :func:`pack`."""
    if bits == 8:
        return packed
    mask = 2**bits - 1
    return torch.cat([(packed >> (bits * place)) & mask for place in range(8 // bits)], -1)
