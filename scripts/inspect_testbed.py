"""Write docs/results/testbed.md: what the shipped reasoners can do, before any policy is judged on them.

``python scripts/inspect_testbed.py [--problems 200] [--out docs/results/testbed.md]``: accuracy by role and
by length with the full cache, the leak test, and value ranges by kind of word, on confirm problems that no
training step and no tuning has seen.
"""

import argparse
import json
import sys
import time
from itertools import islice
from pathlib import Path

from transformers import PreTrainedModel

from kvkeep.testbed.inspection import (
    accuracy_by_role,
    faults,
    leak_test,
    value_ranges,
    writes_found,
)
from kvkeep.testbed.model import load
from kvkeep.testbed.shipped import shipped_model, shipped_models
from kvkeep.testbed.solve import solve
from kvkeep.testbed.trace_task import SIZES, Problem, problems, size

ROLES = ("all", "hot", "warm", "dormant")


def fresh(name: str, count: int) -> list[Problem]:
    """Return confirm problems of a size, of a seed that nothing else uses."""
    return list(islice(problems(size(name), "confirm", seed="inspection"), count))


def accuracy_table(model: PreTrainedModel, count: int) -> list[str]:
    """Return accuracy by size and role with the full cache, greedy."""
    lines = [
        "| size | tokens (mean) | all | hot | warm | dormant | whole problems | steps locally right |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in SIZES:
        asked = fresh(name, count)
        grades, _ = solve(model, asked)
        length = sum(len(problem.prompt) + len(problem.chain) for problem in asked) / count
        roles = accuracy_by_role(grades)
        shares = " | ".join(f"{100 * roles[role]:.1f} %" for role in ROLES)
        whole = sum(all(graded.answers) for graded in grades) / count
        good = faults(grades)[""]
        lines.append(f"| {name} | {length:.0f} | {shares} | {100 * whole:.1f} % | {100 * good:.2f} % |")
    return lines


def range_tables(model: PreTrainedModel, count: int) -> list[str]:
    """Return value ranges by kind of word, and how well they tell writes from the rest of a chain."""
    asked = fresh("M", count)
    ranges = value_ranges(model, asked)
    layers = range(len(next(iter(ranges.values()))))
    lines = [
        "| kind of word | " + " | ".join(f"layer {index}" for index in layers) + " |",
        "|---" * (len(layers) + 1) + "|",
    ]
    for name, numbers in sorted(ranges.items(), key=lambda item: -sum(item[1])):
        lines.append(f"| `{name}` | " + " | ".join(f"{number:.2f}" for number in numbers) + " |")
    areas = "; ".join(
        f"layer {index}: " + ", ".join(f"{area:.2f}" for area in heads)
        for index, heads in enumerate(writes_found(model, asked))
    )
    lines += ["", f"Area under the ROC curve of the range as a detector of writes, by KV head: {areas}."]
    return lines


def describe(name: str, count: int) -> list[str]:
    """Return the section of one model."""
    model = load(name)
    facts = json.loads((shipped_model(name) / "training.json").read_text())
    progress, config = facts["progress"], facts["config"]
    seen, hidden = leak_test(model, fresh("M", min(count, 50)))
    return [
        f"## {name}",
        "",
        f"{sum(p.numel() for p in model.parameters()):,} parameters; shape {config['shape']}; seed "
        f"{config['seed']}; {progress['step']:,} steps, {progress['tokens'] / 1e6:.1f} million tokens, "
        f"{progress['seconds'] / 60:.0f} minutes.",
        "",
        f"Accuracy of answers, full cache, greedy, {count} fresh problems a size (L is longer than anything "
        "seen in training):",
        "",
        *accuracy_table(model, count),
        "",
        f"Leak test ({min(count, 50)} problems of size M, chain given): a register is read right in "
        f"{100 * seen:.1f} % of the asked steps; with every value of the chain masked, in {100 * hidden:.1f} "
        "% (chance: 10 %).",
        "",
        "Mean value range of chain entries (`max(v) - min(v)`, mean over KV heads):",
        "",
        *range_tables(model, min(count, 50)),
        "",
    ]


def main() -> None:
    """Read the command line and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", type=int, default=200, help="fresh problems a size")
    parser.add_argument("--out", type=Path, default=Path("docs/results/testbed.md"))
    given = parser.parse_args()
    lines = [
        "# The built-in reasoners, before any policy",
        "",
        f"Written by `python scripts/inspect_testbed.py --problems {given.problems}` (two CPU threads, "
        "float32). The task is described in `src/kvkeep/testbed/trace_task.py`.",
        "",
    ]
    for name in shipped_models():
        started = time.perf_counter()
        lines += describe(name, given.problems)
        sys.stderr.write(f"{name}: {time.perf_counter() - started:.0f} s\n")
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text("\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    main()
