"""Layer views built by hand, for tests of policies without a model.

A view made here is as nasty as the engine's: rows of different lengths, slots beyond a row's length
filled with rubbish, positions with gaps where earlier evictions took entries, heads that survived with
different positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvkeep.core.decision import KeepCounts, KeepDecision
from kvkeep.core.policy import Policy
from kvkeep.core.random import RandomStream
from kvkeep.core.view import PER_ENTRY, LayerView, protected_mask


def make_view(
    policy: Policy,
    *,
    lengths: Sequence[int | Sequence[int]] | None = None,
    kv_heads: int = 2,
    group: int = 1,
    head_dim: int = 8,
    value_dim: int | None = None,
    evicted: int = 0,
    prompt_lens: Sequence[int] | None = None,
    queries_seen: Sequence[int] | None = None,
    layer: int = 0,
    run_seed: int = 0,
    sequence_ids: Sequence[int] | None = None,
    evictions: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    keys: Tensor | None = None,
    values: Tensor | None = None,
    positions: Tensor | None = None,
    seq_lens: Sequence[int] | None = None,
    **recorded: Any,
) -> LayerView:
    """What the engine would show ``policy``; random where nothing is given.

    Parameters
    ----------
    policy
        Budget, buffer, protection and traits come from it.
    lengths
        Entries stored per row, or a list of one number per head where heads differ; shorter ones end in
        empty slots. Default: one row of 40, or as many as there are ``keys``.
    kv_heads, group
        KV heads, and query heads for each of them.
    evicted
        Tokens that earlier evictions took out of every head, at random places older than the policy's
        recent tokens and newer than its sinks.
    prompt_lens
        Tokens of each prompt (default: a quarter of the sequence).
    queries_seen
        Tokens whose queries were recorded, per row (default: all); fewer than the window leave -1.
    sequence_ids, evictions, run_seed, layer
        What the random stream is derived from (default: ids 0, 1, 2 …, no eviction before).
    keys, values, positions, seq_lens
        Given instead of random: ``[batch, kv_heads, entries, dim]`` and so on.
    recorded
        Further fields by name (``queries``, ``query_positions``, ``attention_sum``, ``calibration`` …);
        queries, attention sums, retentions and the random stream are made when the traits ask for them.
    """
    source = torch.Generator().manual_seed(seed)
    traits = policy.traits
    if keys is not None:
        kv_heads, head_dim = keys.shape[1], keys.shape[3]
        lengths = [keys.shape[2]] * keys.shape[0] if lengths is None else lengths
    sizes = [
        [each] * kv_heads if isinstance(each, int) else list(each)
        for each in ((40,) if lengths is None else lengths)
    ]
    batch, entries = len(sizes), max(map(max, sizes))
    seen = list(seq_lens) if seq_lens is not None else [max(row) + evicted for row in sizes]
    valid = torch.arange(entries) < torch.tensor(sizes)[..., None]
    if positions is None:
        positions = _positions(sizes, seen, policy, source)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=source)

    def stored(dim: int) -> Tensor:
        tensor = noise(batch, kv_heads, entries, dim)
        return torch.where(valid[..., None], tensor, 100.0 * tensor).to(dtype)

    keys = stored(head_dim) if keys is None else keys.to(dtype)
    values = stored(value_dim or head_dim) if values is None else values.to(dtype)
    if traits.queries and "queries" not in recorded:
        window = traits.queries
        recorded["queries"] = noise(batch, kv_heads * group, window, head_dim).to(dtype)
        time = torch.tensor(seen)[:, None] - window + torch.arange(window)
        oldest = (
            [0] * batch if queries_seen is None else [s - q for s, q in zip(seen, queries_seen, strict=True)]
        )
        recorded["query_positions"] = time.masked_fill(time < torch.tensor(oldest)[:, None], -1)
    if traits.attention_sum and "attention_sum" not in recorded:
        total = torch.rand(batch, kv_heads, entries, generator=source)
        recorded["attention_sum"] = torch.where(valid, total, 100.0)
    if traits.recurrence is not None and "last_attended" not in recorded:
        idle = torch.rand(batch, kv_heads, entries, generator=source)
        now = torch.tensor(seen)[:, None, None] - 1
        recorded["last_attended"] = torch.where(valid, now - (idle * (now - positions)).floor(), 1e4)
        pause = torch.randint(0, 9, (batch, kv_heads, entries), generator=source).float()
        recorded["longest_pause"] = torch.where(valid, pause, 1e4)
    if traits.log_retention and "log_retention" not in recorded:
        decay = torch.rand(batch, kv_heads, entries, generator=source)
        recorded["log_retention"] = torch.where(valid, -0.1 * decay, -100.0)
    if traits.random and "random" not in recorded:
        recorded["random"] = RandomStream.derive(
            seed=run_seed,
            sequence_ids=torch.tensor(list(range(batch) if sequence_ids is None else sequence_ids)),
            layer=layer,
            evictions=torch.tensor(list([0] * batch if evictions is None else evictions)),
        )
    prompts = torch.tensor([s // 4 for s in seen] if prompt_lens is None else list(prompt_lens))
    return LayerView(
        layer=layer,
        keys=keys,
        values=values,
        positions=positions,
        valid=valid,
        seq_lens=torch.tensor(seen),
        prompt_lens=prompts,
        budget=policy.amount.count,
        buffer=policy.buffer,
        protected=protected_mask(
            positions=positions,
            valid=valid,
            seq_lens=torch.tensor(seen),
            sinks=policy.sinks,
            recent=policy.recent,
            prompt_lens=prompts if policy.protects_prompt else None,
        ),
        traits=traits,
        recorded=recorded,
        even=min(map(min, sizes)) == entries,
        recent_kept=policy.recent,
    )


def _positions(
    sizes: Sequence[Sequence[int]], seen: Sequence[int], policy: Policy, source: torch.Generator
) -> Tensor:
    slots = max(map(max, sizes))
    positions = torch.zeros(len(sizes), len(sizes[0]), slots, dtype=torch.int64)
    for row, (lengths, total) in enumerate(zip(sizes, seen, strict=True)):
        for head, length in enumerate(lengths):
            recent = min(max(policy.recent, policy.buffer), length)
            sinks = min(policy.sinks, length - recent)
            middle = torch.randperm(total - recent - sinks, generator=source)[: length - recent - sinks]
            kept = (
                torch.arange(sinks),
                middle.sort().values + sinks,
                torch.arange(total - recent, total),
            )
            positions[row, head, :length] = torch.cat(kept)
            positions[row, head, length:] = torch.randint(0, total, (slots - length,), generator=source)
    return positions


def make_counts(view: LayerView, count: int | Sequence[int] | None = None) -> KeepCounts:
    """Counts for :meth:`Policy.select`: one for all rows, one per row, or the view's budget.

    Where the policy keeps the prompt on top, pass the sum, as the engine does.
    """
    batch, heads, _ = view.shape
    wanted = view.budget if count is None else count
    rows = [wanted] * batch if isinstance(wanted, int) else list(wanted)
    return KeepCounts(torch.tensor(rows)[:, None].expand(-1, heads), max(rows))


def decide(policy: Policy, view: LayerView, count: int | Sequence[int] | None = None) -> KeepDecision:
    """Score and select as the engine would, with the decision checked."""
    counts = make_counts(view, count)
    decision = policy.decide([view], [counts])[0]
    wanted = None if policy.traits.ragged else counts
    decision.check(valid=view.valid, protected=view.protected, counts=wanted)
    return decision


def kept(decision: KeepDecision) -> list[list[list[int]]]:
    """Kept indices as plain lists, ``[batch][kv_heads]``."""
    return [
        [head[:length].tolist() for head, length in zip(row, lengths, strict=True)]
        for row, lengths in zip(decision.indices, decision.lengths.tolist(), strict=True)
    ]


def row_of(view: LayerView, row: int) -> dict[str, Any]:
    """One row of a view without its padding, as keyword arguments of another ``make_view``."""
    sizes = view.valid[row].sum(-1).tolist()
    length = max(sizes)
    pick = slice(row, row + 1)
    alone: dict[str, Any] = {
        "lengths": [sizes],
        "keys": view.keys[pick, :, :length],
        "values": view.values[pick, :, :length],
        "positions": view.positions[pick, :, :length],
        "seq_lens": [int(view.seq_lens[row])],
        "prompt_lens": [int(view.prompt_lens[row])],
        "dtype": view.keys.dtype,
        "layer": view.layer,
    }
    for name, value in view.recorded.items():
        if name in ("queries", "query_positions"):
            alone[name] = value[pick]
        elif name in PER_ENTRY:
            alone[name] = value[pick, :, :length]
        elif name == "random":
            alone[name] = RandomStream(value.origin[pick], value.evictions[pick])
        else:
            alone[name] = value
    return alone


# The shapes that every policy is tested on: budget 24, buffer 8 unless a test says otherwise.
SHAPES: dict[str, dict[str, Any]] = {
    "one row": {"lengths": (40,)},
    "grouped queries": {"lengths": (40, 32), "group": 3, "evicted": 9},
    "uneven rows": {"lengths": (25, 40, 31), "kv_heads": 3, "evicted": 5},
    "one above the budget": {"lengths": (25,), "group": 3},
    "bfloat16": {"lengths": (40, 33), "group": 3, "dtype": torch.bfloat16},
    "float16": {"lengths": (32, 40), "dtype": torch.float16},
    "wide values": {"lengths": (36,), "head_dim": 6, "value_dim": 10},
}
