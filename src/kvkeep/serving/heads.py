"""Which pages each KV head of a request holds, and how much is in them: equal shares, or by need.

With equal shares everything follows from the schedule. Where a policy gives heads different counts, their
pages are shared out anew at each eviction among those that the request owns in this layer; who holds a page
is noted beside the page, so that it needs no request either.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.core.errors import CacheIntegrityError
from kvkeep.serving.pages import LayerPages


@dataclass(frozen=True)
class Heads:
    """What the heads of some rows hold.

    Parameters
    ----------
    table
        int64 ``[rows, kv_heads, count]``: pages of each head; arbitrary behind those that it holds.
    held
        int64 ``[rows, kv_heads]``: entries.
    """

    table: Tensor
    held: Tensor


class EqualHeads:
    """All heads hold the same share of the request's blocks.

    Parameters
    ----------
    pages
        The layer.
    """

    def __init__(self, pages: LayerPages) -> None:
        self._pages = pages

    def of(self, blocks: Tensor, held: Tensor, fresh: Tensor) -> Heads:
        """The heads of rows.

        Parameters
        ----------
        blocks
            int64 ``[rows, count]``.
        held
            int64 ``[rows]``: entries, averaged over heads.
        fresh
            bool ``[rows]``: nothing has been evicted yet.
        """
        return Heads(self._pages.table(blocks), held[:, None].expand(-1, self._pages.kv_heads))

    def settle(self, blocks: Tensor, heads: Heads, kept: Tensor, kept_mean: Tensor) -> None:
        """An eviction left ``kept`` entries ``[rows, kv_heads]`` in each head, ``kept_mean`` on average.

        Raises
        ------
        CacheIntegrityError
            If a head keeps another number than its share.
        """
        if not torch.equal(kept, kept_mean[:, None].expand_as(kept)):
            raise CacheIntegrityError(
                f"a policy kept {kept.tolist()} entries per head where the schedule has slots for "
                f"{kept_mean.tolist()}: a policy that vLLM serves must fill its budget exactly."
            )


class UnequalHeads:
    """Heads hold what the policy gave them at the last eviction, and what came since.

    Parameters
    ----------
    pages
        The layer.
    buffer
        Tokens between evictions: room that every head is given beside its entries.
    """

    def __init__(self, pages: LayerPages, buffer: int) -> None:
        self._pages, self._buffer = pages, buffer
        device, shape = pages.cache.device, (pages.blocks, pages.kv_heads)
        # Of a page: the head that holds it, and its place in that head's list (-1: nobody). Of a row's first
        # block: how much more than the mean each head kept.
        self._owner = torch.zeros(shape, dtype=torch.int64, device=device)
        self._place = torch.full(shape, -1, dtype=torch.int64, device=device)
        self._surplus = torch.zeros(shape, dtype=torch.int64, device=device)

    def of(self, blocks: Tensor, held: Tensor, fresh: Tensor) -> Heads:
        """The heads of rows (see :meth:`EqualHeads.of`)."""
        equal = self._pages.table(blocks)
        rows, heads, count = equal.shape
        width = count * heads
        place, owner = self._place[blocks], self._owner[blocks]  # [rows, count, heads]
        # Pages in nobody's list, and the null block behind short rows, fall into a place that is cut off.
        index = torch.where((place < 0) | (blocks == 0)[..., None], heads * width, owner * width + place)
        lists = torch.zeros((rows, heads * width + 1), dtype=torch.int64, device=blocks.device)
        lists.scatter_(1, index.flatten(1), equal.transpose(1, 2).flatten(1))
        own = lists[:, :-1].view(rows, heads, width)
        table = torch.where(fresh[:, None, None], _widen(equal, width), own)
        surplus = self._surplus[blocks[:, 0]].masked_fill(fresh[:, None], 0)
        return Heads(table, held[:, None] + surplus)

    def settle(self, blocks: Tensor, heads: Heads, kept: Tensor, kept_mean: Tensor) -> None:
        """Share the pages out for what heads keep now and the tokens until the next eviction.

        Raises
        ------
        CacheIntegrityError
            If the heads of a row keep more or less than their shares together, or than its pages hold.
        """
        rows, count = blocks.shape
        size, width = self._pages.kv_heads, self._pages.slots
        if not torch.equal(kept.sum(-1), kept_mean * size):
            raise CacheIntegrityError(
                f"a policy kept {kept.sum(-1).tolist()} entries in all heads where the schedule has slots "
                f"for {(kept_mean * size).tolist()}: a policy that vLLM serves must fill its budget exactly."
            )
        need = (kept + self._buffer + width - 1) // width  # pages
        owned = (blocks != 0).sum(-1) * size
        if bool((need.sum(-1) > owned).any()):
            raise CacheIntegrityError(
                f"heads that keep {kept.tolist()} entries need {need.sum(-1).tolist()} pages, and the "
                f"requests own {owned.tolist()}"
            )
        place = torch.arange(heads.table.shape[-1], device=blocks.device)
        stays = place < torch.minimum(need, (heads.held + width - 1) // width)[..., None]
        wanted = (place < need[..., None]) & ~stays
        # Every page of the row that no head goes on holding, in order, is handed to what is wanted, in order.
        local, nowhere = self._local(blocks, heads.table), count * size
        taken = torch.zeros((rows, nowhere + 1), dtype=torch.bool, device=blocks.device)
        taken[:, :-1] = (blocks == 0).repeat_interleave(size, 1)
        taken.scatter_(1, torch.where(stays, local, nowhere).flatten(1), True)
        free = taken[:, :-1].byte().argsort(dim=-1, stable=True)
        rank = (wanted.flatten(1).cumsum(-1) - 1).clamp(min=0, max=nowhere - 1)
        local = torch.where(wanted, free.gather(1, rank).view_as(local), local)
        index = torch.where(stays | wanted, local, nowhere).flatten(1)
        head = torch.arange(size, device=blocks.device)[None, :, None].expand_as(local)
        owner = torch.zeros((rows, nowhere + 1), dtype=torch.int64, device=blocks.device)
        spot = torch.full_like(owner, -1)
        owner.scatter_(1, index, head.flatten(1))
        spot.scatter_(1, index, place.expand_as(local).flatten(1))
        self._owner[blocks] = owner[:, :-1].view(rows, count, size)
        self._place[blocks] = spot[:, :-1].view(rows, count, size)
        self._surplus[blocks[:, 0]] = kept - kept_mean[:, None]

    @staticmethod
    def _local(blocks: Tensor, table: Tensor) -> Tensor:
        """Where the pages of a table stand in the row's own ``[count * kv_heads]``; arbitrary for others."""
        heads = table.shape[1]
        ordered, order = blocks.sort(-1)
        block = torch.div(table, heads, rounding_mode="floor").flatten(1)
        at = torch.searchsorted(ordered, block).clamp(max=blocks.shape[1] - 1)
        return order.gather(1, at).view_as(table) * heads + table % heads


def _widen(table: Tensor, width: int) -> Tensor:
    """The same table with room for longer lists."""
    return torch.nn.functional.pad(table, (0, width - table.shape[-1]))
