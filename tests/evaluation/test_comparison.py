"""Comparisons that are refused, and what the fair ones say."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from typing import Any

import pytest

from kvkeep.core.errors import ConfigError, EvidenceError, UnknownNameError
from kvkeep.evaluation.comparison import compare
from kvkeep.evaluation.records import Run
from kvkeep.evaluation.study import explore
from tests.evaluation.runs import names, run

IDS = names("dev", 60)


def arm(share: int, **changes: Any) -> Run:
    """A run that gets three draws right on every ``share``-th problem and none elsewhere."""
    return run({id: [place % share == 0] * 3 for place, id in enumerate(IDS)}, **changes)


BASE = arm(3, run="base")


def reasons(baseline: Run, challenger: Run, **settings: Any) -> str:
    with pytest.raises(EvidenceError) as refused:
        compare(baseline, challenger, resamples=100, **settings)
    return "\n".join(refused.value.reasons)


@pytest.mark.parametrize(
    ("change", "group"),
    [
        ({"task_sha256": "u" * 64}, "task"),
        ({"task_version": "2"}, "task"),
        ({"split_rule": "other"}, "problems"),
        ({"prompt_sha256": "q" * 64}, "prompt"),
        ({"sampling": {"preset": "vase", "temperature": 0.0}}, "sampling"),
        ({"seeds": (7, 8, 9)}, "seeds"),
        ({"grader_version": "2"}, "grader"),
        ({"model_sha256": "n" * 64}, "model"),
        ({"versions": {"kvkeep": "0.2"}}, "versions"),
    ],
)
def test_different_settings_are_refused_unless_allowed(change: dict[str, Any], group: str) -> None:
    """A difference between policies that is one between prompts is the oldest mistake of the field."""
    other = arm(2, **change)
    assert f"--allow {group}" in reasons(BASE, other)
    assert (
        compare(BASE, other, allow=[group], resamples=100).notes[0] == f"differences in {group} were allowed"
    )


def test_a_refusal_names_what_differs_and_everything_at_once() -> None:
    """One reason per attempt would cost a run of the command each."""
    other = arm(2, sampling={"preset": "vase", "temperature": 0.0}, grader_version="2", mean_cache=150.0)
    text = reasons(BASE, other)
    assert "sampling is {'temperature': 0.6} in the baseline and {'temperature': 0.0}" in text
    assert "grader_version is 1 in the baseline and 2" in text
    assert "mean_cache is 100.0 in the baseline and 150.0 in the challenger (+50.0 %" in text
    assert len(text.splitlines()) == 3


def test_policy_budget_and_machine_may_differ() -> None:
    """They are what is compared, or do not decide a result."""
    other = arm(
        2, policy="h2o", budget={"entries": 70, "prompt": "counts"}, hardware={"cpus": 8}, created="later"
    )
    assert compare(BASE, other, resamples=100).difference.estimate == pytest.approx(1 / 6)


def test_missing_and_doubled_samples_are_refused() -> None:
    """The samples that a crash swallowed are not a random choice: hard problems run longest."""
    samples = BASE.samples
    lacking = dataclasses.replace(BASE, samples=samples[1:])
    assert "lacks 1 samples (q/" in reasons(BASE, lacking)
    assert "has 59 of its 60 problems" in reasons(BASE, dataclasses.replace(BASE, samples=samples[3:]))
    assert "more than once" in reasons(BASE, dataclasses.replace(BASE, samples=(*samples, samples[0])))
    strange = dataclasses.replace(samples[0], draw=7)
    assert "promises 3 draws and has 1 samples" in reasons(
        BASE, dataclasses.replace(BASE, samples=(*samples, strange))
    )
    renamed = tuple(dataclasses.replace(s, id="other") if s.id == samples[0].id else s for s in samples)
    assert "other problems than its header" in reasons(BASE, dataclasses.replace(BASE, samples=renamed))


def test_incomplete_problems_can_be_left_out_of_both() -> None:
    """A look at a running experiment must compare the same problems, and say so."""
    lacking = dataclasses.replace(arm(2), samples=arm(2).samples[1:])
    result = compare(BASE, lacking, allow=["missing"], resamples=100)
    assert result.difference.n == 59
    assert any("complete in both" in note for note in result.notes)
    nothing = dataclasses.replace(BASE, samples=())
    assert "no problem is complete" in reasons(BASE, nothing, allow=["missing", "cache"])
    with pytest.raises(UnknownNameError, match="'sampling'"):
        compare(BASE, BASE, allow=["samplin"])


def test_memory_must_be_equal_and_measured() -> None:
    """More memory is the simplest way to a better accuracy."""
    assert "allowed 2 %" in reasons(BASE, arm(2, mean_cache=102.5))
    assert "kvkeep match" in reasons(BASE, arm(2, mean_cache=97.0))
    assert compare(BASE, arm(2, mean_cache=101.9), resamples=100).cache_ratio == pytest.approx(1.019)
    assert compare(
        BASE, arm(2, mean_cache=104.0), tolerance=0.05, resamples=100
    ).cache_ratio == pytest.approx(1.04)
    assert "not measured" in reasons(BASE, arm(2, mean_cache=0.0))
    misleading = compare(BASE, arm(2, mean_cache=200.0), on="prefill_cache", resamples=100)
    assert misleading.prefill_ratio == 1.0
    assert misleading.cache_ratio == 2.0
    assert any("end of the prompt only" in note for note in misleading.notes)


def test_entries_in_few_bits_are_said() -> None:
    """At equal entries one run holds a third of the other's bytes, and the table has no column for it."""
    few = {"bits": 4, "protect": "range", "group": 32, "reserve": 16, "sinks": 4, "recent": 16}
    solved = {name: [True] for name in names("dev", 20)}
    full, coarse = run(solved), run(solved, precision=few)
    said = "entries are stored in full precision and in 4 bits (range): equal entries are not equal bytes"
    with pytest.raises(EvidenceError) as refused:
        compare(full, coarse, resamples=100)
    assert f"{said}: compare them with --match-on mean_memory" in refused.value.reasons[0]
    assert said in compare(full, coarse, allow=["cache"], resamples=100).notes
    matched = "bytes were matched"

    def weigh(each: Run) -> Run:
        return replace(each, samples=tuple(replace(one, mean_memory=9.0) for one in each.samples))

    weighed = (weigh(full), weigh(coarse))
    assert matched in " ".join(compare(*weighed, on="mean_memory", resamples=100).notes)
    allowed = compare(*weighed, on="mean_memory", allow=["cache"], resamples=100)
    assert matched not in " ".join(allowed.notes)
    finer = run(solved, precision={**few, "key_bits": 8})
    notes = " ".join(compare(coarse, finer, allow=["cache"], resamples=100).notes)
    assert "in 4 bits (range) and in 4 bits, keys 8 (range)" in notes
    # An older log has no bytes, and entries are no substitute where some are in few bits.
    with pytest.raises(EvidenceError, match="mean_memory was not measured"):
        compare(full, coarse, on="mean_memory", resamples=100)
    samples = tuple(replace(each, mean_memory=98.5, mean_cache=160.0) for each in coarse.samples)
    weighed = replace(coarse, samples=samples)
    found = compare(full, weighed, on="mean_memory", resamples=100)
    assert found.memory_ratio == pytest.approx(0.985)
    assert found.cache_ratio == pytest.approx(1.6)
    assert f"{said}, and bytes were matched" in found.notes
    for same in ((full, full), (coarse, coarse)):
        assert not any("bits" in note for note in compare(*same, resamples=100).notes)


