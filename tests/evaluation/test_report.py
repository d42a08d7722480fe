"""Reports: the numbers of the runs, on a page that needs nothing else."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from kvkeep.core.errors import ConfigError
from kvkeep.evaluation.records import Run
from kvkeep.evaluation.report.page import make_report
from kvkeep.evaluation.report.summary import OUTCOMES, label, outcome, summarise
from kvkeep.evaluation.report.svg import ticks
from kvkeep.evaluation.splits import ids_sha256
from kvkeep.evaluation.study import explore
from tests.evaluation.runs import header, sample

POLICIES = ("full", "vase-attnv", "snapkv", "random")


def a_run(policy: str, budget: int | None, skill: float, *, problems: int = 70, **changes: Any) -> Run:
    """A run in which every class of failure occurs."""
    rng = random.Random(f"{policy}{budget}")
    samples = []
    for i in range(problems):
        for draw in range(2):
            extra = {
                "finish": "stop",
                "write_seconds": 0.4,
                "batch_peak_kv_bytes": 1000 * (budget or 400),
                "grade": {"parts": {"hot": [rng.randrange(5), 4 + 1], "dormant": [rng.randrange(3), 3]}},
            }
            kind = rng.random()
            facts: dict[str, Any] = {"mean_cache": float(budget or 300), "tokens": rng.randrange(100, 400)}
            if kind < 0.08:
                facts |= {"answer_class": "not_extracted", "failure_class": "truncated"}
                extra["finish"] = "length"
            elif kind < 0.12:
                facts |= {"answer_class": "not_extracted"}
                extra["present_unextracted"] = True
            right = kind >= 0.12 and rng.random() < skill
            samples.append(sample(f"p/{i}", draw, right, extra=extra, **facts))
    return Run(
        header=header(
            run=f"{policy}-{budget}",
            policy=policy,
            budget={} if budget is None else {"entries": budget, "prompt": "counts"},
            problems=problems,
            draws=2,
            seeds=(0, 1),
            ids_sha256=ids_sha256({each.id for each in samples}),
            **changes,
        ),
        samples=tuple(samples),
    )


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    found = [a_run("full", None, 0.95)]
    for place, policy in enumerate(POLICIES[1:]):
        found += [a_run(policy, budget, 0.2 + budget / 400 + place / 10) for budget in (64, 128)]
    return found


class Page(HTMLParser):
    """Checks nesting and collects what a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "link", "br", "rect", "line", "circle", "polyline"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in ("rect", "circle"):
            return
        assert self.open.pop() == tag


def test_the_page_is_complete_in_itself(runs: list[Run]) -> None:
    """It is mailed, archived, opened without a network: nothing may be fetched, nothing may be broken."""
    text = make_report(runs, title="A <b>title</b> & more").html()
    page = Page()
    page.feed(text)
    assert page.open == []
    assert page.fetched == []
    assert "script" not in page.tags
    assert "url(" not in text
    assert "A &lt;b&gt;title&lt;/b&gt; &amp; more" in text
    assert text.count("<svg") == 5
    assert len(text) < 100_000
    assert "nan" not in re.sub(r"[a-z]*nan[a-z]+|[a-z]+nan", "", text.lower())


def test_every_number_of_a_run_is_in_page_and_markdown(runs: list[Run]) -> None:
    """The page is what people read; it must not say anything else than the log."""
    report = make_report(runs)
    page, markdown = report.html(), report.markdown()
    for run in runs:
        summary = summarise(run)
        assert summary.accuracy is not None
        row = next(line for line in markdown.splitlines() if line.startswith(f"| {summary.label} |"))
        for number in (summary.accuracy.estimate * 100, summary.mean_cache):
            assert f"{number:.1f}" in row
            assert f"<td>{number:.1f}</td>" in page
        assert summary.label in page
    assert "| hot |" in markdown
    assert "phrase loop" in markdown


