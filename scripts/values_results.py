"""Value ranges and what few bits do to them, on SmolLM2-135M-Instruct and trace-1: docs/results/values.md.

    python scripts/values_results.py run --runs runs/values --gates gates.safetensors     # resumable
    python scripts/values_results.py page --runs runs/values

The texts are the chapters of the Python reference that scripts/smollm2_results.py reads, 2,048 tokens each,
and one solved program of `trace`. With gates (scripts/smollm2_gates.py trains some) the chapters are read
once more, in portions as long as the rows of their training, and top sets by retention are compared, too.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from kvkeep_command import kvkeep
from page_figures import standalone
from scipy.stats import t as student

from kvkeep.core.files import atomic_path
from kvkeep.evaluation.report import values_tables as tables
from kvkeep.evaluation.report.plain_figures import curve_figure, share_figure
from kvkeep.evaluation.report.tables import Table

TOPICS = ("specialnames", "compound", "formatstrings", "typesseq")
COMMANDS = ("values", "quantization")
RETENTION = """The same chapters in portions of 1,024 tokens, the top 64 of each head, with retention
at the end of the portion by the gates of [smollm2-gates.md](smollm2-gates.md) (trained on such rows):

"""
LINKS = ("pearson", "spearman", "spearman_norm", "slope", "over_law")


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


def run(runs: Path, gates: Path | None) -> None:
    """Both commands on every text, and the first with gates; what is there is left alone."""
    for name, flags in arms(runs).items():
        todo = {command: [command] for command in COMMANDS}
        if gates is not None and name in TOPICS:
            todo["retention"] = ["values", "--gates", str(gates), "--portion", "1024"]
        for command, added in todo.items():
            out = runs / f"{command}-{name}.json"
            if out.exists():
                continue
            words = ["analyze", *added, *flags, "--threads", "1", "--json"]
            words += ["--page", str(out.with_suffix(".html"))]
            begin = time.monotonic()
            write(out, kvkeep(*words))
            sys.stderr.write(f"{time.monotonic() - begin:.0f} s: {command} {name}\n")


def page(runs: Path, out: Path) -> None:
    """Tables and figures into the text of scripts/values_page.md; all of them by layer below."""
    found = {
        (name, command): json.loads(path.read_text(encoding="utf-8"))
        for name in arms(runs)
        for command in (*COMMANDS, "retention")
        if (path := runs / f"{command}-{name}.json").exists()
    }
    values = {name: facts for (name, command), facts in found.items() if command == "values"}
    links = {name: facts for (name, command), facts in found.items() if command == "quantization"}
    gated = {name: facts for (name, command), facts in found.items() if command == "retention"}
    details: list[str] = []
    for (name, command), facts in found.items():
        if name in (TOPICS[0], "trace-1") and command != "retention":
            details += section(name, command, facts)
    parts = {
        "overlaps": overlap_summary(values),
        "retention": retention_summary(gated),
        "spreads": spread_summary(values),
        "links": link_summary(links),
        "details": "\n".join(details).rstrip(),
    }
    text = Path(__file__).with_name("values_page.md").read_text(encoding="utf-8")
    for name, part in parts.items():
        text = text.replace(f"<!-- {name} -->", part)
    write(out, text.rstrip() + "\n")
    draw(values["specialnames"], links["specialnames"], out.parent.parent / "figures")


def draw(values: dict[str, Any], links: dict[str, Any], folder: Path) -> None:
    """Two figures of one chapter: overlaps, and error against range."""
    rows = [
        (f"{one['one']} and {one['other']}", one["share"], one["chance"], f"{100 * one['share']:.0f} %")
        for one in values["overlaps"]
    ]
    title = "Entries that two top sets share, SmolLM2 (mark: by chance)"
    write(folder / "values-overlap.svg", standalone(share_figure("overlap", rows), title))
    scheme = links["schemes"]["hqq-b2g64"]
    title = "HQQ, 2 bits, groups of 64: error by range, SmolLM2"
    drawing = curve_figure("error by range", scheme["curve"])
    write(folder / "values-error.svg", standalone(drawing, title, ["measured", "quadratic law"]))


def across(numbers: Sequence[float], digits: int, scale: float = 1.0) -> str:
    """Mean over the chapters and its 95 % interval (Student's t)."""
    scaled = [scale * number for number in numbers]
    mean = statistics.fmean(scaled)
    if len(scaled) < 2:
        return f"{mean:.{digits}f}"
    half = float(student.ppf(0.975, len(scaled) - 1)) * statistics.stdev(scaled) / len(scaled) ** 0.5
    return f"{mean:.{digits}f} [{mean - half:.{digits}f}, {mean + half:.{digits}f}]"


def chapters(found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """What was read of SmolLM2."""
    return [found[name] for name in TOPICS if name in found]


def overlap_summary(found: dict[str, dict[str, Any]]) -> str:
    """Each pair of rankings: chapters of SmolLM2 with interval over them, and the reasoner's program."""
    rows = []
    for place, pair in enumerate(found["trace-1"]["overlaps"]):
        many = [facts["overlaps"][place] for facts in chapters(found)]
        assert all((one["one"], one["other"]) == (pair["one"], pair["other"]) for one in many)
        heads = [share for one in many for layer in one["heads"] for share in layer]
        rows.append(
            (
                f"{pair['one']}, {pair['other']}",
                across([one["share"] for one in many], 1, 100),
                f"{100 * many[0]['chance']:.1f}",
                f"{100 * min(heads):.0f} – {100 * max(heads):.0f}",
                f"{100 * pair['share']:.1f} {tables.span(pair['interval'], 100, 1)}",
                f"{100 * pair['chance']:.1f}",
            )
        )
    names = (
        "top sets by",
        "SmolLM2, shared %",
        "by chance",
        "one head, least – most",
        "trace-1, shared %",
        "by chance",
    )
    return Table(columns=names, rows=tuple(rows)).markdown()


def retention_summary(found: dict[str, dict[str, Any]]) -> str:
    """Pairs with retention, where gates were given."""
    if not found:
        return ""
    rows = []
    for place, pair in enumerate(found[TOPICS[0]]["overlaps"]):
        many = [facts["overlaps"][place] for facts in chapters(found)]
        heads = [share for one in many for layer in one["heads"] for share in layer]
        rows.append(
            (
                f"{pair['one']}, {pair['other']}",
                across([one["share"] for one in many], 1, 100),
                f"{100 * pair['chance']:.1f}",
                f"{100 * min(heads):.0f} – {100 * max(heads):.0f}",
            )
        )
    names = ("top sets by", "SmolLM2, shared %", "by chance", "one head, least – most")
    return RETENTION + Table(columns=names, rows=tuple(rows)).markdown()


def spread_summary(found: dict[str, dict[str, Any]]) -> str:
    """Tail ratios, and sinks beside the middle of their head."""
    rows = []
    for kind in found["trace-1"]["magnitudes"]:
        many = [facts["magnitudes"][kind] for facts in chapters(found)]
        one = found["trace-1"]["magnitudes"][kind]
        by_layer = [line["tail"] for each in many for line in each["layers"]]
        by_head = [head["tail"] for each in many for layer in each["heads"] for head in layer]
        rows.append(
            (
                kind,
                across([statistics.fmean(line["tail"] for line in each["layers"]) for each in many], 2),
                f"{min(by_layer):.2f} – {max(by_layer):.2f}",
                f"{statistics.median(by_head):.2f}",
                across([each["sinks_relative"]["p50"] for each in many], 2),
                f"{statistics.fmean(line['tail'] for line in one['layers']):.2f}",
                f"{one['sinks_relative']['p50']:.2f}",
            )
        )
    names = (
        "",
        "SmolLM2, tail",
        "layers, least – most",
        "middle head",
        "sinks over middle",
        "trace-1, tail",
        "sinks over middle",
    )
    return Table(columns=names, rows=tuple(rows)).markdown()


def link_summary(found: dict[str, dict[str, Any]]) -> str:
    """Each scheme, means over layers: chapters with interval over them, and the program."""
    rows = []
    for name in chapters(found)[0]["schemes"]:
        many = [facts["schemes"][name]["mean"] for facts in chapters(found)]
        one = found["trace-1"]["schemes"].get(name)
        top = [each["shares"]["0.05"]["value"] for each in many]
        squares = [each["square_shares"]["0.05"]["value"] for each in many]
        rows.append(
            (
                name,
                *(across([each[key]["value"] for each in many], 2) for key in LINKS),
                f"{across(top, 1, 100)} ({100 * statistics.fmean(squares):.1f})",
                "–" if one is None else " / ".join(f"{one['mean'][key]['value']:.2f}" for key in LINKS),
            )
        )
    names = (
        "scheme",
        "Pearson",
        "Spearman",
        "of the norm",
        "slope",
        "over law",
        "top 5 % carry, %",
        "trace-1: the same five",
    )
    return Table(columns=names, rows=tuple(rows)).markdown()


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
    lines = [f"### {name}: {command}", "", f"`{words}`; weights {facts['model_sha256'][:12]}.", ""]
    for title, table in made.items():
        lines += [f"#### {title}", "", table.markdown(), ""]
    return lines


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("run", "page"))
    parser.add_argument("--runs", type=Path, default=Path("runs/values"))
    parser.add_argument("--gates", type=Path, help="gates of SmolLM2")
    parser.add_argument("--out", type=Path, default=Path("docs/results/values.md"))
    given = parser.parse_args()
    if given.what == "run":
        run(given.runs, given.gates)
    else:
        page(given.runs, given.out)


if __name__ == "__main__":
    main()
