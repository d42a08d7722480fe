"""The table at the end of `kvkeep demo`, on a reasoner that knows nothing."""

from __future__ import annotations

import pytest

from kvkeep.cli import demo_table
from kvkeep.cli.demo import show_accuracies
from kvkeep.cli.report import waiting
from kvkeep.testbed.model import Shape, make_model


def test_every_policy_is_measured_on_the_same_programs(capsys: pytest.CaptureFixture[str]) -> None:
    """A newcomer's first numbers: none may be left out, and none may come from more memory than it says."""
    shape = Shape(layers=1, width=32, heads=2, kv_heads=1, head_dim=16, feed_forward=32)
    rows = demo_table.measure(make_model(shape, 0).eval(), waiting, count=3)
    assert [row.policy for row in rows] == list(demo_table.POLICIES)
    full, *others = rows
    assert all(row.mean_cache < 0.85 * full.mean_cache for row in others)
    assert len({row.mean_cache for row in others}) == 1
    for row in rows:
        assert 0 <= row.right < 0.5
        assert set(row.by_role) == set(demo_table.ROLES)
    demo_table.show(rows, 3)
    printed = capsys.readouterr().out
    assert all(f"{name} " in printed for name in demo_table.POLICIES)
    assert "runs 3 programs" in printed


def test_a_copy_without_weights_says_so(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The demo must not end in an error because of its last table."""
    monkeypatch.setattr("kvkeep.testbed.shipped.MODELS", tmp_path_factory.mktemp("none"))
    show_accuracies(0, None)
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("right", [1.0, 0.25])
def test_shares_are_those_of_the_answers(right: float) -> None:
    """The table must say what the chains say."""
    from itertools import islice

    from kvkeep.testbed.trace_grade import grade
    from kvkeep.testbed.trace_task import problems, size

    programs = list(islice(problems(size("S"), "dev"), 4))
    solved = int(right * len(programs))
    grades = [grade(each, each.chain if place < solved else []) for place, each in enumerate(programs)]
    row = demo_table.row("x", grades, 10.0)
    assert row.right == right
    assert (row.error > 0) == (right < 1)
