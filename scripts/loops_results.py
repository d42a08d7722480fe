"""Loops under several policies on SmolLM2-135M-Instruct, and what went before them: docs/results/loops.md.

    python scripts/loops_results.py run --runs runs/loops-60 --data DATA     # resumable; --arm takes one
    python scripts/loops_results.py run --runs runs/loops-24 --data DATA --problems 24 --tokens 300
    python scripts/loops_results.py page --runs runs/loops-60 --more runs/loops-24

DATA is the folder that holds gsm8k/test.jsonl. Texts are written by `kvkeep eval --log-evictions`, greedily,
and read by `kvkeep analyze loops`.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from kvkeep_command import kvkeep
from page_figures import standalone

from kvkeep.core.files import atomic_path
from kvkeep.evaluation.loops import evictions, start_of
from kvkeep.evaluation.records import SampleRecord
from kvkeep.evaluation.report import loops_tables as tables
from kvkeep.evaluation.report.loops_page import loops_figures
from kvkeep.evaluation.report.tables import Table
from kvkeep.evaluation.runlog import read_log, read_run

BUDGET, BUFFER = 128, 16
PROBLEMS, TOKENS, BATCH = 60, 400, 24
SINK_ENTRIES = 30 * 3 * 4  # layers, KV heads, first positions of SmolLM2-135M
#: Name of an arm -> its policy.
ARMS = {
    "full": "full",
    "random": "random",
    "random-sinks": "random(sinks=4)",
    "evict-large": "vase-attnv(select_by=smallest, reserve=0)",
    "vase-attnv": "vase-attnv",
    "snapkv": "snapkv",
}
BESIDE = "random-sinks"
#: File -> words of its heading on the page, and its title.
FIGURES = {
    "loops-begun": ("by token", "Share of texts that are in a loop, by token"),
    "loops-before": ("Place of the value ranges", "Place of the ranges that go before a loop"),
}


def run(runs: Path, data: Path, arms: list[str], problems: int, tokens: int) -> None:
    """Every arm to its end."""
    for arm in arms:
        out, begin = runs / arm, time.monotonic()
        known = (out / "run.jsonl").exists()
        if known and read_log(out).footer is not None:
            continue
        words = ["eval", "--task", "gsm8k", "--data", str(data), "--model", "demo", "--policy", ARMS[arm]]
        words += (
            []
            if arm == "full"
            else ["--budget", str(BUDGET), "--buffer", str(BUFFER), "--prompt-mode", "counts"]
        )
        words += ["--preset", "greedy", "--max-new-tokens", str(tokens), "--limit", str(problems)]
        words += ["--batch-size", str(BATCH), "--threads", "1", "--log-evictions", "--out", str(out)]
        kvkeep(*words, *(["--resume"] if known else []))
        sys.stderr.write(f"{time.strftime('%H:%M:%S')} {arm}: {time.monotonic() - begin:.0f} s\n")


def complete(runs: Path) -> list[Path]:
    """Runs that have come to their end."""
    begun = [runs / arm for arm in ARMS if (runs / arm / "run.jsonl").exists()]
    return [place for place in begun if read_log(place).footer is not None]


def findings(runs: Path, before: int) -> dict[str, Any]:
    """What `kvkeep analyze loops` says of the arms that are complete."""
    there = [str(place) for place in complete(runs)]
    flags = ("--beside", BESIDE, "--before", str(before), "--json")
    return dict(json.loads(kvkeep("analyze", "loops", *there, *flags)))


def page(runs: Path, more: Path, out: Path) -> None:
    """Tables and figures into the text of scripts/loops_page.md; ``more``: runs of other problems."""
    facts = findings(runs, 2)
    parts = {
        "classes": tables.class_table(facts).markdown(),
        "before": tables.before_table(facts).markdown(),
        "loops": tables.loop_table(facts).markdown(),
        "sinks": sinks_table(runs, facts),
        "examples": examples(runs, facts),
        "more": other_problems(more),
    }
    text = Path(__file__).with_name("loops_page.md").read_text(encoding="utf-8")
    for name, part in parts.items():
        text = text.replace(f"<!-- {name} -->", part)
    write(out, text.rstrip() + "\n")
    drawn = loops_figures(facts)
    for file, (words, title) in FIGURES.items():
        for heading, (drawing, _) in drawn.items():
            if words in heading:
                write(
                    out.parent.parent / "figures" / f"{file}.svg",
                    standalone(drawing, title, list(facts["arms"])),
                )
    lines = []
    for place in [*(runs / arm for arm in facts["arms"]), *complete(more)]:
        header = read_run(place).header.as_dict()
        header["command"] = [Path(word).name if "/" in word else word for word in header["command"]]
        request = header["extra"].get("request", {})
        for name in ("data", "model"):
            request[name] = Path(str(request.get(name))).name
        lines.append(json.dumps(header, sort_keys=True))
    write(out.with_name("loops-headers.jsonl"), "\n".join(lines) + "\n")


def other_problems(runs: Path) -> str:
    """The same tables for runs of another length; nothing before the compared arms are done."""
    if runs / BESIDE not in (there := complete(runs)) or len(there) < 2:
        return ""
    facts, header = findings(runs, 2), read_run(there[0]).header
    parts = (
        f"## {header.problems} problems, {header.sampling['max_new']} tokens",
        tables.class_table(facts).markdown(),
        tables.before_table(facts).markdown(),
        sinks_table(runs, facts),
    )
    return "\n\n".join(parts)


def sinks_table(runs: Path, facts: dict[str, Any]) -> str:
    """How much of the first four positions is gone when a loop begins, and after 100 tokens in all texts."""
    rows = []
    for arm in facts["arms"]:
        samples = read_run(runs / arm).samples
        begun = [gone(one, start) for one in samples if (start := start_of(one)) is not None]
        later = [gone(one, 100) for one in samples if one.tokens >= 100]
        cells = (f"{100 * statistics.fmean(each):.0f} %" if each else "–" for each in (begun, later))
        rows.append((arm, *cells))
    names = ("run", "sinks gone when a loop begins", "after 100 tokens")
    return Table(columns=names, rows=tuple(rows)).markdown()


def gone(sample: SampleRecord, token: int) -> float:
    """Share of the first four positions, over all heads, that evictions before a token took."""
    return sum(one["entries"] * one["sinks"] for one in evictions(sample) if one["at"] < token) / SINK_ENTRIES


def examples(runs: Path, facts: dict[str, Any]) -> str:
    """The end of the first loop of each arm, in its own words."""
    lines = []
    for arm in facts["arms"]:
        first = next((one for one in facts["loops"] if one["arm"] == arm), None)
        if first is not None:
            texts = {(one.id, one.draw): one.extra["text"] for one in read_run(runs / arm).samples}
            end = " ".join(texts[first["id"], first["draw"]][-160:].split()).replace("`", "'")
            lines.append(f"- `{arm}`: `… {end}`")
    return "\n".join(lines)


def write(path: Path, text: str) -> None:
    """Write a file, whole or not at all."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("run", "page"))
    parser.add_argument("--runs", type=Path, default=Path("runs/loops-60"))
    parser.add_argument("--more", type=Path, default=Path("runs/loops-24"))
    parser.add_argument("--problems", type=int, default=PROBLEMS)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--arm", action="append", choices=list(ARMS), help="only this one; repeatable")
    parser.add_argument("--out", type=Path, default=Path("docs/results/loops.md"))
    given = parser.parse_args()
    if given.what == "run":
        run(given.runs, given.data, given.arm or list(ARMS), given.problems, given.tokens)
    else:
        page(given.runs, given.more, given.out)


if __name__ == "__main__":
    main()
