"""Tables and headers of docs/results/gsm8k-qwen.md from the runs of gsm8k_int8.py.

    python scripts/gsm8k_int8_page.py --runs runs/qwen --data FOLDER

Prints the tables (the words around them are written by hand) and writes the headers beside the page.
"""

import argparse
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from gsm8k_int8 import ARMS, slug

from kvkeep.evaluation.comparison import compare
from kvkeep.evaluation.records import Run
from kvkeep.evaluation.runlog import read_log
from kvkeep.evaluation.splits import hash_order
from kvkeep.evaluation.statistics.accuracy import accuracy
from kvkeep.evaluation.statistics.correction import corrected
from kvkeep.evaluation.statistics.paired import PairedDifference, paired_difference
from kvkeep.evaluation.statistics.problem_means import ProblemMeans, problem_means
from kvkeep.evaluation.tasks.registry import make_task

CLASSES = ("ok", "truncated", "phrase_loop", "garbage")
LARGE = "vase-attnv, evict large"
#: Baseline and challenger: every arm against the full cache, VaSE-AttnV against every arm, and the claim.
PAIRS = (
    *(("full", arm) for arm in ARMS if arm != "full"),
    *((arm, "vase-attnv") for arm in ARMS if arm not in ("full", "vase-attnv")),
    ("random", LARGE),
)


def fair(found: Mapping[str, Run], batch: int) -> dict[str, Run]:
    """Cut the runs down to the batches that every arm has completed.

    The samples of a batch that was stopped are its short ones; they would flatter the arm.
    """
    begun = {arm: run for arm, run in found.items() if len(run.samples) >= batch}
    rounds = min(len(run.samples) // batch for run in begun.values())
    ids = set(hash_order({sample.id for sample in begun["full"].samples})[: rounds * batch])
    return {
        arm: replace(run, samples=tuple(sample for sample in run.samples if sample.id in ids))
        for arm, run in begun.items()
    }


def numbers(text: str) -> set[str]:
    """All numbers of a text, written alike.

    Examples
    --------
    >>> sorted(numbers("1,125 dollars, 2.50 each"))
    ['1125', '2.5']
    """
    found = re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?", text)
    return {f"{float(each.replace(',', '')):g}" for each in found}


def recalled(run: Run, questions: Mapping[str, str]) -> ProblemMeans:
    """Share of a question's numbers that stand in the answer, by problem; 1 where it has none."""
    texts = {sample.id: str(sample.extra["text"]) for sample in run.samples}
    means = problem_means(run.samples, "accuracy")
    shares = []
    for name in means.ids:
        asked = numbers(questions[name])
        shares.append(len(asked & numbers(texts[name])) / len(asked) if asked else 1.0)
    return replace(means, means=np.array(shares), first=np.array(shares))


def row(arm: str, run: Run, full: Run, share: float) -> str:
    """One line of the table of arms."""
    right = accuracy(problem_means(run.samples, "accuracy"))
    low, high = right.interval if right.wilson is None else right.wilson
    classes = [sum(sample.failure_class == name for sample in run.samples) for name in CLASSES]
    cycle = sum(sample.extra["tail_period"] is not None for sample in run.samples)
    onset = sum(sample.extra["loop_onset"] is not None for sample in run.samples)
    count = sum(sample.correct for sample in run.samples)
    tokens = sum(sample.tokens for sample in run.samples) / len(run.samples)
    return (
        f"| {arm} | {run.header.budget.get('entries', '–')} | {run.mean_cache:.1f} "
        f"({100 * run.mean_cache / full.mean_cache:.0f} %) | {count} of {len(run.samples)} | "
        f"{100 * low:.0f}–{100 * high:.0f} | {100 * share:.0f} | {tokens:.0f} | "
        f"{' | '.join(map(str, classes))} | {cycle} | {onset} |"
    )


def points(one: PairedDifference) -> str:
    """An estimate and its interval in points."""
    return f"{100 * one.estimate:+.0f} [{100 * one.interval[0]:+.0f}, {100 * one.interval[1]:+.0f}]"


def differences(found: Mapping[str, Run], recall: Mapping[str, ProblemMeans]) -> list[str]:
    """Paired differences, p corrected by Holm over the lines."""
    pairs = [pair for pair in PAIRS if pair[0] in found and pair[1] in found]
    made = {
        pair: compare(
            found[pair[0]],
            found[pair[1]],
            allow=["missing", "cache"] if pair[0] == "full" else ["missing"],
        )
        for pair in pairs
    }
    kept = {
        (one, other): paired_difference(recall[one], recall[other], rng=np.random.default_rng(0))
        for one, other in pairs
    }
    right = corrected({str(pair): each.difference.p for pair, each in made.items()}, "holm")
    share = corrected({str(pair): each.p for pair, each in kept.items()}, "holm")
    lines = []
    for pair, one in made.items():
        main, loops = one.difference, one.beside["phrase_loop"]
        lines.append(
            f"| {pair[1]} − {pair[0]} | {points(main)} | {main.better} / {main.worse} | "
            f"{right[str(pair)]:.3f} | {100 * one.smallest:.0f} | {points(loops)} | {points(kept[pair])} | "
            f"{kept[pair].p:.4f} | {share[str(pair)]:.3f} |"
        )
    return lines


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/qwen"))
    parser.add_argument("--data", required=True)
    parser.add_argument("--batch", type=int, default=15, help="as the runs were made with")
    parser.add_argument("--out", type=Path, default=Path("docs/results/gsm8k-qwen.md"))
    given = parser.parse_args()
    logs = {arm: given.runs / slug(arm) for arm in ARMS if (given.runs / slug(arm) / "run.jsonl").exists()}
    found = fair({arm: read_log(folder).run for arm, folder in logs.items()}, given.batch)
    with make_task("gsm8k", data=given.data) as task:
        questions = {problem.id: problem.question for problem in task.all_problems()}
    recall = {arm: recalled(run, questions) for arm, run in found.items()}
    lines = [
        "| policy | budget | mean cache (of full) | right | 95 %, in % | numbers | tokens | "
        + " | ".join(CLASSES)
        + " | cycle | repeats |",
        "|---" * (9 + len(CLASSES)) + "|",
        *(row(arm, run, found["full"], float(recall[arm].means.mean())) for arm, run in found.items()),
        "",
        "| challenger − baseline | right, points | better / worse | p (Holm) | could be seen | "
        "phrase loops, points | numbers, points | p | p (Holm) |",
        "|---" * 9 + "|",
        *differences(found, recall),
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    headers = [run.header.as_dict() for run in found.values()]
    for header in headers:  # the hash says what the weights are; where they were found may be gone tomorrow
        header["extra"].get("source", {}).pop("package", None)
    text = "".join(json.dumps(header) + "\n" for header in headers)
    # Folders of the machine that ran it tell a reader nothing.
    text = re.sub(r'"(?:/[^"/]+)+/([^"/]+)"', r'"\1"', text)
    (given.out.parent / f"{given.out.stem}-headers.jsonl").write_text(text)


if __name__ == "__main__":
    main()
