"""The page pools of one cache: one per device and shape, sized by the budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from kvkeep.cache.pages import PagePool
from kvkeep.engine.evictor import Evictor


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
    """

    def __init__(self, evictor: Evictor, layers: int, page_size: int, extras: Sequence[str]) -> None:
        self.evictor, self.layers = evictor, layers
        self.page_size, self.extras = page_size, tuple(extras)
        self._pools: dict[Any, PagePool] = {}

    def pool_for(self, keys: Tensor, values: Tensor) -> PagePool:
        """The pool for keys ``[..., head_dim]`` and values ``[..., value_dim]`` like these."""
        kind = (keys.device, keys.dtype, keys.shape[-1], values.shape[-1])
        if kind not in self._pools:
            self._pools[kind] = PagePool(keys, values, self.page_size, self.extras)
        return self._pools[kind]

    def make_room(self, pool: PagePool, fresh: Sequence[int], heads: int) -> None:
        """Lay pages out before the first tokens of a layer are stored.

        Enough for the whole prompt in all layers at once, so that the pool does not move while it is
        read; but where layers evict one after the other, only for one layer's prompt at a time.
        """
        prompt = heads * sum(-(-count // self.page_size) for count in fresh)
        steady = self._steady(len(fresh), heads)
        if self.evictor.traits.trigger.prefill == "chunk" and self.evictor.traits.scope == "layer":
            pool.grow(max(steady + prompt, pool.used + prompt) if steady else pool.used + prompt)
        else:
            pool.grow(max(steady, prompt * self.layers))

    def _steady(self, rows: int, heads: int) -> int:
        """Pages that decoding inside the budget needs at most; 0 for a cache without a bound."""
        policy = self.evictor.policy
        if not policy.bounded:
            return 0
        most = [self.evictor.most(row) for row in range(rows)]
        if self.evictor.traits.ragged:
            # However the entries are spread, no head wastes more than one page.
            full = sum(most) * self.layers * heads // self.page_size
            return int(full) + rows * self.layers * heads
        return sum(-(-entries // self.page_size) for entries in most) * self.layers * heads

    def give_back(self, rows: int) -> None:
        """After a round of evictions: shrink every pool to what decoding inside the budget needs."""
        for pool in self._pools.values():
            if not pool.stores:
                continue
            layers = len(pool.stores)
            steady = self._steady(rows, pool.stores[0].heads) * layers // self.layers
            if steady and pool.capacity > max(steady, pool.used):
                pool.shrink(steady)
