"""Tasks: the right problems, all of them, and nothing else."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import pickle
import re
import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest

from kvkeep.core.errors import ConfigError, DataFileError, UnknownNameError
from kvkeep.evaluation.prompts import prompt_template
from kvkeep.evaluation.splits import hash_order, part_of
from kvkeep.evaluation.tasks.data_files import DataFile, read_rows
from kvkeep.evaluation.tasks.gpqa_diamond import shuffled
from kvkeep.evaluation.tasks.livecodebench import LiveCodeBench, read_tests
from kvkeep.evaluation.tasks.registry import available_tasks, make_task, task_class
from tests.evaluation.data import DATA, needs_data

ROWS = {"gsm8k": 1319, "math500": 500, "aime24": 30, "aime25": 30, "aime26": 30}


@needs_data
@pytest.mark.parametrize("name", sorted(ROWS))
def test_published_files_are_read_whole(name: str) -> None:
    """A benchmark of 29 problems, or of 1,318, is another benchmark."""
    task = make_task(name, data=DATA)
    problems = task.all_problems()
    assert len(problems) == len({p.id for p in problems}) == ROWS[name]
    assert all(p.question.strip() and p.reference.strip() for p in problems)
    assert not any("final answer within" in p.question for p in problems)


@needs_data
def test_a_last_line_without_newline_counts(tmp_path: Path) -> None:
    """Counting newlines finds 29 problems in AIME 2025, and a public harness did."""
    content = (DATA / "aime25" / "test.jsonl").read_bytes()
    assert not content.endswith(b"\n")
    assert content.count(b"\n") == 29
    assert len(make_task("aime25", data=DATA / "aime25" / "test.jsonl").all_problems()) == 30


@needs_data
@pytest.mark.parametrize("cut", [1, 400])
def test_a_truncated_file_is_refused(tmp_path: Path, cut: int) -> None:
    """Half a download would be evaluated without a word."""
    content = (DATA / "math500" / "test.jsonl").read_bytes()
    (tmp_path / "test.jsonl").write_bytes(content[:-cut])
    with pytest.raises(DataFileError, match="truncated or was changed"):
        make_task("math500", data=tmp_path / "test.jsonl").all_problems()


def test_the_very_file_is_asked_for(tmp_path: Path) -> None:
    """Rows and hash are checked wherever a file comes from: without its last newline, cut, changed."""
    content = b'{"a": 1}\n\n{"a": 2}\n{"a": 3}'
    digest = hashlib.sha256(content).hexdigest()
    file = DataFile(path="x/test.jsonl", editions={digest: 3}, origin="nowhere")
    path = tmp_path / "test.jsonl"
    path.write_bytes(content)
    assert read_rows(file, path) == ([{"a": 1}, {"a": 2}, {"a": 3}], digest)
    for wrong in (content + b"\n", content[:-9], content[:-1], content.replace(b"3", b"4")):
        path.write_bytes(wrong)
        with pytest.raises(DataFileError, match="truncated or was changed"):
            read_rows(file, path)
    path.write_bytes(content)
    with pytest.raises(DataFileError, match="has 3 rows, expected 4"):
        read_rows(DataFile(path="x/test.jsonl", editions={digest: 4}, origin="nowhere"), path)


@needs_data
def test_the_folder_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nobody wants to type a path with every command."""
    shutil.copytree(DATA / "aime26", tmp_path / "aime26")
    monkeypatch.setenv("KVKEEP_DATA", str(tmp_path))
    assert len(make_task("aime26").all_problems()) == 30


