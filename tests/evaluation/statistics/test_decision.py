"""Families of comparisons and what follows from them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.core.errors import ConfigError
from kvkeep.evaluation.statistics.correction import corrected
from kvkeep.evaluation.statistics.decision import decide
from kvkeep.evaluation.statistics.paired import PairedDifference, paired_difference
from tests.evaluation.statistics.studies import as_problems

BASE = paired_difference(
    as_problems([0.0, 1.0, 0.0]), as_problems([1.0, 1.0, 0.0]), rng=np.random.default_rng(0), resamples=100
)


def difference(estimate: float, p: float) -> PairedDifference:
    return dataclasses.replace(BASE, estimate=estimate, p=p)


def test_corrections_by_hand() -> None:
    """The published pair of p values, in a family of four with two empty cells."""
    p = {"a": 0.0054, "b": 0.0024, "c": 0.5, "d": 0.9}
    assert list(corrected(p, "bonferroni").values()) == pytest.approx([0.0216, 0.0096, 1.0, 1.0])
    assert list(corrected(p, "holm").values()) == pytest.approx([0.0162, 0.0096, 1.0, 1.0])
    assert corrected(p, "none") == p
    with pytest.raises(ConfigError, match="'fdr'"):
        corrected(p, "fdr")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="not at least one"):
        corrected({})


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_is_never_weaker_than_bonferroni(values: list[float]) -> None:
    """Holm is the default because it finds whatever Bonferroni finds."""
    p = {str(place): value for place, value in enumerate(values)}
    holm, bonferroni = corrected(p, "holm"), corrected(p, "bonferroni")
    for cell, value in p.items():
        assert value - 1e-12 <= holm[cell] <= bonferroni[cell] + 1e-12


@pytest.mark.parametrize(
    ("cells", "branch"),
    [
        ({"x/64": (0.05, 0.001), "x/128": (0.01, 0.4)}, "A"),
        ({"x/64": (0.05, 0.03), "x/128": (-0.01, 0.4)}, "B"),  # 0.03 does not survive two cells
        ({"x/64": (0.05, 0.001), "x/128": (-0.04, 0.001)}, "C"),
        ({"x/64": (-0.05, 0.001), "x/128": (0.01, 0.4)}, "C"),
    ],
)
def test_branches(cells: dict[str, tuple[float, float]], branch: str) -> None:
    """The branch is the program's to name: a person would see what was hoped for."""
    assert decide({cell: difference(*facts) for cell, facts in cells.items()}).branch == branch


def test_the_decision_is_a_sentence() -> None:
    """A reader must not need the code to know what was decided and why."""
    decision = decide(
        {"tiny/64": difference(0.0479, 0.0024), "tiny/128": difference(0.01, 0.3)},
        correction="bonferroni",
        branches={"A": "claim it", "B": "inconclusive", "C": "reject"},
    )
    assert decision.sentence == (
        "Branch A: 1 of 2 cells better and 0 worse after Bonferroni correction at 0.05: "
        "tiny/64 +4.79 pp (p = 0.0048). What follows: claim it."
    )
    assert [cell.verdict for cell in decision.cells] == ["better", "undecided"]
    with pytest.raises(ConfigError, match="need words"):
        decide({"a": BASE}, branches={"A": "claim"})
