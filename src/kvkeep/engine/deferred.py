"""Ask the gates of a layer about several decoded tokens at once.

One token at a time a gate is as slow as reading its weights. Beta depends on its token alone, and nobody
looks at it before the next eviction: so the inputs wait, and the weights are read once for all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kvkeep.cache.store import Store

#: Tokens whose inputs may wait: a sixteenth of the reads, for the memory of some twenty entries of each head.
WAITING = 16


class DeferredGates:
    """The newest tokens of a layer whose log beta is not known yet.

    Parameters
    ----------
    gates
        ``(layer, hidden) -> log beta``; ``None`` for a policy without gates.
    layer
        Index in the model.
    """

    def __init__(self, gates: Any, layer: int) -> None:
        self.gates, self.layer, self.most = gates, layer, WAITING
        self.inputs: list[Tensor] = []

    def wait(self, hidden: Tensor) -> None:
        """Put the input of one new token per row, ``[batch, 1, hidden_size]``, by."""
        self.inputs.append(hidden.detach().clone())  # a compiled model may overwrite its own

    @property
    def full(self) -> bool:
        """Whether no more may wait."""
        return len(self.inputs) >= self.most

    def settle(self, store: Store) -> None:
        """Write what the gates say of the waiting tokens beside their entries, the newest of every head."""
        if not self.inputs:
            return
        with torch.inference_mode():  # a store that was laid out in it can be written to in no other
            log_beta = self.gates(self.layer, torch.cat(self.inputs, dim=1))
            store.set_newest("log_retention", log_beta)
        self.inputs.clear()

    @property
    def nbytes(self) -> int:
        """Memory of what waits."""
        return sum(each.nbytes for each in self.inputs)
