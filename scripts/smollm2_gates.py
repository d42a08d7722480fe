"""Retention gates for SmolLM2-135M-Instruct, and what they hold: docs/results/smollm2-gates.md.

    python scripts/smollm2_gates.py train --runs runs/smollm2-gates    # both kinds of gates; resumable
    python scripts/smollm2_gates.py run --runs runs/smollm2-gates      # text and needles; resumable
    python scripts/smollm2_gates.py page --runs runs/smollm2-gates

Problems, model and settings are those of `smollm2_results.py`; `--policies dbtrimkv` does with one kind of
gates, `--beside` names the policies without gates that are run beside them.
"""

import argparse
import dataclasses
import json
from itertools import accumulate
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from smollm2_page import (
    BUDGETS,
    BUFFER,
    WRITTEN,
    needle_part,
    scores,
    shown,
    text_file,
    text_part,
    without_places,
    write,
)
from smollm2_results import TOPICS, command, run_needles, run_text

from kvkeep.core.files import read_tensors
from kvkeep.evaluation.likelihood import WindowScore
from kvkeep.evaluation.likelihood_summary import difference
from kvkeep.gates.files import FILE

POLICIES = ("dbtrimkv", "trimkv")
BESIDE = ("keydiff", "r-kv", "vase-attnv", "snapkv", "streaming-llm", "random")
#: The same gates otherwise used; text only.
VARIANTS = ("dbtrimkv(sinks=4)", "trimkv(sinks=4)")
ROW = 1024  # tokens of a row in training
TRAINING = (
    *("--memory", "128", "--row", str(ROW), "--accumulate", "1", "--steps", "60", "--warmup", "10"),
    *("--rate", "2e-3", "--bias", "6", "--block", "512", "--threads", "1"),
)
COMMON_WORDS = 12


def runs_of_words(text: str) -> set[str]:
    """Every run of twelve words of a text."""
    words = text.split()
    return {" ".join(words[at : at + COMMON_WORDS]) for at in range(len(words) - COMMON_WORDS + 1)}


def chapters() -> list[str]:
    """Chapters that share no twelve words in a row with those that likelihood is measured on.

    Chapters contain each other: `class` is a part of `compound`. To leave out the four by name is not enough.
    """
    held_out = set().union(*(runs_of_words(topics[name]) for name in TOPICS))
    names = sorted(name for name in topics if name not in TOPICS)
    return [name for name in names if not runs_of_words(topics[name]) & held_out]


def train(runs: Path, model: str, policies: list[str]) -> None:
    """Train the gates that are not there."""
    text = runs / "texts" / "topics.txt"
    write(text, "\n\n".join(topics[name] for name in chapters()))
    for policy in policies:
        out = runs / policy
        if (out / FILE).exists():
            continue
        more = ["--resume"] if (out / "checkpoint.pt").exists() else []
        words = ["--model", model, "--policy", policy, "--data", str(text), *TRAINING, "--out", str(out)]
        command("gates", "train", *words, *more)


def run(given: argparse.Namespace) -> None:
    """Text and needles, with gates and beside."""
    gates = {name: given.runs / name / FILE for name in given.policies}
    names = [*given.policies, *given.beside]
    if given.only != "needle":
        variants = [name for name in VARIANTS if name.partition("(")[0] in gates]
        files = {name: ("--gates", gates[name.partition("(")[0]]) for name in (*variants, *gates)}
        run_text(given.runs, given.model, given.window, given.budgets, [*names, *variants], files)
    if given.only != "text":
        run_needles(given.runs, given.model, given.problems, given.lengths, names, gates=gates)


def training_part(runs: Path, model: str) -> list[str]:
    """What the cards of the gates say."""
    lines = [
        "| gates | parameters | steps, tokens | KL, held out | next token, held out | entries alive at the "
        "end of 1,024 tokens | minutes |",
        "|---" * 7 + "|",
    ]
    for name in POLICIES:
        if not (runs / name / FILE).exists():
            continue
        tensors, header = read_tensors(runs / name / FILE, "gates")
        facts = header["training"]
        held = facts["held_out"]
        lines.append(
            f"| {name} | {sum(each.numel() for each in tensors.values()):,} | {facts['step']}, "
            f"{facts['tokens']:,} | {held['kl']:.3g} | {held['next_token']:.4f} (full cache "
            f"{held['full']:.4f}) | {held['alive']:.0f} | {facts['seconds'] / 60:.0f} |"
        )
    words = f"kvkeep gates train --model {model} --policy … --data topics.txt {' '.join(TRAINING)} --out …"
    return [f"`{words}`", "", *lines, ""]


