"""Two policies on the built-in reasoner through vLLM and through transformers: docs/results/vllm.md.

    python scripts/vllm_results.py run --runs runs/vllm      # where vLLM is installed; resumable
    python scripts/vllm_results.py page --runs runs/vllm

Each run is a `kvkeep eval` command, kept in its header. Both engines run in one environment, with the same
problems and the same random numbers of sampling.
"""

import argparse
import json
import sys
import time
from pathlib import Path

from trace_results import evaluate, without_folders

from kvkeep.evaluation.comparison import compare
from kvkeep.evaluation.records import Run
from kvkeep.evaluation.runlog import read_log
from kvkeep.evaluation.statistics.accuracy import accuracy
from kvkeep.evaluation.statistics.problem_means import problem_means

BASELINE, CHALLENGER = "snapkv", "keydiff"
BUFFER, PROBLEMS = 32, 200
ENGINES = {
    "transformers": ("--threads", "1"),
    "vllm": ("--engine", "vllm", "--engine-option", "max_num_seqs=200"),
}
#: What happens to the prompt -> flags, and what that means in the two engines.
SETTINGS: dict[str, tuple[tuple[str, ...], str]] = {
    "counts": (
        ("--prompt-mode", "counts", "--prefill", "defer", "--budget", "320"),
        "The prompt counts and is read whole first: both engines evict the same entries at the same steps.",
    ),
    "kept": (
        ("--prompt-mode", "kept", "--budget", "90"),
        "The prompt stays on top of the budget. vLLM rounds it up to whole blocks (of 32 here), and so "
        "protects the first tokens of the answer that share a block with its end.",
    ),
}
FULL = "full"


def arms() -> dict[tuple[str, str], list[str]]:
    """Setting and policy -> flags."""
    found = {}
    for setting, (flags, _) in SETTINGS.items():
        for policy in (BASELINE, CHALLENGER):
            found[setting, policy] = ["--policy", policy, "--buffer", str(BUFFER), *flags]
    return {**found, (FULL, FULL): ["--policy", FULL]}


def folder(runs: Path, engine: str, setting: str, policy: str) -> Path:
    """Where a run lies."""
    return runs / f"{engine}-{setting}-{policy}"


def run_all(given: argparse.Namespace) -> None:
    """Run what is missing, one engine after the other."""
    given.runs.mkdir(parents=True, exist_ok=True)
    common = ["--limit", str(given.problems), "--batch-size", str(given.problems)]
    for engine in given.engines:
        for (setting, policy), flags in arms().items():
            if given.arms and f"{setting}-{policy}" not in given.arms:
                continue
            begin = time.perf_counter()
            run = evaluate(folder(given.runs, engine, setting, policy), [*flags, *ENGINES[engine]], common)
            score = accuracy(problem_means(run.samples, "score"))
            sys.stderr.write(
                f"{engine} {setting} {policy}: {100 * score.estimate:.1f} % at {run.mean_cache:.1f} entries, "
                f"{time.perf_counter() - begin:.0f} s\n"
            )


Runs = dict[tuple[str, str, str], Run]  # by engine, setting and policy


def load(runs: Path) -> Runs:
    """The runs that are complete."""
    found = {}
    for engine in ENGINES:
        for arm in arms():
            place = folder(runs, engine, *arm)
            if (place / "run.jsonl").exists() and read_log(place).footer is not None:
                found[engine, *arm] = read_log(place).run
    return found


def same_texts(one: Run, other: Run) -> str:
    """How many answers two engines have in common, word for word."""
    ours, theirs = ({sample.key: sample.extra["text"] for sample in run.samples} for run in (one, other))
    both = ours.keys() & theirs.keys()
    return f"{sum(ours[key] == theirs[key] for key in both)} of {len(both)}"


