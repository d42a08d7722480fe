"""The slow exact twin: a full cache in which exactly the evicted entries are masked.

One run goes through the :class:`~kvkeep.RetentionCache` and writes down which positions each attention
could see, per layer, row and KV head. A second run, over a plain cache that keeps everything, hides all
other positions in a naive float64 softmax. Where evictions changed values (merging), the second run sees the
changed ones at their positions. If storage, compaction, masks and positions are right, the logits agree.
Nothing of kvkeep's attention, storage or masks takes part in the second run. Entries that the first run had
in few bits are rounded in the second one by the formula, each vector from what it was at first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvkeep.core.policy import Policy
from kvkeep.core.precision import Precision
from kvkeep.engine.attending import attending, explicit_mask
from kvkeep.engine.attention import restore
from kvkeep.testing.models import left_padded, tokens
from kvkeep.testing.watching import Replaced, WatchedCache, feed, pieces

_NAME = "kvkeep_oracle"

# Visibility of the forward in progress: layer -> bool [batch, heads or kv_heads, queries, columns].
_visible: ContextVar[dict[int, Tensor]] = ContextVar("visible")
# Likewise which columns count rounded, bool [batch, kv_heads, columns], keys and values, and how.
_rounded: ContextVar[tuple[dict[int, Tensor], dict[int, Tensor], Precision | None]] = ContextVar(
    "rounded", default=({}, {}, None)
)

# Changed values of the forward in progress: layer -> which [batch, kv_heads, columns], and their values.
_changed: ContextVar[dict[int, tuple[Tensor, Tensor]]] = ContextVar("changed")


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    group = query.shape[1] // key.shape[1]
    if module.layer_idx in _changed.get():
        which, values = (each[:, :, : value.shape[2]] for each in _changed.get()[module.layer_idx])
        value = torch.where(which[..., None], values.to(value.dtype), value)
    *layers, precision = _rounded.get()
    key, value = (
        _as_stored(each.double(), columns.get(module.layer_idx), precision, kind)
        for each, columns, kind in zip((key, value), layers, ("keys", "values"), strict=True)
    )
    q, k, v = query.double(), *(each.repeat_interleave(group, 1) for each in (key, value))
    logits = q @ k.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]) if scaling is None else scaling)
    visible = _visible.get().get(module.layer_idx)
    visible = (
        attention_mask
        if visible is None
        else visible.repeat_interleave(query.shape[1] // visible.shape[1], 1)
    )
    if visible is not None:
        logits = logits.masked_fill(~visible, -math.inf)
    if s_aux is not None:  # a learned sink: one more logit per head, without a value
        sink = s_aux.double().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, sink], dim=-1)
    # A padding column of a sliding layer may see nothing at all.
    shares = logits.softmax(-1)[..., : k.shape[2]].nan_to_num(0.0)
    return (shares @ v).transpose(1, 2).contiguous().to(query.dtype), None


def _as_stored(vectors: Tensor, columns: Tensor | None, precision: Precision | None, kind: str) -> Tensor:
    """Keys or values ``[batch, kv_heads, columns, dim]``, rounded where the first run had few bits."""
    if precision is None or columns is None:
        return vectors
    groups, top = vectors.unflatten(-1, (-1, precision.group)), 2 ** precision.width(kind) - 1
    low = groups.amin(-1, keepdim=True).half().double()
    step = ((groups.amax(-1, keepdim=True) - low) / top).half().double()
    codes = ((groups - low) / step.clamp(min=1e-12)).round().clamp(0, top)
    return torch.where(columns[..., None], (low + codes * step).flatten(-2), vectors)


def _visibility(seen: list[list[Tensor]], mask: Tensor, start: int, end: int) -> Tensor:
    """bool ``[batch, heads or kv_heads, end - start, end]`` from the positions that one layer held."""
    visible = torch.zeros(len(seen), len(seen[0]), end - start, end, dtype=torch.bool)
    for row, heads in enumerate(seen):
        columns = mask[row, :end].nonzero()[:, 0]  # column of each position
        for head, positions in enumerate(heads):
            visible[row, head, :, columns[positions]] = True
    causal = torch.arange(end) <= torch.arange(start, end)[:, None]
    padding = (torch.arange(end) == torch.arange(start, end)[:, None]) & (mask[:, None, start:end, None] == 0)
    return (visible & causal) | padding  # a padding column sees itself; nobody reads its output


def _change(
    changed: dict[int, tuple[Tensor, Tensor]], new: Replaced, model: PreTrainedModel, mask: Tensor
) -> None:
    """Write values where their positions stand among all columns."""
    if new.layer not in changed:
        config = model.config.get_text_config(decoder=True)
        shape = (len(mask), config.num_key_value_heads, mask.shape[1])
        empty = torch.zeros(*shape, new.values.shape[-1], dtype=new.values.dtype)
        changed[new.layer] = (torch.zeros(shape, dtype=torch.bool), empty)
    which, values = changed[new.layer]
    columns = mask[new.row].nonzero()[:, 0][new.positions]
    which[new.row, new.head, columns] = True
    values[new.row, new.head, columns] = new.values


def _columns(found: list[list[Tensor]], mask: Tensor, end: int) -> Tensor:
    """bool ``[batch, kv_heads, end]``: the columns of some positions."""
    marked = torch.zeros(len(found), len(found[0]), end, dtype=torch.bool)
    for row, heads in enumerate(found):
        columns = mask[row, :end].nonzero()[:, 0]
        for head, positions in enumerate(heads):
            marked[row, head, columns[positions]] = True
    return marked


def replay(
    model: PreTrainedModel,
    seen: Sequence[dict[int, list[list[Tensor]]]],
    ids: Tensor,
    mask: Tensor,
    lengths: Sequence[int],
    replaced: Sequence[Replaced] = (),
    rounded: Sequence[Sequence[dict[int, list[list[Tensor]]]]] = ((), ()),
    precision: Precision | None = None,
) -> list[Tensor]:
    """Run a model over the tokens of an earlier run, seeing only what that run could see.

    Parameters
    ----------
    seen
        What :class:`WatchedCache` wrote down, one element per forward.
    ids, mask, lengths
        As for :func:`feed`.
    replaced
        Values that evictions changed, as :class:`WatchedCache` wrote them down.
    rounded, precision
        Keys and values that it had in few bits, as :class:`WatchedCache` wrote them down, and how.
    """
    changed: dict[int, tuple[Tensor, Tensor]] = {}
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    start, logits = 0, []
    with attending(model, _NAME, _attention, explicit_mask):
        for forward, (length, layers) in enumerate(zip(lengths, seen, strict=True)):
            end = start + length
            for each in replaced:
                if each.since == forward:
                    _change(changed, each, model, mask)
            values = _changed.set(changed)
            keys, values_too = (
                {layer: _columns(found, mask, end) for layer, found in each[forward].items()} if each else {}
                for each in rounded
            )
            coarse = _rounded.set((keys, values_too, precision))
            token = _visible.set(
                {layer: _visibility(positions, mask, start, end) for layer, positions in layers.items()}
            )
            try:
                logits += feed(model, cache, ids, mask, [length])
            finally:
                _visible.reset(token)
                _changed.reset(values)
                _rounded.reset(coarse)
            start = end
    return logits


@dataclass(frozen=True)
class Gap:
    """How far a run was from its oracle.

    Parameters
    ----------
    largest
        Largest difference of logits.
    evictions
        Carried out.
    rounded
        Entries that had been in few bits when the run ended, in all layers, rows and heads.
    """

    largest: float
    evictions: int
    rounded: int = 0


def oracle_gap(
    model: PreTrainedModel,
    policy: Policy,
    *,
    prompts: Sequence[int] = (30,),
    new: int = 24,
    chunk: int | None = None,
    seed: int = 0,
    **options: Any,
) -> Gap:
    """Compare a policy's run with the oracle's, on the same random tokens.

    Parameters
    ----------
    prompts
        Tokens of each prompt; shorter ones are padded on the left.
    new
        Tokens fed one at a time after the prompt.
    chunk
        Columns of the prompt per forward; ``None`` for all at once.
    options
        Of the cache.

    Examples
    --------
    >>> import kvkeep
    >>> from kvkeep.testing.models import tiny_model
    >>> model = tiny_model("llama", dtype=torch.float64)
    >>> gap = oracle_gap(model, kvkeep.VaSEAttnV(budget=24, buffer=8))
    >>> gap.largest < 1e-9, gap.evictions
    (True, 3)
    """
    ids, mask = left_padded(tuple(prompts), seed=seed)
    prompt = ids.shape[1]
    ids = torch.cat([ids, tokens(len(prompts), new, seed=seed + 1)], dim=1)
    mask = torch.cat([mask, mask.new_ones(len(prompts), new)], dim=1)
    lengths = pieces(prompt, chunk) + [1] * new
    cache = WatchedCache(model, policy, **options)
    ours = feed(model, cache, ids, mask, lengths)
    cache.check_integrity()
    restore(model)
    rounded = (cache.rounded, cache.rounded_values)
    theirs = replay(model, cache.seen, ids, mask, lengths, cache.replaced, rounded, cache.precision)
    real = mask.bool()
    gap = (torch.cat(ours, 1) - torch.cat(theirs, 1))[real].abs().max()
    few = sum(len(head) for rows in cache.rounded[-1].values() for row in rows for head in row)
    return Gap(float(gap), cache.trace.evictions, few)
