"""Selectors beside policies that evict, on the built-in reasoner: docs/results/selection.md.

    python scripts/selection_results.py train --runs runs/selection    # gates of 64 entries; resumable
    python scripts/selection_results.py run --runs runs/selection      # resumable
    python scripts/selection_results.py page --runs runs/selection

Each run is a `kvkeep eval` command, kept in its header. The block gates of 16 entries are those that come
with kvkeep; they were trained by `kvkeep gates train-blocks --model trace-1 --data trace --block 16 --row 768
--rows 4 --steps 800 --token-budget 96 --threads 1 --out DIR`, and so are those of 64, but for --block 64 and
--token-budget 256.
"""

import argparse
import json
import re
import sys
import time
from pathlib import Path

from kvkeep_command import kvkeep

from kvkeep.core.files import read_tensors
from kvkeep.evaluation.comparison import Comparison, compare
from kvkeep.evaluation.records import Run
from kvkeep.evaluation.report.summary import parts
from kvkeep.evaluation.runlog import read_log
from kvkeep.evaluation.statistics.accuracy import accuracy
from kvkeep.evaluation.statistics.correction import corrected
from kvkeep.evaluation.statistics.problem_means import problem_means
from kvkeep.gates.block_files import BLOCK_FILE
from kvkeep.testbed.shipped import shipped_gates

CHAIN = 360  # mean length of a right chain of size M, as in trace_results.py
SHARES = (2, 4, 8)
MORE = (256, 64)  # further token budgets: how much reading is enough
GATES = "trace-1-blocks"
ALLOW = ("cache", "versions")

_SEER = ("--policy", "seer-attention", "--gates", GATES, "--option", "block=16")
_QUEST = ("--policy", "quest", "--option", "dense-layers=0")

#: Selectors: name -> flags without the token budget.
SELECTORS = {"quest": _QUEST, "seer-attention": _SEER}
#: The same with larger blocks, by gates that `train` makes: too few of them for the smaller budgets.
COARSE, COARSE_BLOCK, COARSE_BUDGETS = "seer-attention, blocks of 64", 64, (256, 192)
TRAINING = (
    *("--model", "trace-1", "--data", "trace", "--block", str(COARSE_BLOCK), "--row", "768", "--rows", "4"),
    *("--steps", "800", "--token-budget", "256", "--threads", "1"),
)
#: Policies that evict: name -> flags without the budget.
EVICTORS = {
    "keydiff, prompt counts": ("--policy", "keydiff", "--buffer", "16", "--prompt-mode", "counts"),
    "keydiff": ("--policy", "keydiff", "--buffer", "16"),
    "snapkv": ("--policy", "snapkv", "--buffer", "16"),
    "vase-dkv": ("--policy", "vase-dkv", "--buffer", "16"),
    "snapkv, prompt counts": ("--policy", "snapkv", "--buffer", "16", "--prompt-mode", "counts"),
}
#: Further policies that evict, run last.
FURTHER = {
    "lazy-eviction": ("--policy", "lazy-eviction", "--buffer", "16"),
    "raas": ("--policy", "raas", "--buffer", "16"),
}
#: What is compared: question -> baseline, challenger.
QUESTIONS = {
    "a trained gate against bounds": ("quest", "seer-attention"),
    "selection against eviction that keeps the prompt": ("snapkv", "quest"),
    "the same": ("snapkv", "seer-attention"),
    "the same, against the best eviction": ("keydiff", "seer-attention"),
    "about as much read: eviction of everything alike": ("keydiff, prompt counts", "quest"),
    "the same with the gate": ("keydiff, prompt counts", "seer-attention"),
    "eviction by when entries come back, pauses": ("snapkv", "lazy-eviction"),
    "the same, pages of the last use": ("snapkv", "raas"),
}

