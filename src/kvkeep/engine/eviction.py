"""What an eviction does, for whoever wants to watch: shown before it is carried out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from kvkeep.core.decision import KeepDecision
from kvkeep.core.view import LayerView


@dataclass(frozen=True, kw_only=True)
class Eviction:
    """The rows of one layer that evict now.

    Parameters
    ----------
    view
        What the policy saw. Its tensors are the cache's own memory: copy what is to be kept.
    decision
        What the policy decided.
    sequence_ids
        Names of the rows, as :class:`~kvkeep.RetentionCache` was given them.
    """

    view: LayerView
    decision: KeepDecision
    sequence_ids: tuple[int, ...]

    @property
    def kept(self) -> Tensor:
        """bool ``[rows, kv_heads, entries]``: entries of the view that stay."""
        return self.decision.mask(self.view.shape[2])

    @property
    def evicted(self) -> Tensor:
        """bool ``[rows, kv_heads, entries]``: entries that go."""
        return self.view.valid & ~self.kept


#: Called for each layer that evicts, before anything moves.
Observer = Callable[[Eviction], None]
