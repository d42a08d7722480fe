"""Every policy on the built-in reasoner at matched mean cache: docs/results/trace.md.

    python scripts/trace_results.py run --runs runs/trace --share 4      # one budget: chain/4; resumable
    python scripts/trace_results.py page --runs runs/trace

Each run is a `kvkeep eval` command, kept in its header; this file only lists them, and calls `kvkeep match`
where the measured mean cache of an arm is more than 2 % off that of the reference, VaSE-AttnV.
"""

import argparse
import contextlib
import json
import re
import sys
import time
from itertools import islice
from pathlib import Path

import numpy as np
from kvkeep_command import kvkeep

from kvkeep.core.errors import KvkeepError
from kvkeep.evaluation.comparison import Comparison, compare
from kvkeep.evaluation.records import Run
from kvkeep.evaluation.report.summary import parts
from kvkeep.evaluation.runlog import read_log
from kvkeep.evaluation.statistics.accuracy import accuracy
from kvkeep.evaluation.statistics.correction import corrected
from kvkeep.evaluation.statistics.problem_means import problem_means
from kvkeep.testbed.trace_task import problems, size

CHAIN = 360  # mean length of a right chain of size M
SHARES = (2, 4, 8)
BUFFER = 16
REFERENCE = "vase-attnv"
CALIBRATED = ("triattention", "set-diversity")

#: Name of an arm -> policy and options.
ARMS: dict[str, tuple[str, ...]] = {
    "vase-attnv": ("vase-attnv",),
    "vase-dkv": ("vase-dkv",),
    "random": ("random",),
    "streaming-llm": ("streaming-llm",),
    "key-norm": ("key-norm",),
    "keydiff": ("keydiff",),
    "h2o": ("h2o",),
    "tova": ("tova",),
    "snapkv": ("snapkv",),
    "r-kv": ("r-kv",),
    "cur": ("cur",),
    "expected-attention": ("expected-attention",),
    "triattention": ("triattention",),
    "set-diversity": ("set-diversity", "lam=0.5"),
    "set-diversity, lam 0": ("set-diversity", "lam=0"),
    "vase-attnv, evict large": ("vase-attnv", "select_by=smallest", "reserve=0"),
    "vase-attnv, no reserve": ("vase-attnv", "reserve=0"),
    "vase-attnv, no sampling": ("vase-attnv", "sample=false"),
    "vase-attnv, neither": ("vase-attnv", "reserve=0", "sample=false"),
    "cur, fixed projection": ("cur", "rank=20", "local_window=0"),
}

#: Statement -> baseline, challenger, metric, what the statement expects of challenger minus baseline.
STATEMENTS = {
    "(a) evicting the largest value ranges collapses accuracy": (
        "random",
        "vase-attnv, evict large",
        "score",
        "below",
    ),
    "(a) and makes loops": ("random", "vase-attnv, evict large", "phrase_loop", "above"),
    "(b) reserving large ranges helps an attention-scored policy (sampled)": (
        "vase-attnv, no reserve",
        "vase-attnv",
        "score",
        "above",
    ),
    "(b) the same, top-k": ("vase-attnv, neither", "vase-attnv, no sampling", "score", "above"),
    "(c) sampling beats deterministic top-k (with reserve)": (
        "vase-attnv, no sampling",
        "vase-attnv",
        "score",
        "above",
    ),
    "(c) the same, without reserve": ("vase-attnv, neither", "vase-attnv, no reserve", "score", "above"),
    "(d) redrawing the projection helps CurDKV": ("cur, fixed projection", "vase-dkv", "score", "above"),
    "(e) alpha at 0.5 beats top-k on the same score": (
        "set-diversity, lam 0",
        "set-diversity",
        "score",
        "above",
    ),
}


def entries(share: int) -> int:
    """Chain entries kept when a chain of mean length keeps one part in ``share``."""
    return round(CHAIN / share)


def slug(arm: str) -> str:
    """The name of an arm as a folder."""
    return arm.replace(", ", "-").replace(" ", "-")


def policy_flags(arm: str, calibration: Path) -> list[str]:
    """Return the flags that describe an arm, without its budget."""
    name, *options = ARMS[arm]
    flags = ["--policy", name, "--buffer", str(BUFFER)]
    for option in options:
        flags += ["--option", option]
    return flags + (["--calibration", str(calibration)] if name in CALIBRATED else [])


