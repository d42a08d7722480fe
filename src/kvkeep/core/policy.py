"""The contract of a policy: four steps, score, allocate, select, compact; the first three are here.

A policy is a frozen set of numbers. It looks at a :class:`~kvkeep.core.view.LayerView` and answers
with a :class:`~kvkeep.core.decision.KeepDecision`; it never touches the model, the cache, a file or
the network, and it holds no state, so that one object can serve any number of generations.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import typing
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from kvkeep.core.budget import Budget
from kvkeep.core.decision import KeepCounts, KeepDecision
from kvkeep.core.errors import BudgetError, ConfigError, NotANumberError, ScoreError
from kvkeep.core.traits import DecodeTrigger, PrefillTrigger, Traits, Trigger
from kvkeep.core.view import LayerView


@dataclass(frozen=True, kw_only=True)
class Policy(ABC):
    """Base of all policies.

    Parameters
    ----------
    budget
        Entries kept per KV head and layer after an eviction: a count or a :class:`Budget`.
    buffer
        Newest entries always kept, and the distance between evictions, in tokens.
    sinks
        First tokens of the sequence that are always kept.
    trigger
        When to evict while decoding (see :class:`~kvkeep.core.traits.Trigger`).
    prefill
        When to evict while reading a prompt.

    Raises
    ------
    BudgetError
        If budget and protection cannot be satisfied together.
    ConfigError
        If a number is out of range.
    """

    name: ClassVar[str] = ""
    bounded: ClassVar[bool] = True  # False: keeps everything, memory grows
    mass: ClassVar[bool] = False  # True: scores are shares, not negative, zero means nothing
    one_set: ClassVar[bool] = False  # True: all KV heads of a layer keep the same entries
    recent_option: ClassVar[str] = "buffer"  # the option that sets how many newest entries are kept

    budget: int | Budget
    buffer: int = 64
    sinks: int = 0
    trigger: DecodeTrigger = "periodic"
    prefill: PrefillTrigger = "defer"

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Check the kinds of all options before any of them is used."""
        for option, kinds in _plain_kinds(cls).items():
            if option in options and not _fits(options[option], kinds):
                wanted = " or ".join(words for kind, words in _KINDS.items() if kind in kinds)
                raise ConfigError(f"{cls._called()}: {option} {options[option]!r} is not {wanted}.")
        return super().__new__(cls)

    @classmethod
    def _called(cls) -> str:
        """What a user calls it."""
        return cls.name or cls.__name__

    def __post_init__(self) -> None:
        budget = Budget.of_entries(self.budget)
        object.__setattr__(self, "budget", budget)
        for field in ("buffer", "sinks"):
            self._require(isinstance(getattr(self, field), int), f"{field} must be a whole number")
        self._require(self.buffer >= 1, f"buffer {self.buffer} is below 1 token")
        self._require(self.sinks >= 0, f"sinks {self.sinks} is negative")
        self._make_trigger()
        if budget.entries is not None:
            self._check_budget(budget.entries)

    def _require(self, condition: bool, problem: str) -> None:
        if not condition:
            raise ConfigError(f"{self.name or type(self).__name__}: {problem}.")

    def _check_budget(self, entries: int) -> None:
        option = self.recent_option
        if self.recent >= entries:
            lower = f", or lower {option} ({option}={entries // 2})" if entries > 1 else ""
            raise BudgetError(
                f"{self.name}: the {self.recent} newest entries are always kept, which leaves nothing "
                f"of a budget of {entries}: raise the budget above {self.recent}{lower}."
            )
        if self.sinks + self.recent > entries:
            raise BudgetError(
                f"{self.name}: {self.sinks} sinks and {self.recent} newest entries are always kept, "
                f"more than the budget of {entries}: raise the budget, or lower sinks or {option}."
            )

    def _make_trigger(self) -> Trigger:
        return Trigger(decode=self.trigger, prefill=self.prefill)

    @property
    def traits(self) -> Traits:
        """What this policy, as configured, needs from the engine."""
        return Traits(trigger=self._make_trigger())

    @property
    def amount(self) -> Budget:
        """The budget as an object, whichever way it was given."""
        return Budget.of_entries(self.budget)

    @property
    def request(self) -> str:
        """What was asked for, in words."""
        return str(self.amount) if self.bounded else "everything"

    @property
    def recent(self) -> int:
        """Newest entries protected by mask at an eviction (the buffer, unless a method says less)."""
        return self.buffer

    @property
    def heads_alone(self) -> bool:
        """Whether what a KV head keeps depends on it alone: only then may heads lie on several ranks."""
        return not (self.one_set or self.traits.ragged or self.traits.scope == "model")

    @property
    def no_sample(self) -> str:
        """Why a sample by these scores would mean nothing; empty if it does mean something."""
        return ""

    @property
    def protects_prompt(self) -> bool:
        """Whether the whole prompt is protected."""
        return self.amount.prompt == "kept"

    def equal_share(self, view: LayerView) -> Tensor:
        """int64 ``[batch]``: entries that the budget gives to every head of a row alike."""
        share = view.prompt_lens if self.amount.prompt == "kept" else torch.zeros_like(view.prompt_lens)
        return share + view.budget

    def with_budget(self, budget: int | Budget) -> Self:
        """The same policy with another budget."""
        return dataclasses.replace(self, budget=budget)

    def smallest_budget(self, below: int) -> int:
        """The smallest count that this policy accepts as its budget.

        Raises
        ------
        BudgetError
            If it accepts none below ``below``.
        """
        for entries in range(1, below):
            with contextlib.suppress(ConfigError):
                self.with_budget(Budget(entries=entries, prompt=self.amount.prompt))
                return entries
        raise BudgetError(f"{self.name} accepts no budget below {below} entries: lower its buffer or sinks.")

    def per_layer(self) -> Self:
        """The same policy with every layer deciding alone; itself if it does so already."""
        return self

    def options(self) -> dict[str, Any]:
        """Every hyper-parameter by name, JSON-ready: ``type(policy)(**policy.options())`` is equal."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init}
        budget = fields.get("budget")  # a composition has none of its own
        if isinstance(budget, Budget) and budget.prompt == "counts" and budget.keep_ratio is None:
            fields["budget"] = budget.entries or budget
        return fields

    def check(self, spec: Any) -> list[str]:
        """Reasons why this policy cannot run on a model; empty if it can.

        Parameters
        ----------
        spec
            :class:`~kvkeep.core.spec.ModelSpec` of the model.
        """
        return []

    @abstractmethod
    def score(self, view: LayerView) -> Tensor:
        """Usefulness of every entry, float32 ``[batch, kv_heads, entries]``, larger = keep.

        What stands at protected or empty slots is ignored.
        """

    @abstractmethod
    def select(self, view: LayerView, scores: Tensor, counts: KeepCounts) -> KeepDecision:
        """Choose ``counts`` entries per head, the protected ones among them."""

    def score_all(self, views: Sequence[LayerView]) -> list[Tensor]:
        """Scores of several layers at once.

        Policies of scope ``"model"`` see all layers here and merge them; the others score each alone.
        """
        return [self.score(view) for view in views]

    def allocate(
        self, views: Sequence[LayerView], scores: Sequence[Tensor], counts: Sequence[KeepCounts]
    ) -> list[KeepCounts]:
        """How many entries each head keeps; by default what the budget gives to every head alike.

        A policy that moves entries between heads or layers declares ``ragged`` and keeps the sum over
        ``views`` and heads, row by row.

        Parameters
        ----------
        views, scores
            The layers that decide together, and their scores.
        counts
            The equal shares, one per layer.
        """
        return list(counts)

    def merge(self, view: LayerView, decision: KeepDecision) -> Tensor | None:
        """Values of the kept entries after an eviction, if it changes them; called before it is carried out.

        A policy that writes this declares ``merges``.

        Parameters
        ----------
        view, decision
            What it saw of one layer, and what it decided.

        Returns
        -------
        Tensor or None
            ``[batch, kv_heads, max_kept, value_dim]``, of the type of the values; ``None``: they stay as
            they are.
        """
        return None

    def decide(self, views: Sequence[LayerView], counts: Sequence[KeepCounts]) -> list[KeepDecision]:
        """Score, check the scores, decide by them.

        Raises
        ------
        ScoreError
            If a score has the wrong shape, or is NaN (:class:`~kvkeep.core.errors.NotANumberError`).
        """
        scores = self.score_all(views)
        for view, score in zip(views, scores, strict=True):
            check_scores(self.name, view, score)
        return self.decide_by(views, scores, counts)

    def decide_by(
        self, views: Sequence[LayerView], scores: Sequence[Tensor], counts: Sequence[KeepCounts]
    ) -> list[KeepDecision]:
        """What follows the scores, whoever made them: allocate, select."""
        shares = self.allocate(views, scores, counts)
        return [
            self.select(view, score, share) for view, score, share in zip(views, scores, shares, strict=True)
        ]


_KINDS: dict[type, str] = {
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
    type(None): "none",
}


@functools.cache
def _plain_kinds(policy: type[Policy]) -> dict[str, frozenset[type]]:
    """The options that are plain numbers or switches, and what each may be."""
    try:
        hints = typing.get_type_hints(policy)
    except NameError:  # a class that was defined inside a function, with types of that function
        return {}
    kinds = {name: frozenset(typing.get_args(hint)) or frozenset({hint}) for name, hint in hints.items()}
    return {name: kind for name, kind in kinds.items() if kind <= _KINDS.keys()}


def _fits(value: Any, kinds: frozenset[type]) -> bool:
    if isinstance(value, bool) or value is None:
        return type(value) in kinds
    if isinstance(value, int):
        return int in kinds or float in kinds
    return isinstance(value, float) and float in kinds and math.isfinite(value)


def check_scores(name: str, view: LayerView, scores: Tensor) -> None:
    """Refuse scores that cannot be ranked.

    Raises
    ------
    ScoreError
        Naming the policy and the layer, if the shape is wrong.
    NotANumberError
        The same, if a candidate's score is NaN.
    """
    if tuple(scores.shape) != view.shape:
        raise ScoreError(
            f"{name} returned scores of shape {tuple(scores.shape)} for layer {view.layer}; expected "
            f"[batch, kv_heads, entries] = {view.shape}."
        )
    if bool((scores.isnan() & view.candidates).any()):
        raise NotANumberError(
            f"{name} returned NaN for an entry of layer {view.layer}: its keys, values or queries are not "
            "finite, or the policy divides by zero. Try float32, or another policy."
        )
