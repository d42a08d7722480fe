"""Listening to a cache: the attention logits of chosen queries over the entries that the cache still holds.

The engine tells each layer's recorder about every query once its token is stored and before anything is
evicted. A recorder that listens there works with any policy and any store, and changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvkeep.cache.store import Store
from kvkeep.core.errors import UnsupportedError
from kvkeep.engine.recorder import Recorder
from kvkeep.engine.retention_cache import RetentionCache
from kvkeep.engine.step import Step


class Watch:
    """Logits of some queries of every row of a cache, collected while it reads.

    Parameters
    ----------
    cache
        An empty cache.
    queries
        For each row the positions to listen for, ascending.
    lengths
        For each row the tokens it will read.

    Attributes
    ----------
    logits
        For each row and managed layer float32 ``[heads, queries, tokens]``, scaled as the model scales them;
        ``-inf`` at tokens that a query did not see: later ones, and evicted ones.

    Raises
    ------
    UnsupportedError
        If the model changes its logits before the softmax in ways that are not known here.
    """

    def __init__(
        self, cache: RetentionCache, queries: Sequence[Sequence[int]], lengths: Sequence[int]
    ) -> None:
        config = cache.spec.config
        reasons = [
            f"the model has {name}: its attention is not the softmax of its logits alone"
            for name in ("attn_logit_softcapping", "attention_sinks", "sinks")
            if getattr(config, name, None)
        ]
        if getattr(config, "model_type", "") in _LEARNED_SINKS:
            reasons.append(f"{config.model_type} has learned sinks in its softmax")
        if reasons:
            raise UnsupportedError("attention of this model cannot be measured", reasons)
        self.queries = [{position: place for place, position in enumerate(row)} for row in queries]
        self.lengths = list(lengths)
        self.logits: list[list[Tensor]] = [[] for _ in queries]
        for layer in cache.managed_layers:
            layer.recorder = _Listener(layer.recorder, self, layer.place)

    def hear(self, place: int, query: Tensor, step: Step, store: Store, scaling: float | None) -> None:
        """Note what the wanted ones among some new queries see.

        Parameters
        ----------
        place
            Of the layer among the managed ones.
        query
            ``[batch, heads, new, head_dim]`` rotated; their tokens are stored.
        """
        factor = 1 / math.sqrt(query.shape[-1]) if scaling is None else scaling
        positions = step.positions(query.device).tolist()
        wanted = [
            [(column, self.queries[row][at]) for column, at in enumerate(of_row) if at in self.queries[row]]
            for row, of_row in enumerate(positions)
        ]
        if not any(wanted):
            return
        stored = store.padded(None, "keys", "positions")
        entries = stored["keys"].shape[2]
        valid = store.valid(entries)
        for row, pairs in enumerate(wanted):
            if not pairs:
                continue
            heads = query.shape[1]
            if len(self.logits[row]) <= place:
                shape = (heads, len(self.queries[row]), self.lengths[row])
                self.logits[row].append(torch.full(shape, -torch.inf))
            columns, slots = (list(each) for each in zip(*pairs, strict=True))
            group = heads // stored["keys"].shape[1]
            keys = stored["keys"][row].float().repeat_interleave(group, 0)
            found = (query[row][:, columns].float() @ keys.transpose(-1, -2)) * factor
            where = stored["positions"][row].long().repeat_interleave(group, 0)[:, None]
            now = torch.tensor([positions[row][column] for column in columns], device=where.device)
            seen = valid[row].repeat_interleave(group, 0)[:, None] & (where <= now[None, :, None])
            # Slots without an entry write to one more column, which is cut off again.
            where = torch.where(seen, where, self.lengths[row]).expand(found.shape)
            whole = torch.full((*found.shape[:2], self.lengths[row] + 1), -torch.inf, device=found.device)
            whole.scatter_(-1, where, found)
            self.logits[row][place][:, slots] = whole[..., :-1].cpu()


#: Models whose softmax has one more, learned, term in its denominator.
_LEARNED_SINKS = ("gpt_oss",)


class _Listener(Recorder):
    """A recorder that tells a watch what it is told, and otherwise goes on as the one it replaces."""

    def __init__(self, recorder: Recorder, watch: Watch, place: int) -> None:
        super().__init__(recorder.traits, recorder.rope)
        self._watch, self._place = watch, place

    def record(self, query: Tensor, step: Step, store: Store, *, scaling: float | None, prompt: bool) -> None:
        self._watch.hear(self._place, query, step, store, scaling)
        super().record(query, step, store, scaling=scaling, prompt=prompt)
