"""A policy under test, and runs of it on tiny models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from unittest import SkipTest

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvkeep.core.errors import ConfigError
from kvkeep.core.policy import Policy
from kvkeep.core.precision import Precision
from kvkeep.engine.fitting import StoreKind
from kvkeep.testing.models import left_padded, random_block_gates, random_gates, tiny_model, tokens
from kvkeep.testing.watching import Eviction, WatchedCache, feed, pieces

PolicyOrFactory = Policy | Callable[..., Policy]


def require(condition: object, message: str) -> None:
    """Fail a check with a sentence (an ``assert`` would vanish under ``python -O``)."""
    if not condition:
        raise AssertionError(message)


@lru_cache(maxsize=8)
def shared_model(family: str = "llama", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A tiny model, built once."""
    return tiny_model(family, dtype=dtype)


@lru_cache(maxsize=8)
def _calibration(family: str) -> Any:
    from kvkeep.calibration import capture

    return capture(tiny_model(family), tokens(64, seed=7))


@dataclass(frozen=True)
class Run:
    """One batch fed through a watched cache: what came out, and the cache afterwards."""

    cache: WatchedCache
    logits: list[Tensor]

    def kept(self) -> list[list[list[list[int]]]]:
        """Positions held at the end, ``[layer][row][head]``."""
        layers = self.cache.spec.managed
        return [
            [[head.tolist() for head in row] for row in self.cache.kept_positions(index)] for index in layers
        ]


@dataclass(frozen=True)
class Subject:
    """The policy that a check looks at, and sizes that fit it.

    Parameters
    ----------
    policy
        Its budget is a count, small enough for a tiny model (24 with a buffer of 8, say).
    store
        Where entries live, as for the cache.
    precision
        Likewise; groups of 8 or 16 fit the tiny models.
    """

    policy: Policy
    store: StoreKind = "auto"
    precision: Precision | None = None

    @classmethod
    def of(
        cls, given: PolicyOrFactory, *, store: StoreKind = "auto", precision: Precision | None = None
    ) -> Subject:
        """A policy as it is, a class with ``budget=24, buffer=8``, or whatever a function returns."""
        if isinstance(given, type):
            given = given(budget=24, buffer=8)
        elif not isinstance(given, Policy) and callable(given):
            given = given()
        if not isinstance(given, Policy):
            raise ConfigError(f"{given!r} is neither a policy nor something that makes one.")
        if given.bounded and given.amount.entries is None:
            raise ConfigError("the suite needs a budget that is a count: budget=24, buffer=8 runs fast.")
        if store == "paged" and given.traits.reads is not None:
            raise SkipTest(f"{given.name} reads blocks of the dense store")
        return cls(given, store, precision)

    @property
    def prompts(self) -> tuple[int, int, int]:
        """Prompt lengths of three rows: two above the budget where the policy allows it, and a tiny one.

        The two differ by the buffer, so that they evict on the same steps while they hold different
        numbers of entries.
        """
        if not self.policy.bounded:
            return 30, 2, 12
        count, buffer = self.policy.amount.count, self.policy.buffer
        longest = count + 2 * buffer + 3
        if self.policy.protects_prompt and self.policy.amount.prompt == "counts":
            longest = count - self.policy.recent
        return longest, 2, max(1, longest - buffer)

    @property
    def new(self) -> int:
        """Tokens after the prompt: at least two evictions in every row."""
        return self.policy.amount.count + 3 * self.policy.buffer if self.policy.bounded else 20

    def must_evict(self) -> None:
        """Skip checks of evictions on a policy that has none."""
        if not self.policy.bounded:
            raise SkipTest(f"{self.policy.name} keeps everything")

    def options(self, family: str = "llama") -> dict[str, Any]:
        """What a cache needs for this policy."""
        traits = self.policy.traits
        needed: dict[str, Any] = {"calibration": _calibration(family)} if traits.calibration else {}
        if traits.log_retention:
            needed["gates"] = random_gates(shared_model(family))
        if traits.reads is not None and traits.reads.gates:
            needed["gates"] = random_block_gates(shared_model(family), block=traits.reads.block)
        # Pages of five: budgets and buffers of the suite are no multiples of it.
        return {"store": self.store, "page_size": 5, "precision": self.precision, **needed}

    def run(
        self,
        *,
        dtype: torch.dtype = torch.float64,
        prompts: Sequence[int] | None = None,
        new: int | None = None,
        chunk: int | None = None,
        rows: Sequence[int] | None = None,
        seed: int = 0,
        model: PreTrainedModel | None = None,
        **options: Any,
    ) -> Run:
        """Feed random prompts and random tokens after them.

        Parameters
        ----------
        rows
            Which of the prompts, in which order; they keep their sequence ids, and lose the padding
            that only the others needed.
        """
        lengths = list(self.prompts if prompts is None else prompts)
        ids, mask = left_padded(lengths, seed=seed)
        after = tokens(len(lengths), self.new if new is None else new, seed=seed + 1)
        index = list(range(len(lengths)) if rows is None else rows)
        longest = max(lengths[row] for row in index)
        ids = torch.cat([ids[index, -longest:], after[index]], dim=1)
        mask = torch.cat([mask[index, -longest:], torch.ones_like(after[index])], dim=1)
        model = shared_model("llama", dtype) if model is None else model
        cache = WatchedCache(model, self.policy, sequence_ids=index, **self.options(), **options)
        logits = feed(model, cache, ids, mask, pieces(longest, chunk) + [1] * after.shape[1])
        cache.check_integrity()
        return Run(cache, logits)

    def evictions(self, dtype: torch.dtype = torch.float32) -> list[Eviction]:
        """What the engine shows the policy in a run of three uneven rows, and what it decides."""
        self.must_evict()
        noted = _evictions(self, dtype)
        if not noted:
            raise SkipTest(f"{self.policy.name} never evicts: trigger {self.policy.trigger!r}")
        return noted


@lru_cache(maxsize=64)
def _evictions(subject: Subject, dtype: torch.dtype) -> list[Eviction]:
    return subject.run(dtype=dtype).cache.noted