#: What a reader should take from the tables; no figures, those stand in them.
READING = """## What it says

- Reading half as many entries as a chain has tokens, out of everything, nearly keeps the full score, and
  a gate reads fewer for it than bounds: its query heads read the same blocks. At a quarter both fall, the
  gate by much less. At an eighth there is hardly anything to choose: two blocks of sixteen are the first
  and the newest, where Quest reads three pages a query head in any case. With 64 entries both can choose
  again.
- Neither kind of policy dominates the other. KeyDiff with the prompt kept holds the full score at every
  budget: it stores less than a selector and reads more. A selector stores everything, and more than the
  full cache does where chains break and run on to the length limit.
- At about as much read, eviction that lets the prompt compete fails: what it throws away is the program.
  That is what a selector is for: a step that needs an entry once more can still have it.
- Attention of this model is scattered: the best choice of six blocks of sixteen misses a fifth of it.
  Blocks read fifteen neighbours along with every entry that matters, and the token budgets here are a few
  blocks.
- Blocks of 64, the published size, are too coarse here: reading more, they score far less than blocks of 16.
  A program and its chain have nine or ten of them, and what a step needs lies scattered over more.
- One training of the gates of either size, one draw a problem: seeds were not varied. SmolLM2 was not
  tried."""


def entries(share: int) -> int:
    """Entries when a chain of mean length keeps one part in ``share``."""
    return round(CHAIN / share)


def folder(runs: Path, arm: str, count: int) -> Path:
    """Where the run of an arm is."""
    return runs / f"{arm.replace(', ', '-').replace(' ', '-')}-{count}"


def coarse_gates(runs: Path) -> Path:
    """Where `train` writes its gates."""
    return runs / f"blocks-{COARSE_BLOCK}" / BLOCK_FILE


def plan(runs: Path) -> dict[Path, tuple[str, ...]]:
    """Every run and its flags, the most telling ones first."""
    wanted: dict[Path, tuple[str, ...]] = {runs / "full": ("--policy", "full")}
    for share in (4, 2, 8):
        count = entries(share)
        for arm, flags in SELECTORS.items():
            wanted[folder(runs, arm, count)] = (*flags, "--token-budget", str(count))
        for arm, flags in EVICTORS.items():
            if arm != "snapkv, prompt counts" or share == 4:  # one budget of it says enough
                wanted[folder(runs, arm, count)] = (*flags, "--budget", str(count))
        if share == 8:
            for more in MORE:
                for arm, flags in SELECTORS.items():
                    wanted[folder(runs, arm, more)] = (*flags, "--token-budget", str(more))
    for share in (4, 2, 8):
        for arm, flags in FURTHER.items():
            wanted[folder(runs, arm, entries(share))] = (*flags, "--budget", str(entries(share)))
    if (gates := coarse_gates(runs)).exists():
        seer = ("--policy", "seer-attention", "--gates", str(gates.parent), "--option")
        for count in COARSE_BUDGETS:
            flags = (*seer, f"block={COARSE_BLOCK}", "--token-budget", str(count))
            wanted[folder(runs, COARSE, count)] = flags
    return wanted


def command(flags: tuple[str, ...], model: str, problems: int) -> list[str]:
    """The command of a run, without its folder."""
    size = ["--limit", str(problems), "--batch-size", str(problems), "--threads", "1"]
    return ["kvkeep", "eval", *flags, "--model", model, *size]


def typed_command(run: Run, rebuilt: list[str]) -> list[str]:
    """What a reader can type: the first logs name this script, whose process wrote them."""
    return list(run.header.command) if run.header.command[:1] == ("kvkeep",) else rebuilt


def finished(place: Path) -> Run | None:
    """Read a run that has come to its end."""
    if not (place / "run.jsonl").exists():
        return None
    log = read_log(place)
    return None if log.footer is None else log.run


def run_all(given: argparse.Namespace) -> None:
    """Run what is missing."""
    given.runs.mkdir(parents=True, exist_ok=True)
    for place, flags in plan(given.runs).items():
        if finished(place) is not None:
            continue
        started, more = time.perf_counter(), ["--resume"] if (place / "run.jsonl").exists() else []
        words = command(flags, given.model, given.problems)
        kvkeep(*words[1:], "--out", str(place), *more)
        run = read_log(place).run
        score = accuracy(problem_means(run.samples, "score"))
        sys.stderr.write(
            f"{place.name}: {100 * score.estimate:.1f} %, stored {run.mean_cache:.1f}, read "
            f"{run.mean_read:.1f}, {time.perf_counter() - started:.0f} s\n"
        )


