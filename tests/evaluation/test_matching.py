"""Budgets that hold the same memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvkeep
from kvkeep.core.errors import ConfigError, EvidenceError
from kvkeep.evaluation.expected_cache import expected_cache
from kvkeep.evaluation.matching import match_budget
from kvkeep.evaluation.records import Run
from tests.evaluation.runs import header, sample


def cache(mean: float, prefill: float = 10.0) -> SimpleNamespace:
    return SimpleNamespace(mean_cache=mean, prefill_cache=prefill)


@given(
    target=st.integers(40, 400),
    offset=st.integers(-30, 30),
    slope=st.floats(0.5, 1.5),
    start=st.none() | st.integers(1, 1000),
)
def test_finds_a_budget_in_a_few_runs(target: int, offset: int, slope: float, start: int | None) -> None:
    """Each try is a run of a model: a search that dawdles costs hours."""
    match = match_budget(
        lambda budget: cache(max(1.0, offset + slope * budget)),
        cache(float(target)),
        low=1,
        high=1000,
        start=start,
    )
    assert abs(match.mean_cache / target - 1) <= 0.02
    assert match.ratio == match.mean_cache / target
    assert len(match.tries) <= 20


def test_a_saw_tooth_is_matched_in_two_tries() -> None:
    """The usual case: same cadence, other buffer. The mean differs by half the difference of the buffers."""

    def measured(budget: int, buffer: int):  # type: ignore[no-untyped-def]
        return expected_cache(kvkeep.RandomEviction(budget=budget, buffer=buffer), prompt=40, steps=600)

    match = match_budget(lambda budget: measured(budget, 32), measured(128, 8), low=64, high=256, start=128)
    assert len(match.tries) == 2
    assert match.budget == 118  # near 128 + 9/2 - 33/2, but for the ramp
    assert "mean cache 127.2 against 125.5 (+1.4 %)" in str(match)
    assert "matched on mean_cache" in str(match)


def test_end_of_prompt_matching_misleads_visibly() -> None:
    """Two policies equal when the prompt ends can differ twofold from there on: both are printed."""
    small = match_budget(
        lambda budget: cache(2.0 * budget, prefill=float(min(budget, 100))),
        cache(64.0, prefill=64.0),
        low=8,
        high=128,
        on="prefill_cache",
    )
    assert 63 <= small.prefill_cache <= 65
    assert small.mean_cache / small.target > 1.9
    assert "mean cache 128.0 against 64.0 (+100.0 %)" in str(small)


@given(entries=st.integers(40, 400), weight=st.floats(0.15, 0.5), share=st.floats(0.0, 0.5))
def test_entries_of_two_widths_are_matched_by_their_bytes(entries: int, weight: float, share: float) -> None:
    """Equal entries would give the arm in few bits less, and a screening by name of the width more."""

    def measured(budget: int) -> SimpleNamespace:
        full = int(share * budget)
        memory = full + (budget - full) * weight
        return SimpleNamespace(mean_cache=float(budget), prefill_cache=9.0, mean_memory=memory)

    reference = SimpleNamespace(mean_cache=float(entries), prefill_cache=9.0, mean_memory=float(entries))
    match = match_budget(measured, reference, low=1, high=9 * entries, on="mean_memory", tolerance=0.05)
    assert abs(measured(match.budget).mean_memory / entries - 1) <= 0.05
    assert match.mean_cache > 1.05 * entries
    assert match.ratio == match.matched / entries
    assert f"({match.matched:.1f} entries in 16 bits" in str(match)
    assert len(match.tries) <= 24


def test_unlike_widths_are_not_matched_by_entries() -> None:
    """It would find a budget of equal entries, and call it equal memory."""
    few = {"bits": 4, "protect": "policy"}
    one = Run(header=header(), samples=(sample("a", 0, True),))
    other = Run(header=header(precision=few), samples=(sample("a", 0, True, mean_memory=100.0),))
    with pytest.raises(EvidenceError, match=r"in 4 bits \(policy\): equal entries are not equal bytes"):
        match_budget(lambda budget: other, one, low=1, high=9)
    assert match_budget(lambda budget: other, one, low=1, high=9, on="mean_memory").ratio == 1.0


def test_what_cannot_be_matched_names_the_nearest() -> None:
    """A silent near miss would be reported as a match."""
    with pytest.raises(ConfigError, match=r"nearest is 100 with 50\.0"):
        match_budget(lambda budget: cache(budget / 2), cache(400.0), low=1, high=100)
    with pytest.raises(ConfigError, match="must have been measured"):
        match_budget(lambda budget: cache(1.0), cache(0.0), low=1, high=100)
    with pytest.raises(ConfigError, match="'peak'"):
        match_budget(lambda budget: cache(1.0), cache(1.0), low=1, high=100, on="peak")  # type: ignore[arg-type]


def test_confirm_problems_are_refused() -> None:
    """A budget chosen while looking at the confirm problems is tuned on them."""
    samples = (sample("a", 0, True),)
    dev = Run(header=header(), samples=samples)
    confirm = Run(header=header(run="held-out", split="confirm"), samples=samples)
    with pytest.raises(EvidenceError, match="'held-out' is on 'confirm'"):
        match_budget(lambda budget: confirm, dev, low=1, high=9)
    with pytest.raises(EvidenceError, match="'held-out' is on 'confirm'"):
        match_budget(lambda budget: dev, confirm, low=1, high=9)
    other = Run(header=header(ids_sha256="j" * 64, draws=1), samples=samples)
    with pytest.raises(EvidenceError) as refused:
        match_budget(lambda budget: other, dev, low=1, high=9)
    assert len(refused.value.reasons) == 2
    assert match_budget(lambda budget: dev, dev, low=1, high=9).ratio == 1.0
