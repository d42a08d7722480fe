"""One run and its interval."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from kvkeep.core.errors import ConfigError, UnknownNameError
from kvkeep.evaluation.records import SampleRecord
from kvkeep.evaluation.statistics.accuracy import accuracy, majority_at, pass_at
from kvkeep.evaluation.statistics.problem_means import problem_means
from tests.evaluation.runs import sample
from tests.evaluation.statistics.studies import as_problems, draw_arms

TINY = [
    sample("b", 1, False),
    sample("a", 0, True),
    sample("a", 1, True),
    sample("b", 0, True),
    sample("c", 0, False, answer_class="not_extracted"),
    sample("c", 1, False),
]


def test_tiny_example_by_hand() -> None:
    """Means 1, 1/2, 0: the mean is 1/2, the standard error sd/√n = (1/2)/√3."""
    problems = problem_means(TINY)
    assert problems.ids == ("a", "b", "c")
    assert problems.means.tolist() == [1.0, 0.5, 0.0]
    assert problems.first.tolist() == [1.0, 1.0, 0.0]
    result = accuracy(problems)
    assert (result.metric, result.n, result.clusters, result.draws) == ("avg@2", 3, 3, 6)
    assert result.estimate == 0.5
    assert result.standard_error == pytest.approx(0.5 / 3**0.5)
    # Worth 0.25 / (1/12) = 3 yes-or-no answers: 0.5 ± 4.302653 / (1 + 18.512821 / 3) · √(1/12 + 18.512821/36)
    assert result.interval == pytest.approx((0.5 - 0.463829, 0.5 + 0.463829), abs=1e-6)
    assert "avg@2 50.0 %" in str(result)
    lengths = accuracy(dataclasses.replace(problems, share=False)).interval  # Student's, wherever it ends
    assert lengths == pytest.approx((0.5 - 4.302653 * 0.5 / 3**0.5, 0.5 + 4.302653 * 0.5 / 3**0.5), rel=1e-6)
    assert (problems.share, problem_means(TINY, "tokens").share, problems.only("a").share) == (
        True,
        False,
        True,
    )
    assert problem_means(TINY, "not_extracted").means.tolist() == [0.0, 0.0, 0.5]


def test_wilson_stands_beside_a_weak_interval() -> None:
    """30 of 30 correct must not pass for certainty: nothing varies, and thirty problems are few."""
    perfect = accuracy(as_problems(np.ones(30)))
    assert perfect.interval == pytest.approx((30 / (30 + stats.t.ppf(0.975, 29) ** 2), 1.0), rel=1e-9)
    assert perfect.wilson == pytest.approx((30 / (30 + 1.959964**2), 1.0), rel=1e-6)
    assert "Wilson" in str(perfect)
    assert accuracy(as_problems(np.tile([0.0, 1.0], 60))).wilson is None
    assert (
        accuracy(
            problem_means([sample(str(i), 0, True, score=0.3 + i / 9) for i in range(4)], "score")
        ).wilson
        is None
    )


@pytest.mark.parametrize("means", [[0.7] * 10, [0.1 + 0.2, 0.3] * 5])
def test_problems_that_agree_leave_room(means: list[float]) -> None:
    """Ten problems, each with 7 (or 3) of 10 parts right: their mean is not known without error."""
    found = accuracy(as_problems(means))
    expected = shares_not_ruled_out(means[0], 10, float(stats.t.ppf(0.975, 9)))
    assert found.interval == pytest.approx(expected, abs=2e-5)


def shares_not_ruled_out(estimate: float, observations: float, reach: float) -> tuple[float, float]:
    """Ends of Wilson's interval by trying: shares from which the estimate is not too far."""
    tried = np.linspace(0, 1, 100_001)
    near = tried[np.abs(estimate - tried) <= reach * np.sqrt(tried * (1 - tried) / observations) + 1e-12]
    return float(near.min()), float(near.max())


@given(
    st.lists(st.sampled_from([0.0, 1 / 3, 0.9, 1.0]), min_size=4, max_size=40),
    st.lists(st.sampled_from("abcd"), min_size=40, max_size=40),
)
def test_the_interval_is_that_of_trying_all_shares(means: list[float], names: list[str]) -> None:
    """It stays between 0 and 1, and holds every share that clusters like these do not speak against."""
    groups = "".join(["a", "b", *names[2 : len(means)]])
    found = accuracy(as_problems(means, groups=groups))
    low, high = found.interval
    assert 0 <= low <= found.estimate <= high <= 1
    variance = found.estimate * (1 - found.estimate)
    if found.standard_error < 1e-3 and variance > 1e-9:
        return  # worth more answers than the steps of trying tell apart
    count = variance / found.standard_error**2 if variance > 1e-9 else found.clusters
    expected = shares_not_ruled_out(found.estimate, count, float(stats.t.ppf(0.975, found.clusters - 1)))
    assert (low, high) == pytest.approx(expected, abs=2e-4)


