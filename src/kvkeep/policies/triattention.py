"""TriAttention: score keys by the queries that a calibrated head is going to ask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from kvkeep.core.policy import check_scores
from kvkeep.core.traits import DecodeTrigger, Traits
from kvkeep.core.view import LayerView
from kvkeep.policies.ranked import RankedPolicy
from kvkeep.scoring.standardize import standardize
from kvkeep.scoring.trigonometric import OffsetReduce, trigonometric

SelectionMode = Literal["union", "per-head", "per-layer-per-head"]

# Scores are standardised; noise of this size decides ties and nothing else.
_TIE_NOISE = 1e-6


@dataclass(frozen=True, kw_only=True)
class TriAttention(RankedPolicy):
    """Keep the keys that each head's typical query will attend to, now and far ahead.

    Before the rotary embedding turns them, the queries of a head point in nearly the same direction
    whatever the text. A short calibration measures that direction; turning it to future positions
    tells how strongly each stored key will be asked for, without looking at any recent query. Where
    a head's queries scatter, the length of the key counts instead.

    Parameters
    ----------
    budget
        Entries kept per KV head and layer (paper: 2048), the prompt included.
    buffer
        Tokens between evictions (code: 128).
    recent
        Newest entries always kept (code: 0, they survive by their score; its vLLM plug-in: 128).
    mode
        ``"per-head"`` (paper): one choice per KV head for all layers, by the mean over layers of the
        best query head of the group. ``"union"``: one choice for all layers and heads, by the best query
        head of the model. ``"per-layer-per-head"``: each layer and KV head for itself.
    protect_prompt
        Keep the whole prompt, inside the budget (code). False lets it compete.
    offset_max
        Largest distance looked ahead; distances are the powers of two up to it (paper: 65536).
    offset_reduce
        ``"mean"`` (paper) or ``"max"`` over the distances.
    group_reduce
        ``"max"`` (paper) or ``"mean"`` over the query heads of a KV head, in the two modes per head.
    use_direction, use_concentration
        Ablations: without the first only key lengths count; without the second key lengths are weighed
        by the whole query length, not by the scattered part of it.
    normalize
        Standardise scores per query head over what competes (code).

    Source
    ------
    TriAttention, arXiv 2604.04921; official code WeianMao/triattention at c3744ee.

    Deviations
    ----------
    A prompt that is protected and does not fit the budget is an error; the code keeps its beginning
    and drops the whole answer. Calibration measures queries after query norms and without the scaling
    factor of the rotary embedding, both of which the code's script gets wrong. Channels that do not
    rotate count as pairs of frequency 0. Ties are broken by one number per KV head, not per query head.

    Notes
    -----
    ``union`` is stated as "every head proposes its best, the union is cut by the maximum over heads". An
    entry among the k best by that maximum is among the k best of the head that gives it its maximum, so
    this is top-k by the maximum, and that is what is computed.

    Needs calibration statistics: ``kvkeep calibrate``, or :func:`kvkeep.calibration.capture`.

    Examples
    --------
    >>> TriAttention(budget=2048).traits.scope
    'model'
    """

    name: ClassVar[str] = "triattention"
    recent_option: ClassVar[str] = "recent"

    buffer: int = 128
    recent: int = 0
    trigger: DecodeTrigger = "slack"
    mode: SelectionMode = "per-head"
    protect_prompt: bool = True
    offset_max: int = 65536
    offset_reduce: OffsetReduce = "mean"
    group_reduce: Literal["max", "mean"] = "max"
    use_direction: bool = True
    use_concentration: bool = True
    normalize: bool = True

    def __post_init__(self) -> None:
        modes = ("union", "per-head", "per-layer-per-head")
        self._require(self.mode in modes, f"mode {self.mode!r} is none of {modes}")
        for name in ("offset_reduce", "group_reduce"):
            value = getattr(self, name)
            self._require(value in ("max", "mean"), f"{name} {value!r} is neither 'max' nor 'mean'")
        whole = isinstance(self.offset_max, int) and self.offset_max >= 1
        self._require(whole, f"offset_max {self.offset_max!r} is not a whole number of at least 1")
        self._require(
            isinstance(self.recent, int) and self.recent >= 0,
            f"recent {self.recent!r} is not a whole number of at least 0",
        )
        super().__post_init__()

    @property
    def traits(self) -> Traits:
        return Traits(
            scope="layer" if self.mode == "per-layer-per-head" else "model",
            trigger=self._make_trigger(),
            calibration=True,
            rope=True,
            random=True,
        )

    @property
    def protects_prompt(self) -> bool:
        """Whether the whole prompt is protected."""
        return self.protect_prompt or super().protects_prompt

    def per_layer(self) -> Self:
        """The same policy in the mode in which every layer decides alone."""
        return replace(self, mode="per-layer-per-head")

    def score(self, view: LayerView) -> Tensor:
        """Score of one layer, query heads merged; ties broken."""
        batch, kv_heads, entries = view.shape
        scores = trigonometric(
            view.keys,
            view.seq_lens,
            view.calibration,
            view.rope,
            offset_max=self.offset_max,
            offset_reduce=self.offset_reduce,
            use_direction=self.use_direction,
            use_concentration=self.use_concentration,
        ).view(batch, kv_heads, -1, entries)
        if self.normalize:
            scores = standardize(scores, view.candidates[:, :, None])
        mean = self.group_reduce == "mean" and self.mode != "union"
        merged = scores.mean(2) if mean else scores.amax(2)
        return merged + _TIE_NOISE * view.random.uniform(view.positions)

    def score_all(self, views: Sequence[LayerView]) -> list[Tensor]:
        """Scores of all layers, merged as the mode says; the first two modes give every layer the same."""
        scores = [self.score(view) for view in views]
        if self.mode == "per-layer-per-head":
            return scores
        for view, score in zip(views, scores, strict=True):
            check_scores(self.name, view, score)  # merged, a NaN could not be traced to its layer
        home = scores[0].device
        if self.mode == "union":
            shared = torch.stack([score.to(home).amax(1, keepdim=True) for score in scores]).amax(0)
            shared = shared.expand_as(scores[0])
        else:
            shared = torch.stack([score.to(home) for score in scores]).mean(0)
        return [shared.to(score.device) for score in scores]
