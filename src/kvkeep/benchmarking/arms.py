"""The arms: stock caches of transformers, and policies of ours, each decoding one token per step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache

from kvkeep.benchmarking.memory import PeakMemory, retention_bytes, stock_bytes
from kvkeep.benchmarking.synthetic import LayerScale, fill_retention, fill_stock, skew_entries
from kvkeep.core.policy import Policy
from kvkeep.engine.fitting import StoreKind
from kvkeep.engine.generation import cache_argument
from kvkeep.engine.retention_cache import RetentionCache

STOCK = ("dynamic", "static", "static-compiled")


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What all arms of one benchmark share.

    Parameters
    ----------
    prompt
        Token ids ``[batch, tokens]`` that are read for real.
    context
        Tokens seen when a block begins.
    seed
        Of the synthetic entries.
    peak
        Memory gauge of the device.
    """

    prompt: Tensor
    context: int
    seed: int
    peak: PeakMemory

    @property
    def batch(self) -> int:
        """Sequences."""
        return int(self.prompt.shape[0])


class DecodeArm(ABC):
    """Decodes greedily, one token per sequence and step.

    Parameters
    ----------
    name
        As it stands in the report.
    model
        Whose forward runs.
    scene
        Batch, context and seed.
    steps
        Steps per round.
    """

    evicts = False
    kind = "stock"

    def __init__(self, name: str, model: PreTrainedModel, scene: Scene, steps: int) -> None:
        self.name, self.model, self.scene, self.steps = name, model, scene, steps
        self.keyword = cache_argument(model)
        self.call: Callable[..., Any] = model
        self.cache: Any = None
        self.token = scene.prompt[:, -1:].contiguous()
        self.peak_bytes: list[int] = []
        self.cache_bytes = self.beside_bytes = 0
        self.entries_read = 0.0

    def begin(self) -> None:
        """Fill the cache up to the context."""
        self._fill()
        self.scene.peak.reset()

    @torch.no_grad()
    def step(self) -> None:
        """One forward, one token per sequence."""
        output = self.call(input_ids=self.token, **{self.keyword: self.cache})
        self.token = output.logits[:, -1:].argmax(-1)

    def end(self) -> None:
        """Note bytes and lengths of a block that counts."""
        self.peak_bytes.append(self.scene.peak.peak())
        self._read_off()

    def release(self) -> None:
        """Give the cache's memory back, so that it does not weigh on the other arms."""
        self.cache = None

    @property
    def held_bytes(self) -> int:
        """Bytes that lie around while other arms run."""
        return 0

    @abstractmethod
    def _fill(self) -> None: ...

    @abstractmethod
    def _read_off(self) -> None: ...


class DynamicArm(DecodeArm):
    """The cache that ``generate`` uses unless told otherwise: it grows by concatenation."""

    def __init__(self, model: PreTrainedModel, scene: Scene, steps: int, scales: list[LayerScale]) -> None:
        super().__init__("DynamicCache", model, scene, steps)
        self.scales = scales

    def _fill(self) -> None:
        scene = self.scene
        self.cache = DynamicCache(config=self.model.config)
        fill_stock(self.cache, self.scales, batch=scene.batch, context=scene.context, seed=scene.seed)

    def _read_off(self) -> None:
        self.cache_bytes = stock_bytes(self.cache)
        self.entries_read = self.scene.context + (self.steps + 1) / 2


class StaticArm(DecodeArm):
    """The stock cache in preallocated memory, with or without ``torch.compile``."""

    def __init__(
        self, model: PreTrainedModel, scene: Scene, steps: int, scales: list[LayerScale], compiled: bool
    ) -> None:
        super().__init__("StaticCache, compiled" if compiled else "StaticCache", model, scene, steps)
        self.scales, self.compiled = scales, compiled
        if compiled:
            mode = "reduce-overhead" if scene.prompt.is_cuda else None
            self.call = torch.compile(model.__call__, dynamic=False, mode=mode)

    def _fill(self) -> None:
        scene = self.scene
        if self.cache is None:
            length = scene.context + self.steps
            self.cache = StaticCache(config=self.model.config, max_cache_len=length)
        else:
            self.cache.reset()
        fill_stock(self.cache, self.scales, batch=scene.batch, context=scene.context, seed=scene.seed)

    def step(self) -> None:
        """One forward; a CUDA graph must be told where a step begins."""
        if self.compiled and self.scene.prompt.is_cuda:
            torch.compiler.cudagraph_mark_step_begin()
        super().step()

    def _read_off(self) -> None:
        self.cache_bytes = stock_bytes(self.cache)
        self.entries_read = self.scene.context + self.steps  # it reads all its slots at every step

    def release(self) -> None:
        """Compiled code is bound to the addresses of its cache: a compiled arm keeps it."""
        if not self.compiled:
            super().release()

    @property
    def held_bytes(self) -> int:
        """A compiled arm keeps its cache."""
        return self.cache_bytes if self.cache is not None else 0


class PolicyArm(DecodeArm):
    """A kvkeep policy on its bounded cache."""

    kind = "policy"

    def __init__(
        self,
        model: PreTrainedModel,
        scene: Scene,
        steps: int,
        policy: Policy,
        calibration: Any = None,
        *,
        gates: Any = None,
        store: StoreKind = "auto",
        name: str = "",
    ) -> None:
        keeps_and_reads_all = not policy.bounded and policy.traits.reads is None
        super().__init__(
            name or ("full (kvkeep)" if keeps_and_reads_all else policy.name), model, scene, steps
        )
        self.policy = policy
        self.evicts = policy.bounded
        self.cache = RetentionCache(
            model,
            policy,
            seed=scene.seed,
            context=scene.context + steps,
            calibration=calibration,
            gates=gates,
            profile=True,
            store=store,
        )
        # From a full budget on there is one eviction per period; before it is full there are fewer.
        self.steady = policy.bounded and scene.context >= self.cache.policy.amount.count
        self.eviction_seconds: list[float] = []
        self.evictions: list[float] = []

    def _fill(self) -> None:
        scene = self.scene
        self.cache.reset()
        fill_retention(self.cache, self.model, scene.prompt, context=scene.context, seed=scene.seed)

    def _read_off(self) -> None:
        cache = self.cache
        self.cache_bytes, self.beside_bytes = retention_bytes(cache)
        trace = cache.trace
        evictions = trace.evictions / self.scene.batch
        self.eviction_seconds.append(cache.eviction_seconds)
        self.evictions.append(evictions)
        # The trace counts what is left after a step; a step reads what was there before its eviction.
        self.entries_read = trace.mean_entries + evictions * self.policy.buffer / max(1, trace.steps)

    def release(self) -> None:
        """Empty the cache; the object stays."""
        self.cache.reset()


class SkewedArm(PolicyArm):
    """A full paged cache in which one head of each layer holds many times the mean, at the same total.

    Parameters
    ----------
    skew
        Entries of the long head over the mean.
    """

    def __init__(self, model: PreTrainedModel, scene: Scene, steps: int, policy: Policy, skew: int) -> None:
        super().__init__(
            model, scene, steps, policy, store="paged", name=f"paged, one head {skew} times the mean"
        )
        self.skew = skew

    def _fill(self) -> None:
        super()._fill()
        skew_entries(self.cache, self.skew, seed=self.scene.seed)
