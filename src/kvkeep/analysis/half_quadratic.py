"""Half-quadratic quantization of groups: the zero is moved until few channels are far off.

Source
------
HQQ (Badri and Shaji, Mobius Labs 2023), the default solver of the package ``hqq`` 0.2.8: minimise
``sum |e|^p`` of the round trip's error ``e``, ``p = 0.7``, by turns: shrink the error to what counts as an
outlier, set the zero to the mean of what the rest asks for. The scale stays that of plain rounding.

Deviations
----------
Turns end for each group by itself, where the package ends them for all groups of a tensor at once: there the
error of a token hangs on the tokens that it is quantized with. A single group gives what the package gives,
but for ties: a turn whose gain is below a millionth counts as none. Moving the zero of a group with as many
errors above as below leaves their mean as it was, and the last bit of a sum would decide.
The package itself is not used: it compiles functions when it is imported, which takes seconds.
"""

from __future__ import annotations

import torch
from torch import Tensor

NORM, PULL, TURNS = 0.7, 10.0, 20

# Part of the error that a turn must save to be followed by another.
_LEAST_GAIN = 1e-6

# Below this range a group counts as constant; above this scale half precision would overflow. As the package.
_LEAST_SPAN, _LARGEST_SCALE = 1e-4, 2e4


def half_quadratic(values: Tensor, *, bits: int, group: int, turns: int = TURNS) -> Tensor:
    """Write values down in ``bits`` and read them back.

    Parameters
    ----------
    values
        ``[..., value_dim]``, a multiple of ``group``.
    turns
        At most; a group stops after the first turn in which its mean absolute error did not fall.

    Returns
    -------
    Tensor
        float32 (float64 of float64), shape as given.
    """
    groups = widened(values).unflatten(-1, (-1, group))
    top = 2**bits - 1
    low = groups.amin(-1, keepdim=True)
    span = groups.amax(-1, keepdim=True) - low
    scale = torch.where(span <= _LEAST_SPAN, 1.0, top / span).clamp(max=_LARGEST_SCALE)
    zero = -low * scale
    best = torch.full_like(zero, torch.inf)
    going = torch.ones_like(zero, dtype=torch.bool)
    for _ in range(turns):
        codes = (groups * scale + zero).round_().clamp_(0, top)
        error = groups - (codes - zero) / scale
        level = error.abs().mean(-1, keepdim=True)
        moved = (codes - (groups - shrink(error)) * scale).mean(-1, keepdim=True)
        # The turn that finds no gain still moves the zero: so does the package.
        zero = torch.where(going, moved, zero)
        going &= level < best * (1 - _LEAST_GAIN)
        best = torch.minimum(best, level)
        if not going.any():
            break
    codes = (groups * scale + zero).round_().clamp_(0, top)
    return ((codes - zero) / scale).flatten(-2)


def widened(values: Tensor) -> Tensor:
    """float32, and float64 as it is: a test holds rounding against loops there."""
    return values if values.dtype == torch.float64 else values.float()


def shrink(error: Tensor) -> Tensor:
    """What is left of an error as an outlier: the generalised soft threshold of ``|e|^p``."""
    size = error.abs()
    # 0 ** (p - 1) is infinite: minus that, cut off at 0.
    return (size - size.pow(NORM - 1) / PULL).clamp_(min=0) * error.sign()
