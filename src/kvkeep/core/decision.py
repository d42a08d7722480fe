"""What a policy returns: which entries stay."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.core.errors import CacheIntegrityError


@dataclass(frozen=True)
class KeepCounts:
    """How many entries each head keeps, protected ones included.

    Parameters
    ----------
    per_head
        int64 ``[batch, kv_heads]``.
    largest
        The largest count, known on the host so that shapes need no device sync.
    """

    per_head: Tensor
    largest: int


@dataclass(frozen=True)
class KeepDecision:
    """Which entries stay, by index into the view.

    Parameters
    ----------
    indices
        int64 ``[batch, kv_heads, max_kept]``, ascending within each head; beyond ``lengths`` the
        content is arbitrary but in range.
    lengths
        int64 ``[batch, kv_heads]``.
    """

    indices: Tensor
    lengths: Tensor

    @classmethod
    def from_mask(cls, keep: Tensor, counts: KeepCounts) -> KeepDecision:
        """Turn a keep mask ``[batch, kv_heads, entries]`` into ascending indices.

        A running count gives every kept entry its place, so the cost is linear and no length has
        to be read back from the device.
        """
        entries = keep.shape[-1]
        place = keep.cumsum(-1) - 1
        # Entries that go are all written to one extra slot, which is cut off again.
        target = torch.where(keep, place, counts.largest).clamp_(max=counts.largest)
        indices = torch.zeros((*keep.shape[:2], counts.largest + 1), dtype=torch.int64, device=keep.device)
        source = torch.arange(entries, device=keep.device).expand_as(keep)
        indices.scatter_(-1, target, source)
        return cls(indices[..., :-1], keep.sum(-1))

    def mask(self, entries: int) -> Tensor:
        """bool ``[batch, kv_heads, entries]``: which of so many entries stay."""
        listed = torch.arange(self.max_kept, device=self.indices.device) < self.lengths[..., None]
        kept = torch.zeros(*self.indices.shape[:2], entries, dtype=torch.int64, device=self.indices.device)
        # Beyond its length a head's indices are arbitrary: they add nothing.
        return kept.scatter_add_(-1, self.indices, listed.to(torch.int64)) > 0

    @property
    def max_kept(self) -> int:
        """Width of :attr:`indices`."""
        return int(self.indices.shape[-1])

    def check(self, *, valid: Tensor, protected: Tensor, counts: KeepCounts | None) -> None:
        """Verify the decision against what the engine asked for (reads the device; for tests).

        Raises
        ------
        CacheIntegrityError
            If an index is out of range, repeated, not ascending or not a stored entry, if a
            protected entry is missing, or if a count differs from the one asked for.
        """
        kept = torch.arange(self.max_kept, device=valid.device) < self.lengths[..., None]
        problems = []
        if bool(((self.indices < 0) | (self.indices >= valid.shape[-1])).any()):
            problems.append("an index is out of range")
        else:
            later = self.indices[..., 1:] <= self.indices[..., :-1]
            if bool((later & kept[..., 1:]).any()):
                problems.append("indices are not strictly ascending")
            if bool((kept & ~valid.gather(-1, self.indices)).any()):
                problems.append("an empty slot was kept")
            mask = torch.zeros_like(valid, dtype=torch.int64)
            mask.scatter_add_(-1, self.indices, kept.to(torch.int64))
            if bool((protected & (mask == 0)).any()):
                problems.append("a protected entry was evicted")
        if counts is not None and bool((self.lengths != counts.per_head).any()):
            problems.append(
                f"counts {self.lengths.tolist()} differ from those asked for, {counts.per_head.tolist()}"
            )
        if problems:
            raise CacheIntegrityError("a policy returned a wrong decision: " + "; ".join(problems))
