"""Set-conditioned diversity (alpha): each pick minds what has been kept already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvkeep.core.decision import KeepCounts, KeepDecision
from kvkeep.core.view import LayerView
from kvkeep.policies.triattention import SelectionMode, TriAttention
from kvkeep.scoring.standardize import standardize
from kvkeep.selection.diverse import Similarity, diverse, unit_signatures


@dataclass(frozen=True, kw_only=True)
class SetDiversity(TriAttention):
    """Score as TriAttention does, but charge a token for being like those picked before it.

    The highest scores often go to tokens that say the same thing. Tokens are therefore picked one at
    a time, and a token whose values resemble those of a token already picked loses up to ``lam`` score
    units, so that the cache holds less of the same.

    Parameters
    ----------
    budget
        Entries kept per KV head and layer (paper: 64 and 128), the prompt included.
    lam
        Score units that a perfect likeness costs (paper: 0.5). 0 is TriAttention's top-k, bit for bit.
    similarity
        Likeness to the set: ``"max"`` (ours, see Deviations), ``"mean"`` or ``"sum"`` over it.
    clamp
        A negative cosine counts as 0 (ours).
    mode
        ``"union"`` (default): one choice for the model; a token's signature is its value averaged over
        all layers and heads. ``"per-head"``: one choice per KV head; signatures averaged over layers.
        ``"per-layer-per-head"``: the entry's own value.
    start_from_protected
        Count protected entries among the picks from the start, so that likeness to them costs too.
    renorm
        ``"zscore"`` standardises the merged scores again before the picking; ``"none"`` (default).
    protect_prompt
        Keep the whole prompt, inside the budget. Off by default: budgets of 64 are below any prompt.
    buffer, recent, offset_max, offset_reduce, group_reduce, use_direction, use_concentration, normalize
        As in :class:`~kvkeep.policies.triattention.TriAttention`.

    Source
    ------
    alpha, arXiv 2605.14292 (TMLR submission 8990): greedy choice by score minus lambda times the
    likeness of value signatures. Known to us from its abstract and a summary; its code could not be read.

    Deviations
    ----------
    The sources leave open, and we chose: the maximum over the set, negative cosines as 0, TriAttention's
    standardised scores as they are, the union mode, a prompt that competes, an interval of 128 tokens.
    Entries that are protected (``recent``, ``sinks``, a kept prompt) do not count among the picks unless
    ``start_from_protected`` is set: a reconstruction that puts them first charges likeness to them too.
    By default nothing is protected, and the two agree.

    Notes
    -----
    With the maximum it is maximal marginal relevance: it charges redundancy among kept tokens and does
    not ask whether the evicted ones are covered. With an interval of 128 the mean cache lies about 64
    entries above the budget.

    Picks are sequential: an eviction costs picks x entries x dim, once for the model in the first two
    modes but once for every layer in the third.

    Examples
    --------
    >>> SetDiversity(budget=128).lam
    0.5
    """

    name: ClassVar[str] = "set-diversity"

    mode: SelectionMode = "union"
    protect_prompt: bool = False
    lam: float = 0.5
    similarity: Similarity = "max"
    clamp: bool = True
    start_from_protected: bool = False
    renorm: Literal["none", "zscore"] = "none"

    def __post_init__(self) -> None:
        known = ("max", "mean", "sum")
        self._require(self.similarity in known, f"similarity {self.similarity!r} is none of {known}")
        self._require(self.lam >= 0, f"lam {self.lam} is negative")
        self._require(
            self.renorm in ("none", "zscore"), f"renorm {self.renorm!r} is neither 'none' nor 'zscore'"
        )
        super().__post_init__()

    def select(self, view: LayerView, scores: Tensor, counts: KeepCounts) -> KeepDecision:
        """Protected entries, then greedy picks, with the values of this layer as signatures."""
        if self.lam == 0:
            return super().select(view, scores, counts)
        return self._pick(view, view.values, scores, counts)

    def decide_by(
        self, views: Sequence[LayerView], scores: Sequence[Tensor], counts: Sequence[KeepCounts]
    ) -> list[KeepDecision]:
        """Pick: once for all layers in the first two modes, where all have the same scores."""
        if self.mode == "per-layer-per-head" or self.lam == 0:
            return super().decide_by(views, scores, counts)
        decision = self._pick(views[0], self._shared_values(views), scores[0], counts[0])
        return [
            KeepDecision(decision.indices.to(each.keys.device), decision.lengths.to(each.keys.device))
            for each in views
        ]

    def _shared_values(self, views: Sequence[LayerView]) -> Tensor:
        """Values averaged over layers, and over heads where all heads hold the same tokens."""
        total = torch.zeros_like(views[0].values, dtype=torch.float32)
        for view in views:
            total += view.values.to(total.device)
        if self.mode == "union":
            total = total.mean(1, keepdim=True)
        return total / len(views)

    def _pick(self, view: LayerView, values: Tensor, scores: Tensor, counts: KeepCounts) -> KeepDecision:
        if self.renorm == "zscore":
            scores = standardize(scores, view.candidates)
        # One head stands for all where the signature is shared: scores and masks are equal there.
        heads = values.shape[1]
        decision = diverse(
            scores[:, :heads],
            unit_signatures(values, view.valid[:, :heads]),
            replace(counts, per_head=counts.per_head[:, :heads]),
            candidates=view.candidates[:, :heads],
            kept=view.protected[:, :heads],
            weight=self.lam,
            similarity=self.similarity,
            clamp=self.clamp,
            start_from_kept=self.start_from_protected,
        )
        batch, every, _ = view.shape
        return KeepDecision(decision.indices.expand(batch, every, -1), decision.lengths.expand(batch, every))
