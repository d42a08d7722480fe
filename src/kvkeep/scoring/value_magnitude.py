"""How large a value is: range, variance or norm over its channels."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from kvkeep.scoring.lengths import lengths

Magnitude = Literal["range", "variance", "l2"]
MAGNITUDES: tuple[str, ...] = ("range", "variance", "l2")


def value_magnitude(values: Tensor, kind: Magnitude = "range") -> Tensor:
    """Size of each value vector.

    Parameters
    ----------
    values
        ``[batch, kv_heads, entries, value_dim]``.
    kind
        ``"range"`` (largest minus smallest channel), ``"variance"`` (unbiased) or ``"l2"``.

    Returns
    -------
    Tensor
        float32 ``[batch, kv_heads, entries]``.

    Source: VaSE (arXiv 2606.03928), value magnitude and its ablations.
    """
    if kind == "range":
        # Two reductions: on a CPU torch.aminmax takes four times as long.
        return values.amax(-1).float() - values.amin(-1).float()
    if kind == "variance":
        return values.float().var(dim=-1)
    return lengths(values)
