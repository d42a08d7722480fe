"""The page pools of one cache: one per device and shape, sized by the budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvkeep.cache.pages import PagePool
from kvkeep.core.arrays import IntArray
from kvkeep.core.precision import Precision
from kvkeep.engine.evictor import Evictor


def spare_entries(page_size: int, heads: int) -> int:
    """Entries per head that pages may leave empty: a page of each head, and a share of the empty page.

    Parameters
    ----------
    heads
        KV heads of all layers and rows together.
    """
    return page_size + -(-page_size // heads)


class Pools:
    """Finds a layer's pool, lays it out in time, and gives memory back.

    Parameters
    ----------
    evictor
        Knows what a row keeps.
    layers
        Managed layers of the model.
    page_size
        Entries per page.
    extras
        Numbers kept per entry.
    precision
        Of a cache with entries in few bits, which have a pool of their own.
    """

    def __init__(
        self,
        evictor: Evictor,
        layers: int,
        page_size: int,
        extras: Sequence[str],
        precision: Precision | None = None,
    ) -> None:
        self.evictor, self.layers, self.precision = evictor, layers, precision
        self.page_size, self.extras = page_size, tuple(extras)
        self._pools: dict[Any, PagePool] = {}

    def pool_for(self, keys: Tensor, values: Tensor) -> PagePool:
        """The pool for keys ``[..., head_dim]`` and values ``[..., value_dim]`` like these."""
        kind = (keys.device, keys.dtype, keys.shape[-1], values.shape[-1])
        if kind not in self._pools:
            self._pools[kind] = PagePool(keys, values, self.page_size, self.extras)
        return self._pools[kind]

    def make_room(self, pool: PagePool, fresh: Sequence[int], heads: int, place: int, first: bool) -> None:
        """Lay pages out before several tokens, or the first ones, are stored in a layer.

        Enough for a prompt in all layers at once and for the tokens up to its eviction, so that the pool does
        not move before; but where layers evict one after the other, only for one layer's prompt at a time.
        What is not foreseen here (a further turn, a prompt in chunks that are not evicted) grows by steps.

        Parameters
        ----------
        fresh
            New tokens per row.
        place
            Of the layer among the managed ones.
        first
            The layer holds nothing yet.
        """
        traits, steady = self.evictor.traits, self._steady(len(fresh), heads, pool)
        new = heads * sum(self._pages(count) for count in fresh)
        at_once = self.precision is not None and traits.trigger.prefill != "after"
        if not self.evictor.policy.bounded:
            steady = 0
        if (steady and traits.trigger.prefill == "chunk") or at_once:
            alone = traits.scope == "layer"
            waiting = 1 if alone else self.layers - place
            pool.grow(max(steady + new if alone else steady, pool.used + new * waiting))
        elif first:
            if not steady or traits.trigger.prefill == "defer":
                most = (self.evictor.most(row, count) for row, count in enumerate(fresh))
                new = heads * sum(self._pages(entries) for entries in most)
            pool.grow(max(steady, new * self.layers))

    def make_room_again(self, pool: PagePool, held: IntArray) -> None:
        """Lay pages out for a layer that a file held, ``[batch, kv_heads]`` entries."""
        pages = int(self._pages(held).sum())
        rows, heads = held.shape
        steady = self._steady(rows, heads, pool)
        # Without a bound all layers hold equally many; with one, ragged layers need just their own pages.
        pool.grow(max(steady, pool.used + pages) if steady else pages * self.layers)

    def _pages(self, entries: Any) -> Any:
        return -(-entries // self.page_size)

    def _most(self, rows: int, pool: PagePool) -> list[int]:
        """Entries per head that a pool holds for each row while it decodes inside the budget; 0: no bound."""
        evictor, precision = self.evictor, self.precision
        bounded = evictor.policy.bounded
        most = [evictor.most(row) if bounded else 0 for row in range(rows)]
        if precision is None:
            return most
        stays = [precision.full_of(evictor.rows.prompt_lens[row]) for row in range(rows)]
        if pool.keys.dtype == torch.uint8:
            return [max(0, evictor.limit(row) - stay) if bounded else 0 for row, stay in enumerate(stays)]
        full = [stay + evictor.policy.buffer for stay in stays]
        return [min(each, one) if bounded else one for each, one in zip(most, full, strict=True)]

    def _steady(self, rows: int, heads: int, pool: PagePool) -> int:
        """Pages that decoding inside the budget needs at most; 0 for a cache without a bound."""
        most = self._most(rows, pool)
        if not any(most):
            return 0
        if self.evictor.traits.ragged:
            # However the entries are spread, no head wastes more than one page.
            full = sum(most) * self.layers * heads // self.page_size
            return int(full) + rows * self.layers * heads
        return sum(self._pages(entries) for entries in most) * self.layers * heads

    def give_back(self, rows: int) -> None:
        """After a round of evictions: shrink every pool to what decoding inside the budget needs."""
        for pool in self._pools.values():
            if not pool.stores:
                continue
            layers = len(pool.stores)
            steady = self._steady(rows, pool.stores[0].heads, pool) * layers // self.layers
            if steady and pool.capacity > max(steady, pool.used):
                pool.shrink(steady)
