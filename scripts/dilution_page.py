"""The page docs/results/dilution.md: words from dilution_page.md, figures from dilution_results.py's runs."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvkeep.evaluation.comparison import compare
from kvkeep.evaluation.records import Run
from kvkeep.evaluation.runlog import read_log
from kvkeep.evaluation.seal import load_frozen
from kvkeep.evaluation.statistics.accuracy import accuracy
from kvkeep.evaluation.statistics.correction import corrected
from kvkeep.evaluation.statistics.problem_means import problem_means
from kvkeep.evaluation.study import confirm

#: Settings of the task: name -> task and model.
DIALS: dict[str, tuple[str, str]] = {
    "s30": ("trace(steps=30)", "trace-1"),
    "s45": ("trace(steps=45)", "trace-1"),
    "s60": ("trace(steps=60)", "trace-1"),
    "s60v": ("trace(steps=60, verbose=1.0)", "trace-1"),
    "s70": ("trace(steps=70)", "trace-1"),
    "s80": ("trace(steps=80)", "trace-1"),
    "d20": ("trace(distractors=20)", "trace-1"),
    "d40": ("trace(distractors=40)", "trace-1"),
    "t2-s45": ("trace(steps=45)", "trace-2"),
}

#: Evicting arms of the search: policy and entries beside the prompt.
SEARCH: dict[str, list[tuple[str, int]]] = {
    "s30": [("keydiff", 180), ("keydiff", 90)],
    "s45": [("keydiff", 180), ("keydiff", 90)],
    "s60": [
        ("keydiff", 180),
        ("keydiff", 90),
        ("keydiff", 45),
        ("r-kv", 180),
        ("cur", 180),
        ("cur", 90),
        ("vase-dkv", 180),
        ("snapkv", 180),
    ],
    "s60v": [("keydiff", 180), ("keydiff", 90), ("keydiff", 45)],
    "s70": [("keydiff", 90)],
    "s80": [("keydiff", 180), ("keydiff", 90), ("keydiff", 45), ("r-kv", 90), ("cur", 90)],
    "d20": [("keydiff", 180), ("keydiff", 90)],
    "d40": [("keydiff", 180), ("keydiff", 90)],
    "t2-s45": [("keydiff", 180), ("keydiff", 90), ("cur", 180)],
}


@dataclass(frozen=True)
class Study:
    """A sealed study: its file, and where in the search it comes from."""

    file: str
    dial: str
    policy: str
    budget: int


STUDIES = (
    Study("dilution-keydiff.yaml", "s60v", "keydiff", 90),
    Study("dilution-r-kv.yaml", "s60", "r-kv", 180),
)


@dataclass(frozen=True)
class Curve:
    """One table of `kvkeep analyze dilution`."""

    title: str
    flags: tuple[str, ...]


_KEYDIFF = ("--policy", "keydiff", "--budget", "90", "--buffer", "16", "--limit", "8")
CURVES = {
    "values-distractors": Curve(
        "Reads of registers, as overwritten values are added",
        ("--task", "trace", "--distractors", "0,10,20,40", *_KEYDIFF),
    ),
    "program-distractors": Curve(
        "Reads of the program, as overwritten values are added",
        ("--task", "trace", "--distractors", "0,10,20,40", "--reads", "program", *_KEYDIFF),
    ),
    "values-steps": Curve(
        "Reads of registers, as programs grow (trained on 30 steps and less)",
        ("--task", "trace", "--vary", "steps=30,45,60,80", *_KEYDIFF),
    ),
    "program-steps": Curve(
        "Reads of the program, as programs grow",
        ("--task", "trace", "--vary", "steps=30,45,60,80", "--reads", "program", *_KEYDIFF),
    ),
    "program-verbose": Curve(
        "Reads of the program, as its execution gets wordier (60 steps)",
        ("--task", "trace(steps=60)", "--vary", "verbose=0,0.5,1", "--reads", "program", *_KEYDIFF),
    ),
    "needle": Curve(
        "SmolLM2-135M-Instruct: digits of a needle in 768 tokens, as other needles are added",
        (
            *("--task", "needle(length=768)", "--model", "demo", "--distractors", "0,4,16"),
            *("--policy", "keydiff", "--budget", "256", "--limit", "5"),
        ),
    ),
}

_COLUMNS = (
    "mass full",
    "after eviction",
    "predicted",
    "bound",
    "gap",
    "rivals",
    "rho_U",
    "rho_D",
    "right, full",
    "right, evicted",
    "difference",
)


def curve_file(runs: Path, name: str) -> Path:
    """Where a curve's JSON lies."""
    return runs / "curves" / f"{name}.json"