def length_part(runs: Path) -> list[str]:
    """Loss to the full cache before and after the length of a training row, paired by window."""
    base = scores(json.loads(text_file(runs, "full", None).read_text()))
    lines = [
        f"| policy | budget | more than full, first {ROW:,} tokens | more than full, after them |",
        "|---" * 4 + "|",
    ]
    for budget in BUDGETS:
        for name in (*POLICIES, *VARIANTS, *BESIDE):
            path = text_file(runs, name, budget)
            if path.exists():
                mine = scores(json.loads(path.read_text()))
                parts = [
                    shown(difference(cut(base, *ends), cut(mine, *ends)), "+")
                    for ends in ((0, ROW), (ROW, 10**9))
                ]
                lines.append(f"| {name} | {budget} | " + " | ".join(parts) + " |")
    return [*lines, ""]


def cut(windows: list[WindowScore], start: int, stop: int) -> list[WindowScore]:
    """Windows with the chunks that lie between two positions."""
    found = []
    for one in windows:
        ends = list(accumulate(one.tokens))
        kept = [place for place, end in enumerate(ends) if start < end <= stop]
        part = {
            name: tuple(getattr(one, name)[place] for place in kept) for name in ("nats", "tokens", "entries")
        }
        found.append(dataclasses.replace(one, **part))
    return found


def paired_part(runs: Path) -> list[str]:
    """Gates against policies that were run beside them, paired by window; nothing if none was."""
    lines = []
    for other in BESIDE:
        for name in (*POLICIES, *VARIANTS):
            for budget in BUDGETS:
                files = [text_file(runs, each, budget) for each in (other, name)]
                if all(file.exists() for file in files):
                    base, mine = (scores(json.loads(file.read_text())) for file in files)
                    lines.append(f"| {name} | {other} | {budget} | {shown(difference(base, mine), '+')} |")
    head = [
        "### Paired with other policies",
        "",
        "| gates | minus | budget | nats per token |",
        "|---" * 4 + "|",
    ]
    return [*head, *lines, ""] if lines else []


def page(given: argparse.Namespace) -> None:
    """Write the page: words from smollm2_gates.md, figures from the runs."""
    headers: list[dict[str, Any]] = []
    names = [*POLICIES, *VARIANTS, *BESIDE]
    text, needles = text_part(given.runs, headers, names), needle_part(given.runs, headers, names)
    parts = {
        "training": training_part(given.runs, given.model),
        "text": text,
        "paired": paired_part(given.runs),
        "length": length_part(given.runs),
        "needles": needles,
    }
    words = Path(__file__).with_suffix(".md").read_text()
    for name, lines in parts.items():
        words = words.replace(f"<!-- {name} -->", "\n".join(lines).strip())
    found = chapters()
    facts = {
        "model": f"{given.model}, weights {headers[0]['model_sha256'][:12]}",
        "buffer": BUFFER,
        "written": WRITTEN,
        "window": headers[0]["window"],
        "topics": ", ".join(f"`{name}`" for name in TOPICS),
        "chapters": len(found),
        "characters": f"{sum(len(topics[name]) for name in found):,}",
        "python": headers[0]["versions"]["python"],
    }
    for name, value in facts.items():
        words = words.replace(f"<!-- {name} -->", str(value))
    write(given.out, words.rstrip("\n") + "\n")
    write(given.out.with_name(f"{given.out.stem}-headers.jsonl"), without_places(headers))


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("train", "run", "page"))
    parser.add_argument("--runs", type=Path, default=Path("runs/smollm2-gates"))
    parser.add_argument("--model", default="demo")
    parser.add_argument("--policies", nargs="*", default=list(POLICIES), choices=POLICIES)
    parser.add_argument("--beside", nargs="*", default=list(BESIDE))
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--budgets", type=int, nargs="*", default=list(BUDGETS), help="of text")
    parser.add_argument("--problems", type=int, default=10, help="needles of each length")
    parser.add_argument("--lengths", type=int, nargs="*", default=[1024, 2048], help="of needles")
    parser.add_argument("--only", choices=("text", "needle"), help="only this part")
    parser.add_argument("--out", type=Path, default=Path("docs/results/smollm2-gates.md"))
    given = parser.parse_args()
    if given.what == "train":
        train(given.runs, given.model, given.policies)
    elif given.what == "run":
        run(given)
    else:
        page(given)


if __name__ == "__main__":
    main()
