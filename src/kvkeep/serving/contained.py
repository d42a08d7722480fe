"""A request whose scores are no numbers, kept from taking the others down.

A model that overflows in 16 bits, or a text that a method divides by zero on, makes one request's scores NaN.
vLLM goes on with such requests, and their clients see what became of them; an engine that stops takes all
others along. So a request that cannot be judged keeps its newest entries, and that is said.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from kvkeep.core.decision import KeepCounts, KeepDecision
from kvkeep.core.errors import NotANumberError
from kvkeep.core.policy import Policy
from kvkeep.core.view import LayerView
from kvkeep.selection.top_k import top_k
from kvkeep.serving.ledger import LedgerReader

logger = logging.getLogger("vllm.kvkeep")


@dataclass
class Contained:
    """What a worker decided without its policy.

    Parameters
    ----------
    evictions
        Of one request in one layer each.
    """

    evictions: int = 0

    def note(self, error: NotANumberError) -> None:
        """Count one; say it the first time, and then ever more rarely."""
        self.evictions += 1
        if self.evictions & (self.evictions - 1) == 0:
            logger.error(
                "kvkeep: %s The request keeps its newest entries instead, and others are not affected "
                "(evictions of one layer decided that way so far: %d).",
                error,
                self.evictions,
            )


#: One worker process serves one engine.
CONTAINED = Contained()


def newest(policy: Policy, view: LayerView, counts: KeepCounts) -> KeepDecision:
    """What is protected, and the newest entries; as many as the policy would have kept."""
    scores = view.positions.float()
    (shares,) = policy.allocate([view], [scores], [counts]) if policy.traits.ragged else (counts,)
    return top_k(scores, shares, candidates=view.candidates, kept=view.protected)


class WorkerReader(LedgerReader):
    """All that is asked of a worker, for vLLM's ``worker_extension_cls``."""

    def kvkeep_contained(self) -> int:
        """Evictions that this worker decided without its policy."""
        return CONTAINED.evictions
