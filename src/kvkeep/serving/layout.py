"""Where the numbers of an entry lie inside a page of vLLM's cache, learned from its own write kernel.

A page is one block of one KV head. Kernels store keys plain, transposed, or interleaved for matrix
instructions, beside their values or before them all, and differ by instruction set. The order is found once
by writing numbered entries and reading them back: no kernel's layout is written down.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.core.errors import CacheIntegrityError

#: Writes keys and values ``[tokens, 1, dim]`` into a cache ``[1, 1, slots, 2 * dim]`` at slots.
Write = Callable[[Tensor, Tensor, Tensor, Tensor], None]

# Numbers up to 256 are exact in bfloat16, so positions are written in two digits.
_DIGIT = 256


@dataclass(frozen=True)
class Offsets:
    """Where keys, or values, lie in a page.

    Parameters
    ----------
    at
        int64 ``[slots, dim]``: offset of each channel of each slot.
    steps
        Distance between slots and between channels, where these are the same all over.
    """

    at: Tensor
    steps: tuple[int, int] | None

    @classmethod
    def of(cls, at: Tensor) -> Offsets:
        """Find out whether offsets grow evenly."""
        step = (
            int(at[-1, 0] - at[0, 0]) // max(1, at.shape[0] - 1),
            int(at[0, -1] - at[0, 0]) // max(1, at.shape[1] - 1),
        )
        slots, channels = (torch.arange(size, device=at.device) for size in at.shape)
        even = at[0, 0] + slots[:, None] * step[0] + channels * step[1]
        return cls(at, step if torch.equal(at, even) else None)

    @property
    def rows(self) -> tuple[int, int] | None:
        """First row and step between rows of ``dim`` numbers in a page, if every entry is one row."""
        dim, first = self.at.shape[1], int(self.at[0, 0])
        if self.steps is None or self.steps[1] != 1 or self.steps[0] % dim or first % dim:
            return None
        return first // dim, self.steps[0] // dim

    def view(self, pages: Tensor) -> Tensor | None:
        """Entries ``[pages, slots, dim]`` of contiguous pages ``[pages, numbers]``; ``None`` if uneven."""
        if self.steps is None:
            return None
        shape, strides = (pages.shape[0], *self.at.shape), (pages.shape[1], *self.steps)
        return pages.as_strided(shape, strides, pages.storage_offset() + int(self.at[0, 0]))


@dataclass(frozen=True)
class Layout:
    """Offsets of keys and of values inside one page."""

    keys: Offsets
    values: Offsets

    @classmethod
    def learn(cls, write: Write, *, slots: int, dim: int, dtype: torch.dtype, device: torch.device) -> Layout:
        """Find the layout of a write kernel.

        Raises
        ------
        CacheIntegrityError
            If the kernel does not store every number exactly once.
        """
        count = slots * dim
        number = torch.arange(2 * count, device=device).view(2, slots, 1, dim)
        found = torch.zeros(2 * count, dtype=torch.int64, device=device)
        for weight, digit in ((1, number % _DIGIT), (_DIGIT, number // _DIGIT)):
            cache = torch.full((1, 1, slots, 2 * dim), -1.0, dtype=dtype, device=device)
            keys, values = digit.to(dtype)
            write(keys, values, cache, torch.arange(slots, device=device))
            found += weight * cache.flatten().long()
        if not torch.equal(found.sort().values, number.flatten()):
            raise CacheIntegrityError(
                "vLLM's cache does not hold each number of a block once: this attention kernel stores "
                "keys or values in a way that kvkeep cannot read (quantized, or with numbers of its own)."
            )
        keys_at, values_at = found.argsort().view(2, slots, dim)
        return cls(Offsets.of(keys_at), Offsets.of(values_at))
