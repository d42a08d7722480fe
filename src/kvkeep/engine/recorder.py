"""What one layer writes down for its policy: newest queries, received attention, query moments."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from kvkeep.cache.store import Store
from kvkeep.core.errors import CacheError
from kvkeep.core.traits import Traits
from kvkeep.core.view import Rope
from kvkeep.engine.recording import MomentSums, QueryRing, attention_received, recurrences
from kvkeep.engine.step import Step


class Recorder:
    """Recordings of one layer; nothing that the traits do not ask for.

    Parameters
    ----------
    traits
        Of the policy.
    rope
        Rotary embedding of the model, for query moments.
    """

    def __init__(self, traits: Traits, rope: Rope | None) -> None:
        self.traits, self.rope = traits, rope
        self.ring: QueryRing | None = None
        self.sums: MomentSums | None = None
        self.unsummed = 0  # newest queries in the ring whose attention has not been added up yet

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        recorders = [each for each in (self.ring, self.sums) if each is not None]
        tensors = [value for each in recorders for value in vars(each).values()]
        return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))

    def record(self, query: Tensor, step: Step, store: Store, *, scaling: float | None, prompt: bool) -> None:
        """Note the queries of a forward whose tokens are stored already.

        Parameters
        ----------
        query
            ``[batch, heads, new, head_dim]`` rotated.
        scaling
            Factor on the model's logits; ``None`` for 1 / sqrt(head_dim).
        prompt
            The tokens belong to the prompt.
        """
        traits = self.traits
        if not (traits.queries or traits.query_moments or traits.attends):
            return
        # Policies divide logits by sqrt(head_dim); a model that scales otherwise has it in its queries.
        factor = 1.0 if scaling is None else scaling * math.sqrt(query.shape[-1])
        if not math.isclose(factor, 1.0, rel_tol=1e-6):
            query = query * factor
        positions = step.positions(query.device)
        if traits.query_moments and prompt and self.rope is not None:
            if self.sums is None:
                self.sums = MomentSums(query, self.rope)
            self.sums.add(query, positions)
        window = traits.queries
        if window and self.ring is None:
            self.ring = QueryRing(query, window)
        if traits.attends:
            if self.unsummed + step.query_len > window:
                # The ring is about to lose queries that have not been summed.
                self.sum_attention(store, pending=step.query_len, in_line=not step.padded)
            if step.query_len > window:
                self._add_attention(store, query, positions, in_line=not step.padded)
            else:
                self.unsummed += step.query_len
        if self.ring is not None:
            self.ring.push(query, positions)
        if step.padded and traits.attends:
            self.sum_attention(store, in_line=False)

    def sum_attention(self, store: Store, *, pending: int = 0, in_line: bool = True) -> None:
        """Work out the attention of the queries recorded since the last time, and note it at their entries.

        Parameters
        ----------
        pending
            Tokens that are stored already but whose queries are not recorded yet.
        in_line
            Each of these queries has its token stored, one after the other: no padding.
        """
        if self.ring is None or not self.unsummed:
            return
        queries, positions = self.ring.ordered()
        count, self.unsummed = self.unsummed, 0
        queries, positions = queries[:, :, -count:], positions[:, -count:]
        self._add_attention(store, queries, positions, pending=pending, in_line=in_line)

    def _add_attention(
        self,
        store: Store,
        queries: Tensor,
        positions: Tensor,
        *,
        pending: int = 0,
        in_line: bool,
        factor: float = 1.0,
    ) -> None:
        held = store.held
        if self.traits.recurrence is not None:
            self._note_recurrence(store, queries, positions, self.traits.recurrence)
        if not self.traits.attention_sum:
            return
        in_line = in_line and bool((held == held.flat[0]).all())
        if in_line:
            keys = store.padded(None, "keys")["keys"][:, :, : store.longest - pending]
            received = attention_received(queries, positions, keys)
        else:
            stored = store.padded(None, "keys", "positions")
            valid = store.valid(store.longest)
            received = attention_received(queries, positions, stored["keys"], stored["positions"], valid)
        store.add_extra("attention_sum", factor * received)

    @staticmethod
    def _note_recurrence(store: Store, queries: Tensor, positions: Tensor, threshold: float) -> None:
        stored = store.padded(None, "keys", "positions", "extra.idle_start", "extra.longest_pause")
        valid, where = store.valid(store.longest), stored["positions"]
        start, pause = stored["extra.idle_start"], stored["extra.longest_pause"]
        last, longest = recurrences(
            queries, positions, stored["keys"], where, valid, start + where, pause, threshold
        )
        store.add_extra("idle_start", (last - where - start).masked_fill(~valid, 0.0))
        store.add_extra("longest_pause", (longest - pause).masked_fill(~valid, 0.0))

    def forget_newest(self, removed: int, seq_lens: Sequence[int], store: Store) -> None:
        """Take back the newest ``removed`` tokens, whose entries are still stored.

        What their queries have added already is subtracted, as far as they are recorded.
        """
        if self.ring is None:
            return
        summed = removed - self.unsummed
        if self.traits.recurrence is not None and summed > 0:
            raise CacheError(
                f"the newest {summed} of these tokens cannot be taken back: when entries were attended to "
                "has been worked out from their queries, and is not undone. Crop less, or use another policy."
            )
        self.unsummed = max(0, self.unsummed - removed)
        if self.traits.attention_sum and summed > 0:
            queries, positions = self.ring.ordered()
            start = self.ring.window - removed
            part = slice(max(0, start), max(0, start + summed))
            self._add_attention(store, queries[:, :, part], positions[:, part], in_line=False, factor=-1.0)
        self.ring.forget(removed, seq_lens)

    def select_rows(self, index: Tensor) -> None:
        """Keep the rows ``index``, in that order, repeats allowed."""
        for recorder in (self.ring, self.sums):
            if recorder is not None:
                recorder.select_rows(index)
