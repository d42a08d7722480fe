"""VaSE: reserve slots for values of large range, sample the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from kvkeep.core.decision import KeepCounts, KeepDecision
from kvkeep.core.policy import Policy
from kvkeep.core.traits import Traits
from kvkeep.core.view import LayerView
from kvkeep.policies.ranked import RankedPolicy
from kvkeep.scoring.leverage import LEVERAGES, Leverage, gaussian_projection, leverage, squared_norms
from kvkeep.scoring.value_magnitude import MAGNITUDES, value_magnitude
from kvkeep.scoring.window_attention import window_attention
from kvkeep.selection.reserve import reserve, reserve_of_share
from kvkeep.selection.top_k import top_k
from kvkeep.selection.weighted_sample import weighted_sample


@dataclass(frozen=True, kw_only=True)
class VaSEAttnV(Policy):
    """Reserve slots for the largest value ranges, fill the rest with an attention-weighted sample.

    Some values have a few channels that stick out; they are rarely attended to and yet a chain of
    thought breaks without them, so a share of the budget goes to the largest value ranges whatever
    their attention. The other slots are drawn at random, in proportion to the attention of the
    last queries, which keeps a trace of everything instead of the same favourites each time.

    Parameters
    ----------
    budget
        Entries kept per KV head and layer, ``C``. Papers use 4096 (AIME), 2048 (GPQA), 1024 (MATH).
    buffer
        Newest entries always kept, period of the evictions and observation window, ``B`` (paper: 64).
    sinks
        First tokens always kept, inside the reserve (paper: 4).
    reserve
        Slots for the largest magnitudes, ``N_v``; ``None`` is a quarter of the budget (paper), 0 is off.
    magnitude
        ``"range"`` (paper), ``"variance"`` or ``"l2"`` (its ablations), or ``"random"``: a reserve of
        uniformly random entries.
    sample
        Draw by attention (paper), or keep the highest attention instead (False).
    pool
        Width of the average that smooths the attention along the entries (paper: 5; 1 is off).
    temperature
        Divides the attention logits (paper: 1).
    select_by
        ``"attention"`` (paper). Two controls of the paper's pilot ignore attention and reserve:
        ``"smallest"`` keeps the smallest magnitudes ("evict large"), ``"random"`` keeps at random.

    Source
    ------
    VaSE, arXiv 2606.03928; official code terarachang/VaSE at bfa2692, mode
    ``range_sink_sample_attn`` and its ablation modes.

    Deviations
    ----------
    Survivors stay in the order of their positions; the official code stores them in the order of
    selection, so its smoothing sees other neighbours after the first eviction. Random numbers are
    hashed from sequence and position. Weights that underflow to zero can still be drawn, last.

    Notes
    -----
    Where an allocation gives heads different counts, a head's reserve grows and shrinks with the slots that
    it has free beside its protected entries: reserve and sample keep their ratio.

    Cost of an eviction: one product of ``buffer`` queries with the stored keys, per layer.

    Examples
    --------
    >>> VaSEAttnV(budget=1024).reserve_slots(1024)
    256
    """

    name: ClassVar[str] = "vase-attnv"
    mass: ClassVar[bool] = True

    sinks: int = 4
    reserve: int | None = None
    magnitude: Literal["range", "variance", "l2", "random"] = "range"
    sample: bool = True
    pool: int = 5
    temperature: float = 1.0
    select_by: Literal["attention", "smallest", "random"] = "attention"

    def __post_init__(self) -> None:
        known = (*MAGNITUDES, "random")
        self._require(self.magnitude in known, f"magnitude {self.magnitude!r} is none of {known}")
        self._require(
            self.select_by in ("attention", "smallest", "random"),
            f"select_by {self.select_by!r} is none of 'attention', 'smallest', 'random'",
        )
        self._require(self.pool >= 1 and self.pool % 2 == 1, f"pool {self.pool} is not odd")
        self._require(self.temperature > 0, f"temperature {self.temperature} is not positive")
        self._require(self.reserve is None or self.reserve >= 0, f"reserve {self.reserve} is negative")
        super().__post_init__()

    def _check_budget(self, entries: int) -> None:
        super()._check_budget(entries)
        self._require(
            self.reserve_slots(entries) <= entries - self.buffer,
            f"a reserve of {self.reserve} does not fit the {entries - self.buffer} slots that a budget "
            f"of {entries} leaves beside the {self.buffer} newest entries",
        )

    @property
    def traits(self) -> Traits:
        uses_attention = self.select_by == "attention"
        return Traits(
            trigger=self._make_trigger(),
            queries=self.buffer if uses_attention else 0,
            random=self.select_by == "random"
            or self.magnitude == "random"
            or (uses_attention and self.sample),
        )

    @property
    def no_sample(self) -> str:
        """The two controls score without saying how useful an entry is."""
        if self.select_by == "attention":
            return ""
        return f"select_by={self.select_by} is a control whose scores no sample can follow"

    def reserve_slots(self, budget: int) -> int:
        """``N_v`` at a budget of so many entries."""
        return min(budget // 4, budget - self.buffer) if self.reserve is None else self.reserve

    def score(self, view: LayerView) -> Tensor:
        """Attention of the last ``buffer`` queries to everything older than them."""
        if self.select_by == "random":
            return view.random.uniform(view.positions)
        if self.select_by == "smallest":
            return -self._magnitudes(view)
        return window_attention(
            view.queries,
            view.query_positions,
            view.keys,
            view.positions,
            view.valid & ~view.recent(self.buffer),
            pool="avg" if self.pool > 1 else "none",
            kernel=self.pool,
            temperature=self.temperature,
            stop=view.older_slots(self.buffer),
        )

    def _magnitudes(self, view: LayerView) -> Tensor:
        if self.magnitude == "random":
            return view.random.uniform(view.positions, purpose=1)
        return value_magnitude(view.values, self.magnitude)

    def select(self, view: LayerView, scores: Tensor, counts: KeepCounts) -> KeepDecision:
        """Protected entries, then the reserve, then a draw in proportion to the scores."""
        kept = view.protected
        if self.select_by == "attention":
            # Sinks are part of the N_v quota: only the rest of it goes to large values.
            slots = max(0, self.reserve_slots(view.budget) - self.sinks)
            own = reserve_of_share(slots, counts, self.equal_share(view), kept)
            kept = kept | reserve(self._magnitudes(view), own, candidates=view.candidates)
        rest = view.valid & ~kept
        if self.select_by == "attention" and self.sample:
            return weighted_sample(
                scores,
                counts,
                candidates=rest,
                kept=kept,
                positions=view.positions,
                random=view.random,
            )
        return top_k(scores, counts, candidates=rest, kept=kept)


@dataclass(frozen=True, kw_only=True)
class VaSEDKV(RankedPolicy):
    """Keep the largest products of key and value length, seen through a fresh random projection.

    An entry matters if both its key and its value are long. Measuring the lengths through a random
    projection that is drawn anew at every eviction makes the choice stochastic: a fixed projection
    would look down on whole directions for ever.

    Parameters
    ----------
    budget
        Entries kept per KV head and layer, ``C``.
    buffer
        Newest entries always kept and period of the evictions, ``B`` (paper: 64).
    sinks
        First tokens always kept (paper: 4).
    rank
        Columns of the projection, ``r`` (paper: 20).
    combine
        ``"kv_product"`` (paper), ``"kv_average"``, ``"key"`` or ``"value"``.

    Source
    ------
    VaSE, arXiv 2606.03928; official code terarachang/VaSE at bfa2692, mode ``cur_resample_gauss``.

    Deviations
    ----------
    Survivors stay in the order of their positions. The projection is hashed from sequence, layer
    and eviction index instead of drawn from a global generator, and applied in float32. Sinks are kept
    by mask, where the code sets their score to 1, an upper bound of all others.

    Notes
    -----
    No queries are recorded and no attention is computed: the cheapest of the stochastic policies.

    Examples
    --------
    >>> VaSEDKV(budget=1024).traits.queries
    0
    """

    name: ClassVar[str] = "vase-dkv"
    mass: ClassVar[bool] = True

    sinks: int = 4
    rank: int = 20
    combine: Leverage = "kv_product"

    def __post_init__(self) -> None:
        self._require(self.rank >= 1, f"rank {self.rank} is below 1")
        self._require(self.combine in LEVERAGES, f"combine {self.combine!r} is none of {LEVERAGES}")
        super().__post_init__()

    @property
    def traits(self) -> Traits:
        return Traits(trigger=self._make_trigger(), random=True)

    def score(self, view: LayerView) -> Tensor:
        """Share of each entry in the sum of ``||k G||^2 ||v G||^2`` over all but the newest."""
        dim = max(view.keys.shape[-1], view.values.shape[-1])
        projection = gaussian_projection(view.random, dim, self.rank)
        among = view.valid & ~view.recent(self.buffer)
        return leverage(
            squared_norms(view.keys, projection),
            squared_norms(view.values, projection),
            among,
            combine=self.combine,
        )