@pytest.mark.parametrize("chance", [0.03, 0.97])
def test_the_interval_covers_shares_near_the_edge(chance: float) -> None:
    """Where Student's interval leaves the range it also misses the truth far too often."""
    rng = np.random.default_rng(7)
    hits = {True: 0, False: 0}
    for _ in range(1000):
        # Sixty problems in twenty clusters, each cluster with a difficulty of its own.
        difficulty = rng.beta(20 * chance, 20 * (1 - chance), 20).repeat(3)
        problems = as_problems((rng.random(60) < difficulty).astype(float), groups="abcdefghijklmnopqrst" * 3)
        problems = dataclasses.replace(problems, groups=tuple(sorted(problems.groups)))
        for share in hits:
            low, high = accuracy(dataclasses.replace(problems, share=share)).interval
            hits[share] += low <= chance <= high
    assert 930 <= hits[True] <= 985
    assert hits[False] < 900


def test_clusters_widen_the_interval() -> None:
    """Four turns of one dialogue are not four independent problems."""
    values = [1, 1, 0, 0, 1, 1, 0, 0]
    alone, together = accuracy(as_problems(values)), accuracy(as_problems(values, groups="aabbccdd"))
    assert (together.n, together.clusters) == (8, 4)
    assert together.estimate == alone.estimate
    assert together.standard_error == pytest.approx((1 / 3) ** 0.5 / 2)
    assert together.standard_error > alone.standard_error


def test_pass_at_k_by_hand() -> None:
    """One of two correct: a single try succeeds half the time, two tries always."""
    problems = problem_means(TINY)
    assert pass_at(problems, 1).estimate == pytest.approx(0.5)
    assert pass_at(problems, 2).estimate == pytest.approx(2 / 3)
    assert pass_at(problems, 2).metric == "pass@2"
    with pytest.raises(ConfigError, match="1 <= k <= 2"):
        pass_at(problems, 3)


def answers(id: str, *given: str | None, gold: str) -> list[SampleRecord]:
    facts = [{"extra": {"extracted": each}} for each in given]
    return [
        sample(
            id, draw, each == gold, **fact, answer_class="not_extracted" if each is None else
            "correct" if each == gold else "wrong",
        )
        for draw, (each, fact) in enumerate(zip(given, facts, strict=True))
    ]  # fmt: skip


def test_majority_at_k_by_hand() -> None:
    """A vote hides a policy's errors: it must be named, and counted as it says."""
    two_of_three = answers("a", "4", "5", "4", gold="4")
    wrong_wins = answers("b", "5", "7", "5", gold="7")
    tie_goes_to_the_first = answers("c", "1", "2", None, gold="1")
    silent = answers("d", None, None, None, gold="1")
    samples = [*two_of_three, *wrong_wins, *tie_goes_to_the_first, *silent]
    result = majority_at(samples[::-1], 3)
    assert (result.metric, result.estimate, result.n) == ("maj@3", 0.5, 4)
    assert majority_at(samples, 1).estimate == accuracy(problem_means(samples[::3])).estimate == 0.5
    with pytest.raises(ConfigError, match="1 <= k <= 3"):
        majority_at(samples, 4)


def test_answers_that_mean_the_same_vote_together() -> None:
    """Three ways of writing one half are no disagreement."""
    halves = answers("a", "3", "0.5", "\\frac{1}{2}", "1/2", "3", gold="1/2")
    right = [dataclasses.replace(s, correct=True, answer_class="correct") for s in halves[1:4]]
    other = answers("b", "\\text{East}", "west", "east", "x", "y", gold="east")
    right_words = [dataclasses.replace(other[0], correct=True, answer_class="correct"), *other[1:]]
    samples = [halves[0], *right, halves[4], *right_words]
    assert majority_at(samples, 5).estimate == 1.0


def test_avg_at_k_keeps_its_expectation() -> None:
    """If avg@k drifted with k, runs with different numbers of samples could not be read side by side."""
    rng = np.random.default_rng(3)
    for draws in (1, 4, 16):
        means, _ = draw_arms(rng, 400, 100, draws)
        error = means.mean(axis=1).std() / 400**0.5
        assert abs(means.mean() - 0.5) < 4 * error


@pytest.mark.parametrize("problems", [30, 200])
def test_interval_covers_the_truth(problems: int) -> None:
    """An interval that missed the truth too often would sell noise as knowledge."""
    means, _ = draw_arms(np.random.default_rng(problems), 2000, problems, 3)
    hits = 0
    for study in means:
        low, high = accuracy(as_problems(study)).interval
        hits += low <= 0.5 <= high
    assert 0.93 <= hits / 2000 <= 0.97


def test_spread_of_whole_runs_would_be_far_too_small() -> None:
    """The reason for the formula: run means share their problems, so they agree too well."""
    rng = np.random.default_rng(0)
    chance = rng.beta(0.6, 0.6, 30)
    x = rng.random((30, 16)) < chance[:, None]
    right = accuracy(as_problems(x.mean(axis=1), draws=16)).standard_error
    assert stats.sem(x.mean(axis=0)) < right / 2


def test_mistakes_are_explained() -> None:
    """A wrong metric name or an empty log must not end in a NaN."""
    with pytest.raises(UnknownNameError, match="did you mean 'accuracy'"):
        problem_means(TINY, "acuracy")
    with pytest.raises(ConfigError, match="no samples"):
        problem_means([])
    with pytest.raises(ConfigError, match="at least two"):
        accuracy(as_problems([1.0]))
    with pytest.raises(ConfigError, match="different clusters"):
        problem_means([sample("a", 0, True, cluster="x"), sample("a", 1, True, cluster="y")])
