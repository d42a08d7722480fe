"""The task of the built-in reasoner, as the harness sees it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvkeep.core.errors import ConfigError
from kvkeep.evaluation.grading.text_classes import text_facts
from kvkeep.evaluation.splits import part_of
from kvkeep.evaluation.tasks.registry import make_task
from kvkeep.evaluation.tasks.trace import Trace
from kvkeep.testbed.model import Shape, make_model
from kvkeep.testbed.tokenizer import make_tokenizer


@pytest.fixture(scope="module")
def task() -> Trace:
    return Trace(size="S", count=60)


def chain(task: Trace, name: str, change: Callable[[str], str] = str) -> str:
    """The right text, each word changed."""
    return " ".join(change(word) for word in task._programs[name].chain[:-1])


def test_the_parts_agree_with_the_rule_of_the_split(task: Trace) -> None:
    """Programs that the model was trained on must be in neither part, and the parts must not mix."""
    parts = [{p.id for p in task.problems(part)} for part in ("dev", "confirm", "all")]  # type: ignore[arg-type]
    assert [len(part) for part in parts] == [60, 60, 120]
    assert not parts[0] & parts[1]
    splits = {name: task._programs[name].split for name in parts[2]}
    assert all(splits[name] == part_of(name) for name in parts[2])
    assert "train" not in splits.values()


def test_the_right_chain_is_right_in_every_role(task: Trace) -> None:
    """A grader that misses right answers would blame the policies."""
    for problem in task.problems(limit=20):
        grade = task.grade(problem, chain(task, problem.id))
        assert (grade.answer_class, grade.score, grade.extra["faults"]) == ("correct", 1.0, {})
        assert grade.extra["first_error"] is None
        assert all(right == total for right, total in grade.extra["parts"].values())


def test_other_digits_cost_their_share(task: Trace) -> None:
    """The score is what compares policies; one wrong read must not cost the whole problem."""
    problem = task.problems(limit=1)[0]
    answers = problem.reference.split()
    wrong = chain(task, problem.id).split()
    place = max(index for index, word in enumerate(wrong) if word == answers[-1])
    wrong[place] = f"o{(int(answers[-1][1:]) + 1) % 10}"
    grade = task.grade(problem, " ".join(wrong))
    assert grade.answer_class == "wrong"
    assert grade.score == pytest.approx(1 - 1 / len(answers))
    assert grade.extra["faults"] == {"sum": 1}
    assert grade.extra["first_error"] == place
    assert task.grade(problem, "L0 LD k1").answer_class == "not_extracted"


def test_right_chains_raise_no_alarm(task: Trace) -> None:
    """Programs repeat themselves by nature: at most one right chain in a hundred may look like a loop."""
    alarms = 0
    for problem in task.problems():
        words = chain(task, problem.id).split()
        facts = text_facts(" ".join(words), words, finished=True, cycles=True)
        alarms += facts.failure_class != "ok" or facts.loop_onset is not None
    assert alarms <= 0.01 * 120


def test_the_length_limit_fits_right_chains_and_ends_loops(task: Trace) -> None:
    """Too short a limit would truncate right answers; a long one makes every loop cost a fortune."""
    longest = max(len(task._programs[p.id].chain) for p in task.problems())
    assert task.max_new is not None
    assert longest < task.max_new < 2 * longest


def test_dials_can_be_set_and_wrong_ones_are_explained() -> None:
    """`trace(size=L, stale=0.9)` from the command line."""
    assert make_task("trace(size=S, registers=9, count=2)").dials.registers == 9  # type: ignore[attr-defined]
    for text, message in (
        ("trace(size=XL)", "size"),
        ("trace(size=S, hot=40)", "registers"),
        ("trace(sizes=S)", "no setting 'sizes'"),
        ("trace(count=0)", "at least 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_task(text)


def test_an_untrained_reasoner_runs_through_the_command(tmp_path: Path) -> None:
    """Words, end token and grading fit together; the model knows nothing and loops to the limit."""
    from kvkeep.cli.app import app

    shape = Shape(layers=1, width=32, heads=2, kv_heads=1, head_dim=16, feed_forward=32)
    folder = tmp_path / "model"
    make_model(shape, 0).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    arguments = ["eval", "--task", "trace(size=S, count=4)", "--draws", "2", "--out", str(tmp_path / "run")]
    arguments += ["--policy", "random", "--budget", "40", "--buffer", "16", "--prompt-mode", "kept"]
    arguments += ["--model", str(folder)]
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.stderr
    found: Any = json.loads(result.stdout)
    assert found["samples"] == 8
    assert found["metric"] == "score"
    assert set(found["parts"]) == {"hot", "warm", "dormant"}
    assert found["evictions"] > 1