def calibrate(runs: Path, model: str) -> Path:
    """Measure the statistics of a model on training problems, once."""
    path, text = runs / "calibration.safetensors", runs / "calibration.txt"
    if not path.exists():
        rows = islice(problems(size("M"), "train", seed="calibration"), 60)
        text.write_text("\n".join(" ".join(row.prompt + row.chain) for row in rows))
        kvkeep("calibrate", "--model", model, "--text", str(text), "--out", str(path))
    return path


def evaluate(folder: Path, flags: list[str], common: list[str]) -> Run:
    """Run or go on with one arm."""
    log = folder / "run.jsonl"
    if not log.exists() or read_log(folder).footer is None:
        more = ["--resume"] if log.exists() else []
        kvkeep("eval", *flags, *common, "--out", str(folder), *more)
    return read_log(folder).run


def matched(runs: Path, arm: str, share: int, calibration: Path, common: list[str]) -> Run:
    """Run an arm at the nominal budget, and at another one if its mean cache is off."""
    home = runs / f"chain-{share}"
    flags = policy_flags(arm, calibration)
    run = evaluate(
        home / arm.replace(", ", "-").replace(" ", "-"), [*flags, "--budget", str(entries(share))], common
    )
    if arm == REFERENCE:
        return run
    reference = read_log(home / REFERENCE).run
    if abs(run.mean_cache / reference.mean_cache - 1) <= 0.02:
        return run
    tries = home / f"match-{slug(arm)}"
    with contextlib.suppress(KvkeepError):  # no budget comes that close: the page says how far off
        kvkeep("match", str(home / REFERENCE), *flags, "--out", str(tries))
    return best(run, reference, tries)


def best(run: Run, reference: Run, tries: Path) -> Run:
    """Return the run whose mean cache lies nearest to that of the reference."""
    found = [run, *(read_log(path.parent).run for path in sorted(tries.glob("*/run.jsonl")))]
    return min(found, key=lambda one: abs(one.mean_cache / reference.mean_cache - 1))


def run_all(given: argparse.Namespace) -> None:
    """Run every arm of one budget, and the full cache."""
    runs: Path = given.runs
    runs.mkdir(parents=True, exist_ok=True)
    common = ["--model", given.model, "--limit", str(given.problems), "--draws", str(given.draws)]
    common += ["--threads", "1", "--batch-size", str(given.batch)]
    calibration = calibrate(runs, given.model)
    plan = [arm for arm in ARMS if not given.arms or arm in given.arms]
    if not given.arms:
        evaluate(runs / "full", ["--policy", "full"], common)
    for number, arm in enumerate(plan, 1):
        started = time.perf_counter()
        run = matched(runs, arm, given.share, calibration, common)
        score = accuracy(problem_means(run.samples, "score"))
        sys.stderr.write(
            f"chain/{given.share} {number}/{len(plan)} {arm}: {100 * score.estimate:.1f} % at "
            f"{run.mean_cache:.1f} entries, {time.perf_counter() - started:.0f} s\n"
        )


def load(runs: Path, share: int) -> dict[str, Run]:
    """Read the matched runs of one budget."""
    home = runs / f"chain-{share}"
    found: dict[str, Run] = {}
    for arm in ARMS:
        folder = home / slug(arm)
        if (folder / "run.jsonl").exists() and read_log(folder).footer is not None:
            run = read_log(folder).run
            reference = read_log(home / REFERENCE).run
            found[arm] = best(run, reference, home / f"match-{folder.name}")
    return found


def row(arm: str, run: Run, reference: Run) -> str:
    """One line of a table."""
    score = accuracy(problem_means(run.samples, "score"))
    low, high = score.interval
    roles = parts(run.samples)
    shares = " | ".join(f"{100 * roles.get(role, float('nan')):.1f}" for role in ("hot", "warm", "dormant"))
    loops = np.mean([sample.failure_class == "phrase_loop" for sample in run.samples])
    cut = np.mean([sample.failure_class == "truncated" for sample in run.samples])
    budget = run.header.budget.get("entries") or "–"
    off = run.mean_cache / reference.mean_cache - 1
    mark = "" if abs(off) <= 0.02 or arm == "full" else f" ({100 * off:+.1f} %)"
    return (
        f"| {arm} | {budget} | {run.mean_cache:.1f}{mark} | {100 * score.estimate:.1f} [{100 * low:.1f}, "
        f"{100 * high:.1f}] | {shares} | {100 * loops:.1f} | {100 * cut:.1f} |"
    )


