"""Can forgetting beat remembering? Curves, a search, two sealed studies: docs/results/dilution.md.

    python scripts/dilution_results.py curves --runs runs/dilution   # kvkeep analyze dilution; resumable
    python scripts/dilution_results.py search --runs runs/dilution   # kvkeep eval, dev problems; resumable
    python scripts/dilution_results.py confirm --runs runs/dilution  # the studies sealed in docs/results
    python scripts/dilution_results.py page --runs runs/dilution

`search --arm dbtrimkv --budget 90 --gates FILE --dials s60 s60v` tries another policy beside the same full
caches.
"""

import argparse
import sys
import time
from pathlib import Path

from dilution_page import CURVES, DIALS, SEARCH, STUDIES, curve_file, folder, page
from kvkeep_command import kvkeep

from kvkeep.evaluation.runlog import read_log

BUFFER = "16"
RESULTS = Path("docs/results")


def command(*words: str) -> str:
    """Run a command of kvkeep in this process, and say how long it took; what it printed."""
    begin = time.monotonic()
    printed = kvkeep(*words)
    sys.stderr.write(f"{time.monotonic() - begin:.0f} s: kvkeep {' '.join(words)}\n")
    return printed


def run_curves(runs: Path, names: list[str]) -> None:
    """One command for each curve."""
    for name, curve in CURVES.items():
        out = curve_file(runs, name)
        if out.exists() or (names and name not in names):
            continue
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(command("analyze", "dilution", *curve.flags, "--threads", "1", "--json"))


def evaluate(out: Path, *flags: str) -> None:
    """Run or go on with one arm; a run that is complete is left alone."""
    log = out / "run.jsonl"
    if log.exists() and read_log(out).footer is not None:
        return
    command("eval", *flags, "--threads", "1", "--out", str(out), *(["--resume"] if log.exists() else []))


def policy_flags(policy: str, budget: int | None, gates: Path | None = None) -> list[str]:
    """Flags of one arm."""
    flags = ["--policy", policy]
    flags += [] if budget is None else ["--budget", str(budget), "--buffer", BUFFER]
    return flags + ([] if gates is None else ["--gates", str(gates)])


def run_search(given: argparse.Namespace) -> None:
    """Full cache and evicting arms on dev problems of each dial."""
    arms = {dial: list(found) for dial, found in SEARCH.items()}
    if given.arm is not None:
        arms = {dial: [(given.arm, given.budget)] for dial in arms}
    for dial, found in arms.items():
        if given.dials and dial not in given.dials:
            continue
        task, model = DIALS[dial]
        common = ["--task", task, "--model", model, "--limit", "32", "--batch-size", "32"]
        for policy, budget in [("full", None), *found]:
            gates = given.gates if policy == given.arm else None
            evaluate(folder(given.runs, dial, policy, budget), *common, *policy_flags(policy, budget, gates))


def run_confirm(runs: Path) -> None:
    """Both arms of each sealed study on its held-out problems."""
    for study in STUDIES:
        task, model = DIALS[study.dial]
        plan = ["--split", "confirm", "--prereg", str(RESULTS / study.file), "--limit", "200"]
        for policy, budget in ((study.policy, study.budget), ("full", None)):
            common = ["--task", task, "--model", model, "--batch-size", "100"]
            evaluate(runs / f"confirm-{study.policy}-{policy}", *common, *plan, *policy_flags(policy, budget))


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("curves", "search", "confirm", "page"))
    parser.add_argument("--runs", type=Path, default=Path("runs/dilution"))
    parser.add_argument("--curves", nargs="*", default=[], help="only these curves")
    parser.add_argument("--dials", nargs="*", default=[], help="only these dials of the search")
    parser.add_argument("--arm", help="search: this policy in place of the listed ones")
    parser.add_argument("--budget", type=int, help="of --arm")
    parser.add_argument("--gates", type=Path, help="of --arm")
    parser.add_argument("--out", type=Path, default=RESULTS / "dilution.md")
    given = parser.parse_args()
    if given.what == "curves":
        run_curves(given.runs, given.curves)
    elif given.what == "search":
        run_search(given)
    elif given.what == "confirm":
        run_confirm(given.runs)
    else:
        page(given.runs, given.out)


if __name__ == "__main__":
    main()
