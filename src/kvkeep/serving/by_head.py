"""A round for heads of different length: every request and KV head a row of its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.serving.heads import Heads


@dataclass(frozen=True)
class Rows:
    """The rows of a round, for heads that differ in length.

    Parameters
    ----------
    blocks
        int64 ``[rows, count]``: blocks of their slots.
    before
        int64 ``[rows]``: entries before the round, averaged over heads.
    fresh
        bool ``[rows]``: nothing has been evicted yet.
    counts
        int64 ``[rows]``: new tokens.
    owner, offset
        int64 ``[tokens]``: row of each token, and its place among the row's new tokens.
    """

    blocks: Tensor
    before: Tensor
    fresh: Tensor
    counts: Tensor
    owner: Tensor
    offset: Tensor


@dataclass(frozen=True)
class HeadCalls:
    """A round of one layer as rows of one request and one KV head, whose pages are blocks to the kernel.

    Parameters
    ----------
    query_start_loc, seq_lens, table
        int32 ``[rows * kv_heads + 1]``, ``[rows * kv_heads]``, ``[rows * kv_heads, pages]``.
    longest
        The largest of ``seq_lens``.
    slots
        int64 ``[tokens * kv_heads]``: where the new entries go.
    kv_heads
        KV heads.
    index
        int64 ``[tokens * kv_heads]``: the order (request, head, token); ``None`` if that is how they lie.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    table: Tensor
    longest: int
    slots: Tensor
    kv_heads: int
    index: Tensor | None

    @classmethod
    def of(cls, rows: Rows, heads: Heads, page: int) -> HeadCalls:
        """Take a round apart, for pages of so many slots."""
        kv_heads = heads.held.shape[1]
        lens = heads.held + rows.counts[:, None]
        longest = int(lens.max())
        slot = heads.held[rows.owner] + rows.offset[:, None]  # [tokens, kv_heads]
        pages = heads.table[rows.owner].gather(2, (slot // page)[..., None]).squeeze(2)
        slots = (pages * page + slot % page).flatten()
        index = None
        if rows.owner.shape[0] != rows.counts.shape[0]:
            # Sorting by row and head keeps the order of tokens within them; single tokens are in order.
            line = rows.owner[:, None] * kv_heads + torch.arange(kv_heads, device=slot.device)
            index = line.flatten().argsort(stable=True)
            slots = slots[index]
        bounds = torch.zeros(lens.numel() + 1, dtype=torch.int32, device=lens.device)
        bounds[1:] = rows.counts.repeat_interleave(kv_heads).cumsum(0)
        count = -(-longest // page)
        table = heads.table[..., :count].reshape(-1, count).int()
        return cls(bounds, lens.flatten().int(), table, longest, slots, kv_heads, index)

    def gather(self, tensor: Tensor) -> Tensor:
        """``[tokens, heads, dim]`` as ``[tokens * kv_heads, heads / kv_heads, dim]``, row by row."""
        lines = tensor.reshape(tensor.shape[0] * self.kv_heads, -1, tensor.shape[-1])
        return lines.contiguous() if self.index is None else lines[self.index]

    def scatter(self, lines: Tensor, tensor: Tensor) -> None:
        """Write what :meth:`gather` would read."""
        whole = tensor.view(lines.shape)
        if self.index is None:
            whole.copy_(lines)
        else:
            whole[self.index] = lines
