"""The design space of a policy on the built-in reasoners: docs/results/design-space.md.

    python scripts/design_space_results.py run --runs runs/design-space     # hours; resumable
    python scripts/design_space_results.py page --runs runs/design-space

`run` is `kvkeep study design-space` with the flags below; `page` writes its tables with the reading of them
(design_space_reading.md) and puts the sealed plan and the headers of all runs beside the page.
"""

import argparse
import json
import re
import shlex
import shutil
import sys
from pathlib import Path

from kvkeep_command import kvkeep

from kvkeep.evaluation.runlog import read_run
from kvkeep.evaluation.seal import lock_path

#: Programs of another seed: those of seed 0, held-out ones included, were looked at by an earlier study.
TASK = "trace(seed=1)"
READING = Path(__file__).with_name("design_space_reading.md")


def flags(runs: Path) -> list[str]:
    """Return the command of the study."""
    words = ["study", "design-space", "--task", TASK, "--out", str(runs)]
    return [*words, "--batch-size", "200", "--threads", "1"]


def write_page(runs: Path, out: Path) -> None:
    """Tables, reading, sealed plan and headers."""
    kvkeep(*flags(runs), "--page", str(out))
    head, _, *rest = out.read_text().split("\n\n")  # the second says how the tables were written
    words = shlex.join(flags(Path("runs/design-space")))
    command = (
        f"Written by `python scripts/design_space_results.py page`; the study is `kvkeep {words}`. The "
        "plan, sealed first: [design-space.yaml](design-space.yaml) and its `.lock`."
        " Headers of all runs: `design-space-headers.jsonl`."
    )
    out.write_text("\n\n".join([head, command, READING.read_text().strip(), *rest]))
    plan = out.with_suffix(".yaml")
    shutil.copyfile(runs / "study.yaml", plan)
    shutil.copyfile(lock_path(runs / "study.yaml"), lock_path(plan))
    lines = [json.dumps(read_run(log).header.as_dict()) for log in sorted(runs.rglob("run.jsonl"))]
    headers = re.sub(r'"(?:/[^"/]+)+/([^"/]+)"', r'"\1"', "\n".join(lines) + "\n")
    out.with_name("design-space-headers.jsonl").write_text(headers)


def main() -> None:
    """Run the study, or write its page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=("run", "page"))
    parser.add_argument("--runs", type=Path, default=Path("runs/design-space"))
    parser.add_argument("--out", type=Path, default=Path("docs/results/design-space.md"))
    given = parser.parse_args()
    if given.what == "run":
        sys.stdout.write(kvkeep(*flags(given.runs)))
    else:
        write_page(given.runs, given.out)


if __name__ == "__main__":
    main()
