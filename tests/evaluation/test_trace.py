"""The task of the built-in reasoner, as the harness sees it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvkeep.core.errors import ConfigError
from kvkeep.evaluation.grading.text_classes import text_facts
from kvkeep.evaluation.runlog import read_run
from kvkeep.evaluation.splits import ids_sha256, part_of
from kvkeep.evaluation.tasks.registry import make_task
from kvkeep.evaluation.tasks.trace import PARTS, Trace
from kvkeep.testbed.model import Shape, make_model
from kvkeep.testbed.tokenizer import make_tokenizer


@pytest.fixture(scope="module")
def task() -> Trace:
    return Trace(size="S", count=60)


def chain(task: Trace, name: str, change: Callable[[str], str] = str) -> str:
    """The right text, each word changed."""
    return " ".join(change(word) for word in task.programs(part_of(name))[name].chain[:-1])


def test_the_parts_agree_with_the_rule_of_the_split(task: Trace) -> None:
    """Programs that the model was trained on must be in neither part, and the parts must not mix."""
    for part in PARTS:
        names = {problem.id for problem in task.problems(part)}
        assert len(names) == 60
        assert {part_of(name) for name in names} == {part}
        assert {task.programs(part)[name].split for name in names} == {part}
    assert len(task.all_problems()) == 120


def test_the_right_chain_is_right_in_every_role(task: Trace) -> None:
    """A grader that misses right answers would blame the policies."""
    for problem in task.problems("dev", 20):
        grade = task.grade(problem, chain(task, problem.id))
        assert (grade.answer_class, grade.score, grade.extra["faults"]) == ("correct", 1.0, {})
        assert grade.extra["first_error"] is None
        assert all(right == total for right, total in grade.extra["parts"].values())


def test_other_digits_cost_their_share(task: Trace) -> None:
    """The score is what compares policies; one wrong read must not cost the whole problem."""
    problem = task.problems("dev", 1)[0]
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
    for problem in task.all_problems():
        words = chain(task, problem.id).split()
        facts = text_facts(" ".join(words), words, finished=True, cycles=True)
        alarms += facts.failure_class != "ok" or facts.loop_onset is not None
    assert alarms <= 0.01 * 120


def test_the_length_limit_fits_right_chains_and_ends_loops(task: Trace) -> None:
    """Too short a limit would truncate right answers; a long one makes every loop cost a fortune."""
    longest = max(len(program.chain) for part in PARTS for program in task.programs(part).values())
    assert task.max_new is not None
    assert longest < task.max_new < 2 * longest


def test_a_dial_that_is_not_turned_leaves_sealed_studies_alone() -> None:
    """The hash below stands in a study that was sealed before there were distractors."""
    sealed = "6f0c22bd7691b87e146c1085f439bd08e0e1a816193cf9990a50a63ebce42d8b"
    assert make_task("trace").fingerprint() == make_task("trace(distractors=0)").fingerprint() == sealed
    assert make_task("trace(distractors=1)").fingerprint() != sealed


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


@pytest.fixture(scope="module")
def reasoner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that knows nothing, under the name of a shipped one."""
    folder = tmp_path_factory.mktemp("models") / "trace-1"
    shape = Shape(layers=1, width=32, heads=2, kv_heads=1, head_dim=16, feed_forward=32)
    make_model(shape, 0).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def shipped(reasoner: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As if it came with kvkeep."""
    monkeypatch.setattr("kvkeep.testbed.shipped.MODELS", reasoner.parent)
    return reasoner


def call(*arguments: object) -> Result:
    from kvkeep.cli.app import app

    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def facts(result: Result) -> Any:
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_a_first_evaluation_needs_neither_task_nor_model(shipped: Path, tmp_path: Path) -> None:
    """The offline default: words, end token, sampling and grading fit together without any download."""
    policy = ("--policy", "random", "--budget", 40, "--buffer", 16)
    found = facts(call("eval", *policy, "--limit", 1, "--draws", 2, "--out", tmp_path / "run", "--json"))
    assert (found["task"], found["model"], found["samples"]) == ("trace", "trace-1", 2)
    assert found["metric"] == "score"
    assert set(found["parts"]) == {"hot", "warm", "dormant"}
    assert found["evictions"] > 1
    log = read_run(tmp_path / "run")
    assert log.header.budget == {"entries": 40, "prompt": "kept"}
    assert (log.header.sampling["preset"], log.header.sampling["temperature"]) == ("trace", 0.6)
    assert log.header.extra["draws_differ_by"] == "sampling"
    for sample in log.samples:
        assert sample.prefill_cache == sample.prompt_tokens
        assert {"parts", "steps", "faults", "first_error"} <= set(sample.extra["grade"])


def test_memory_is_matched_in_the_mode_of_the_run(shipped: Path, tmp_path: Path) -> None:
    """A budget that counts the prompt, matched to one that does not, would be another question."""
    task = (
        "--task",
        "trace(size=S, steps=4, count=2)",
        "--max-new-tokens",
        90,
        "--policy",
        "random",
        "--buffer",
        16,
    )
    facts(call("eval", *task, "--budget", 40, "--out", tmp_path / "run", "--json"))
    tries = ("--policy", "streaming-llm", "--buffer", 16, "--out", tmp_path / "tries")
    found = facts(call("match", tmp_path / "run", *tries, "--json"))
    header = read_run(tmp_path / "tries" / f"budget-{found['budget']}").header
    assert header.budget["prompt"] == "kept"
    assert abs(found["budget"] - 40) <= 6


def test_a_study_from_first_look_to_decision(shipped: Path, tmp_path: Path) -> None:
    """The whole way on the built-in task, as it is typed: dev runs, plan, seal, held-out runs, decision."""
    common = ("--task", "trace(size=S, steps=4, count=6)", "--max-new-tokens", 40, "--draws", 2)
    arms = {"random": 24, "streaming-llm": 24}

    def evaluate(name: str, place: str, *more: object) -> Result:
        arm = ("--policy", name, "--budget", arms[name], "--buffer", 8, "--out", tmp_path / place)
        return call("eval", *common, *arm, *more, "--json")

    dev = [tmp_path / f"dev-{name}" for name in arms]
    for name, place in zip(arms, dev, strict=True):
        facts(evaluate(name, place.name))
    plan = tmp_path / "plan.yaml"
    words = ("--question", "Does it?", "--hypothesis", "It does.", "--limit", 5)
    assert call("study", "draft", *dev, "--out", plan, *words).exit_code == 0
    sealed = ("--split", "confirm", "--limit", 5, "--prereg", plan)
    early = evaluate("random", "early", *sealed)
    assert (early.exit_code, "not frozen" in early.stderr) == (1, True)
    assert call("study", "freeze", plan).exit_code == 0
    for name in arms:
        facts(evaluate(name, f"confirm-{name}", *sealed))
    strange = evaluate("random", "strange", "--split", "confirm", "--limit", 4, "--prereg", plan)
    assert (strange.exit_code, "registered as" in strange.stderr) == (1, True)
    assert not (tmp_path / "strange").exists()
    confirmed = [tmp_path / f"confirm-{name}" for name in arms]
    refused = call("compare", *confirmed)
    assert "frozen pre-registration" in refused.stderr
    found = facts(call("compare", *confirmed, "--confirm", "--prereg", plan, "--json"))
    (comparison,) = found["comparisons"].values()
    assert (comparison["difference"]["metric"], comparison["difference"]["n"]) == ("score", 5)
    assert found["decision"]["branch"] in "ABC"


def test_weights_that_are_not_there_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a copy without weights the hub would be asked for a model of that name, and answer nonsense."""
    monkeypatch.setattr("kvkeep.testbed.shipped.MODELS", tmp_path / "models")
    lacking = call("eval", "--policy", "full", "--out", tmp_path / "run")
    assert lacking.exit_code == 2
    assert "the weights of 'trace-1' are not part of this copy" in lacking.stderr
    assert not (tmp_path / "run").exists()


def test_a_mistyped_reasoner_is_explained(shipped: Path, tmp_path: Path) -> None:
    """Choices are worth more than a failed download."""
    wrong = call("generate", "--policy", "full", "--model", "trace-7", "BOS GO")
    assert wrong.exit_code == 2
    assert "Choose one of trace-1" in wrong.stderr


def test_the_split_is_shown(tmp_path: Path) -> None:
    """What `kvkeep eval split trace` prints is what runs are made of."""
    shown = facts(call("eval", "split", "trace(size=S, count=30)", "--json"))
    task = make_task("trace(size=S, count=30)")
    for part in PARTS:
        ids = [problem.id for problem in task.problems(part)]
        assert shown[part] == {"problems": 30, "ids_sha256": ids_sha256(ids)}
