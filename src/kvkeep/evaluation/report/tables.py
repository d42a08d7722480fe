"""The tables of a report: rows of plain text, for the page and for Markdown alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvkeep.core.budget import format_bytes
from kvkeep.evaluation.report.summary import OUTCOMES, Summary
from kvkeep.evaluation.study import Family


@dataclass(frozen=True, kw_only=True)
class Table:
    """Text in rows.

    Parameters
    ----------
    columns
        Their names; the first column names the row, the others hold numbers.
    rows
        As many texts as columns, each.
    note
        What a reader must know.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    def markdown(self) -> str:
        """A pipe table."""
        rule = ["---", *["--:"] * (len(self.columns) - 1)]
        lines = [self.columns, tuple(rule), *self.rows]
        text = "\n".join(
            "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
        )
        return text + (f"\n\n{self.note}" if self.note else "")


def result_table(summaries: Sequence[Summary]) -> Table:
    """Accuracy and memory, one run a row."""
    rows = []
    measured = axis(summaries)
    # Where entries are in few bits their number says little of what they take.
    weighed = any(each.weighed for each in summaries)
    for each in summaries:
        found = each.accuracy
        low, high = found.interval if found is not None else (0.0, 0.0)
        rows.append(
            (
                each.label + ("" if each.complete else " (incomplete)"),
                "–" if found is None else f"{100 * found.estimate:.1f}",
                "–" if found is None else f"{100 * low:.1f} to {100 * high:.1f}",
                f"{100 * each.correct:.1f}",
                f"{each.mean_cache:.1f}",
                *((f"{each.mean_memory:.1f}" if each.mean_memory else "–",) if weighed else ()),
                f"{each.mean_read:.1f}",
                f"{each.mean_cache_per_sample:.1f}",
                f"{each.peak_cache:.0f}",
                f"{each.peak_read:.0f}",
                f"{each.prefill_cache:.1f}",
                f"{each.evictions:.1f}",
                f"{each.problems} × {each.draws}",
            )
        )
    return Table(
        columns=(
            "policy and budget",
            f"{measured} %",
            "95 % interval",
            "all right %",
            "mean cache",
            *(("mean memory",) if weighed else ()),
            "mean read",
            "per sample",
            "peak",
            "peak read",
            "after prompt",
            "evictions",
            "problems × draws",
        ),
        rows=tuple(rows),
        note=(
            "Cache: measured entries per KV head and layer, prompt included; read: those of them that a step "
            "read, fewer than stored only under a selector. Means weigh every step alike, per sample every "
            "sample. Intervals come from the spread between problems."
            + (" Memory: entries of 16 bits that would take as many bytes." if weighed else "")
        ),
    )


def axis(summaries: Sequence[Summary]) -> str:
    """What the task is judged by, in a word."""
    return "score" if any(each.metric == "score" for each in summaries) else "correct"


def cost_table(summaries: Sequence[Summary]) -> Table:
    """Speed and memory, one run a row."""
    return Table(
        columns=("policy and budget", "tokens/s", "KV memory", "tokens a sample", "at the limit %"),
        rows=tuple(
            (
                each.label,
                "–" if each.tokens_per_second is None else f"{each.tokens_per_second:.0f}",
                "–" if each.kv_bytes is None else format_bytes(each.kv_bytes),
                f"{each.tokens:.0f}",
                f"{100 * each.at_limit:.1f}",
            )
            for each in summaries
        ),
        note=(
            "Speed of this run on its machine, prompts excluded; batches shrink as answers end, so it is no "
            "benchmark (`kvkeep bench decode` is). KV memory: the most that one batch held."
        ),
    )


def failure_table(summaries: Sequence[Summary]) -> Table:
    """What became of the samples, in percent."""
    rows = []
    for each in summaries:
        outcomes = [f"{100 * each.outcomes[name] / each.samples:.1f}" for name in OUTCOMES]
        texts = [f"{100 * each.failure_classes[name] / each.samples:.1f}" for name in _TEXTS]
        extracted = each.accuracy_extracted
        share = "–" if extracted is None else f"{100 * extracted:.1f}"
        rows.append((each.label, *outcomes, share, *texts))
    return Table(
        columns=("policy and budget", *OUTCOMES, "correct if extracted", *_TEXTS.values()),
        rows=tuple(rows),
        note=(
            "Percent of the samples. The first six columns add up to 100. An answer that was not extracted "
            "is a failure of format, not of reasoning; the text classes say how texts went wrong."
        ),
    )


_TEXTS = {"truncated": "cut off text", "phrase_loop": "phrase loop", "garbage": "garbage"}


def draw_table(summaries: Sequence[Summary]) -> Table | None:
    """What several samples of a problem are worth together, one run a row."""
    counted = [each for each in summaries if each.majority is not None and each.any_of is not None]
    if not counted:
        return None
    return Table(
        columns=("policy and budget", "one sample %", "vote of all %", "any of them %", "draws"),
        rows=tuple(
            (
                each.label,
                *(
                    f"{100 * found.estimate:.1f}" if found is not None else "–"
                    for found in (each.accuracy, each.majority, each.any_of)
                ),
                str(each.draws),
            )
            for each in counted
        ),
        note=(
            "avg@k, maj@k and pass@k. In a vote, samples without an answer do not count, and of equally "
            "frequent answers the first one wins."
        ),
    )


def part_table(summaries: Sequence[Summary]) -> Table | None:
    """Share of correct parts by name, for tasks that grade by parts."""
    names = sorted({name for each in summaries for name in each.parts})
    if not names:
        return None
    return Table(
        columns=("policy and budget", *names),
        rows=tuple(
            (each.label, *(f"{100 * each.parts[name]:.1f}" if name in each.parts else "–" for name in names))
            for each in summaries
        ),
        note="Percent of the parts that are right.",
    )


def decision_table(family: Family) -> Table:
    """Every comparison with its interval and p."""
    rows = []
    for cell in family.decision.cells:
        difference = cell.difference
        low, high = difference.interval
        rows.append(
            (
                cell.cell,
                f"{100 * difference.baseline:.1f}",
                f"{100 * difference.challenger:.1f}",
                f"{100 * difference.estimate:+.2f}",
                f"{100 * low:+.2f} to {100 * high:+.2f}",
                f"{difference.p:.4f}",
                f"{cell.adjusted_p:.4f}",
                cell.verdict,
                f"{family.comparisons[cell.cell].cache_ratio:.3f}",
            )
        )
    return Table(
        columns=(
            "cell",
            "baseline %",
            "challenger %",
            "difference pp",
            "95 % interval",
            "p",
            "corrected p",
            "verdict",
            "cache ratio",
        ),
        rows=tuple(rows),
        note=family.decision.sentence,
    )
