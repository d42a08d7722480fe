"""Where the numbers of an entry lie inside a block of vLLM's cache, learned from its own write kernel.

CPU kernels store keys transposed, or interleaved for matrix instructions, and differ by instruction set.
The order is found once by writing numbered entries and reading them back: no kernel's layout is written down.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.core.errors import CacheIntegrityError

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
        slots, dim = offsets.shape
        shape = pages.shape[:-1]
        step, stride = _stride(offsets, 0), _stride(offsets, 1)
        if (step, stride) == (dim, 1):
            return pages.view(*shape, slots, dim)
        if (step, stride) == (1, slots):
            return pages.view(*shape, dim, slots).transpose(-1, -2)
        return pages[..., offsets.reshape(-1)].view(*shape, slots, dim)


def _stride(offsets: Tensor, axis: int) -> int:
    """The constant step of offsets along an axis; 0 if there is none."""
    steps = offsets.diff(dim=axis)
    return int(steps.flatten()[0]) if steps.numel() and bool((steps == steps.flatten()[0]).all()) else 0
