"""Retention gates of the built-in reasoner, and their ablations: docs/results/gates.md.

    python scripts/gates_results.py train --runs runs/trace            # seven sets of gates; resumable
    python scripts/gates_results.py run --runs runs/trace --share 4    # each of them at one budget
    python scripts/gates_results.py page --runs runs/trace

The other policies come from `scripts/trace_results.py run`, with the same folder of runs: same problems, same
draws, same measured mean cache.
"""

import argparse
import contextlib
import json
import sys
import time
from pathlib import Path

import trace_results as base

from kvkeep.evaluation.comparison import compare
from kvkeep.evaluation.records import Run
from kvkeep.evaluation.runlog import read_log
from kvkeep.evaluation.statistics.accuracy import accuracy
from kvkeep.evaluation.statistics.correction import corrected
from kvkeep.evaluation.statistics.problem_means import problem_means

MEMORY = 32
TRAINING = (
    *("--data", "trace", "--memory", str(MEMORY), "--row", "640", "--rows", "2", "--accumulate", "1"),
    *("--steps", "200", "--warmup", "20", "--rate", "5e-3", "--bias", "6", "--threads", "1"),
)

#: Arm -> policy, and what its training does otherwise.
GATES: dict[str, tuple[str, tuple[str, ...]]] = {
    "dbtrimkv": ("dbtrimkv", ()),
    "trimkv": ("trimkv", ("--policy", "trimkv")),
    "dbtrimkv, untied": ("dbtrimkv", ("--untied",)),
    "dbtrimkv, scalar": ("dbtrimkv", ("--scalar",)),
    "dbtrimkv, no KL": ("dbtrimkv", ("--kl", "0")),
    "dbtrimkv, no next token": ("dbtrimkv", ("--next-token", "0")),
    "dbtrimkv, no capacity": ("dbtrimkv", ("--capacity", "0")),
    "dbtrimkv, untrained": ("dbtrimkv", ("--steps", "1", "--rate", "1e-9")),
}
OTHERS = ("vase-attnv", "vase-dkv", "keydiff", "snapkv", "triattention", "set-diversity", "random")


def folder(runs: Path, arm: str) -> Path:
    """Where the gates of an arm are."""
    return runs / "gates" / base.slug(arm)


def train_all(given: argparse.Namespace) -> None:
    """Train every set of gates that is not there."""
    (given.runs / "gates").mkdir(parents=True, exist_ok=True)
    for arm in given.arms or GATES:
        out, started = folder(given.runs, arm), time.perf_counter()
        if (out / "gates.safetensors").exists():
            continue
        more = ("--resume",) if (out / "checkpoint.pt").exists() else ()
        base.kvkeep(
            "gates", "train", "--model", given.model, "--out", str(out), *TRAINING, *GATES[arm][1], *more
        )
        sys.stderr.write(f"{arm}: {time.perf_counter() - started:.0f} s\n")


def run_all(given: argparse.Namespace) -> None:
    """Run every set of gates at one budget, matched to the reference's mean cache."""
    common = ["--model", given.model, "--limit", str(given.problems), "--draws", str(given.draws)]
    common += ["--threads", "1", "--batch-size", str(given.batch)]
    home = given.runs / f"chain-{given.share}"
    reference = read_log(home / base.REFERENCE).run
    for arm in given.arms or GATES:
        started = time.perf_counter()
        flags = ["--policy", GATES[arm][0], "--buffer", str(base.BUFFER)]
        flags += ["--gates", str(folder(given.runs, arm) / "gates.safetensors")]
        out = home / f"gates-{base.slug(arm)}"
        run = base.evaluate(out, [*flags, "--budget", str(base.entries(given.share))], common)
        if abs(run.mean_cache / reference.mean_cache - 1) > 0.02:
            with contextlib.suppress(base.KvkeepError):
                base.kvkeep("match", str(home / base.REFERENCE), *flags, "--out", str(matches(out)))
            run = base.best(run, reference, matches(out))
        score = accuracy(problem_means(run.samples, "score"))
        sys.stderr.write(
            f"chain/{given.share} {arm}: {100 * score.estimate:.1f} % at {run.mean_cache:.1f} entries, "
            f"{time.perf_counter() - started:.0f} s\n"
        )


def matches(out: Path) -> Path:
    """Where the tries of a match are."""
    return out.with_name(f"match-{out.name}")


def load(runs: Path, share: int) -> dict[str, Run]:
    """Matched runs of gates and of the other policies at one budget."""
    home = runs / f"chain-{share}"
    found = {}
    for arm in GATES:
        out = home / f"gates-{base.slug(arm)}"
        if (out / "run.jsonl").exists() and read_log(out).footer is not None:
            found[arm] = base.best(read_log(out).run, read_log(home / base.REFERENCE).run, matches(out))
    others = base.load(runs, share)
    return found | {arm: others[arm] for arm in OTHERS if arm in others}


