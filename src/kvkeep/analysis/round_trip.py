"""What is left of a value after it was written down in few bits: round trips, token by token.

Each value vector is cut into groups of neighbouring channels; each group has a scale and a zero of its own,
in full precision. Plain rounding between the smallest and the largest channel of a group with range ``R`` has
the step ``R / (2^b - 1)``; where errors are spread evenly over a step, their mean square is a twelfth of its
square, ``R^2 / (12 (2^b - 1)^2)``: the error of a group grows with the square of its range.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from kvkeep.analysis.half_quadratic import half_quadratic
from kvkeep.core.errors import ConfigError
from kvkeep.kernels.few_bits import round_groups

Kind = Literal["minmax", "hqq"]
_NAME = re.compile(r"(minmax|hqq)-b(2|4|8)g(\d+)")


@dataclass(frozen=True)
class Scheme:
    """A way to write values down.

    Parameters
    ----------
    kind
        ``"minmax"``: scale and zero from smallest and largest channel. ``"hqq"``: the zero is optimised.
    bits
        Of each code.
    group
        Channels that share scale and zero.
    """

    kind: Kind
    bits: int
    group: int

    @property
    def name(self) -> str:
        """As on the command line: ``hqq-b2g32``."""
        return f"{self.kind}-b{self.bits}g{self.group}"

    @property
    def bits_per_channel(self) -> float:
        """Bits that a channel takes, scale and zero of 16 bits each included."""
        return self.bits + 2 * 16 / self.group

    def round_trip(self, values: Tensor) -> Tensor:
        """Write down and read back, float32 ``[..., value_dim]``; groups lie along the last dimension."""
        solve = min_max if self.kind == "minmax" else half_quadratic
        return solve(values, bits=self.bits, group=self.group)


#: Those of VaSE's analysis, one of 8 bits, and the same by plain rounding.
SCHEMES = tuple(
    Scheme(kind, bits, group)
    for kind in ("hqq", "minmax")
    for bits, group in ((2, 32), (2, 64), (4, 32), (4, 64), (8, 64))
)


def scheme(name: str) -> Scheme:
    """Read the name of a scheme.

    Raises
    ------
    ConfigError
        If it is none.

    Examples
    --------
    >>> scheme("hqq-b2g32").bits_per_channel
    3.0
    """
    found = _NAME.fullmatch(name)
    if found is None or int(found[3]) < 2:
        raise ConfigError(
            f"cannot read the scheme {name!r}: write kind, bits and group as in hqq-b2g32 or minmax-b4g64 "
            "(2, 4 or 8 bits; groups of 2 channels or more)."
        )
    kind: Kind = "hqq" if found[1] == "hqq" else "minmax"
    return Scheme(kind, int(found[2]), int(found[3]))


def fitting(schemes: tuple[Scheme, ...], dim: int) -> tuple[Scheme, ...]:
    """Schemes whose groups fill a head of so many channels without a rest."""
    return tuple(each for each in schemes if dim % each.group == 0)


def min_max(values: Tensor, *, bits: int, group: int) -> Tensor:
    """Round to ``2^bits`` even steps between the extremes of each group.

    Parameters
    ----------
    values
        ``[..., value_dim]``, a multiple of ``group``.

    Returns
    -------
    Tensor
        float32 (float64 of float64), shape as given; a group of equal channels comes back as it was.
    """
    codes, low, step = round_groups(values, bits, group, scales=None)
    return (codes * step + low).flatten(-2)


def token_error(values: Tensor, back: Tensor) -> Tensor:
    """Mean square over the channels of each vector: float32 ``[...]``."""
    return (values.float() - back).square().mean(-1)


def law(values: Tensor, *, bits: int, group: int) -> Tensor:
    """The error that the quadratic law expects of each vector: mean over its groups, float32 ``[...]``."""
    groups = values.float().unflatten(-1, (-1, group))
    spans = groups.amax(-1) - groups.amin(-1)
    return spans.square().mean(-1) / (12 * (2**bits - 1) ** 2)
