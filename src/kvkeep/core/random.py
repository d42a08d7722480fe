"""Random numbers that belong to a sequence, not to a batch.

Each number is a hash of (run seed, sequence id, layer, eviction index, purpose, KV head, position);
the persistent stream leaves the eviction index out, for what is drawn once and reused.
There is no generator state: a sequence draws the same numbers alone or in a batch, padded or not,
in any row, on any device, in transformers or in vLLM, and nothing has to be saved or restored.

The hash is the 64-bit finaliser of SplitMix64 (Steele, Lea & Flood, "Fast splittable pseudorandom
number generators", OOPSLA 2014), applied once per key component. Integer arithmetic wraps modulo
2**64 in torch, so it runs vectorised and without host syncs on every device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor


def _signed(value: int) -> int:
    """Reinterpret an unsigned 64-bit constant as the signed number that torch stores."""
    return value - 2**64 if value >= 2**63 else value


_GAMMA = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _logical_shift(x: Tensor, bits: int) -> Tensor:
    """Shift right filling with zeros; torch's own shift copies the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _logical_shift(x, 30)) * _MIX_1
    x = (x ^ _logical_shift(x, 27)) * _MIX_2
    return x ^ _logical_shift(x, 31)


def _absorb(state: Tensor, value: Tensor | int) -> Tensor:
    """Fold one more key component into a hash state (broadcasts)."""
    return _mix(state * _GAMMA + value + _GAMMA)


# The eviction index of numbers that are drawn once and stay: no eviction has it.
_ALWAYS = -1


@dataclass(frozen=True)
class RandomStream:
    """The random source of one layer's eviction, for every row of a view.

    Parameters
    ----------
    origin
        Hash state of shape ``[batch]`` (int64): seed, sequence and layer folded in.
    evictions
        int64 of shape ``[batch]``: evictions that the sequence had before.
    first_head
        The layer's KV head that stands first in what is drawn for: not 0 where heads are spread over ranks.
    """

    origin: Tensor
    evictions: Tensor
    first_head: int = 0

    @classmethod
    def derive(
        cls, *, seed: int, sequence_ids: Tensor, layer: int, evictions: Tensor, first_head: int = 0
    ) -> RandomStream:
        """Derive the stream of (seed, sequence, layer, eviction index).

        Parameters
        ----------
        sequence_ids, evictions
            int64 of shape ``[batch]``: who the sequence is, and how many evictions it had before.
        """
        start = torch.full_like(sequence_ids, _signed(seed % 2**64))
        return cls(_absorb(_absorb(start, sequence_ids), layer), evictions, first_head)

    @property
    def persistent(self) -> RandomStream:
        """The stream that ignores the eviction index: what is drawn here is the same at every eviction."""
        return replace(self, evictions=torch.full_like(self.evictions, _ALWAYS))

    def _key(self, purpose: int) -> Tensor:
        return _absorb(_absorb(self.origin, self.evictions), purpose)

    def uniform(self, positions: Tensor, *, purpose: int = 0) -> Tensor:
        """Draw one number in (0, 1) per entry.

        Parameters
        ----------
        positions
            int64 ``[batch, kv_heads, entries]``; an entry's number depends on its head and its
            position, never on where it is stored.
        purpose
            Different purposes give independent numbers for the same entries.

        Returns
        -------
        Tensor
            float32 of the same shape, strictly between 0 and 1.
        """
        heads = torch.arange(positions.shape[1], device=positions.device) + self.first_head
        per_head = _absorb(self._key(purpose)[:, None], heads)
        return _to_unit(_absorb(per_head[:, :, None], positions))

    def normal(self, shape: tuple[int, ...], *, purpose: int = 0) -> Tensor:
        """Draw standard normal numbers of shape ``[batch, *shape]`` (Box-Muller), float32."""
        count = math.prod(shape)
        index = torch.arange(2 * count, device=self.origin.device)
        unit = _to_unit(_absorb(self._key(purpose)[:, None], index))
        radius = torch.sqrt(-2.0 * torch.log(unit[:, :count]))
        return (radius * torch.cos(2.0 * math.pi * unit[:, count:])).reshape(-1, *shape)

    def gumbel(self, positions: Tensor, *, purpose: int = 0) -> Tensor:
        """Draw standard Gumbel numbers, one per entry (see :meth:`uniform`)."""
        return -torch.log(-torch.log(self.uniform(positions, purpose=purpose)))


def _to_unit(bits: Tensor) -> Tensor:
    """Map 64 random bits to float32 in (0, 1): the upper 23, centred, so 0 and 1 never appear."""
    return (_logical_shift(bits, 41).to(torch.float32) + 0.5) * 2.0**-23
