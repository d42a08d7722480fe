"""Caches laid out in strange orders, as attention kernels lay theirs out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ORDERS = ("plain", "side by side", "transposed keys", "interleaved", "scrambled")


@dataclass
class Kernel:
    """A write kernel with an order of its own.

    Parameters
    ----------
    order
        One of :data:`ORDERS`.
    slots, dim
        Of a page.
    """

    order: str
    slots: int
    dim: int

    def __post_init__(self) -> None:
        slots, dim = self.slots, self.dim
        number, half = torch.arange(slots * dim).view(slots, dim), slots * dim
        self.keys, self.values = number, number + half
        if self.order == "side by side":  # each key beside its value
            both = torch.arange(2 * half).view(slots, 2 * dim)
            self.keys, self.values = both[:, :dim], both[:, dim:]
        elif self.order == "transposed keys":
            self.keys = number.view(dim, slots).T
        elif self.order == "interleaved":  # pairs side by side, as for matrix instructions
            self.keys = number.view(dim // 2, slots, 2).transpose(0, 1).reshape(slots, dim)
            self.values = half + number.view(slots // 2, dim, 2).transpose(1, 2).reshape(slots, dim)
        elif self.order == "scrambled":
            shuffled = torch.randperm(2 * half, generator=torch.Generator().manual_seed(1))
            self.keys, self.values = shuffled.view(2, slots, dim)

    def write(self, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
        """Store ``[tokens, kv_heads, dim]`` in ``[blocks, kv_heads, slots, 2 * dim]``, token by token."""
        pages = cache.view(*cache.shape[:2], -1)
        for token, slot in enumerate(slots.tolist()):
            block, place = divmod(slot, self.slots)
            pages[block][:, self.keys[place]] = key[token]
            pages[block][:, self.values[place]] = value[token]