def test_a_summary_counts_what_is_there(runs: list[Run]) -> None:
    """By hand, on one run."""
    run = runs[1]
    summary = summarise(run)
    assert sum(summary.outcomes.values()) == len(run.samples) == summary.samples == 140
    assert summary.accuracy is not None
    assert summary.accuracy.estimate == pytest.approx(sum(s.correct for s in run.samples) / 140)
    assert summary.tokens_per_second == pytest.approx(sum(s.tokens for s in run.samples) / (0.4 * 140))
    assert summary.kv_bytes == 64_000
    assert summary.complete
    assert summary.at_limit == summary.outcomes["cut off"] / 140
    right = sum(s.extra["grade"]["parts"]["dormant"][0] for s in run.samples)
    assert summary.parts["dormant"] == right / (3 * 140)
    json.dumps(summary.as_dict())


def test_a_task_that_gives_parts_of_a_point_is_judged_by_its_score() -> None:
    """Sixteen reads that must all be right say nothing about a policy that gets fifteen."""
    run = a_run("full", None, 0.0, extra={"metric": "score"})
    graded = Run(header=run.header, samples=tuple(dataclasses.replace(s, score=0.75) for s in run.samples))
    summary = summarise(graded)
    assert summary.accuracy is not None
    assert (summary.accuracy.estimate, summary.score, summary.correct) == (0.75, 0.75, 0.0)
    assert "| score % | 95 % interval | all right % |" in make_report([graded]).markdown()


def test_several_samples_of_a_problem_are_counted_together(runs: list[Run]) -> None:
    """A vote, and luck among several tries, are other numbers than the chance of one: each by its name."""
    three = tuple(
        sample(f"p/{i}", draw, draw < i % 4, extra={"extracted": "7" if draw < i % 4 else str(draw)})
        for i in range(8)
        for draw in range(3)
    )
    facts = {"problems": 8, "draws": 3, "ids_sha256": ids_sha256({s.id for s in three})}
    run = Run(header=header(**facts), samples=three)
    summary = summarise(run)
    assert summary.majority is not None
    assert summary.any_of is not None
    # 0, 1, 2 or 3 of three are right; the one of 1 came first in a tie of three.
    assert (summary.majority.metric, summary.majority.estimate) == ("maj@3", 0.75)
    assert (summary.any_of.metric, summary.any_of.estimate) == ("pass@3", 0.75)
    assert "| random 64 | 50.0 | 75.0 | 75.0 | 3 |" in make_report([run]).markdown()
    assert summarise(runs[0]).majority is None
    programs = Run(header=header(**facts, grader="code"), samples=three)
    assert summarise(programs).majority is None
    assert summarise(Run(header=run.header, samples=three[:-1])).majority is None


def test_outcomes_tell_format_from_reasoning() -> None:
    """A policy that makes models ramble must not look like one that makes them reason badly."""
    cases = {
        "correct": sample("a", 0, True),
        "wrong": sample("a", 0, False),
        "grader stopped": sample("a", 0, False, answer_class="timed_out"),
        "no answer": sample("a", 0, False, answer_class="not_extracted", extra={"finish": "stop"}),
        "cut off": sample("a", 0, False, answer_class="not_extracted", extra={"finish": "length"}),
        "answer not extracted": sample(
            "a", 0, False, answer_class="not_extracted", extra={"present_unextracted": True}
        ),
    }
    assert {name: outcome(each) for name, each in cases.items()} == {name: name for name in cases}
    assert set(cases) == set(OUTCOMES)


def test_runs_of_other_tasks_and_models_get_their_own_section(runs: list[Run]) -> None:
    """Two tasks in one figure would be read as one curve."""
    other = a_run("full", None, 0.5, task="products")
    small = a_run("full", None, 0.5, model="tiny-b", model_sha256="b" * 64)
    report = make_report([*runs, other, small])
    assert [section.title for section in report.sections] == [
        "sums, tiny, dev problems",
        "products, tiny, dev problems",
        "sums, tiny-b, dev problems",
    ]


def test_an_incomplete_run_says_so(runs: list[Run]) -> None:
    """Half a run looks like a whole one otherwise."""
    half = Run(header=runs[1].header, samples=runs[1].samples[:30])
    assert "(incomplete)" in make_report([half]).markdown()
    with pytest.raises(ConfigError, match="no sample yet"):
        make_report([Run(header=runs[1].header, samples=())])
    with pytest.raises(ConfigError, match="at least one run"):
        make_report([])


