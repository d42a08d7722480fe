"""What every policy promises, checked on the views that the engine shows it."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable, Sequence
from unittest import SkipTest

import torch
from torch import Tensor

from kvkeep.core.decision import KeepCounts, KeepDecision
from kvkeep.core.errors import CacheIntegrityError, ConfigError
from kvkeep.core.policy import Policy
from kvkeep.core.traits import Traits
from kvkeep.core.view import LayerView
from kvkeep.engine.spec import model_spec
from kvkeep.testing.subject import Subject, require, shared_model
from kvkeep.testing.variants import flipped, of_head, paired_tensors, with_contents, with_empty_slots
from kvkeep.testing.watching import copy_view

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def documented(subject: Subject) -> None:
    """Name, one line, and where it comes from: the page that users read is made of these."""
    policy = subject.policy
    require(policy.name, f"{type(policy).__name__} has no name")
    text = inspect.getdoc(type(policy)) or ""
    first = text.split("\n\n")[0]
    require(
        first.endswith(".") and "\n" not in first, f"the docstring starts with {first!r}, not one sentence"
    )
    for section in ("Source", "Deviations"):
        heading = f"\n{section}\n{'-' * len(section)}\n"
        require(heading in text, f"the docstring has no section {section!r}")


def frozen(subject: Subject) -> None:
    """A policy whose numbers can change between two evictions is not reproducible."""
    policy = subject.policy
    require(dataclasses.is_dataclass(policy), "a policy is a dataclass")
    try:
        policy.buffer = 1  # type: ignore[misc]
    except (AttributeError, dataclasses.FrozenInstanceError):
        pass
    else:
        raise AssertionError("a hyper-parameter could be changed: use @dataclass(frozen=True)")
    require(isinstance(policy.traits, Traits), "traits is not a Traits object")
    require(policy.traits == policy.traits, "two looks at traits differ")


def rebuilt_from_options(subject: Subject) -> None:
    """Run logs hold the options; without a way back a run cannot be repeated."""
    policy, kind = subject.policy, type(subject.policy)
    missing = {field.name for field in dataclasses.fields(policy) if field.init} - policy.options().keys()
    require(not missing, f"options() leaves out {sorted(missing)}")
    require(kind(**policy.options()) == policy, "kind(**policy.options()) differs from the policy")
    if any(isinstance(value, Policy) for value in policy.options().values()):
        return  # a composition: logs write its parts out
    try:
        text = json.dumps(policy.options())
    except TypeError as error:
        raise AssertionError(f"options() cannot be written as JSON: {error}") from error
    if policy.bounded and policy.amount.prompt == "counts":
        require(kind(**json.loads(text)) == policy, "options do not survive JSON")


def refusals_are_reasons(subject: Subject) -> None:
    """The engine shows what check() returns to the user, one line each."""
    reasons = subject.policy.check(model_spec(shared_model().config))
    require(
        isinstance(reasons, list) and all(isinstance(each, str) and each for each in reasons),
        f"check() returned {reasons!r}, not a list of sentences",
    )


def decisions_are_sound(subject: Subject) -> None:
    """Ascending, unique, stored, protected ones among them, as many as asked for: else entries get lost."""
    for dtype in _DTYPES:
        for eviction in subject.evictions(dtype):
            _check(subject.policy, eviction.views, eviction.counts, eviction.decisions)


def protection_is_by_position(subject: Subject) -> None:
    """After the first eviction slots and positions differ; sinks and newest tokens go by position."""
    policy = subject.policy
    for eviction in subject.evictions():
        for view, decision in zip(eviction.views, eviction.decisions, strict=True):
            for row, heads in enumerate(_kept_positions(view, decision)):
                seen, prompt = int(view.seq_lens[row]), int(view.prompt_lens[row])
                owed = set(range(policy.sinks)) | set(range(seen - policy.recent, seen))
                if policy.protects_prompt:
                    owed |= set(range(prompt))
                for head in heads:
                    require(owed <= set(head), f"protected positions {sorted(owed - set(head))} were evicted")


def protection_survives_ties(subject: Subject) -> None:
    """When all scores are equal nothing but the mask tells a sink from the rest."""
    for eviction in subject.evictions():
        views = [
            with_contents(view, torch.ones_like, torch.ones_like, torch.zeros_like) for view in eviction.views
        ]
        _check(subject.policy, views, eviction.counts, _decide(subject.policy, views, eviction.counts))


def protection_survives_large_float16(subject: Subject) -> None:
    """Squares of large float16 numbers are infinite; a score of infinity must not push a sink out."""
    for eviction in subject.evictions():
        views = [
            with_contents(
                view, lambda k: (k.sign() * 75).half(), lambda v: (v.sign() * 6e4).half(), Tensor.half
            )
            for view in eviction.views
        ]
        _check(subject.policy, views, eviction.counts, _decide(subject.policy, views, eviction.counts))


def scores_are_finite(subject: Subject) -> None:
    """Scores are ranked in float32, one per entry; a NaN has no rank."""
    for dtype in _DTYPES:
        for eviction in subject.evictions(dtype):
            for view, scores in zip(eviction.views, subject.policy.score_all(eviction.views), strict=True):
                require(scores.dtype == torch.float32, f"{dtype} entries gave {scores.dtype} scores")
                require(
                    tuple(scores.shape) == view.shape, f"scores {tuple(scores.shape)} for a view {view.shape}"
                )
                ranked = scores[view.candidates]
                require(bool(ranked.isfinite().all()), f"{dtype} entries gave scores that are not finite")


def inputs_are_left_alone(subject: Subject) -> None:
    """Views are the cache's own memory: writing to one changes the model's past."""
    for eviction in subject.evictions():
        views = [copy_view(view) for view in eviction.views]
        _decide(subject.policy, views, eviction.counts)
        for before, after in zip(eviction.views, views, strict=True):
            for name, old, new in paired_tensors(before, after):
                require(torch.equal(old, new), f"the policy wrote to view.{name}")


def merged_values_fit(subject: Subject) -> None:
    """New values of kept entries: finite, of the right shape and type, and the old ones are left alone."""
    if not subject.policy.traits.merges:
        raise SkipTest(f"{subject.policy.name} does not merge")
    for dtype in _DTYPES:
        for eviction in subject.evictions(dtype):
            for view, decision in zip(eviction.views, eviction.decisions, strict=True):
                shown = copy_view(view)
                values = subject.policy.merge(shown, decision)
                if values is None:
                    continue
                wanted = (*decision.indices.shape, view.values.shape[-1])
                require(tuple(values.shape) == wanted, f"values of shape {tuple(values.shape)}, not {wanted}")
                require(values.dtype == view.values.dtype, f"{values.dtype} values for a {dtype} cache")
                listed = torch.arange(wanted[2]) < decision.lengths[..., None]
                finite = bool(values[listed].isfinite().all())
                require(finite, f"{dtype} entries gave values that are not finite")
                for name, old, new in paired_tensors(view, shown):
                    require(torch.equal(old, new), f"the policy wrote to view.{name}")


def reads_only_what_it_declares(subject: Subject) -> None:
    """What is not declared is not recorded: the policy would fail in the middle of a generation."""
    for eviction in subject.evictions():
        try:
            _decide(subject.policy, eviction.views, eviction.counts)
        except ConfigError as error:
            raise AssertionError(str(error)) from error


def same_stream_same_decision(subject: Subject) -> None:
    """A policy is a pure function: no state, no global random numbers."""
    twin = type(subject.policy)(**subject.policy.options())
    for eviction in subject.evictions():
        first = [_positions(eviction.views, eviction.decisions)]
        for policy in (subject.policy, twin):
            first.append(_positions(eviction.views, _decide(policy, eviction.views, eviction.counts)))
        require(first[0] == first[1] == first[2], "the same view and random stream gave another decision")


def empty_slots_do_not_count(subject: Subject) -> None:
    """Slots behind a row's entries hold rubbish, and how many there are depends on the other rows."""
    for eviction in subject.evictions():
        views = [with_empty_slots(view) for view in eviction.views]
        decisions = _decide(subject.policy, views, eviction.counts)
        require(
            _positions(views, decisions) == _positions(eviction.views, eviction.decisions),
            "three more empty slots changed what is kept",
        )


