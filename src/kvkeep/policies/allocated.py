"""A policy whose budget is shared out between heads or layers by what they score."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from kvkeep.allocation.adaptive_heads import mixed_with_equal, safeguarded
from kvkeep.allocation.pool import Pool
from kvkeep.allocation.pyramid import pyramid
from kvkeep.allocation.threshold import above_threshold, above_threshold_within_share
from kvkeep.allocation.uniform import uniform
from kvkeep.allocation.whole_model import whole_model
from kvkeep.core.decision import KeepCounts, KeepDecision
from kvkeep.core.policy import Policy
from kvkeep.core.traits import Traits
from kvkeep.core.view import LayerView
from kvkeep.policies.wrapped import Wrapped
from kvkeep.scoring.calibrate import CALIBRATIONS, Calibration

Share = Literal["uniform", "pyramid", "adaptive-heads", "whole-model", "threshold"]

# Ways to share a budget out, with the options each takes; each may stand after a "+".
SHARES: dict[str, tuple[str, ...]] = {
    "uniform": (),
    "pyramid": ("beta",),
    "adaptive-heads": ("safe", "floor", "calibrate"),
    "whole-model": ("calibrate", "floor", "threshold"),
    "threshold": ("at", "calibrate"),
}
_SAFE = 0.2  # kvpress


@dataclass(frozen=True, kw_only=True)
class Allocated(Wrapped):
    """Score and choose as one policy does, but let heads or layers keep different numbers of entries.

    Heads differ: some look at a handful of entries, others at everything. The budget stays what it is on
    average (with a threshold: at most); who gets how much of it is decided here, at every eviction. A head
    keeps its protected entries in any case, they count towards the budget, and no head gets more than it
    holds. Equal scores go to the oldest entry, what is left over by rounding to the lowest head.

    Parameters
    ----------
    base
        Gives score, selection, budget, buffer, sinks, triggers and protection. A base that gives all layers
        one score is taken in the mode in which each layer decides alone.
    share
        ``"uniform"``: every head alike. ``"pyramid"``: a line that falls from the first layer to the last.
        ``"adaptive-heads"``: the heads of a layer share its budget by the ranking of their entries.
        ``"whole-model"``: so do all heads of all layers. ``"threshold"``: each head keeps what scores well
        enough, at most its equal share.
    beta
        Of the pyramid: the last layer gets so many times less than the mean (paper: 20).
    safe, floor
        Of adaptive-heads, one of the two: each head keeps its own best, a share ``safe`` of the budget
        (kvpress: 0.2, the default), or what it wins is mixed with the equal share, which weighs ``floor``
        (code: 0.5, paper: 0.2). Of whole-model: ``floor`` is the least number of entries per head, protected
        ones included.
    calibrate
        How scores of different heads are made comparable: ``"raw"``, ``"rank"``, ``"z-score"`` or
        ``"softmax"``, each head by itself.
    threshold
        Of whole-model: keep what scores at least so much (after calibration). The budget then only says when
        an eviction is due, and does not bound what stays.
    at
        Of threshold: the least score, after calibration, that keeps an entry. What a score means is up to the
        policy; ``calibrate=softmax`` makes it a share of the head's mass.

    Source
    ------
    Pyramid: PyramidKV, arXiv 2406.02069. Adaptive heads: Ada-KV, arXiv 2407.11550, and its form in kvpress.
    Whole model: DBTrimKV, arXiv 2605.09649, which does so with its own score. Threshold: as KVzap (kvpress)
    drops by one, with its own score and without a budget.

    Deviations
    ----------
    Runs at every eviction, where the first two papers compress the prompt once. What rounding or a short head
    leaves over is given to others, so that the total is exactly the budget. The pyramid's share is what is
    free beside all protected entries, not beside the window alone. A threshold is asked when more than the
    budget is stored, where KVzap asks it of every token that leaves the window: nothing is evicted that fits
    (docs/decisions, number 18).

    Notes
    -----
    Below a threshold the cache is smaller than its budget after an eviction, and fills up to budget and
    buffer before the next: match the measured mean cache before comparing.

    Examples
    --------
    >>> from kvkeep.policies.snapkv import SnapKV
    >>> Allocated(base=SnapKV(budget=512), share="adaptive-heads", floor=0.2).name
    'snapkv + adaptive-heads(floor=0.2)'
    """

    changes: ClassVar[str] = "share out"

    share: Share
    beta: float = 20.0
    safe: float | None = None
    floor: float | None = None
    calibrate: Calibration = "raw"
    threshold: float | None = None
    at: float | None = None

    def __post_init__(self) -> None:
        if self.share != "uniform":  # layers no longer hold the same tokens
            object.__setattr__(self, "base", self.base.per_layer())
        self._require(self.share in SHARES, f"share {self.share!r} is none of {tuple(SHARES)}")
        super().__post_init__()
        self._require(
            not self.one_set or self.share in ("uniform", "pyramid"),
            f"all heads of a layer keep one set of entries under {self.base.name}, so they cannot differ in "
            "number: take '+ pyramid', or another policy",
        )
        self._require(
            not self.base.traits.shared or self.share == "uniform",
            f"layers that share a selection cannot differ in number: leave shared-layers or {self.share} out",
        )
        self._check_options()

    def _check_options(self) -> None:
        for option in ("safe", "floor", "threshold", "at"):
            given, known = getattr(self, option), option in SHARES[self.share]
            self._require(given is None or known, f"{self.share} has no option {option}")
        self._require(
            self.share != "threshold" or self.at is not None,
            "threshold needs the score that keeps an entry: '+ threshold(at=0.001)'",
        )
        self._require(self.beta > 1, f"beta {self.beta} is not above 1")
        self._require(
            self.calibrate in CALIBRATIONS, f"calibrate {self.calibrate!r} is none of {CALIBRATIONS}"
        )
        self._require(
            self.safe is None or self.floor is None, "safe and floor are two forms: give one of them"
        )
        if self.share == "adaptive-heads":
            for option in ("safe", "floor"):
                part = getattr(self, option)
                self._require(part is None or 0 <= part <= 1, f"{option} {part} is outside [0, 1]")
        elif self.floor is not None:
            self._require(
                self.floor >= 0 and self.floor == int(self.floor),
                f"floor {self.floor} is not a whole number of entries",
            )
            self._require(self.threshold is None, "a threshold decides alone: leave floor out")

    def _check_budget(self, entries: int) -> None:
        most = entries if self.share == "whole-model" and self.floor is not None else None
        self._require(
            most is None or self.floor is None or self.floor <= most,
            f"a floor of {self.floor} entries per head is above the budget of {entries}",
        )

    def _label(self) -> str:
        given = {name: getattr(self, name) for name in SHARES[self.share]}
        usual = {f.name: f.default for f in dataclasses.fields(self)}
        text = ", ".join(f"{name}={value}" for name, value in given.items() if value != usual[name])
        return f"{self.base.name} + {self.share}" + (f"({text})" if text else "")

    @property
    def traits(self) -> Traits:
        traits = self.base.traits
        whole = self.share in ("pyramid", "whole-model")
        return dataclasses.replace(
            traits,
            scope="model" if whole else traits.scope,
            ragged=True,
            exact_budget=traits.exact_budget and self.threshold is None and self.share != "threshold",
        )

    def decide_by(
        self, views: Sequence[LayerView], scores: Sequence[Tensor], counts: Sequence[KeepCounts]
    ) -> list[KeepDecision]:
        """Allocate, and let the base select; equal shares are left to the base."""
        if self.share == "uniform" and not self.base.traits.ragged:
            return self.base.decide_by(views, scores, counts)
        return Policy.decide_by(self, views, scores, counts)

    def allocate(
        self, views: Sequence[LayerView], scores: Sequence[Tensor], counts: Sequence[KeepCounts]
    ) -> list[KeepCounts]:
        """Counts per layer and head; their sum over what shares a budget is that of ``counts``."""
        if self.share not in ("adaptive-heads", "threshold"):
            return self._shared(views, scores, counts)
        groups = zip(views, scores, counts, strict=True)
        return [self._shared([view], [score], [count])[0] for view, score, count in groups]

    def _shared(
        self, views: Sequence[LayerView], scores: Sequence[Tensor], counts: Sequence[KeepCounts]
    ) -> list[KeepCounts]:
        pool = Pool.of(views, scores, counts, by=self.calibrate, mass=self.mass)
        if self.share == "uniform":
            shares = uniform(pool)
        elif self.share == "pyramid":
            shares = pyramid(pool, beta=self.beta)
        elif self.share == "whole-model":
            if self.threshold is None:
                shares = whole_model(pool, floor=int(self.floor or 0))
            else:
                shares = above_threshold(pool, threshold=self.threshold)
        elif self.at is not None:
            shares = above_threshold_within_share(pool, threshold=self.at)
        elif self.floor is None:
            shares = safeguarded(pool, safe=_SAFE if self.safe is None else self.safe)
        else:
            shares = mixed_with_equal(pool, floor=self.floor)
        return pool.split(shares, [score.device for score in scores])