def test_a_missing_file_says_where_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A bare "file not found" sends the user to search the web."""
    monkeypatch.delenv("KVKEEP_DATA", raising=False)
    with pytest.raises(DataFileError, match=r"neither --data nor KVKEEP_DATA .*grade-school-math"):
        make_task("gsm8k").all_problems()
    with pytest.raises(DataFileError, match=str(tmp_path)):
        make_task("gsm8k", data=tmp_path).all_problems()


def test_every_task_has_a_version_and_an_existing_template() -> None:
    """A header without a version cannot tell two graders apart."""
    for name in available_tasks():
        kind = task_class(name)
        assert kind.name == name
        assert kind.version
        prompt_template(kind.template)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("math50", UnknownNameError, "did you mean 'math500'"),
        ("needle(lenght=5)", ConfigError, "no setting 'lenght'; it has: count, depth, distractors, length"),
        ("needle(5)", ConfigError, "write a name"),
        ("needle(length=", ConfigError, "write a name"),
        ("needle(length=20)", ConfigError, "length must be above"),
        ("needle(depth=2)", ConfigError, "outside 0"),
        ("needle(distractors=112)", ConfigError, "0 to 111 get a key each"),
        ("ruler(kind=other)", ConfigError, "multikey"),
    ],
)
def test_wrong_settings_are_explained(text: str, error: type[Exception], message: str) -> None:
    """A mistyped setting that is ignored evaluates something else."""
    with pytest.raises(error, match=message):
        make_task(text)


def test_generated_tasks_refuse_a_data_file(tmp_path: Path) -> None:
    """The user would believe that the file was used."""
    with pytest.raises(ConfigError, match="drop --data"):
        make_task("needle", data=tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "needle(length=300, count=6)",
        "needle(length=300, count=6, distractors=5)",
        "ruler(kind=multikey, length=300, count=6)",
        "ruler(kind=multivalue, length=300, count=6)",
        "ruler(kind=multiquery, length=300, count=6)",
        "ruler(kind=variables, length=300, count=6)",
    ],
)
def test_generated_prompts_fill_the_length_they_were_asked_for(text: str) -> None:
    """ "Retrieval at 4k" with prompts of 2k would flatter every policy."""
    task: Any = make_task(text)
    task.bind(lambda prompt: 2 * len(prompt.split()))
    problems = task.all_problems()
    room = 300 - task.answer_tokens
    for problem in problems:
        assert room - 40 < 2 * len(problem.question.split()) <= room
    assert len({p.id for p in problems}) == 6
    again: Any = make_task(text)
    again.bind(lambda prompt: 2 * len(prompt.split()))
    assert again.all_problems() == problems


def test_only_the_problems_that_are_asked_for_are_made() -> None:
    """A needle of 4,096 tokens takes a second to make, and 200 of them would be made to ask one."""
    task, other = (make_task("needle(length=200, count=30)") for _ in range(2))
    counted: list[str] = []

    def count(text: str) -> int:
        counted.append(text)
        return len(text.split())

    task.bind(count)
    some = task.problems("dev", 3)
    spent = len(counted)
    wanted = {problem.id: problem for problem in other.all_problems() if part_of(problem.id) == "dev"}
    assert some == [wanted[name] for name in hash_order(wanted)[:3]]
    assert task.problems("dev", 3) == some
    assert len(counted) == spent
    assert task.problems("dev") == [wanted[name] for name in hash_order(wanted)]
    assert len(counted) > 2 * spent


def test_needles_are_graded_by_the_number() -> None:
    """A model that names another number must not pass, one that answers in a sentence must."""
    task = make_task("needle(length=200, count=2)")
    first, second = task.all_problems()
    assert first.reference in first.question
    assert task.grade(first, f" {first.reference}. The").answer_class == "correct"
    assert task.grade(first, f"It is {second.reference}").answer_class == "wrong"
    assert task.grade(first, "I do not know").answer_class == "not_extracted"


def test_other_needles_leave_the_needle_where_it_is() -> None:
    """The dial must add things to mistake, and neither move nor change what is asked."""
    plain, more = (
        make_task("needle(length=300, count=9)"),
        make_task("needle(length=300, count=9, distractors=4)"),
    )
    assert plain.fingerprint() == make_task("needle(length=300, count=9, distractors=0)").fingerprint()
    assert plain.fingerprint() != more.fingerprint()
    assert not {p.id for p in plain.all_problems()} & {p.id for p in more.all_problems()}
    task = make_task("needle(length=300, count=9, distractors=4)")
    for problem in more.all_problems():
        found = re.findall(r"The secret number of (\w+) is (\d{7})\.", problem.question)
        asked = re.findall(r"What is the secret number of (\w+)\?", problem.question)
        assert len({key for key, _ in found}) == 5
        assert [number for key, number in found if key == asked[0]] == [problem.reference]
        other = next(number for _, number in found if number != problem.reference)
        assert task.grade(problem, f" {other}").answer_class == "wrong"


def test_variables_are_followed_through_the_chain() -> None:
    """The right variables are those of the asked chain, and each stands behind the one it refers to."""
    task = make_task("ruler(kind=variables, length=400, count=5, facts=3, steps=True)")
    for problem in task.all_problems():
        wanted = json.loads(problem.reference)
        for earlier, later in itertools.pairwise(wanted):
            link = problem.question.index(f"VAR {later} = VAR {earlier}.")
            assert problem.question.index(f"VAR {earlier} = ") < link
        text = f"VAR A = VAR B. Final answer: {', '.join(wanted)}"
        assert task.grade(problem, text).answer_class == "correct"
        assert task.grade(problem, text.replace(wanted[0], "")).score == pytest.approx(2 / 3)
        assert task.grade(problem, "no end").answer_class == "not_extracted"


def test_choices_are_shuffled_by_record_and_the_letter_follows() -> None:
    """Letters that change between runs make two runs incomparable."""
    row = {
        "Record ID": "rec1",
        "Question": "Which?",
        "Correct Answer": "right",
        "Incorrect Answer 1": "one",
        "Incorrect Answer 2": "two",
        "Incorrect Answer 3": "three",
    }
    problem = shuffled(row)
    assert problem == shuffled(row)
    assert f"{problem.reference}) right" in problem.question
    letters = {shuffled(row | {"Record ID": f"rec{i}"}).reference for i in range(40)}
    assert letters == set("ABCD")


def code_row(private: str) -> dict[str, Any]:
    return {
        "question_id": "1",
        "question_content": "Add two numbers.",
        "starter_code": "",
        "difficulty": "medium",
        "public_test_cases": json.dumps([{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]),
        "private_test_cases": private,
        "metadata": "{}",
    }


def packed(value: object) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def test_packed_tests_are_read_and_nothing_else_is_loaded() -> None:
    """A pickle of a data set from the hub could run any code on the machine that grades."""
    private = json.dumps([{"input": "2 2\n", "output": "4\n", "testtype": "stdin"}])
    assert [test.expected for test in read_tests(code_row(packed(private)))] == ["3\n", "4\n"]
    with pytest.raises(DataFileError, match="refused"):
        read_tests(code_row(packed(Path("x"))))


def test_programs_are_graded_by_their_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The task end to end: a file of one problem, a right and a wrong program, and no program at all."""
    pytest.importorskip("resource")
    monkeypatch.setattr(LiveCodeBench, "rows_expected", 1)
    path = tmp_path / "test.jsonl"
    path.write_text(json.dumps(code_row("[]")) + "\n")
    task = LiveCodeBench(path)
    (problem,) = task.all_problems()
    assert "Question: Add two numbers.\n\nRead the inputs from stdin" in problem.question
    assert problem.question.endswith("STDOUT.\n```python\n# YOUR CODE HERE\n```\n\n")
    right = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
    assert task.grade(problem, right).answer_class == "correct"
    assert task.grade(problem, right.replace("+", "-")).extra["outcome"] == "wrong"
    assert task.grade(problem, "I would add them.").answer_class == "not_extracted"
