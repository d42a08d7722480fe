"""Views changed in one respect, for checks that compare two decisions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvkeep.core.random import RandomStream
from kvkeep.core.view import PER_ENTRY, LayerView, QueryMoments


def with_contents(
    view: LayerView,
    keys: Callable[[Tensor], Tensor],
    values: Callable[[Tensor], Tensor],
    queries: Callable[[Tensor], Tensor],
) -> LayerView:
    """The view with other numbers in keys, values and queries; attention and retention are equal for all."""
    recorded = dict(view.recorded)
    if "queries" in recorded:
        recorded["queries"] = queries(recorded["queries"])
    if "attention_sum" in recorded:
        recorded["attention_sum"] = torch.ones_like(recorded["attention_sum"])
    for name in ("last_attended", "longest_pause"):
        if name in recorded:
            recorded[name] = torch.ones_like(recorded[name])
    if "log_retention" in recorded:
        recorded["log_retention"] = torch.zeros_like(recorded["log_retention"])
    return replace(view, keys=keys(view.keys), values=values(view.values), recorded=recorded)


def paired_tensors(before: Any, after: Any, prefix: str = "") -> list[tuple[str, Tensor, Tensor]]:
    """Pairs of tensors of two views by name, recorded fields included."""
    pairs = []
    for field in dataclasses.fields(before):
        old, new = getattr(before, field.name), getattr(after, field.name)
        if isinstance(old, Tensor):
            pairs.append((prefix + field.name, old, new))
        elif field.name == "recorded":
            for name, value in old.items():
                if isinstance(value, Tensor):
                    pairs.append((name, value, new[name]))
                elif dataclasses.is_dataclass(value):
                    pairs += paired_tensors(value, new[name], f"{name}.")
    return pairs


def with_empty_slots(view: LayerView, count: int = 3) -> LayerView:
    """The view with slots behind its entries that hold rubbish."""

    def wider(tensor: Tensor, fill: float) -> Tensor:
        shape = (*tensor.shape[:2], count, *tensor.shape[3:])
        return torch.cat([tensor, tensor.new_full(shape, fill)], dim=2)

    recorded = {
        name: wider(value, 100.0) if name in PER_ENTRY else value for name, value in view.recorded.items()
    }
    return replace(
        view,
        keys=wider(view.keys, 9.0),
        values=wider(view.values, -9.0),
        positions=wider(view.positions, 5),
        valid=wider(view.valid, False),
        protected=wider(view.protected, False),
        recorded=recorded,
        even=False,
    )


def flipped(view: LayerView) -> LayerView:
    """The view with its KV heads in reverse order, their query heads with them."""
    kv_heads = view.shape[1]

    def flip(tensor: Tensor) -> Tensor:
        grouped = tensor.unflatten(1, (kv_heads, tensor.shape[1] // kv_heads))
        return grouped.flip(1).flatten(1, 2)

    recorded: dict[str, Any] = {}
    for name, value in view.recorded.items():
        if name == "queries" or name in PER_ENTRY:
            value = flip(value)
        elif isinstance(value, QueryMoments):
            value = QueryMoments(flip(value.mean), flip(value.covariance))
        recorded[name] = value
    turned: dict[str, Any] = {
        name: flip(getattr(view, name)) for name in ("keys", "values", "positions", "valid", "protected")
    }
    return replace(view, **turned, recorded=recorded)


def of_head(view: LayerView, head: int) -> LayerView:
    """The view of one KV head, as a rank sees it that has no other."""
    kv_heads = view.shape[1]

    def part(tensor: Tensor, dim: int = 1) -> Tensor:
        group = tensor.shape[dim] // kv_heads
        return tensor.narrow(dim, head * group, group)

    recorded: dict[str, Any] = {}
    for name, value in view.recorded.items():
        if name == "queries" or name in PER_ENTRY:
            value = part(value)
        elif isinstance(value, QueryMoments):
            value = QueryMoments(part(value.mean), part(value.covariance))
        elif isinstance(value, RandomStream):
            value = replace(value, first_head=head)
        elif name == "calibration":
            value = replace(value, mean=part(value.mean, 0), magnitude=part(value.magnitude, 0))
        recorded[name] = value
    own: dict[str, Any] = {
        name: part(getattr(view, name)) for name in ("keys", "values", "positions", "valid", "protected")
    }
    return replace(view, **own, recorded=recorded)
