"""Where the numbers of an entry lie inside a block of vLLM's cache, learned from its own write kernel.

CPU kernels store keys transposed, or interleaved for matrix instructions, and differ by instruction set.
The order is found once by writing numbered entries and reading them back: no kernel's layout is written down.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from kvkeep.core.errors import CacheIntegrityError

#: Entry after entry, channel after channel, or something else.
Order = Literal["plain", "transposed", "other"]

#: Writes keys and values ``[tokens, kv_heads, dim]`` into caches ``[blocks, kv_heads, slots, dim]`` at slots.
Write = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]

# Numbers up to 256 are exact in bfloat16, so positions are written in two digits.
_DIGIT = 256


@dataclass(frozen=True)
class Layout:
    """Offsets of entries inside one page (one block of one KV head), keys first, values after them.

    Parameters
    ----------
    keys, values
        int64 ``[slots, dim]``: offset of each channel of each slot within the page's keys or values.
    """

    keys: Tensor
    values: Tensor

    @classmethod
    def learn(cls, write: Write, *, slots: int, dim: int, dtype: torch.dtype, device: torch.device) -> Layout:
        """Find the layout of a write kernel.

        Raises
        ------
        CacheIntegrityError
            If the kernel does not store every number exactly once.
        """
        number = torch.arange(slots * dim, device=device).view(slots, 1, dim)
        digits = []
        for digit in (number % _DIGIT, number // _DIGIT):
            cache = torch.full((1, 1, 2 * slots, dim), -1.0, dtype=dtype, device=device)
            keys, values = cache.chunk(2, dim=2)
            written = digit.to(dtype)
            write(written, written, keys, values, torch.arange(slots, device=device))
            digits.append(cache.view(2, slots * dim).long())
        found = digits[0] + _DIGIT * digits[1]
        if not torch.equal(found.sort(-1).values, number.view(1, -1).expand(2, -1)):
            raise CacheIntegrityError(
                "vLLM's cache does not hold each number of a block once: this attention kernel stores "
                "keys or values in a way that kvkeep cannot read (quantized, or with numbers of its own)."
            )
        keys_at, values_at = found.argsort(-1).view(2, slots, dim)
        return cls(keys_at, values_at)

    @property
    def slots(self) -> int:
        """Slots of a page."""
        return int(self.keys.shape[0])

    @property
    def dim(self) -> int:
        """Channels of a key."""
        return int(self.keys.shape[1])

    def read(self, pages: Tensor, offsets: Tensor) -> Tensor:
        """Entries of whole pages, in the order of their slots.

        Parameters
        ----------
        pages
            ``[..., slots * dim]``.
        offsets
            :attr:`keys` or :attr:`values`.

        Returns
        -------
        Tensor
            ``[..., slots, dim]``; a view where the layout is plain or transposed.
        """
        shape, order = pages.shape[:-1], self.order(offsets)
        slots, dim = offsets.shape
        if order == "plain":
            return pages.view(*shape, slots, dim)
        if order == "transposed":
            return pages.view(*shape, dim, slots).transpose(-1, -2)
        return pages[..., offsets.reshape(-1)].view(*shape, slots, dim)

    def order(self, offsets: Tensor) -> Order:
        """How :attr:`keys` or :attr:`values` lie."""
        return self._orders[0 if offsets is self.keys else 1]

    @cached_property
    def _orders(self) -> tuple[Order, Order]:
        return _order(self.keys), _order(self.values)


def _order(offsets: Tensor) -> Order:
    in_line = torch.arange(offsets.numel(), device=offsets.device)
    if torch.equal(offsets.flatten(), in_line):
        return "plain"
    return "transposed" if torch.equal(offsets.T.flatten(), in_line) else "other"