def train(given: argparse.Namespace) -> None:
    """Train block gates of 64 entries, or go on."""
    place = coarse_gates(given.runs).parent
    more = ["--resume"] if place.exists() else []
    sys.stdout.write(kvkeep("gates", "train-blocks", *TRAINING, "--out", str(place), *more))


def row(name: str, asked: str, run: Run) -> str:
    """One line of a table."""
    score = accuracy(problem_means(run.samples, "score"))
    low, high = score.interval
    roles = parts(run.samples)
    shares = " | ".join(f"{100 * roles.get(role, float('nan')):.1f}" for role in ("hot", "warm", "dormant"))
    query = run.mean_read_by_query
    alone = f" ({query:.1f})" if query is not None and query < run.mean_read - 0.05 else ""
    peak = max(sample.peak_cache for sample in run.samples)
    return (
        f"| {name} | {asked} | {run.mean_cache:.1f} | {peak:.0f} | {run.mean_read:.1f}{alone} | "
        f"{run.peak_read:.0f} | {100 * score.estimate:.1f} [{100 * low:.1f}, {100 * high:.1f}] | {shares} |"
    )


HEAD = (
    "| policy | asked for | stored, mean | peak | read, mean | peak | score | hot | warm | dormant |\n"
    + "|---" * 10
    + "|"
)


def table(runs: Path, count: int, full: Run) -> list[str]:
    """All arms at one number of entries."""
    lines = [HEAD, row("full", "–", full)]
    found = []
    for arm in (*SELECTORS, *EVICTORS, *FURTHER):
        run = finished(folder(runs, arm, count))
        if run is None:
            continue
        what = "read" if arm in SELECTORS else "kept" if "counts" in arm else "kept + prompt"
        found.append((problem_means(run.samples, "score").means.mean(), row(arm, f"{count} {what}", run)))
    return [*lines, *(line for _, line in sorted(found, key=lambda each: -each[0])), ""]


def differences(runs: Path, baseline: str, challenger: str) -> list[str]:
    """The cells of one question, corrected over its budgets by Holm."""
    found: dict[int, Comparison] = {}
    for share in SHARES:
        one, two = (finished(folder(runs, arm, entries(share))) for arm in (baseline, challenger))
        if one is not None and two is not None:
            found[share] = compare(one, two, metric="score", allow=ALLOW)
    adjusted = corrected({str(share): each.difference.p for share, each in found.items()}, "holm")
    cells = []
    for share in SHARES:
        if share not in found:
            cells.append("–")
            continue
        each, p = found[share], adjusted[str(share)]
        low, high = each.difference.interval
        word = "undecided" if p > 0.05 else "above" if each.difference.estimate > 0 else "below"
        cells.append(
            f"{100 * each.difference.estimate:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}], p {p:.4f}: "
            f"{word}; stored x {each.cache_ratio:.2f}, read x {each.read_ratio:.2f}"
        )
    return cells


def trained(gates: Path) -> list[str]:
    """What gates say of their own training."""
    _, header = read_tensors(gates, "block-gates")
    facts = header["training"]
    now, before = facts["held_out"], facts["held_out_untrained"]
    layers = ", ".join(
        f"{100 * share:.1f} in layer {layer}" for layer, share in now["covered_by_layer"].items()
    )
    recipe, covered = facts["recipe"], now["covered"]
    return [
        f"{facts['parameters']:,} parameters (width 64, one pair of matrices for each KV head), "
        f"{recipe['steps']} steps of {recipe['rows']} training problems, {facts['tokens']:,} tokens, "
        f"{facts['seconds']:.0f} s on a shared core. Loss on held-out programs {before['loss']:.3f} "
        f"untrained, {now['loss']:.3f} trained. Share of a query's attention in {now['token_budget']} "
        "entries, in "
        f"blocks of {recipe['block']}, last half of programs of about 590 tokens: "
        f"{100 * covered['gates']:.1f} % by the "
        f"gates ({layers}), {100 * before['covered']['gates']:.1f} % untrained, "
        f"{100 * covered['newest']:.1f} % "
        f"the newest blocks, {100 * covered['best']:.1f} % the best choice.",
        "",
    ]