def test_the_decision_table_is_that_of_compare(runs: list[Run]) -> None:
    """Page and command must not come to different conclusions."""
    family = explore(runs[1], runs[3:4], resamples=1000)
    report = make_report([runs[1], runs[3]], family=family)
    for text in (report.html(), report.markdown()):
        assert family.decision.sentence.split(":")[0] in text
        assert f"{family.decision.cells[0].adjusted_p:.4f}" in text
        assert "it does not confirm" in text


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]), (0, 4096, [0, 1000, 2000, 3000, 4000, 5000]), (5, 5, [5, 6])],
)
def test_axes_have_round_numbers_that_cover_the_data(low: float, high: float, expected: list[float]) -> None:
    """A point outside its axis is drawn over the legend."""
    found = ticks(low, high)
    assert found == expected
    assert found[0] <= low
    assert found[-1] >= high


def test_labels_say_how_the_prompt_counts() -> None:
    """The same number means another memory when the prompt is kept on top."""
    assert label("full", None) == "full"
    assert label("vase-attnv", 64, "kept") == "vase-attnv 64 + prompt"
    few = {"bits": 2, "key_bits": 4, "protect": "range"}
    assert label("snapkv", 64, precision=few) == "snapkv 64, 2 bits, keys 4, protect range"


def test_entries_in_few_bits_are_weighed(runs: list[Run]) -> None:
    """Twice as many entries in half the bytes would look like twice the memory."""
    assert "mean memory" not in make_report(runs).markdown()
    few = a_run("snapkv", 128, 0.5, precision={"bits": 4, "protect": "none"})
    weighed = replace(few, samples=tuple(replace(each, mean_memory=41.5) for each in few.samples))
    lines = make_report([runs[0], weighed]).markdown().splitlines()
    names = next(line for line in lines if "mean memory" in line).split(" | ")
    cells = next(line for line in lines if line.startswith("| snapkv 128, 4 bits")).split(" | ")
    assert len(cells) == len(names)
    assert cells[names.index("mean cache")] == "128.0"
    assert cells[names.index("mean memory")] == "41.5"
    # An older log has no bytes.
    assert "| 128.0 | – |" in make_report([runs[0], weighed, few]).markdown()


def test_the_command_writes_both_files(runs: list[Run], tmp_path: Path) -> None:
    """`kvkeep report` end to end, with a decision against a baseline that was not in the list."""
    from typer.testing import CliRunner

    from kvkeep.cli.app import app
    from kvkeep.evaluation.runlog import RunLog

    places = []
    for run in (runs[1], runs[3]):
        place = tmp_path / run.header.run
        with RunLog(place, run.header) as log:
            for each in run.samples:
                log.append(each)
        places.append(str(place))
    page = tmp_path / "out.html"
    arguments = ["report", places[1], "--baseline", places[0], "--out", str(page)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.stderr
    assert "2 runs" in result.stdout
    assert "Decision" in page.read_text()
    assert "## Decision" in page.with_suffix(".md").read_text()
    found = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert {each["run"] for each in found["runs"]} == {run.header.run for run in (runs[1], runs[3])}
    assert found["decision"]["decision"]["branch"] in "ABC"


BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FRAME = """<iframe src="page.html" style="width:{width}px;height:900px;border:0" onload="
const page = this.contentDocument.documentElement;
document.title = page.scrollWidth + ' ' + [...page.querySelectorAll('svg')].map(s => s.clientWidth).join(' ');
"></iframe>"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_sticks_out_in_a_browser(runs: list[Run], tmp_path: Path, width: int) -> None:
    """On a phone a page that scrolls sideways is not read; wide tables scroll inside their own frame."""
    (tmp_path / "page.html").write_text(make_report(runs).html(), encoding="utf-8")
    (tmp_path / "frame.html").write_text(FRAME.format(width=width), encoding="utf-8")
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1400,1000", "--dump-dom"]
    done = subprocess.run(
        [*command, (tmp_path / "frame.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    found = re.search(r"<title>([\d ]+)</title>", done.stdout)
    assert found, done.stderr[-500:]
    page, *drawings = (int(number) for number in found.group(1).split())
    assert page <= width
    assert len(drawings) == 5
    assert all(250 < drawing < width for drawing in drawings)
