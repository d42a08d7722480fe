"""Synthetic entries: caches of any length without decoding up to it first.

Reading 8,192 real tokens takes minutes on two CPU cores and says nothing about the speed of the next
token, which depends on shapes alone. So a short prompt is read for real, its keys and values are
measured per channel, and the rest of the context is drawn from normal distributions with those means
and deviations.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from kvkeep.cache import DenseStore, PagedStore
from kvkeep.core.errors import ConfigError
from kvkeep.engine.generation import cache_argument
from kvkeep.engine.retention_cache import RetentionCache

NOTE = (
    "entries beyond the prompt are synthetic: normal draws with the mean and deviation of each channel "
    "of a real prompt's keys and values"
)


@dataclass(frozen=True, kw_only=True)
class LayerScale:
    """Mean and deviation of the keys and values of one layer.

    Parameters
    ----------
    keys, values
        (mean, deviation), each ``[1, kv_heads, 1, dim]``.
    """

    keys: tuple[Tensor, Tensor]
    values: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, keys: Tensor, values: Tensor) -> LayerScale:
        """Measure entries ``[batch, kv_heads, entries, dim]``."""
        return cls(keys=_moments(keys), values=_moments(values))

    def draw(self, rows: int, entries: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Keys and values ``[rows, kv_heads, entries, dim]``."""
        return _draw(self.keys, rows, entries, generator), _draw(self.values, rows, entries, generator)


def _moments(tensor: Tensor) -> tuple[Tensor, Tensor]:
    wide = tensor.float()
    mean = wide.mean((0, 2), keepdim=True)
    return mean.to(tensor.dtype), (wide - mean).square().mean((0, 2), keepdim=True).sqrt().to(tensor.dtype)


def _draw(scale: tuple[Tensor, Tensor], rows: int, entries: int, generator: torch.Generator) -> Tensor:
    mean, deviation = scale
    shape = (rows, mean.shape[1], entries, mean.shape[3])
    noise = torch.randn(shape, dtype=mean.dtype, device=mean.device, generator=generator)
    return noise.mul_(deviation).add_(mean)


@torch.no_grad()
def measure_scales(model: PreTrainedModel, prompt: Tensor) -> list[LayerScale]:
    """Read a prompt ``[batch, tokens]`` for real and measure each layer's keys and values."""
    cache = DynamicCache(config=model.config)
    model(input_ids=prompt, **{cache_argument(model): cache})
    return [LayerScale.of(layer.keys, layer.values) for layer in cache.layers]


def seeded(device: torch.device, seed: int) -> torch.Generator:
    """A generator on a device."""
    return torch.Generator(device=device).manual_seed(seed)


def fill_stock(cache: Cache, scales: list[LayerScale], *, batch: int, context: int, seed: int) -> None:
    """Fill an empty cache of transformers up to ``context`` tokens.

    All rows get the same entries: a stock cache costs the same whatever they are, and drawing one row
    is ``batch`` times quicker.
    """
    for index, scale in enumerate(scales):
        generator = seeded(scale.keys[0].device, seed + index)
        keys, values = scale.draw(1, context, generator)
        cache.update(keys.expand(batch, -1, -1, -1), values.expand(batch, -1, -1, -1), index)


