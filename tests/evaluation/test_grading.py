"""Graders: neither lie, nor hang, nor leave anything behind."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from kvkeep.evaluation.grading.code import CodeLimits, CodeTest, run_tests
from kvkeep.evaluation.grading.extract import last_boxed, last_choice, last_code_block, present_unextracted
from kvkeep.evaluation.grading.isolation import isolation_prefix
from kvkeep.evaluation.grading.maths import MathsGrader
from kvkeep.evaluation.tasks.math500 import MATH500
from kvkeep.evaluation.tasks.registry import make_task
from tests.evaluation.data import DATA, needs_data

needs_isolation = pytest.mark.skipif(not isolation_prefix(), reason="this system cannot isolate a process")


@pytest.fixture(scope="module")
def grader() -> Iterator[MathsGrader]:
    each = MathsGrader()
    yield each
    each.close()


@pytest.fixture
def patient() -> Iterator[MathsGrader]:
    """Verdicts are in question, not times: a busy machine must not turn one into a time-out."""
    each = MathsGrader(seconds=60)
    yield each
    each.close()


def golds() -> list[str]:
    lines = (DATA / "math500" / "test.jsonl").read_text().splitlines()
    return [json.loads(line)["answer"] for line in lines]


@needs_data
def test_every_gold_is_right_and_no_other_gold_is(patient: MathsGrader) -> None:
    """A public harness could never score above 79 % because 103 golds did not match themselves."""
    answers = golds()
    assert [a for a in answers if patient.compare(a, a)[0] != "correct"] == []
    other = random.Random(0).sample(answers, len(answers))
    pairs = list(zip(answers, other, strict=True))[::8]
    alike = {(a, b) for a, b in pairs if patient.compare(a, b)[0] != "wrong"}
    assert all(a == b for a, b in alike)
    assert len(alike) < 6


@needs_data
def test_golds_survive_computer_algebra_too(grader: MathsGrader) -> None:
    """The cheap comparison must not be what makes the golds pass."""
    hard = [a for a in golds() if not a.lstrip("-").isdigit()][::3]
    assert len(hard) > 50
    jobs = ({"gold": a, "given": a, "seconds": 5.0} for a in hard)
    assert [job["gold"] for job in jobs if not grader._ask(job).get("equal")] == []


@pytest.mark.parametrize(
    ("given", "gold", "verdict"),
    [
        # several boxes are handled by the extractor; lists are not "any of"
        ("5, 6, 7", "7", "wrong"),
        ("1,2", "1,2,3", "wrong"),
        ("3,2,1", "1,2,3", "correct"),
        # sets and tuples
        ("\\{1,2\\}", "(1,2)", "wrong"),
        ("1,2", "(1,2)", "wrong"),
        ("[1,2]", "(1,2)", "wrong"),
        ("(1, 2)", "(1,2)", "correct"),
        ("(2,1)", "(1,2)", "wrong"),
        # inequality gold accepts an interval
        ("(3,4]", "3<x\\le 4", "correct"),
        ("[3,4]", "3<x\\le 4", "wrong"),
        # assignment, bases, percent, degrees, units
        ("x=5", "5", "correct"),
        ("4210", "4210_5", "correct"),
        ("50", "50\\%", "correct"),
        ("90", "90^\\circ", "correct"),
        ("5.4", "5.4 \\text{ cents}", "correct"),
        ("\\$32{,}348", "\\$32,\\!348", "correct"),
        ("10080", "10,\\!080", "correct"),
        # decimals
        ("0.333333", "\\frac{1}{3}", "correct"),
        ("0.33", "\\frac{1}{3}", "wrong"),
        ("0.5", "\\frac12", "correct"),
        ("-\\dfrac{1}{2}", "-0.5", "correct"),
        # words: a bare word is a product of letters for the parser
        ("seat", "\\text{east}", "wrong"),
        ("seat", "east", "wrong"),
        ("nylevE", "Evelyn", "wrong"),
        ("\\text{East}", "east", "correct"),
        ("C", "\\text{(C)}", "correct"),
        ("\\text{(B)}", "\\text{(C)}", "wrong"),
        # algebra
        ("(x+1)^2", "x^2+2x+1", "correct"),
        ("(x+1)^2", "x^2+2x+2", "wrong"),
        ("\\sqrt{12}", "2\\sqrt{3}", "correct"),
        ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix} ", "correct"),
    ],
)
def test_known_pitfalls(grader: MathsGrader, given: str, gold: str, verdict: str) -> None:
    """Each row went wrong in some harness; a wrong verdict here moves accuracies by whole points."""
    assert grader.compare(given, gold)[0] == verdict


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("\\boxed{70} is wrong, so \\boxed{12}", "12"),
        ("<think>\\boxed{3}</think> I give up.", None),
        ("<think>\\boxed{3}</think> \\boxed{4}", "4"),
        ("so the walk takes 204 minutes, therefore 204", None),
        ("cut off in \\boxed{\\frac{1}{", None),
        ("\\boxed{\\frac{1}{2}} and then \\boxed{", "\\frac{1}{2}"),
        ("\\fbox{ 7 }", "7"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("", None),
    ],
)
@needs_data
def test_only_the_last_box_after_the_thinking_is_an_answer(text: str, answer: str | None) -> None:
    """A truncated text whose last number happens to be right is not a solution."""
    task = MATH500(DATA)
    assert task.extract(text) == answer
    if answer is None:
        assert task.grade(task.all_problems()[0], text).answer_class == "not_extracted"


@needs_data
def test_gsm8k_accepts_its_own_way_of_answering() -> None:
    """The solutions end with '#### 18'; a model trained on them answers so."""
    task = make_task("gsm8k", data=DATA)
    problem = task.all_problems()[0]
    with task:
        assert task.grade(problem, "…\n#### 18").answer_class == "correct"
        assert task.grade(problem, "so \\boxed{18.00}").answer_class == "correct"
        assert task.grade(problem, "so it is 18").answer_class == "not_extracted"


def test_slow_answers_are_timed_out_not_wrong() -> None:
    """A grader that gives up must not count as a model that failed."""
    grader = MathsGrader(seconds=1.0)
    try:
        grader.compare("2x", "x+x")  # the process is up
        begin = time.monotonic()
        assert grader.compare("10^{10^8}", "x+1")[0] == "timed_out"
        assert time.monotonic() - begin < 5
        assert grader.compare("2x", "x+x")[0] == "correct"  # a new process took over
    finally:
        grader.close()


def hostile(count: int) -> list[str]:
    rng = random.Random(0)
    kinds = [
        "9^{9^{9^9}}", "2^{2^{30}}", "1000000!", "10^{10^8}", "\\frac{1}{0}", "\\sqrt{" * 60 + "2" + "}" * 60,
        "{" * 200, "}" * 200, "\\boxed{" * 40, "x" * 1_000_000, "\x00\x01",
        "__import__('os').system('touch pwned')",
        "eval('1')", "lambda: 0", "`id`", "((((((((((1))))))))))", "\\left(" * 30, "∑" * 100,
        "0x" + "f" * 200,
        "\\text{" * 40, "1," * 140, "\\begin{pmatrix}" * 15, "0." + "0" * 200 + "1", "-" * 250 + "1", "'" * 9,
        "\\int_0^1 x dx", "\\sum_{n=1}^{\\infty} 1/n^2", "\\infty-\\infty", "1/0", "x==y", "\\\\" * 100,
        "open(chr(112))", "().mro()", "\n" * 200 + "1", "١٢٣", "1e999999", "\\lim_{x\\to 0}", "a" * 250,
    ]  # fmt: skip
    return [rng.choice(kinds) + rng.choice(["", " ", "+1", "x", str(rng.randrange(9))]) for _ in range(count)]


@pytest.mark.slow
def test_a_thousand_hostile_answers_finish_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Model output is untrusted: sympy evaluates text, and one answer must not stop or own an evaluation."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = our_children("maths_child.py")
    grader = MathsGrader(seconds=0.2)
    try:
        verdicts = {grader.compare(text, "x^2+1")[0] for text in hostile(1000)}
    finally:
        grader.close()
    assert verdicts <= {"wrong", "timed_out"}
    assert list(tmp_path.rglob("*")) == []
    assert not Path("pwned").exists()
    assert our_children("maths_child.py") == before


def our_children(script: str) -> list[int]:
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if any(script in word for word in process.cmdline()):
                found.append(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


@pytest.mark.parametrize(
    "text", ["\\boxed{" * 50_000, "{" * 300_000, "answer" + " " * 300_000, "```\n" * 80_000]
)
def test_extraction_is_linear(text: str) -> None:
    """A text in a loop is the rule under bad policies; a quadratic search would stop the evaluation."""
    begin = time.monotonic()
    for extract in (last_boxed, last_choice, last_code_block):
        extract(text)
    assert time.monotonic() - begin < 10


def test_answers_without_a_box_are_noticed() -> None:
    """They are failures of format, not of reasoning, and must be told apart."""
    assert present_unextracted("so the total is 204 minutes.", "204", finished=True)
    assert not present_unextracted("204 " + "and then " * 100, "204", finished=True)
    assert present_unextracted("204 " + "and then " * 100, "204", finished=False)
    assert not present_unextracted("so the total is 1204 or 204.5", "204", finished=True)


ADD = [CodeTest(given="3 4\n", expected="7\n")]
LIMITS = CodeLimits(seconds=1, memory=512 * 2**20, file_size=100_000)


@needs_isolation
@pytest.mark.parametrize(
    ("program", "outcome"),
    [
        ("a, b = map(int, input().split())\nprint(a + b)", "passed"),
        ("if __name__ == '__main__':\n    print('7 ')", "passed"),
        ("print(8)", "wrong"),
        ("syntax error", "error"),
        ("import time\ntime.sleep(100)", "timed_out"),
        ("while True: pass", "timed_out"),
        ("x = 'a' * (2 * 10**9)\nprint(7)", "error"),
        ("import socket\nsocket.create_connection(('192.0.2.1', 80), 1)\nprint(7)", "error"),
        ("open('big', 'wb').write(b'x' * 10**6)\nprint(7)", "error"),
        ("print('7' * 10**7)", "error"),
    ],
)
def test_programs_run_isolated_and_limited(
    program: str, outcome: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A generated program that loops, fills the disk or calls home must only fail its own test."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert run_tests(program, ADD, limits=LIMITS) == outcome
    assert list(tmp_path.iterdir()) == []
    assert our_children("code_child.py") == []


@needs_isolation
def test_programs_see_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens live in environment variables."""
    monkeypatch.setenv("SECRET_TOKEN", "7")
    program = "import os\nprint(os.environ.get('SECRET_TOKEN'))"
    assert run_tests(program, ADD, limits=LIMITS) == "wrong"


@needs_isolation
@pytest.mark.skipif(os.name != "posix" or os.getuid() == 0, reason="the limit does not bind root")
def test_programs_start_no_processes() -> None:
    """A fork bomb would take the machine down."""
    assert run_tests("import os\nos.fork()\nprint(7)", ADD, limits=LIMITS) == "error"


@needs_isolation
def test_functions_are_called_with_json() -> None:
    """Half of the problems ask for a method; what it prints on the way is not its answer."""
    program = "class Solution:\n    def add(self, a, b):\n        print('hm')\n        return [a + b]"
    tests = [CodeTest(given="1\n2", expected="[3]")]
    assert run_tests(program, tests, function="add", limits=LIMITS) == "passed"