def heads_are_alike(subject: Subject) -> None:
    """Permuting the KV heads permutes the decision: no head is special."""
    traits = subject.policy.traits
    if traits.random or traits.calibration:
        raise SkipTest(f"{subject.policy.name} draws or calibrates per head")
    for eviction in subject.evictions():
        decisions = _decide(subject.policy, [flipped(view) for view in eviction.views], eviction.counts)
        there = _positions([flipped(view) for view in eviction.views], decisions)
        back = [[row[::-1] for row in layer] for layer in there]
        require(
            back == _positions(eviction.views, eviction.decisions), "another order of heads, another choice"
        )


def heads_decide_alone(subject: Subject) -> None:
    """A head keeps the same without the others: ranks of a server have a part of the heads each."""
    policy = subject.policy
    if not policy.heads_alone:
        raise SkipTest(f"{policy.name} says that it looks at heads together")
    for eviction in subject.evictions():
        for view, count, kept in zip(
            eviction.views,
            eviction.counts,
            _positions(eviction.views, eviction.decisions),
            strict=True,
        ):
            for head in range(view.shape[1]):
                part = of_head(view, head)
                own = dataclasses.replace(count, per_head=count.per_head[:, head : head + 1])
                alone = _positions([part], _decide(policy, [part], [own]))[0]
                require(
                    alone == [row[head : head + 1] for row in kept],
                    f"KV head {head} keeps other entries alone than beside the others: let the property "
                    "heads_alone say so",
                )


