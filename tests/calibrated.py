"""Calibrated layers built by hand, for tests of policies that read calibration statistics."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.core.policy import Policy
from kvkeep.core.view import LayerView, Rope
from kvkeep.testing.views import make_view

HEAD_DIM = 8


@dataclass
class Layer:
    """What a policy reads of a calibrated layer."""

    mean: Tensor
    magnitude: Tensor


def make_layer(heads: int, seed: int, head_dim: int = HEAD_DIM) -> Layer:
    source = torch.Generator().manual_seed(seed)
    mean = torch.randn(heads, head_dim // 2, dtype=torch.complex64, generator=source)
    return Layer(mean, mean.abs() + torch.rand(heads, head_dim // 2, generator=source))


def make_rope(rotary_dim: int = HEAD_DIM, scaling: float = 1.0) -> Rope:
    return Rope(10000.0 ** (-torch.arange(rotary_dim // 2) * 2.0 / rotary_dim), scaling)


def make_layers(
    policy: Policy, layers: int = 2, group: int = 2, seed: int = 0, **options: object
) -> list[LayerView]:
    """Views of several layers that share their positions, as a policy of model scope meets them."""
    options = {"kv_heads": 2, "lengths": (40, 33), "evicted": 9, "head_dim": HEAD_DIM} | options
    views: list[LayerView] = []
    for layer in range(layers):
        heads = options["kv_heads"] * group
        recorded = {"rope": make_rope(), "calibration": make_layer(heads, seed + layer)}
        views.append(make_view(policy, layer=layer, seed=seed + 10 * layer, **recorded, **options))
        options["positions"] = views[0].positions
    return views