def test_confirm_problems_need_a_study() -> None:
    """One look at the held-out problems while tuning, and they are held out no longer."""
    held_out = run({id: [True, False] for id in names("confirm", 5)}, split="confirm")
    assert "--confirm and a frozen pre-registration" in reasons(held_out, held_out)


def test_a_fair_comparison_says_all_that_matters() -> None:
    """Accuracy, interval, p, memory, failures, and how much to believe it: one object, JSON-ready."""
    result = compare(BASE, arm(2, run="new"), seed=3, resamples=500)
    assert result.baseline.accuracy.estimate == pytest.approx(1 / 3)
    assert result.challenger.accuracy.estimate == pytest.approx(1 / 2)
    assert result.challenger.given_extracted == pytest.approx(1 / 2)
    assert (result.difference.better, result.difference.worse) == (20, 10)
    assert list(result.growth) == [50]
    assert result.growth[50].n == 50
    assert result.beside["not_extracted"].p == 1.0
    assert 0.1 < result.smallest < 0.4
    assert "60 problems: a true difference below" in result.notes[0]
    assert json.loads(json.dumps(result.as_dict()))["difference"]["n"] == 60
    assert result == compare(BASE, arm(2, run="new"), seed=3, resamples=500)


def test_failures_to_read_an_answer_are_told_apart() -> None:
    """A policy that makes the model ramble would be blamed for bad reasoning."""
    silent = tuple(
        dataclasses.replace(
            s, correct=False, score=0.0, answer_class="not_extracted", failure_class="truncated"
        )
        if s.correct and s.draw < 2
        else s
        for s in BASE.samples
    )
    doubtful = tuple(
        dataclasses.replace(s, answer_class="timed_out") if s.id == IDS[1] else s for s in silent
    )
    result = compare(BASE, dataclasses.replace(BASE, samples=doubtful), resamples=500)
    assert result.difference.estimate == pytest.approx(-2 / 9)
    assert result.beside["not_extracted"].estimate == pytest.approx(2 / 9)
    assert result.beside["truncated"].estimate == pytest.approx(2 / 9)
    assert result.challenger.given_extracted == pytest.approx(20 / (180 - 40 - 3))
    assert result.challenger.if_timed_out_correct == pytest.approx((20 + 3) / 180)


