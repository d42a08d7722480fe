"""Range against the error of few bits over portions of text: the numbers of `kvkeep analyze quantization`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from kvkeep.analysis.findings import mean_interval, round_to
from kvkeep.analysis.link import TOPS, Link, link
from kvkeep.analysis.reading import Portion
from kvkeep.analysis.round_trip import Scheme
from kvkeep.analysis.spread import SINKS

#: Parts of equal size that entries are cut into by range, for the curve of error against range.
STEPS = 20


def quantization_findings(
    portions: Sequence[Portion], schemes: Sequence[Scheme], value_dim: int
) -> dict[str, Any]:
    """Each scheme, layer by layer: all heads and tokens of a layer are one set, sinks dropped.

    Parameters
    ----------
    portions
        Read with these schemes.
    value_dim
        Channels of a value.
    """
    ranges = _body([portion.magnitudes["range"] for portion in portions])
    norms = _body([portion.magnitudes["l2"] for portion in portions])
    energy = float(norms.double().square().sum()) / value_dim
    found = {}
    for each in schemes:
        errors = _body([portion.errors[each.name] for portion in portions])
        expected = _body([portion.expected[each.name] for portion in portions])
        layers = [link(*one) for one in zip(ranges, norms, errors, expected, strict=True)]
        found[each.name] = {
            "bits": each.bits,
            "group": each.group,
            "bits_per_channel": each.bits_per_channel,
            # Share of the values' own energy: what the error is to be held against.
            "noise": round_to(float(errors.double().sum()) / energy if energy else 0.0),
            "mean": mean_link(layers),
            "layers": [
                {"layer": index, **_facts(one)} for index, one in zip(portions[0].layers, layers, strict=True)
            ],
            "curve": curve(ranges, errors, expected),
        }
    return {
        "layers": list(portions[0].layers),
        "kv_heads": ranges.shape[1],
        "portions": [portion.tokens for portion in portions],
        "sinks_dropped": SINKS,
        "schemes": found,
    }


def _body(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part[..., SINKS:] for part in parts], -1)


def _facts(one: Link) -> dict[str, Any]:
    return {
        name: {top: round_to(share) for top, share in value.items()}
        if isinstance(value, dict)
        else value
        if name == "entries"
        else round_to(value)
        for name, value in asdict(one).items()
    }


def mean_link(layers: Sequence[Link]) -> dict[str, Any]:
    """Means over layers with their intervals (layers are drawn)."""

    def mean(numbers: Sequence[float]) -> dict[str, Any]:
        found = torch.tensor(numbers, dtype=torch.float64)
        return {"value": round_to(float(found.mean())), "interval": mean_interval(found)}

    names = ("pearson", "spearman", "spearman_norm", "slope", "over_law")
    tops = [f"{top:g}" for top in TOPS]
    return {
        **{name: mean([getattr(one, name) for one in layers]) for name in names},
        "shares": {top: mean([one.shares[top] for one in layers]) for top in tops},
        "square_shares": {top: mean([one.square_shares[top] for one in layers]) for top in tops},
    }


def curve(ranges: Tensor, errors: Tensor, expected: Tensor, steps: int = STEPS) -> list[dict[str, float]]:
    """Mean range, error and expected error of entries cut by range into parts of equal size, ascending.

    Ranges are taken beside the middle of their layer, errors beside the middle error of their layer, so that
    layers of different scale can be shown in one curve.
    """
    layers = ranges.flatten(1).double()
    error, law = errors.flatten(1).double(), expected.flatten(1).double()
    scale = layers.median(-1, keepdim=True).values.clamp(min=1e-30)
    unit = error.median(-1, keepdim=True).values.clamp(min=1e-30)
    order = (layers / scale).flatten().argsort()
    columns = [(part / by).flatten()[order] for part, by in ((layers, scale), (error, unit), (law, unit))]
    return [
        {
            name: round_to(float(part.mean()))
            for name, part in zip(("range", "error", "law"), parts, strict=True)
        }
        for parts in zip(*(column.tensor_split(steps) for column in columns), strict=True)
        if len(parts[0])
    ]
