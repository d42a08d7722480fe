"""Policies by text, also those that nobody has published: one method's score, another's selection.

    vase-attnv
    vase-attnv(reserve=128, pool=1)
    triattention + sample + reserve
    snapkv(window=32) + sample(temperature=0.5) + reserve(slots=128, magnitude=l2)
    snapkv + adaptive-heads(floor=0.2)
    vase-attnv + whole-model(calibrate=rank, floor=4)

The first part is a registered policy, which gives the score, the trigger and the protection; the parts
after it change how the entries are chosen, and how the budget is shared out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from torch import Tensor

from kvkeep.core.budget import Budget
from kvkeep.core.decision import KeepCounts, KeepDecision
from kvkeep.core.errors import ConfigError, UnknownNameError
from kvkeep.core.policy import Policy
from kvkeep.core.registry import available_policies
from kvkeep.core.traits import DecodeTrigger, PrefillTrigger, Traits
from kvkeep.core.view import LayerView
from kvkeep.policies.allocated import SHARES, Allocated
from kvkeep.policies.text import read_parts
from kvkeep.scoring.standardize import standardize
from kvkeep.scoring.value_magnitude import MAGNITUDES, Magnitude, value_magnitude
from kvkeep.selection.reserve import reserve, reserve_of_share
from kvkeep.selection.top_k import top_k
from kvkeep.selection.weighted_sample import weighted_sample


@dataclass(frozen=True, kw_only=True)
class Composed(Policy):
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

    base: Policy
    choose: Literal["top-k", "sample"] = "top-k"
    temperature: float = 1.0
    magnitude: Magnitude | None = None
    slots: int | None = None

    # Whatever Policy has as fields comes from the base.
    budget: int | Budget = field(init=False, repr=False, default=0)
    buffer: int = field(init=False, repr=False, default=0)
    sinks: int = field(init=False, repr=False, default=0)
    trigger: DecodeTrigger = field(init=False, repr=False, default="never")
    prefill: PrefillTrigger = field(init=False, repr=False, default="defer")

    def __post_init__(self) -> None:
        if self.choose == "sample" or self.magnitude is not None:
            object.__setattr__(self, "base", self.base.per_layer())
        for name in ("budget", "buffer", "sinks", "trigger", "prefill", "mass", "one_set"):
            object.__setattr__(self, name, getattr(self.base, name))
        object.__setattr__(self, "name", self._label())
        self._require(self.base.bounded, f"{self.base.name} keeps everything, so there is nothing to choose")
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
        super().__post_init__()

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

    @property
    def recent(self) -> int:
        """What the base protects."""
        return self.base.recent

    @property
    def protects_prompt(self) -> bool:
        """What the base protects."""
        return self.base.protects_prompt

    def with_budget(self, budget: int | Budget) -> Self:
        """The same composition with another budget."""
        return dataclasses.replace(self, base=self.base.with_budget(budget))

    def check(self, spec: Any) -> list[str]:
        """Whatever the base objects to."""
        return self.base.check(spec)

    def score(self, view: LayerView) -> Tensor:
        """The base's score."""
        return self.base.score(view)

    def score_all(self, views: Sequence[LayerView]) -> list[Tensor]:
        """The base's scores."""
        return self.base.score_all(views)

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


# What may stand after a "+", with the options each part takes.
CHOICES = {"top-k": (), "sample": ("temperature",), "reserve": ("slots", "magnitude")}
PARTS: dict[str, tuple[str, ...]] = CHOICES | SHARES


def policy(text: str, /, **options: Any) -> Policy:
    """Build a policy from its name, or from a composition of parts.

    Parameters
    ----------
    text
        A name of ``kvkeep policies``, with options in brackets if you like, and after it any of
        ``+ sample``, ``+ reserve``, ``+ top-k``, and one of ``+ uniform``, ``+ pyramid``,
        ``+ adaptive-heads``, ``+ whole-model``.
    options
        Hyper-parameters of the first part, for example ``budget=1024``; they win over those in brackets.

    Raises
    ------
    UnknownNameError
        For a policy, a part or an option that does not exist; the message names the nearest.
    ConfigError
        If the text cannot be read, or a value is out of range.

    Examples
    --------
    >>> policy("vase-attnv", budget=1024).name
    'vase-attnv'
    >>> policy("vase-dkv(rank=8) + sample + reserve(slots=64)", budget=512).base.rank
    8
    """
    (name, given), *parts = read_parts(text)
    known = available_policies()
    if name not in known:
        raise UnknownNameError("policy", name, known)
    base = _build(known[name], given | options)
    if not parts:
        return base
    chosen: dict[str, Any] = {}
    shared: dict[str, Any] = {}
    for part, settings in parts:
        if part not in PARTS:
            raise UnknownNameError("part of a policy", part, PARTS)
        for setting in settings:
            if setting not in PARTS[part]:
                raise UnknownNameError(f"option of {part}", setting, PARTS[part] or ("none",))
        if part in SHARES:
            if shared:
                raise ConfigError(
                    f"{text!r} shares the budget out twice, by {shared['share']} and {part}: leave one out."
                )
            shared = {"share": part} | settings
        elif part == "reserve":
            chosen |= {"magnitude": "range"} | settings
        else:
            chosen |= {"choose": part} | settings
    answer = Composed(base=base, **chosen) if chosen else base
    return Allocated(base=answer, **shared) if shared else answer


def _build(kind: type[Policy], options: dict[str, Any]) -> Policy:
    fields = {f.name for f in dataclasses.fields(kind) if f.init}
    for option in options:
        if option not in fields:
            raise UnknownNameError(f"option of {kind.name}", option, fields)
    required = {
        f.name
        for f in dataclasses.fields(kind)
        if f.init and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    }
    missing = sorted(required - options.keys())
    if missing:
        raise ConfigError(f"{kind.name} needs {', '.join(missing)}: for example {missing[0]}=1024.")
    return kind(**options)
