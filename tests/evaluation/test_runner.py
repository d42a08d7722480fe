"""Runs: every sample once, whatever happens in between."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from kvkeep.core.errors import ConfigError, DataFileError, EvidenceError
from kvkeep.evaluation.jobs import Job
from kvkeep.evaluation.records import Run, SampleRecord
from kvkeep.evaluation.runlog import RunLog, log_path, read_log, read_run
from kvkeep.evaluation.runner import Plan, Progress, evaluate
from kvkeep.evaluation.splits import Part, part_of
from kvkeep.evaluation.tasks.base import Problem
from tests.evaluation.runs import header, sample
from tests.evaluation.scripted import Script, Sums

PARTS: tuple[Part, Part] = ("dev", "confirm")


def essence(run: Run) -> list[SampleRecord]:
    return list(run.samples)


def test_every_problem_gets_every_draw_once(tmp_path: Path) -> None:
    """A lost or doubled sample shifts an accuracy without a trace."""
    task, script = Sums(7), Script()
    run = evaluate(task, script, tmp_path / "run", Plan(draws=3, batch_size=4))
    ids = {problem.id for problem in Sums(7).problems("dev")}
    assert {s.key for s in run.samples} == {(id, draw) for id in ids for draw in range(3)}
    assert len(run.samples) == 21
    assert [len(batch) for batch in script.batches] == [4, 4, 4, 4, 4, 1]
    assert task.closed == 1
    assert read_run(tmp_path / "run") == Run(header=run.header, samples=read_run(tmp_path / "run").samples)
    assert sorted(s.key for s in read_run(tmp_path / "run").samples) == sorted(s.key for s in run.samples)


def test_the_header_says_what_decides_the_result(tmp_path: Path) -> None:
    """Two runs can only be compared if both say what they were."""
    plan = Plan(part="dev", limit=4, draws=2, seed=11)
    run = evaluate(Sums(40), Script(), tmp_path / "x", plan, command=["kvkeep", "eval"])
    assert run.header.run == "x"
    assert (run.header.split, run.header.problems, run.header.draws) == ("dev", 4, 2)
    assert run.header.seeds == (11, 12)
    assert run.header.preregistration is None
    assert run.header.command == ("kvkeep", "eval")
    assert {"kvkeep", "torch", "transformers"} <= set(run.header.versions)
    assert all(part_of(s.id) == "dev" for s in run.samples)


def test_the_two_parts_share_no_problem() -> None:
    """Tuning on confirmation problems makes the confirmation worthless."""
    dev, confirm = ({problem.id for problem in Sums(30).problems(part)} for part in PARTS)
    assert not dev & confirm
    assert dev | confirm == {problem.id for problem in Sums(30).all_problems()}
    assert len(dev) == 30


def test_held_out_problems_are_not_touched_without_a_study(tmp_path: Path) -> None:
    """One run on them while tuning, and the problems are held out no longer."""
    script = Script()
    with pytest.raises(EvidenceError, match="confirm problems are held out"):
        evaluate(Sums(30), script, tmp_path / "x", Plan(part="confirm"))
    assert not script.batches
    assert not (tmp_path / "x").exists()


def test_a_run_that_says_nothing_is_on_dev_problems(tmp_path: Path) -> None:
    """The way of least resistance must not be the one that spends the held-out problems."""
    run = evaluate(Sums(5), Script(), tmp_path / "x", Plan())
    assert run.header.split == "dev"
    assert {s.id for s in run.samples} == {p.id for p in Sums(5).problems("dev")}


def test_a_set_that_is_held_out_as_a_whole_says_what_to_do(tmp_path: Path) -> None:
    """Twelve of thirty problems are too few to tune on and eighteen too few to confirm."""

    class Contest(Sums):
        def all_problems(self) -> list[Problem]:
            return [Problem(id=f"aime25/{i}", question="?", reference="7") for i in range(30)]

    assert len(Contest().problems("confirm")) == 30
    with pytest.raises(ConfigError, match="all 30 are for the other part"):
        evaluate(Contest(), Script(), tmp_path / "x", Plan())


def test_samples_do_not_depend_on_batch_size_or_number_of_draws(tmp_path: Path) -> None:
    """A run that is repeated on a larger machine must give the same samples."""
    small = evaluate(Sums(9), Script(), tmp_path / "a", Plan(draws=2, batch_size=2))
    large = evaluate(Sums(9), Script(), tmp_path / "b", Plan(draws=3, batch_size=16))
    found = {s.key: s for s in large.samples}
    assert all(found[s.key] == s for s in small.samples)
    later = evaluate(Sums(9), Script(), tmp_path / "c", Plan(draws=1, seed=1))
    assert [s.correct for s in later.samples] == [found[s.id, 1].correct for s in later.samples]


def test_draws_that_would_be_copies_are_refused(tmp_path: Path) -> None:
    """Eight identical greedy answers look like eight samples and shrink every interval."""
    with pytest.raises(ConfigError, match="copies of each other"):
        evaluate(Sums(), Script(random=False), tmp_path / "a", Plan(draws=2))
    assert not (tmp_path / "a").exists()
    assert evaluate(Sums(3), Script(random=False), tmp_path / "b", Plan()).samples


@pytest.mark.parametrize("draws", [1, 4, 16])
def test_accuracy_does_not_change_with_the_number_of_draws(tmp_path: Path, draws: int) -> None:
    """A public harness reported another pass@1 for every k: averaging must be over all draws."""
    run = evaluate(Sums(400), Script(0.7), tmp_path / "run", Plan(draws=draws, batch_size=64))
    accuracy = sum(s.score for s in run.samples) / len(run.samples)
    assert abs(accuracy - 0.7) < 4 * (0.21 / (400 * draws)) ** 0.5


def test_progress_is_reported_sample_by_sample(tmp_path: Path) -> None:
    """The bar must move and must know the end."""
    seen: list[Progress] = []
    run = evaluate(Sums(5), Script(), tmp_path / "run", Plan(), on_progress=seen.append)
    assert [p.done for p in seen] == [1, 2, 3, 4, 5]
    assert all(p.total == 5 for p in seen)
    assert seen[-1].metric == "accuracy"
    assert seen[-1].credit == sum(s.correct for s in run.samples)


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """An error on sample 12 must not cost the eleven before it, nor write any of them twice."""
    whole = evaluate(Sums(10), Script(), tmp_path / "whole", Plan(draws=2, batch_size=4))
    left = [12]

    def fail(job: Job) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError):
        evaluate(Sums(10), Script(on_text=fail), tmp_path / "run", Plan(draws=2, batch_size=4))
    kept = read_log(tmp_path / "run")
    assert len(kept.run.samples) == 11
    assert kept.footer is None
    script = Script()
    again = evaluate(Sums(10), script, tmp_path / "run", Plan(draws=2, batch_size=4), resume=True)
    assert essence(again) == essence(whole)
    assert len(script.batches) == 3  # the two that were complete are not written again
    assert read_log(tmp_path / "run").footer is not None


def test_a_complete_run_is_not_run_again(tmp_path: Path) -> None:
    """--resume in a loop of a script must be harmless."""
    first = evaluate(Sums(4), Script(), tmp_path / "run", Plan())
    content = log_path(tmp_path / "run").read_bytes()
    script = Script()
    assert essence(evaluate(Sums(4), script, tmp_path / "run", Plan(), resume=True)) == essence(first)
    assert script.batches == []
    assert log_path(tmp_path / "run").read_bytes() == content


def test_another_run_is_neither_overwritten_nor_continued(tmp_path: Path) -> None:
    """Two settings in one log would be reported as one result."""
    evaluate(Sums(4), Script(), tmp_path / "run", Plan())
    with pytest.raises(ConfigError, match="--resume"):
        evaluate(Sums(4), Script(), tmp_path / "run", Plan())
    with pytest.raises(ConfigError, match=r"seeds was .* and is"):
        evaluate(Sums(4), Script(), tmp_path / "run", Plan(seed=1), resume=True)
    with pytest.raises(ConfigError, match="policy_options"):
        evaluate(Sums(4), Script(0.1), tmp_path / "run", Plan(), resume=True)


@pytest.mark.parametrize(
    "torn", [b"", b"{", b'{"kind": "sample", "id": "sums/3", "dr', '{"kind": "ä'.encode()[:-1]]
)
def test_a_torn_last_line_is_dropped(tmp_path: Path, torn: bytes) -> None:
    """A kill in the middle of a write leaves half a line; the run must still be readable."""
    path = tmp_path / "run.jsonl"
    with RunLog(path, header()) as log:
        log.append(sample("a", 0, True))
    path.write_bytes(path.read_bytes() + torn)
    assert read_log(path).torn == len(torn)
    with RunLog(path, header(), resume=True) as log:
        assert list(log.done) == [("a", 0)]
        log.append(sample("a", 1, False))
    assert [s.key for s in read_run(path).samples] == [("a", 0), ("a", 1)]
    assert read_log(path).torn == 0


def test_a_log_without_its_first_line_starts_anew(tmp_path: Path) -> None:
    """Killed before the header was written: there is nothing to resume and nothing to lose."""
    path = tmp_path / "run.jsonl"
    path.write_bytes(b'{"kind": "head')
    with pytest.raises(DataFileError, match="no header"):
        read_run(path)
    with RunLog(path, header(), resume=True) as log:
        log.append(sample("a", 0, True))
    assert len(read_run(path).samples) == 1


def test_damage_inside_a_log_is_an_error(tmp_path: Path) -> None:
    """Dropping lines in the middle silently would drop problems."""
    path = tmp_path / "run.jsonl"
    with RunLog(path, header()) as log:
        log.append(sample("a", 0, True))
        log.append(sample("b", 0, True))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1][:20] + b"\n" + lines[2])
    with pytest.raises(DataFileError, match="line 2"):
        read_run(path)
    path.write_bytes(lines[0] + lines[1] + lines[1])
    with pytest.raises(DataFileError, match="stands twice"):
        read_run(path)
    with pytest.raises(DataFileError, match="no run log"):
        read_run(tmp_path / "nothing")


def test_odd_texts_survive_the_log(tmp_path: Path) -> None:
    """Models under bad policies write anything: newlines, NULs, half surrogates."""
    text = "a\nb\r\u2028\x00\ud800 ∑ \\boxed{"
    path = tmp_path / "run.jsonl"
    with RunLog(path, header()) as log:
        log.append(sample("a", 0, True, extra={"text": text}))
    assert read_run(path).samples[0].extra["text"] == text.replace("\ud800", "?")


KILLED = """
    import sys, time
    from tests.evaluation.scripted import Script, Sums
    from kvkeep.evaluation.runner import Plan, evaluate
    evaluate(Sums(30), Script(on_text=lambda job: time.sleep(0.004)), sys.argv[1],
             Plan(draws=2, batch_size=8), resume=True)
"""


@pytest.mark.slow
def test_kill_nine_at_any_moment_loses_nothing(tmp_path: Path) -> None:
    """The promise of --resume, tried: killed again and again, the result is that of a quiet run."""
    whole = evaluate(Sums(30), Script(), tmp_path / "whole", Plan(draws=2, batch_size=8))
    place = tmp_path / "run"
    rng = random.Random(0)
    for _ in range(4):
        process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(KILLED), str(place)])
        while not place.exists() and process.poll() is None:
            time.sleep(0.005)
        time.sleep(rng.random() * 0.15)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        if log_path(place).exists() and b"\n" in log_path(place).read_bytes():
            read_log(place)  # readable at every moment
    final = evaluate(Sums(30), Script(), place, Plan(draws=2, batch_size=8), resume=True)
    strip = {"seconds": 0.0}
    assert [s.as_dict() | strip for s in final.samples] == [s.as_dict() | strip for s in whole.samples]
    lines = [json.loads(line) for line in log_path(place).read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["header"] + ["sample"] * 60 + ["footer"]
