"""Value ranges and what few bits do to them, on SmolLM2-135M-Instruct and trace-1: docs/results/values.md.

    python scripts/values_results.py run --runs runs/values     # resumable
    python scripts/values_results.py page --runs runs/values

The texts are the chapters of the Python reference that scripts/smollm2_results.py reads, 2,048 tokens each,
and one solved program of `trace`.
"""

import argparse
import contextlib
import io
import json
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from kvkeep.cli.app import app
from kvkeep.core.files import atomic_path
from kvkeep.evaluation.report import values_tables as tables

TOPICS = ("specialnames", "compound", "formatstrings", "typesseq")
COMMANDS = ("values", "quantization")


def write(path: Path, text: str) -> None:
    """Write a file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def arms(runs: Path) -> dict[str, list[str]]:
    """Flags of each text, by its name."""
    found = {"trace-1": ["--model", "trace-1"]}
    for name in TOPICS:
        path = runs / "texts" / f"{name}.txt"
        if not path.exists():
            write(path, topics[name])
        found[name] = ["--model", "demo", "--text", str(path), "--limit", "2048"]
    return found


def run(runs: Path) -> None:
    """Both commands on every text; what is there is left alone."""
    for name, flags in arms(runs).items():
        for command in COMMANDS:
            out = runs / f"{command}-{name}.json"
            if out.exists():
                continue
            words = ["analyze", command, *flags, "--threads", "1", "--json"]
            words += ["--page", str(out.with_suffix(".html"))]
            printed, begin = io.StringIO(), time.monotonic()
            before, sys.argv = sys.argv, ["kvkeep", *words]
            try:
                with contextlib.redirect_stdout(printed):
                    app(words, standalone_mode=False)
            finally:
                sys.argv = before
            write(out, printed.getvalue())
            sys.stderr.write(f"{time.monotonic() - begin:.0f} s: {command} {name}\n")


def page(runs: Path, out: Path) -> None:
    """Every table of every text that is there."""
    lines = ["# Value ranges, and what few bits do to them", ""]
    for name in arms(runs):
        for command in COMMANDS:
            path = runs / f"{command}-{name}.json"
            if path.exists():
                lines += section(name, command, json.loads(path.read_text(encoding="utf-8")))
    write(out, "\n".join(lines).rstrip() + "\n")


def section(name: str, command: str, facts: dict[str, Any]) -> list[str]:
    """Heading, command and tables of one run."""
    made = (
        {
            "Do they name the same entries?": tables.overlap_table(facts),
            "Along the text": tables.stretch_table(facts),
            "By layer": tables.spread_table(facts),
        }
        if command == "values"
        else {"Means over layers": tables.link_table(facts), "By layer": tables.layer_link_table(facts)}
    )
    words = " ".join(Path(word).name if "/" in word else word for word in facts["command"])
    lines = [f"## {name}: {command}", "", f"`{words}`; weights {facts['model_sha256'][:12]}.", ""]
    for title, table in made.items():
        lines += [f"### {title}", "", table.markdown(), ""]
    return lines


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("run", "page"))
    parser.add_argument("--runs", type=Path, default=Path("runs/values"))
    parser.add_argument("--out", type=Path, default=Path("docs/results/values.md"))
    given = parser.parse_args()
    if given.what == "run":
        run(given.runs)
    else:
        page(given.runs, given.out)


if __name__ == "__main__":
    main()
