"""What few bits do to the output of attention when some entries are spared: the numbers, layer by layer."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import kvkeep
from kvkeep.engine.generation import cache_argument
from kvkeep.kernels import few_bits
from kvkeep.scoring.value_magnitude import value_magnitude
from kvkeep.scoring.window_attention import window_attention

SINKS, RECENT, ASK = 4, 64, 32  # never rounded: first and newest tokens; queries that ask
RESERVES = (0, 32, 64, 128)
RULES = ("range", "key range", "attention", "random", "recent")
BITS = (4, 2)


def output_errors(model: PreTrainedModel, windows: Tensor) -> list[dict[str, Any]]:
    """Relative square error of attention's output, by window, layer, what is rounded, bits, rule and reserve.

    The newest 32 queries of a window ask. Rules choose by what was there before them: ``attention`` is that
    of the 32 queries before. Sinks and the newest 64 entries are never rounded.
    """
    rows = []
    for place, ids in enumerate(windows):
        cache = kvkeep.RetentionCache(model, kvkeep.SnapKV(budget=4096, window=2 * ASK))
        with torch.no_grad():
            model(input_ids=ids[None], **{cache_argument(model): cache})
        for layer in cache.managed_layers:
            stored = layer.stored.padded()
            queries, times = layer.recorder.ring.ordered()
            for found in _of_layer(stored, queries, times, place):
                rows.append({"window": place, "layer": layer.index, **found})
    return rows


def _of_layer(stored: dict[str, Tensor], queries: Tensor, times: Tensor, seed: int) -> list[dict[str, Any]]:
    keys, values, positions = stored["keys"], stored["values"], stored["positions"].long()
    exact = _attend(queries[:, :, ASK:], times[:, ASK:], keys, values, positions)
    scores = {
        "range": value_magnitude(values),
        "key range": value_magnitude(keys),
        "attention": window_attention(
            queries[:, :, :ASK], times[:, :ASK], keys, positions, torch.ones_like(positions) > 0, causal=True
        ),
        "random": torch.rand(positions.shape, generator=torch.Generator().manual_seed(seed)),
        "recent": positions.float(),
    }
    entries = positions.shape[2]
    always = (positions < SINKS) | (positions >= entries - RECENT)
    found = []
    for bits in BITS:
        low = [few_bits.decode(few_bits.encode(x, bits, 32), bits, 32, 64, x.dtype) for x in (keys, values)]
        for rule in RULES:
            order = scores[rule].masked_fill(always, -torch.inf).argsort(-1, descending=True)
            for reserve in RESERVES:
                if reserve == 0 and rule != "range":
                    continue
                spared = always.scatter(-1, order[..., :reserve], True)[..., None]
                coarse = [torch.where(spared, x, y) for x, y in zip((keys, values), low, strict=True)]
                facts = {"bits": bits, "rule": rule if reserve else "none", "reserve": reserve}
                for rounded, there_keys in (("both", coarse[0]), ("values", keys)):
                    there = _attend(queries[:, :, ASK:], times[:, ASK:], there_keys, coarse[1], positions)
                    error = float((there - exact).square().sum() / exact.square().sum())
                    found.append({"rounded": rounded, **facts, "error": error})
    return found


def _attend(queries: Tensor, times: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
    group = queries.shape[1] // keys.shape[1]
    k, v, p = (each.repeat_interleave(group, 1) for each in (keys, values, positions))
    logits = queries @ k.transpose(-1, -2) / queries.shape[-1] ** 0.5
    later = p[:, :, None] > times[:, None, :, None]
    return logits.masked_fill(later, -torch.inf).softmax(-1) @ v