CHECKS: tuple[Callable[[Subject], None], ...] = (
    documented,
    frozen,
    rebuilt_from_options,
    refusals_are_reasons,
    decisions_are_sound,
    protection_is_by_position,
    protection_survives_ties,
    protection_survives_large_float16,
    scores_are_finite,
    inputs_are_left_alone,
    merged_values_fit,
    reads_only_what_it_declares,
    same_stream_same_decision,
    empty_slots_do_not_count,
    heads_are_alike,
    heads_decide_alone,
)


def _decide(policy: Policy, views: Sequence[LayerView], counts: Sequence[KeepCounts]) -> list[KeepDecision]:
    return policy.decide(list(views), list(counts))


def _check(
    policy: Policy,
    views: Sequence[LayerView],
    counts: Sequence[KeepCounts],
    decisions: Sequence[KeepDecision],
) -> None:
    exact, ragged = policy.traits.exact_budget, policy.traits.ragged
    wanted = held = kept = torch.zeros(())
    for view, count, decision in zip(views, counts, decisions, strict=True):
        equal = count if exact and not ragged else None
        try:
            decision.check(valid=view.valid, protected=view.protected, counts=equal)
        except CacheIntegrityError as error:
            raise AssertionError(str(error)) from error
        kept = kept + decision.lengths.sum(-1)
        wanted, held = wanted + count.per_head.sum(-1), held + view.valid.sum((1, 2))
    if exact and ragged:
        wanted = torch.minimum(wanted, held)
        require(torch.equal(kept, wanted), f"{kept.tolist()} entries kept of a total of {wanted.tolist()}")


def _kept_positions(view: LayerView, decision: KeepDecision) -> list[list[list[int]]]:
    """Kept positions, ``[row][head]``."""
    positions = view.positions.gather(-1, decision.indices)
    return [
        [head[:length].tolist() for head, length in zip(row, lengths, strict=True)]
        for row, lengths in zip(positions, decision.lengths.tolist(), strict=True)
    ]


def _positions(views: Sequence[LayerView], decisions: Sequence[KeepDecision]) -> list[list[list[list[int]]]]:
    return [_kept_positions(view, decision) for view, decision in zip(views, decisions, strict=True)]
