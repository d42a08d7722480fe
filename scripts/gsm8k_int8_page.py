"""Tables and headers of docs/results/gsm8k-qwen.md from the runs of gsm8k_int8.py.

    python scripts/gsm8k_int8_page.py --runs runs/qwen

Prints the tables (the words around them are written by hand) and writes the headers beside the page.
"""

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from gsm8k_int8 import ARMS, slug

from kvkeep.evaluation.comparison import compare
from kvkeep.evaluation.records import Run
from kvkeep.evaluation.runlog import read_log
from kvkeep.evaluation.statistics.accuracy import accuracy
from kvkeep.evaluation.statistics.correction import corrected
from kvkeep.evaluation.statistics.problem_means import problem_means

CLASSES = ("ok", "truncated", "phrase_loop", "garbage")


def row(arm: str, run: Run, full: Run) -> str:
    """One line of the table of arms."""
    right = accuracy(problem_means(run.samples, "accuracy"))
    low, high = right.interval
    classes = [sum(sample.failure_class == name for sample in run.samples) for name in CLASSES]
    cycles = sum(sample.extra["tail_period"] is not None for sample in run.samples)
    onset = sum(sample.extra["loop_onset"] is not None for sample in run.samples)
    unread = sum(sample.answer_class == "not_extracted" for sample in run.samples)
    tokens = sum(sample.tokens for sample in run.samples) / len(run.samples)
    return (
        f"| {arm} | {run.header.budget.get('entries', '–')} | {run.mean_cache:.1f} "
        f"({100 * run.mean_cache / full.mean_cache:.0f} %) | {100 * right.estimate:.1f} [{100 * low:.1f}, "
        f"{100 * high:.1f}] | {unread} | {tokens:.0f} | {' | '.join(map(str, classes))} | {onset} | "
        f"{cycles} |"
    )


def differences(found: Mapping[str, Run], pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Lines of paired differences, challenger minus baseline, corrected by Holm over all of them."""
    made = {
        f"{challenger} − {baseline}": compare(
            found[baseline], found[challenger], allow=["cache"] if baseline == "full" else []
        )
        for baseline, challenger in pairs
        if baseline in found and challenger in found
    }
    adjusted = corrected({name: one.difference.p for name, one in made.items()}, "holm")
    lines = []
    for name, one in made.items():
        main, loops, cut = one.difference, one.beside["phrase_loop"], one.beside["truncated"]
        cells = [
            f"{100 * each.estimate:+.1f} [{100 * each.interval[0]:+.1f}, {100 * each.interval[1]:+.1f}]"
            for each in (main, loops, cut)
        ]
        lines.append(
            f"| {name} | {cells[0]} | {main.better} / {main.worse} | {adjusted[name]:.4f} | "
            f"{100 * one.smallest:.1f} | {cells[1]} | {cells[2]} |"
        )
    return lines


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/qwen"))
    parser.add_argument("--out", type=Path, default=Path("docs/results/gsm8k-qwen.md"))
    given = parser.parse_args()
    found = {
        arm: read_log(given.runs / slug(arm)).run
        for arm in ARMS
        if (given.runs / slug(arm) / "run.jsonl").exists() and read_log(given.runs / slug(arm)).footer
    }
    full = found["full"]
    lines = [
        "| policy | budget | mean cache (of full) | right, % [95 %] | no answer | tokens | "
        + " | ".join(CLASSES)
        + " | repeats | ends in a cycle |",
        "|---" * (8 + len(CLASSES)) + "|",
        *(row(arm, run, full) for arm, run in found.items()),
        "",
        "| challenger − baseline | right, points [95 %] | better / worse | p (Holm) | smallest seen | "
        "phrase loops, points | truncated, points |",
        "|---" * 7 + "|",
        *differences(found, [("full", arm) for arm in found if arm != "full"]),
        *differences(found, [(arm, "vase-attnv") for arm in found if arm not in ("full", "vase-attnv")]),
        *differences(found, [("random", "vase-attnv, evict large")]),
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    text = "".join(json.dumps(run.header.as_dict()) + "\n" for run in found.values())
    # Folders of the machine that ran it tell a reader nothing.
    text = re.sub(r'"(?:/[^"/]+)+/([^"/]+)"', r'"\1"', text)
    (given.out.parent / f"{given.out.stem}-headers.jsonl").write_text(text)


if __name__ == "__main__":
    main()
