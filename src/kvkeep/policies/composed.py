"""Score as one policy does, choose as another does: `+ top-k`, `+ sample`, `+ reserve`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from kvkeep.core.decision import KeepCounts, KeepDecision
from kvkeep.core.policy import Policy
from kvkeep.core.traits import Traits
from kvkeep.core.view import LayerView
from kvkeep.policies.wrapped import Wrapped
from kvkeep.scoring.standardize import standardize
from kvkeep.scoring.value_magnitude import MAGNITUDES, Magnitude, value_magnitude
from kvkeep.selection.reserve import reserve, reserve_of_share
from kvkeep.selection.top_k import top_k
from kvkeep.selection.weighted_sample import weighted_sample


@dataclass(frozen=True, kw_only=True)
class Composed(Wrapped):
    """Take the score of one policy and choose in another way.

    The base policy says how useful each entry is, when to evict and what is protected. How the
    slots are then filled is chosen here: a reserve for large values first, and the rest by
    highest score or by a draw.

    Parameters
    ----------
    base
        Gives score, budget, buffer, sinks, triggers and protection. Where a draw or a reserve makes
        every layer keep other tokens, a base that decides for all layers together is taken in the mode
        in which each layer decides alone (:meth:`~kvkeep.core.policy.Policy.per_layer`). A base whose heads
        keep one set of entries (TOVA) stays so: there is one draw for all heads of a layer, and the reserve
        goes to the largest mean of the heads' magnitudes.
    choose
        ``"top-k"``, or ``"sample"``: without replacement, in proportion to the score where scores are
        shares (attention, leverage), else to ``exp(z / temperature)`` of the standardised score.
    temperature
        Of the sample; below 1 comes closer to top-k.
    magnitude, slots
        Reserve so many slots for the largest value magnitudes first (``slots=None``: a quarter of the
        budget); ``magnitude=None`` reserves nothing.

    Source
    ------
    Ours: the parts come from the policies that are composed.

    Deviations
    ----------
    none known

    Examples
    --------
    >>> from kvkeep.policies.vase import VaSEDKV
    >>> Composed(base=VaSEDKV(budget=512), choose="sample", magnitude="range").name
    'vase-dkv + sample + reserve'
    """

    changes: ClassVar[str] = "choose"

    choose: Literal["top-k", "sample"] = "top-k"
    temperature: float = 1.0
    magnitude: Magnitude | None = None
    slots: int | None = None

    def __post_init__(self) -> None:
        if self.choose == "sample" or self.magnitude is not None:
            object.__setattr__(self, "base", self.base.per_layer())
        super().__post_init__()
        known = ("top-k", "sample")
        self._require(self.choose in known, f"choose {self.choose!r} is none of {known}")
        self._require(self.temperature > 0, f"temperature {self.temperature} is not positive")
        self._require(
            self.choose != "sample" or not self.base.no_sample,
            f"{self.base.no_sample}: leave '+ sample' or that option out",
        )
        magnitudes = (None, *MAGNITUDES)
        self._require(
            self.magnitude in magnitudes, f"magnitude {self.magnitude!r} is none of {magnitudes[1:]}"
        )
        self._require(self.slots is None or self.slots >= 0, f"{self.slots} reserve slots are negative")

    def _check_budget(self, entries: int) -> None:
        free = entries - self.recent
        self._require(
            self.slots is None or self.slots <= free,
            f"a reserve of {self.slots} does not fit the {free} slots that a budget of {entries} leaves",
        )

    def _label(self) -> str:
        parts = [self.base.name]
        if self.choose == "sample":
            parts.append("sample" + (f"(temperature={self.temperature:g})" if self.temperature != 1 else ""))
        if self.magnitude is not None:
            given = {"slots": self.slots, "magnitude": None if self.magnitude == "range" else self.magnitude}
            text = ", ".join(f"{key}={value}" for key, value in given.items() if value is not None)
            parts.append("reserve" + (f"({text})" if text else ""))
        return " + ".join(parts)

    @property
    def traits(self) -> Traits:
        traits = self.base.traits
        return dataclasses.replace(traits, random=traits.random or self.choose == "sample")

    def allocate(
        self, views: Sequence[LayerView], scores: Sequence[Tensor], counts: Sequence[KeepCounts]
    ) -> list[KeepCounts]:
        """Equal shares: the slots are filled here."""
        return list(counts)

    def decide_by(
        self, views: Sequence[LayerView], scores: Sequence[Tensor], counts: Sequence[KeepCounts]
    ) -> list[KeepDecision]:
        """This policy's own selection, at the counts of :meth:`allocate`."""
        return Policy.decide_by(self, views, scores, counts)

    def select(self, view: LayerView, scores: Tensor, counts: KeepCounts) -> KeepDecision:
        """Protected entries, then the reserve, then the rest by score or by a draw."""
        # One head stands for all where they keep one set: its positions and masks are those of the others.
        heads = slice(0, 1) if self.base.one_set else slice(None)
        valid, kept = view.valid[:, heads], view.protected[:, heads]
        scores, counts = scores[:, heads], dataclasses.replace(counts, per_head=counts.per_head[:, heads])
        if self.magnitude is not None:
            slots = view.budget // 4 if self.slots is None else self.slots
            quota = max(0, min(slots, view.budget - self.recent) - self.sinks)
            own = reserve_of_share(quota, counts, self.equal_share(view), kept)
            magnitudes = value_magnitude(view.values, self.magnitude)
            if self.base.one_set:
                magnitudes = magnitudes.mean(1, keepdim=True)
            kept = kept | reserve(magnitudes, own, candidates=valid & ~kept)
        rest = valid & ~kept
        if self.choose == "top-k":
            decision = top_k(scores, counts, candidates=rest, kept=kept)
        else:
            candidates = view.candidates[:, heads]
            weights = scores if self.base.mass else standardize(scores, candidates).exp()
            decision = weighted_sample(
                weights.pow(1.0 / self.temperature),
                counts,
                candidates=rest,
                kept=kept,
                positions=view.positions[:, heads],
                random=view.random,
            )
        batch, every, _ = view.shape
        return KeepDecision(decision.indices.expand(batch, every, -1), decision.lengths.expand(batch, every))


# Parts that say how entries are chosen, with the options each takes; each may stand after a "+".
CHOICES: dict[str, tuple[str, ...]] = {
    "top-k": (),
    "sample": ("temperature",),
    "reserve": ("slots", "magnitude"),
}
