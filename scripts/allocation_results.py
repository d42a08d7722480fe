"""Who gets how much: equal heads, adaptive heads and one budget for the model, at equal measured cache.

    python scripts/allocation_results.py run --runs runs/trace    # resumable; equal heads: runs of trace.md
    python scripts/allocation_results.py page --runs runs/trace

The arms are those of `scripts/trace_results.py` (same problems, draws, buffer and budgets), with another
allocation behind the same score.
"""

import argparse
import json
import re
import sys
from pathlib import Path

import trace_results as trace

from kvkeep.evaluation.comparison import compare
from kvkeep.evaluation.records import Run
from kvkeep.evaluation.statistics.correction import corrected

SCORERS = ("snapkv", "h2o", "vase-dkv")
SHARES = {
    "adaptive heads": " + adaptive-heads",
    "whole model": " + whole-model",
    "whole model, z-score": " + whole-model(calibrate=z-score)",
}


def arms() -> dict[str, str]:
    """Name of an arm -> the scorer that it is compared with."""
    return {f"{scorer}, {share}": scorer for scorer in SCORERS for share in SHARES}


def register() -> None:
    """Make the arms known to the functions of `trace_results`."""
    for arm, scorer in arms().items():
        trace.ARMS[arm] = (scorer + SHARES[arm.partition(", ")[2]],)


def run(given: argparse.Namespace) -> None:
    """Run what is missing."""
    given.arms = [trace.REFERENCE, *SCORERS, *arms()]
    trace.run_all(given)


def load(runs: Path, share: int) -> dict[str, Run]:
    """The finished runs of one budget."""
    found = trace.load(runs, share)
    return {arm: found[arm] for arm in (*SCORERS, *arms()) if arm in found}


def page(given: argparse.Namespace) -> None:
    """Write the page and the headers of its runs."""
    found = load(given.runs, given.share)
    tests = {
        arm: compare(found[scorer], found[arm], metric="score", allow=["cache", "versions"]).difference
        for arm, scorer in arms().items()
        if arm in found
    }
    adjusted = corrected({arm: one.p for arm, one in tests.items()}, "holm")
    header = next(iter(found.values())).header
    lines = [
        "# Who gets how much: allocation on the built-in reasoner",
        "",
        f"`trace` (size M), model {header.model} (weights {header.model_sha256[:12]}), {header.problems} dev "
        f"problems x {header.draws} draws, {trace.entries(given.share)} entries of the chain per head on "
        f"average (1/{given.share} of it), buffer {trace.BUFFER}, prompt kept on top. Equal heads are the "
        "runs of [trace.md](trace.md). Scores in percent with the 95 % interval over problems; differences "
        f"to equal heads are paired by problem, p corrected by Holm over {len(tests)} comparisons. Written "
        "by `python scripts/allocation_results.py run` and `… page`; headers in `allocation-headers.jsonl`.",
        "",
        "| policy | mean cache | score | hot | warm | dormant | against equal heads |",
        "|---" * 7 + "|",
    ]
    for arm, one in found.items():
        cells = trace.row(arm, one, found[SCORERS[0]]).split(" | ")
        change = "–"
        if arm in tests:
            low, high = tests[arm].interval
            word = "undecided" if adjusted[arm] > 0.05 else "better" if tests[arm].estimate > 0 else "worse"
            change = (
                f"{100 * tests[arm].estimate:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}], "
                f"p {adjusted[arm]:.4f}: {word}"
            )
        lines.append(" | ".join([cells[0], *cells[2:7], change]) + " |")
    given.out.write_text("\n".join(lines) + "\n")
    text = "".join(json.dumps(one.header.as_dict()) + "\n" for one in found.values())
    # Folders of the machine that ran it tell a reader nothing.
    text = re.sub(r'"(?:/[^"/]+)+/([^"/]+)"', r'"\1"', text)
    given.out.with_name("allocation-headers.jsonl").write_text(text)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("run", "page"))
    parser.add_argument("--runs", type=Path, default=Path("runs/trace"))
    parser.add_argument("--model", default="trace-1")
    parser.add_argument("--share", type=int, choices=trace.SHARES, default=4)
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--batch", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("docs/results/allocation.md"))
    given = parser.parse_args()
    register()
    if given.what == "run":
        sys.stderr.write(f"{len(arms())} arms beside those of trace.md\n")
        run(given)
    else:
        page(given)


if __name__ == "__main__":
    main()