def page(given: argparse.Namespace) -> None:
    """Write the page and the headers of its runs."""
    runs, full = given.runs, finished(given.runs / "full")
    if full is None:
        raise SystemExit("the run with the full cache is missing: run it first.")
    what = full.header
    lines = [
        "# Eviction and selection side by side",
        "",
        f"`trace` (size M), model {what.model} (weights {what.model_sha256[:12]}), {what.problems} dev "
        f"problems x {what.draws} draw at temperature {what.sampling.get('temperature')}. Scores are "
        "shares of "
        "right answers in percent with the 95 % interval over problems. **Stored** and **read**: measured "
        "entries "
        "per KV head and layer, prompt included, while the steps attend; an entry that several query "
        "heads of a "
        "KV head read counts once, and what one query head reads stands in brackets where it is less. A "
        "policy "
        "that evicts reads all it stores. Not counted: what a selector looks at to choose (two bounds or "
        "one gate "
        "vector for 16 entries). Quest has pages of 16 and, here, no dense layers (its default of two "
        "would leave "
        "one of three layers sparse); SeerAttention-R has blocks of 16. Written by "
        "`python scripts/selection_results.py run` and `… page`; headers of all runs, commands included: "
        "`selection-headers.jsonl`.",
        "",
        "## The gates",
        "",
        *trained(shipped_gates()[GATES]),
        *(trained(coarse_gates(runs)) if coarse_gates(runs).exists() else []),
    ]
    for share in SHARES:
        lines += [
            f"## {entries(share)} entries (1/{share} of the chain)",
            "",
            *table(runs, entries(share), full),
        ]
    lines += ["## How much reading is enough", "", HEAD]
    for arm in (*SELECTORS, COARSE):
        for count in sorted((*MORE, *map(entries, SHARES), *COARSE_BUDGETS[1:]), reverse=True):
            if (run := finished(folder(runs, arm, count))) is not None:
                lines.append(row(arm, f"{count} read", run))
    lines += [
        "",
        "## Differences",
        "",
        "In points, challenger minus baseline, paired by problem (bootstrap, 10,000 times); p corrected "
        "by Holm "
        "over the budgets of a line. Stored and read: challenger over baseline.",
        "",
        "| question | challenger − baseline | " + " | ".join(f"{entries(share)}" for share in SHARES) + " |",
        "|---" * (2 + len(SHARES)) + "|",
    ]
    for question, (baseline, challenger) in QUESTIONS.items():
        cells = differences(runs, baseline, challenger)
        lines.append(f"| {question} | {challenger} − {baseline} | " + " | ".join(cells) + " |")
    given.out.write_text("\n".join([*lines, "", READING]) + "\n")
    headers = [
        run.header.as_dict() | {"command": typed_command(run, command(flags, what.model, what.problems))}
        for place, flags in plan(runs).items()
        if (run := finished(place)) is not None
    ]
    said = "".join(json.dumps(one) + "\n" for one in headers)
    given.out.with_name("selection-headers.jsonl").write_text(
        re.sub(r'"(?:/[^"/]+)+/([^"/]+)"', r'"\1"', said)
    )


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("train", "run", "page"))
    parser.add_argument("--runs", type=Path, default=Path("runs/selection"))
    parser.add_argument("--model", default="trace-1")
    parser.add_argument("--problems", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("docs/results/selection.md"))
    given = parser.parse_args()
    {"train": train, "run": run_all, "page": page}[given.what](given)


if __name__ == "__main__":
    main()
