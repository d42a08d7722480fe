"""An eviction inside vLLM's blocks: the policy looks, and survivors of the tail move into the holes."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from kvkeep.core.decision import KeepCounts
from kvkeep.core.errors import NotANumberError
from kvkeep.core.random import RandomStream
from kvkeep.core.view import protected_mask
from kvkeep.engine.viewing import StoredView
from kvkeep.serving.contained import CONTAINED, newest
from kvkeep.serving.deployment import Deployment
from kvkeep.serving.heads import EqualHeads, Heads, UnequalHeads
from kvkeep.serving.pages import LayerPages, OrderedPages


@dataclass(frozen=True)
class Cuts:
    """The rows that evict before their next token is stored; shared by all layers of a step.

    Parameters
    ----------
    blocks
        int64 ``[rows, count]``: blocks of their slots.
    seen
        int64 ``[rows]``: tokens seen, which is the position of the next one.
    held, kept
        int64 ``[rows]``: entries before and after.
    first
        bool ``[rows]``: it is the row's first eviction.
    evictions
        int64 ``[rows]``: how many it had before.
    entries, largest, moves
        Largest of ``held``, of ``kept`` and of ``held - kept``, known on the host.
    even
        All rows hold equally many.
    ring_blocks, ring_places
        int64 ``[rows, window]``: where the newest queries are, oldest first; ``None`` if none are recorded.
    names
        int64 ``[rows]``: whose the rows are, for random numbers; ``None``: nobody said, and all are 0.
    """

    blocks: Tensor
    seen: Tensor
    held: Tensor
    kept: Tensor
    first: Tensor
    evictions: Tensor
    entries: int
    largest: int
    moves: int
    even: bool
    ring_blocks: Tensor | None = None
    ring_places: Tensor | None = None
    names: Tensor | None = None

    def alone(self, row: int) -> Cuts:
        """One of the rows; waits for the device."""
        own = slice(row, row + 1)
        tensors = {
            each.name: value[own]
            for each in fields(self)
            if isinstance(value := getattr(self, each.name), Tensor)
        }
        held, kept = int(self.held[row]), int(self.kept[row])
        return replace(self, **tensors, entries=held, largest=kept, moves=held - kept, even=True)


class Compaction:
    """Evictions of one layer.

    Parameters
    ----------
    deployment
        Policy, model and statistics.
    layer
        Its index in the model.
    pages, heads
        Its cache, and who holds what in it.
    query_factor
        Brings the model's queries to logits divided by sqrt(dim).
    """

    def __init__(
        self,
        deployment: Deployment,
        layer: int,
        pages: LayerPages,
        heads: EqualHeads | UnequalHeads,
        query_factor: float,
    ) -> None:
        self._deployment, self._layer, self._pages, self._heads = deployment, layer, pages, heads
        self._policy, self._traits = deployment.policy, deployment.policy.traits
        self._query_factor = query_factor

    def evict(self, cuts: Cuts) -> int:
        """Carry out one eviction of every row of ``cuts``; the most entries that a head held before it.

        A row whose scores are no numbers keeps its newest entries (:mod:`kvkeep.serving.contained`).

        Raises
        ------
        CacheIntegrityError
            If the policy keeps another number of entries than it was asked for.
        """
        heads = self._heads.of(cuts.blocks, cuts.held, cuts.first)
        ragged = self._traits.ragged
        entries = int(heads.held.max()) if ragged else cuts.entries
        table = heads.table[..., : -(-entries // self._pages.slots)]
        positions = self._positions(cuts, heads, table)
        slot = torch.arange(positions.shape[-1], device=positions.device)
        valid = slot < heads.held[..., None]
        # Holes are filled from the tail, so slots are in no order; policies work along the text.
        order = positions.masked_fill(~valid, _LATE).argsort(-1)[..., :entries]
        view = self._view(cuts, table, positions.gather(-1, order), valid.gather(-1, order), order)
        per_head = cuts.kept[:, None].expand(-1, self._pages.kv_heads)
        counts = KeepCounts(per_head, cuts.largest)
        try:
            (decision,) = self._policy.decide([view], [counts])
        except NotANumberError as error:
            if (rows := len(cuts.seen)) > 1:  # nothing has been moved yet: every row for itself
                return max(self.evict(cuts.alone(row)) for row in range(rows))
            CONTAINED.note(error)
            decision = newest(self._policy, view, counts)
        keep = torch.zeros(*valid.shape[:2], valid.shape[2] + 1, dtype=torch.bool, device=valid.device)
        chosen = torch.arange(decision.max_kept, device=valid.device) < decision.lengths[..., None]
        places = order.gather(-1, decision.indices.clamp(max=entries - 1))
        keep.scatter_(-1, torch.where(chosen, places, valid.shape[2]), True)
        self._heads.settle(cuts.blocks, heads, decision.lengths, cuts.kept)
        self._fill(table, positions, keep[..., :-1], decision.lengths, None if ragged else cuts.moves)
        return entries

    def _positions(self, cuts: Cuts, heads: Heads, table: Tensor) -> Tensor:
        """int64 ``[rows, kv_heads, slots]``: of what stands in each slot, arbitrary beyond ``held``."""
        slot = torch.arange(table.shape[-1] * self._pages.slots, device=table.device)
        tail = (cuts.seen[:, None] - heads.held)[..., None] + slot  # the newest tokens stand in line
        before = heads.held - (cuts.held - cuts.kept)[:, None]  # left by the eviction before
        in_line = cuts.first[:, None, None] | (slot >= before[..., None])
        return torch.where(in_line, tail, self._pages.read_positions(table))

    def _view(self, cuts: Cuts, table: Tensor, positions: Tensor, valid: Tensor, order: Tensor) -> StoredView:
        policy, traits, deployment = self._policy, self._traits, self._deployment
        budget = policy.amount.count
        prompt_lens = cuts.kept - budget  # the kept prompt in whole blocks; 0 where prompts compete
        recorded: dict[str, Any] = {}
        if traits.queries and cuts.ring_blocks is not None and cuts.ring_places is not None:
            window = torch.arange(-traits.queries, 0, device=positions.device)
            queries = self._pages.recorded(cuts.ring_blocks, cuts.ring_places)
            recorded["queries"] = queries if self._query_factor == 1.0 else queries * self._query_factor
            recorded["query_positions"] = cuts.seen[:, None] + window
        if traits.calibration:
            recorded["calibration"] = deployment.statistics[self._layer]
        if traits.rope:
            recorded["rope"] = deployment.rope
        if traits.random:
            recorded["random"] = RandomStream.derive(
                seed=deployment.settings.seed,
                sequence_ids=torch.zeros_like(cuts.seen) if cuts.names is None else cuts.names,
                layer=self._layer,
                evictions=cuts.evictions,
                first_head=deployment.first_head,
            )
        return StoredView(
            store=OrderedPages(self._pages, table, order),
            rows=None,
            layer=self._layer,
            positions=positions,
            valid=valid,
            seq_lens=cuts.seen,
            prompt_lens=prompt_lens,
            budget=budget,
            buffer=policy.buffer,
            protected=protected_mask(
                positions=positions,
                valid=valid,
                seq_lens=cuts.seen,
                sinks=policy.sinks,
                recent=policy.recent,
                prompt_lens=prompt_lens if policy.protects_prompt else None,
            ),
            traits=traits,
            recorded=recorded,
            even=cuts.even and not traits.ragged,
            recent_kept=policy.recent,
        )

    def _fill(self, table: Tensor, positions: Tensor, keep: Tensor, kept: Tensor, moves: int | None) -> None:
        """Move kept entries that stand behind the first ``kept`` slots into the holes before."""
        slot = torch.arange(keep.shape[-1], device=keep.device)
        front = slot < kept[..., None]
        holes, movers = front & ~keep, keep & ~front
        count = holes.sum(-1, keepdim=True)
        moves = int(count.max()) if moves is None else moves
        # A stable sort brings the marked slots to the front, in order; there are equally many of both.
        target = holes.byte().argsort(dim=-1, descending=True, stable=True)[..., :moves]
        source = movers.byte().argsort(dim=-1, descending=True, stable=True)[..., :moves]
        real = torch.arange(moves, device=keep.device) < count
        source = torch.where(real, source, target)  # where there is no more to move, a slot moves onto itself
        self._pages.move(table, source, target)
        moved = positions.scatter(-1, target, positions.gather(-1, source))
        self._pages.write_positions(table, moved)


# Later than any position: empty slots are sorted behind the entries.
_LATE = 2**31 - 1