def training_table(runs: Path) -> list[str]:
    """What training says of each set of gates."""
    from kvkeep.core.files import read_tensors

    lines = [
        "| gates | parameters | KL, held out | next token, held out | entries alive at the end | seconds |",
        "|---" * 6 + "|",
    ]
    for arm in GATES:
        path = folder(runs, arm) / "gates.safetensors"
        if path.exists():
            tensors, header = read_tensors(path, "gates")
            facts = header["training"]
            held = facts["held_out"]
            size = sum(each.numel() for each in tensors.values())
            lines.append(
                f"| {arm} | {size:,} | {held['kl']:.2g} | {held['next_token']:.2g} (full {held['full']:.2g}) "
                f"| {held['alive']:.0f} | {facts['seconds']:.0f} |"
            )
    return lines


def differences(budgets: dict[int, dict[str, Run]], arm: str, against: tuple[str, ...]) -> list[str]:
    """Paired differences of one arm to others, each line corrected over its budgets."""
    lines = ["| " + arm + " minus | " + " | ".join(f"1/{share}" for share in budgets) + " |"]
    lines.append("|---" * (1 + len(budgets)) + "|")
    for other in against:
        compared = {
            share: compare(found[other], found[arm], metric="score", allow=["cache", "versions"]).difference
            for share, found in budgets.items()
            if other in found and arm in found
        }
        if not compared:
            continue
        adjusted = corrected({str(share): one.p for share, one in compared.items()}, "holm")
        cells = [
            f"{100 * one.estimate:+.1f} [{100 * one.interval[0]:+.1f}, {100 * one.interval[1]:+.1f}], "
            f"p {adjusted[str(share)]:.4f}"
            if (one := compared.get(share))
            else "–"
            for share in budgets
        ]
        lines.append(f"| {other} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def page(given: argparse.Namespace) -> None:
    """Write the page and the headers of its runs."""
    runs: Path = given.runs
    full = read_log(runs / "full").run
    budgets = {share: load(runs, share) for share in base.SHARES}
    budgets = {share: found for share, found in budgets.items() if any(arm in found for arm in GATES)}
    what = full.header
    lines = [
        "# Retention gates on the built-in reasoner",
        "",
        f"Gates for {what.model} (weights {what.model_sha256[:12]}), trained on training problems of `trace` "
        f"with memory {MEMORY}: `kvkeep gates train --model {what.model} {' '.join(TRAINING)} --out …`, with "
        "what the name of an arm says changed. Entries alive are by the gates, per KV head, of a program of "
        "about 590 tokens.",
        "",
        *training_table(runs),
        "",
        f"Then as in [trace.md](trace.md): {what.problems} dev problems x {what.draws} draws, buffer "
        f"{base.BUFFER}, prompt kept on top of the budget, measured mean cache within 2 % of the reference's "
        "unless marked. Scores are shares of right answers in percent with the 95 % interval over problems.",
        "",
    ]
    headers = [full.header.as_dict()]
    head = "| policy | budget | mean | score | hot | warm | dormant | loops | cut off |\n" + "|---" * 9 + "|"
    for share, found in budgets.items():
        reference = found[base.REFERENCE]
        ranked = sorted(found, key=lambda arm: -accuracy(problem_means(found[arm].samples, "score")).estimate)
        lines += [f"## Budget {base.entries(share)} entries of the chain (1/{share} of it)", "", head]
        lines += [base.row("full", full, reference)]
        lines += [base.row(arm, found[arm], reference) for arm in ranked]
        lines.append("")
        headers += [found[arm].header.as_dict() for arm in found if arm in GATES]
    lines += [
        "## Differences",
        "",
        "In points, with the 95 % interval over problems (bootstrap, 10,000 times); p corrected by Holm over "
        "the budgets of a line.",
        "",
        *differences(budgets, "dbtrimkv", ("trimkv", *OTHERS)),
        "Ablations:",
        "",
        *differences(budgets, "dbtrimkv", tuple(arm for arm in GATES if "," in arm)),
    ]
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text("\n".join(lines))
    text = "".join(json.dumps(one) + "\n" for one in headers)
    given.out.with_name("gates-headers.jsonl").write_text(base.without_folders(text))


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("train", "run", "page"))
    parser.add_argument("--runs", type=Path, default=Path("runs/trace"))
    parser.add_argument("--model", default="trace-1")
    parser.add_argument("--share", type=int, choices=base.SHARES, default=4)
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--batch", type=int, default=200)
    parser.add_argument("--arms", nargs="*", help="only these arms")
    parser.add_argument("--out", type=Path, default=Path("docs/results/gates.md"))
    given = parser.parse_args()
    {"train": train_all, "run": run_all, "page": page}[given.what](given)


if __name__ == "__main__":
    main()