def verdict(found: dict[int, Comparison], expects: str) -> list[str]:
    """The cells of one statement, corrected over its budgets by Holm."""
    adjusted = corrected({str(share): one.difference.p for share, one in found.items()}, "holm")
    cells = []
    for share in SHARES:
        if share not in found:
            cells.append("–")
            continue
        one, p = found[share].difference, adjusted[str(share)]
        low, high = one.interval
        right_way = one.estimate > 0 if expects == "above" else one.estimate < 0
        word = "undecided" if p > 0.05 else "holds" if right_way else "**the opposite**"
        cells.append(f"{100 * one.estimate:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}], p {p:.4f}: {word}")
    return cells


def page(given: argparse.Namespace) -> None:
    """Write the page and the headers of its runs."""
    runs: Path = given.runs
    full = read_log(runs / "full").run
    budgets = {share: load(runs, share) for share in SHARES}
    budgets = {share: found for share, found in budgets.items() if REFERENCE in found}
    what = full.header
    lines = [
        "# The built-in reasoner under every policy",
        "",
        f"`trace` (size M), model {what.model} (weights {what.model_sha256[:12]}), {what.problems} dev "
        f"problems x {what.draws} draws at temperature {what.sampling.get('temperature')}, buffer {BUFFER}, "
        "prompt kept on top of the budget. Scores are shares of right answers in percent, with the 95 % "
        "interval over problems. `mean` is the measured mean cache per KV head, prompt included; a mark says "
        "how far it is off the reference where no budget came within 2 %. Written by "
        "`python scripts/trace_results.py run --share N` and `… page`; the headers of all runs, commands "
        "included, are in `trace-headers.jsonl`.",
        "",
    ]
    head = "| policy | budget | mean | score | hot | warm | dormant | loops | cut off |\n" + "|---" * 9 + "|"
    headers = [full.header.as_dict()]
    for share, found in budgets.items():
        lines += [f"## Budget {entries(share)} entries of the chain (1/{share} of it)", "", head]
        ranked = sorted(found, key=lambda arm: -accuracy(problem_means(found[arm].samples, "score")).estimate)
        lines += [row("full", full, found[REFERENCE])]
        lines += [row(arm, found[arm], found[REFERENCE]) for arm in ranked]
        lines.append("")
        headers += [found[arm].header.as_dict() for arm in found]
    lines += [
        "## What the papers say, and what happened here",
        "",
        "Paired differences in points (challenger minus baseline; bootstrap over problems, 10,000 times), "
        "p corrected by Holm over the budgets of a line.",
        "",
        "| statement | challenger − baseline | " + " | ".join(f"chain/{share}" for share in SHARES) + " |",
        "|---" * (2 + len(SHARES)) + "|",
    ]
    for statement, (baseline, challenger, metric, expects) in STATEMENTS.items():
        compared = {
            share: compare(found[baseline], found[challenger], metric=metric, allow=["cache", "versions"])
            for share, found in budgets.items()
            if baseline in found and challenger in found
        }
        lines.append(
            f"| {statement} | {challenger} − {baseline} | " + " | ".join(verdict(compared, expects)) + " |"
        )
    lines += ["", "(f) Random with the prompt kept is a strong floor:", ""]
    for share, found in budgets.items():
        others = [arm for arm in ARMS if arm in found and "," not in arm and arm != "random"]
        tests = {
            arm: compare(found["random"], found[arm], allow=["cache", "versions"]).difference
            for arm in others
        }
        adjusted = corrected({arm: one.p for arm, one in tests.items()}, "holm")
        above = [arm for arm in others if adjusted[arm] <= 0.05 and tests[arm].estimate > 0]
        below = [arm for arm in others if adjusted[arm] <= 0.05 and tests[arm].estimate < 0]
        lines.append(
            f"- chain/{share}: better than random (Holm over {len(others)}): {', '.join(above) or 'none'}; "
            f"worse: {', '.join(below) or 'none'}; the others undecided."
        )
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text("\n".join(lines) + "\n")
    text = "".join(json.dumps(one) + "\n" for one in headers)
    given.out.with_name("trace-headers.jsonl").write_text(without_folders(text))


def without_folders(text: str) -> str:
    """Strip folders of the machine that ran it, which tell a reader nothing."""
    return re.sub(r'"(?:/[^"/]+)+/([^"/]+)"', r'"\1"', text)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("run", "page"))
    parser.add_argument("--runs", type=Path, default=Path("runs/trace"))
    parser.add_argument("--model", default="trace-1")
    parser.add_argument("--share", type=int, choices=SHARES, default=4)
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--batch", type=int, default=200)
    parser.add_argument("--arms", nargs="*", help="only these arms")
    parser.add_argument("--out", type=Path, default=Path("docs/results/trace.md"))
    given = parser.parse_args()
    run_all(given) if given.what == "run" else page(given)


if __name__ == "__main__":
    main()