def fill_retention(
    cache: RetentionCache, model: PreTrainedModel, prompt: Tensor, *, context: int, seed: int
) -> None:
    """Bring an empty cache to the state after ``context`` tokens and the eviction that ends a period.

    The prompt is read for real (so queries, sums and lengths are what the engine records), then each
    managed layer is filled up to its budget; positions of the synthetic entries are spread over the
    context, the newest ``buffer`` of them without gaps.

    Parameters
    ----------
    cache
        Empty.
    prompt
        Token ids ``[batch, tokens]``, fewer than the budget and not more than ``context``.
    context
        Tokens seen afterwards, per sequence.

    Raises
    ------
    ConfigError
        If the prompt does not fit the context or the budget.
    """
    batch, read = prompt.shape
    policy = cache.policy
    limit = context
    if policy.bounded:
        kept_prompt = read if policy.amount.prompt == "kept" else 0
        limit = min(context, policy.amount.count + kept_prompt)
    if read > limit:
        raise ConfigError(
            f"a prompt of {read} tokens exceeds the {limit} entries that are to be stored: "
            "shorten the prompt, or raise the context or the budget."
        )
    with torch.no_grad():
        model(input_ids=prompt, **{cache_argument(model): cache})
    generator = seeded(prompt.device, seed)
    for index, layer in enumerate(cache.layers):
        if index not in cache.spec.managed:
            if context > read:
                scale = LayerScale.of(layer.keys, layer.values)
                keys, values = scale.draw(1, context - read, generator)
                layer.update(keys.expand(batch, -1, -1, -1), values.expand(batch, -1, -1, -1))
            continue
        store = layer.store
        stored = store.longest
        if limit > stored:
            real = store.padded(None, "keys", "values")
            scale = LayerScale.of(real["keys"], real["values"])
            keys, values = scale.draw(batch, limit - stored, generator)
            if isinstance(store, DenseStore) and store.capacity < limit:
                store.resize(cache.evictor.capacity_for(limit))
            positions = spread_positions(read, context, limit - stored, recent=policy.buffer)
            positions = positions.to(keys.device).expand(batch, -1)
            store.append(keys, values, positions, [limit - stored] * batch)
        for name in store.extras:
            shape = (batch, store.heads, limit)
            store.add_extra(name, torch.rand(shape, generator=generator, device=store.device))
    rows = cache.rows
    rows.seq_lens = [context] * batch
    rows.columns = context
    rows.reading_prompt = False


def skew_entries(cache: RetentionCache, skew: int, *, seed: int) -> None:
    """Let one head of each layer of a filled paged cache hold ``skew`` times the mean.

    The total of each layer stays; the other heads share the rest alike. Entries are drawn anew.
    """
    rows = cache.rows
    for index, layer in enumerate(cache.managed_layers):
        store: PagedStore = layer.stored
        heads, total = store.batch * store.heads, int(store.held.sum())
        mean = total // heads
        if heads <= skew:
            raise ConfigError(
                f"one of {heads} heads cannot hold {skew} times the mean: use a larger batch, or less skew."
            )
        held = np.full(heads, (total - skew * mean) // (heads - 1))
        held[0] = total - held[1:].sum()
        sample = store.padded(None, "keys", "values")
        scale = LayerScale.of(sample["keys"], sample["values"])
        store.forget_newest(store.longest)
        generator = seeded(store.device, seed + index)
        drawn = scale.draw(1, total, generator)
        entries = {name: each[0, 0] for name, each in zip(("keys", "values"), drawn, strict=True)}
        entries["positions"] = torch.cat([torch.arange(count) for count in held.tolist()]).to(torch.int32)
        store.unpack(entries, held.reshape(store.batch, store.heads))
    # A cache with a budget has room for one period, however long its heads are: make it before timing.
    pool = cache.managed_layers[0].stored.pool
    spare = -(-cache.evictor.policy.buffer // pool.page_size) * heads * len(cache.managed_layers)
    pool.grow(pool.used + spare)
    rows.seq_lens = [int(held.max())] * len(rows.seq_lens)
    rows.columns = int(held.max())


def spread_positions(first: int, end: int, count: int, *, recent: int) -> Tensor:
    """``count`` ascending positions in ``[first, end)``: the newest ``recent`` dense, the rest spread.

    Examples
    --------
    >>> spread_positions(4, 20, 6, recent=2).tolist()
    [4, 8, 12, 17, 18, 19]
    """
    dense = min(recent, count)
    older = count - dense
    start = end - dense
    spread = torch.linspace(first, start - 1, older, dtype=torch.float64).long() if older else torch.empty(0)
    return torch.cat([spread.long(), torch.arange(start, end)])