def folder(runs: Path, dial: str, policy: str, budget: int | None) -> Path:
    """Where a run of the search lies."""
    return runs / f"{dial}-{policy}{'' if budget is None else f'-{budget}'}"


def read_runs(runs: Path) -> dict[str, dict[str, Run]]:
    """Complete runs of the search, by dial and arm; arms that are not listed too."""
    found: dict[str, dict[str, Run]] = {}
    for dial in DIALS:
        for log in sorted(runs.glob(f"{dial}-*/run.jsonl")):
            one = read_log(log.parent)
            if one.footer is not None:
                found.setdefault(dial, {})[log.parent.name.removeprefix(f"{dial}-")] = one.run
    return {dial: arms for dial, arms in found.items() if "full" in arms}


def curve_table(facts: dict[str, Any]) -> list[str]:
    """One line for each setting: the reading head, and what was predicted right."""
    lines = ["| " + " | ".join((facts["dial"], "entries seen", *_COLUMNS)) + " |"]
    lines.append("|---" * (2 + len(_COLUMNS)) + "|")
    for setting in facts["settings"]:
        head = setting["heads"][0]
        cells = [
            f"{setting['dial']:g}",
            f"{setting['evidence'] + setting['distractors']:.0f}",
            interval(head["mass_full"], 3),
            interval(head["mass_evicted"], 3),
            f"{head['mass_predicted']['value']:.3f}",
            f"{head['bound']:.3f}",
            f"{head['gap']:+.1f}",
            f"{head['rivals']:.3f}",
            f"{head['rho_useful']:.3f}",
            f"{head['rho_distracting']:.3f}",
            interval(setting["right_full"], 1, 100),
            interval(setting["right_evicted"], 1, 100),
            interval(setting["right_difference"], 1, 100, "+"),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def interval(mean: dict[str, Any], digits: int, scale: float = 1, sign: str = "") -> str:
    """A mean with its interval."""
    text = f"{scale * mean['value']:{sign}.{digits}f}"
    if mean["interval"] is None:
        return text
    low, high = mean["interval"]
    return f"{text} [{scale * low:{sign}.{digits}f}, {scale * high:{sign}.{digits}f}]"


def curve_section(runs: Path, name: str, curve: Curve) -> list[str]:
    """Title, command and table of one curve; nothing if it was not run."""
    path = curve_file(runs, name)
    if not path.exists():
        return []
    facts = json.loads(path.read_text())
    words = " ".join(f"'{word}'" if "(" in word else word for word in curve.flags)
    first = facts["settings"][0]
    lines = [f"### {curve.title}", "", f"`kvkeep analyze dilution {words}`", ""]
    lines += [
        f"Head {first['heads'][0]['head']}; {first['problems']} problems and "
        f"{min(each['queries'] for each in facts['settings'])} reads or more a line.",
        "",
    ]
    return [*lines, *curve_table(facts), ""]


def search_table(found: dict[str, dict[str, Run]]) -> list[str]:
    """Every evicting run beside the full cache of its dial, corrected over all of them."""
    tests = {
        (dial, arm): compare(arms["full"], run, allow=["cache", "versions"])
        for dial, arms in found.items()
        for arm, run in arms.items()
        if arm != "full"
    }
    adjusted = corrected({f"{dial} {arm}": one.difference.p for (dial, arm), one in tests.items()}, "holm")
    lines = ["| task | model | cache | mean cache | score | other form | wrong read | beside full |"]
    lines.append("|---" * 8 + "|")
    for dial, arms in found.items():
        task, model = DIALS[dial]
        for arm in sorted(arms, key=lambda arm: (arm != "full", arm)):
            run, beside = arms[arm], ""
            if arm != "full":
                one, p = tests[dial, arm].difference, adjusted[f"{dial} {arm}"]
                low, high = (100 * each for each in one.interval)
                beside = f"{100 * one.estimate:+.1f} [{low:+.1f}, {high:+.1f}], p {p:.3f}"
            score = accuracy(problem_means(run.samples, "score"))
            low, high = (100 * each for each in score.interval)
            form, read = (100 * faulty(run, fault) for fault in ("form", "read"))
            name = " ".join(arm.rsplit("-", 1)) if arm != "full" else arm
            lines.append(
                f"| `{task}` | {model} | {name} | {run.mean_cache:.0f} | {100 * score.estimate:.1f} "
                f"[{low:.1f}, {high:.1f}] | {form:.1f} | {read:.1f} | {beside} |"
            )
    return lines


def faulty(run: Run, fault: str) -> float:
    """Share of the program's lines whose execution has a fault, judged by the chain's own earlier values."""
    grades = [sample.extra["grade"] for sample in run.samples]
    return sum(each["faults"].get(fault, 0) for each in grades) / sum(each["steps"] for each in grades)


def study_lines(runs: Path, out: Path, study: Study) -> list[str]:
    """What a sealed study decided; nothing while a run is missing."""
    places = [runs / f"confirm-{study.policy}-{arm}" for arm in ("full", study.policy)]
    logs = [read_log(place) for place in places if (place / "run.jsonl").exists()]
    task, model = DIALS[study.dial]
    name = f"[{study.file}]({study.file})"
    if len(logs) < 2 or any(log.footer is None for log in logs):
        return [f"- {name}: not carried out yet."]
    family = confirm(load_frozen(out.parent / study.file), [log.run for log in logs])
    lines = []
    for cell in family.decision.cells:
        one = family.comparisons[cell.cell]
        low, high = (100 * each for each in cell.difference.interval)
        sides = [f"{100 * side.accuracy.estimate:.1f} %" for side in (one.baseline, one.challenger)]
        lines += [
            f"- {name}: `{task}`, {model}, {study.policy} at {study.budget} entries beside the prompt: "
            f"full {sides[0]} at {one.baseline.mean_cache:.0f} entries, {study.policy} {sides[1]} at "
            f"{one.challenger.mean_cache:.0f}; difference {100 * cell.difference.estimate:+.2f} points "
            f"[{low:+.2f}, {high:+.2f}], p {cell.adjusted_p:.4f}, {cell.difference.n} problems: "
            f"**{cell.verdict}**. {family.decision.sentence} On the first problems in hash order: "
            + ", ".join(
                f"{count}: {100 * each.estimate:+.2f} [{100 * each.interval[0]:+.2f}, "
                f"{100 * each.interval[1]:+.2f}]"
                for count, each in one.growth.items()
            )
            + ".",
        ]
        lines += [f"  Deviation: {' '.join(deviation.split())}" for deviation in family.deviations]
    return lines


def page(runs: Path, out: Path) -> None:
    """Write the page and the headers of its runs."""
    found = read_runs(runs)
    text = Path(__file__).with_suffix(".md").read_text()
    parts = {
        "curves": [line for name, curve in CURVES.items() for line in curve_section(runs, name, curve)],
        "search": search_table(found),
        "studies": [line for study in STUDIES for line in study_lines(runs, out, study)],
    }
    for name, lines in parts.items():
        text = text.replace(f"<!-- {name} -->", "\n".join(lines).strip())
    out.write_text(text)
    logs = [read_log(path.parent).run for path in sorted(runs.glob("confirm-*/run.jsonl"))]
    every = [run for arms in found.values() for run in arms.values()] + logs
    headers = "".join(json.dumps(run.header.as_dict()) + "\n" for run in every)
    for name in CURVES:
        if curve_file(runs, name).exists():
            facts = json.loads(curve_file(runs, name).read_text())
            headers += json.dumps({key: value for key, value in facts.items() if key != "settings"}) + "\n"
    # Folders of the machine that ran it tell a reader nothing.
    headers = re.sub(r'"(?:/[^"/]+)+/([^"/]+)"', r'"\1"', headers)
    out.with_name("dilution-headers.jsonl").write_text(headers)