def test_a_task_that_gives_parts_of_a_point_is_judged_by_them() -> None:
    """Two policies that never solve a whole problem would look alike, however much more one of them knows."""
    graded = {"extra": {"metric": "score"}}

    def half_right(run: Run, score: float) -> Run:
        samples = tuple(
            dataclasses.replace(s, correct=False, score=score, answer_class="wrong") for s in run.samples
        )
        return dataclasses.replace(run, samples=samples)

    base, other = half_right(arm(1, **graded), 0.25), half_right(arm(1, run="new", **graded), 0.75)
    assert compare(base, other, resamples=100).difference.estimate == pytest.approx(0.5)
    assert compare(base, other, resamples=100).difference.metric == "score"
    assert explore(base, [other], resamples=100).decision.cells[0].difference.metric == "score"
    assert compare(base, other, metric="accuracy", resamples=100).difference.estimate == 0.0
    assert compare(BASE, arm(2), resamples=100).difference.metric == "accuracy"


def test_several_challengers_are_corrected_for_their_number() -> None:
    """Ten policies against one baseline find something by luck in four cases of ten."""
    family = explore(
        BASE, [arm(2, run="a"), arm(3, run="b"), arm(4, run="c")], correction="bonferroni", resamples=500
    )
    assert list(family.comparisons) == ["a", "b", "c"]
    first = family.decision.cells[0]
    assert first.adjusted_p == pytest.approx(min(1.0, 3 * first.difference.p))
    assert first.difference.family_level == pytest.approx(1 - 0.05 / 3)
    assert family.decision.sentence.startswith("Branch ")
    assert family.preregistration is None
    assert json.dumps(family.as_dict())
    with pytest.raises(ConfigError, match="its own name"):
        explore(BASE, [arm(2), arm(3)])