def difference(baseline: Run | None, challenger: Run | None) -> str:
    """A paired difference of scores, in points."""
    if baseline is None or challenger is None:
        return "not run"
    allowed = [
        "cache",
        "engine",
        "versions",
        "problems",
        "missing",
    ]  # a run of fewer problems has the first ones
    found = compare(baseline, challenger, allow=allowed).difference
    low, high = found.interval
    both = {sample.id for sample in baseline.samples} & {sample.id for sample in challenger.samples}
    fewer = f", {len(both)} problems" if len(both) < PROBLEMS else ""
    return f"{100 * found.estimate:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}], p {found.p:.4f}{fewer}"


def row(runs: Runs, setting: str, policy: str) -> str:
    """One policy in both engines."""
    pair = [runs.get((engine, setting, policy)) for engine in ENGINES]
    cells = [policy]
    for run in pair:
        if run is None:
            cells += ["not run", "–"]
            continue
        score = accuracy(problem_means(run.samples, "score"))
        low, high = score.interval
        fewer = f", {run.header.problems} problems" if run.header.problems < PROBLEMS else ""
        cells.append(f"{100 * score.estimate:.1f} [{100 * low:.1f}, {100 * high:.1f}]{fewer}")
        cells.append(f"{run.mean_cache:.1f}")
    both = [run for run in pair if run is not None]
    cells += [difference(*pair), same_texts(*both) if len(both) == len(pair) else "–"]
    return f"| {' | '.join(cells)} |"


def table(runs: Runs, setting: str, policies: tuple[str, ...]) -> list[str]:
    """Policies of a setting in both engines."""
    head = "| policy | transformers | mean | vLLM | mean | vLLM − transformers | same answer |"
    return [head, "|---" * 7 + "|", *(row(runs, setting, policy) for policy in policies), ""]


def page(given: argparse.Namespace) -> None:
    """Write the page and the headers of its runs."""
    found = load(given.runs)
    what = found["vllm", FULL, FULL].header
    software = ", ".join(f"{name} {number}" for name, number in sorted(what.versions.items()))
    lines = [
        "# The same policies through vLLM and through transformers",
        "",
        f"`trace` (size M), model {what.model} (weights {what.model_sha256[:12]}), {what.problems} dev "
        f"problems, one draw at temperature {what.sampling.get('temperature')}, buffer {BUFFER}, float32 on "
        "a CPU. Scores are shares of right answers in percent, differences are paired over problems, in "
        "points, with 95 % intervals (bootstrap, 10,000 times). `mean` is the measured mean cache per "
        "KV head and layer, prompt included; in vLLM the workers' own counts had to agree with it. Both "
        "engines draw with the same random numbers, so that answers can be compared word for word. Software: "
        f"{software}. Written by `python scripts/vllm_results.py run` and `… page`; the headers of all runs, "
        "commands included, are in `vllm-headers.jsonl`.",
        "",
        "## Full cache",
        "",
        *table(found, FULL, (FULL,)),
    ]
    for setting, (flags, meaning) in SETTINGS.items():
        lines += [f"## {' '.join(flags)}", "", meaning, "", *table(found, setting, (BASELINE, CHALLENGER))]
        lines += [f"| engine | {CHALLENGER} − {BASELINE} |", "|---|---|"]
        for engine in ENGINES:
            pair = [found.get((engine, setting, policy)) for policy in (BASELINE, CHALLENGER)]
            lines.append(f"| {engine} | {difference(*pair)} |")
        lines.append("")
    given.out.write_text("\n".join(lines))
    headers = "".join(json.dumps(run.header.as_dict()) + "\n" for run in found.values())
    given.out.with_name("vllm-headers.jsonl").write_text(without_folders(headers))


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("run", "page"))
    parser.add_argument("--runs", type=Path, default=Path("runs/vllm"))
    parser.add_argument("--engines", nargs="*", choices=tuple(ENGINES), default=tuple(ENGINES))
    parser.add_argument("--arms", nargs="*", help="only these, for example kept-snapkv")
    parser.add_argument("--problems", type=int, default=PROBLEMS)
    parser.add_argument("--out", type=Path, default=Path("docs/results/vllm.md"))
    given = parser.parse_args()
    run_all(given) if given.what == "run" else page(given)


if __name__ == "__main__":
    main()
