"""A report from runs: one page that needs nothing but a browser, and the same as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvkeep import __version__
from kvkeep.core.errors import ConfigError
from kvkeep.evaluation.extras import need
from kvkeep.evaluation.records import Run
from kvkeep.evaluation.report import figures, tables
from kvkeep.evaluation.report.figures import Mark
from kvkeep.evaluation.report.summary import OUTCOMES, Summary, summarise
from kvkeep.evaluation.report.tables import Table
from kvkeep.evaluation.study import Family

_TEMPLATE = Path(__file__).with_name("page.html.j2")


@dataclass(frozen=True, kw_only=True)
class Section:
    """Runs of one task and one model on one part of the split.

    Parameters
    ----------
    title
        Task, model and part.
    runs, summaries
        In order of mean cache.
    facts
        Sentences on how the samples were made.
    """

    title: str
    runs: tuple[Run, ...]
    summaries: tuple[Summary, ...]
    facts: tuple[str, ...]

    @property
    def tables(self) -> dict[str, Table]:
        """Tables by heading."""
        found = {
            "Results": tables.result_table(self.summaries),
            "Parts": tables.part_table(self.summaries),
            "Several samples together": tables.draw_table(self.summaries),
            "Failures": tables.failure_table(self.summaries),
            "Cost": tables.cost_table(self.summaries),
        }
        return {name: table for name, table in found.items() if table is not None}

    @property
    def figures(self) -> dict[str, tuple[str, str]]:
        """Figures by heading, each with its legend: ``"policies"``, ``"outcomes"`` or ``""``."""
        return {
            "Accuracy against mean cache": (figures.accuracy_figure(self.summaries), "policies"),
            "What became of the samples": (figures.outcome_figure(self.summaries), "outcomes"),
            "Lengths of the answers, in tokens": (figures.length_figure(self.runs, self.summaries), ""),
            "Tokens per second": (figures.speed_figure(self.summaries), ""),
            "Memory of keys and values, largest batch": (figures.memory_figure(self.summaries), ""),
        }

    @property
    def legend(self) -> dict[str, Mark]:
        """The mark of each policy, by the words that explain it."""
        return figures.legend(self.summaries)


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was found, ready to be written.

    Parameters
    ----------
    title
        Heading.
    sections
        One per task, model and part.
    family
        Comparisons and their decision, if they were asked for.
    """

    title: str
    sections: tuple[Section, ...]
    family: Family | None = None

    @property
    def decision(self) -> Table | None:
        """The decision table."""
        return None if self.family is None else tables.decision_table(self.family)

    @property
    def remarks(self) -> tuple[str, ...]:
        """What a reader must know before believing the decision."""
        if self.family is None:
            return ()
        kind = (
            "An exploration: it suggests, it does not confirm."
            if self.family.preregistration is None
            else f"Pre-registered, {self.family.preregistration}."
        )
        notes = [f"{name}: {note}." for name, each in self.family.comparisons.items() for note in each.notes]
        return (kind, *(f"Deviation: {each}" for each in self.family.deviations), *notes)

    def html(self) -> str:
        """The page; needs jinja2."""
        return render(self, written="from run logs")

    def markdown(self) -> str:
        """The same without figures."""
        lines = [f"# {self.title}", ""]
        if self.decision is not None:
            lines += [
                "## Decision",
                "",
                self.decision.markdown(),
                "",
                *(f"- {each}" for each in self.remarks),
                "",
            ]
        for section in self.sections:
            lines += [f"## {section.title}", "", *(f"- {fact}" for fact in section.facts), ""]
            for name, table in section.tables.items():
                lines += [f"### {name}", "", table.markdown(), ""]
        return "\n".join(lines).rstrip() + "\n"


def render(report: Any, *, written: str) -> str:
    """Fill the template with anything that has a title, sections and a decision or ``None``; needs jinja2.

    Parameters
    ----------
    written
        From what, in the last line of the page.
    """
    jinja = need("jinja2", extra="eval", purpose="writing a report")
    environment = jinja.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return str(template.render(report=report, outcomes=OUTCOMES, version=__version__, written=written))


def make_report(runs: Sequence[Run], *, title: str = "kvkeep report", family: Family | None = None) -> Report:
    """Sort runs into sections and sum them up.

    Raises
    ------
    ConfigError
        If there is no run, or one without a sample.
    """
    if not runs:
        raise ConfigError("a report needs at least one run.")
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        header = run.header
        if not run.samples:
            raise ConfigError(f"run {header.run!r} has no sample yet: leave it out, or let it go on.")
        groups.setdefault((header.task, header.model, header.model_sha256, header.split), []).append(run)
    return Report(title=title, sections=tuple(section(members) for members in groups.values()), family=family)


def section(runs: Sequence[Run]) -> Section:
    """One section; the runs share task, model and part."""
    ordered = sorted(runs, key=lambda run: run.mean_cache)
    header = ordered[0].header
    return Section(
        title=f"{header.task}, {header.model}, {header.split} problems",
        runs=tuple(ordered),
        summaries=tuple(summarise(run) for run in ordered),
        facts=tuple(dict.fromkeys(fact for run in ordered for fact in facts(run))),
    )


def facts(run: Run) -> list[str]:
    """How the samples of a run were made."""
    header, sampling = run.header, run.header.sampling
    temperature = sampling.get("temperature")
    return [
        f"Task {header.task} version {header.task_version}, data {header.task_sha256[:12]}…, "
        f"{header.problems} problems × {header.draws} draws.",
        f"Model {header.model}, weights {header.model_sha256[:12]}….",
        f"Sampling {sampling.get('preset')}: temperature {temperature}, top-p {sampling.get('top_p')}.",
        f"Grader {header.grader} {header.grader_version}.",
        "Software: "
        + ", ".join(f"{name} {number}" for name, number in sorted(header.versions.items()))
        + ".",
    ]
