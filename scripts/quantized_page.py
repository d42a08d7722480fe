"""Write docs/results/quantized.md from the logs of scripts/quantized_results.py."""

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from page_tables import rows
from quantized_arms import (
    BOUNDED,
    BUFFER,
    FULL_BYTES,
    NEEDLE,
    PLAIN,
    STOCK,
    UNBOUNDED,
    WINDOW,
    Arm,
    few_bytes,
)
from quantized_reasoner import headers, reasoner_part
from scipy import stats

from kvkeep.evaluation.statistics.paired import paired_difference
from kvkeep.evaluation.statistics.problem_means import ProblemMeans


def mean_interval(values: Sequence[float]) -> str:
    """Mean and 95 % interval over windows, Student's t."""
    found = np.asarray(values)
    half = stats.t.ppf(0.975, len(found) - 1) * found.std(ddof=1) / len(found) ** 0.5
    return f"{found.mean():+.4f} [{found.mean() - half:+.4f}, {found.mean() + half:+.4f}]"


# -- output of attention ----------------------------------------------------------------------------------


def error_part(found: dict[str, Any]) -> list[str]:
    """Mean relative error of attention's output, and each rule against random at the same reserve."""
    by: dict[tuple[Any, ...], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in found["rows"]:
        by[row["rounded"], row["bits"], row["rule"], row["reserve"]][row["window"]].append(row["error"])
    means = {key: np.array([np.mean(value) for _, value in sorted(of.items())]) for key, of in by.items()}
    body = []
    for (rounded, bits, rule, reserve), values in sorted(means.items()):
        base = means.get((rounded, bits, "random", reserve))
        ratio = "–"
        if base is not None and rule != "random":
            logs = np.log(values / base)
            half = stats.t.ppf(0.975, len(logs) - 1) * logs.std(ddof=1) / len(logs) ** 0.5
            low, mid, high = (np.exp(logs.mean() + by_ * half) for by_ in (-1, 0, 1))
            ratio = f"{mid:.2f} [{low:.2f}, {high:.2f}]"
        if reserve in (0, 64):
            body.append([rounded, str(bits), rule, f"{values.mean():.5f}", ratio])
    return [
        "## Output of attention",
        "",
        "Square of the error of attention's output over the square of the output, mean over layers and "
        f"windows ({found['window']} tokens of a chapter each, {len(next(iter(means.values())))} "
        "chapters). The newest 32 queries ask; sinks and the newest 64 entries are never rounded; "
        "64 more are spared by the rule, no more where it says `none`. `attention` is that of the 32 "
        "queries before. The ratio to `random` at the same reserve is the geometric mean over windows, with "
        "a 95 % interval.",
        "",
        *rows(("rounded", "bits", "rule", "error", "against random"), body),
    ]


# -- likelihood -------------------------------------------------------------------------------------------


def nats(scores: Sequence[dict[str, Any]]) -> np.ndarray:
    """Nats per token of each window."""
    return np.array([sum(each["nats"]) / sum(each["tokens"]) for each in scores])


def _text_logs(runs: Path) -> dict[str, Any]:
    """Name of an arm -> its log, of those that read as many chapters as the full cache did."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted((runs / "text").glob("*.json"))}
    return {name: log for name, log in found.items() if len(log["scores"]) == len(found["full"]["scores"])}


def text_part(runs: Path) -> list[str]:
    """Likelihood of the chapters: bounded arms, then those that keep everything."""
    found = _text_logs(runs)

    def of(name: str) -> Any:
        return found.get(name.replace(", ", "-").replace(" ", "-"))

    full = nats(of("full")["scores"])
    lines = [
        "## Log-likelihood of text",
        "",
        f"{len(full)} chapters of the Python reference that comes with CPython (`pydoc_data.topics`), "
        "their first 768 tokens, read 32 at a time with an eviction after each. `more than full` is the "
        f"paired difference to the full cache ({full.mean():.4f} nats per token), 95 % interval over "
        "chapters (Student's t).",
        "",
        f"### SnapKV at the bytes of {PLAIN} full entries",
        "",
        "Every arm holds as many bytes per head, in the middle of a period; what is saved on bits buys "
        "entries. Protected arms keep 4 sinks, the newest 16 and a reserve of 32 in full precision, `none` "
        "nothing (`--protect none`).",
        "",
    ]
    lines += rows(
        *_text_rows(
            BOUNDED,
            of,
            full,
            {
                "against random": "bounded, {bits} bits, random",
                "against none": "bounded, {bits} bits, none",
                "against 4 bits for all": "bounded, 4 bits, none",
                "against 16 bits": "bounded, 16 bits",
            },
        )
    )
    lines += [
        "### Everything stays",
        "",
        "No eviction. Arms with a reserve keep 64 entries. `bytes` at the end of a chapter, per head. "
        "Arms that have not run are not listed.",
        "",
    ]
    lines += rows(*_text_rows(UNBOUNDED, of, full, {"against random": "full, {bits} bits, random"}))
    stock = [(name, found[name]) for name in STOCK if name in found]
    if stock:
        body = []
        for name, each in stock:
            mine, bits = nats(each["scores"]), each["stock"]["nbits"]
            ours = of(f"full, {bits} bits in groups of 32")
            size = BUFFER * FULL_BYTES + (WINDOW - BUFFER) * few_bytes(bits)
            line = [name.replace("-", " "), f"{size:,}", mean_interval(mine - full)]
            body.append([*line, "–" if ours is None else mean_interval(mine - nats(ours["scores"]))])
        lines += [
            "transformers' own quantized cache (optimum-quanto, groups of 32, newest 32 entries in full "
            "precision; `channel`: keys with `axis_key=-1`, KIVI's way; `token`: `axis_key=0`; it rounds "
            "what it holds anew every 64 tokens: 32 are in full precision at the end, where ours has rounded "
            "all). `bytes` counts its scales as 16 bits; `ours` is the arm "
            "above with all entries in as many bits, by token:",
            "",
            *rows(("cache", "bytes per head", "more than full", "against ours"), body),
        ]
    else:
        lines += ["transformers' own quantized cache was not run.", ""]
    return lines


def _text_rows(
    arms: dict[str, Arm], of: Any, full: np.ndarray, bases: dict[str, str]
) -> tuple[tuple[str, ...], list[list[str]]]:
    """``bases``: heading -> arm to compare with, ``{bits}`` of the arm itself in its name."""
    body = []
    for name, arm in arms.items():
        log = of(name)
        if log is None:
            continue
        mine = nats(log["scores"])
        size = arm.bytes_at() if arm.budget else arm.bytes_at(WINDOW, new=0)
        line = [name, str(arm.budget or WINDOW), f"{size:,.0f}"]
        line.append(mean_interval(mine - full) if name != "full" else "")
        for base in bases.values():
            other = "" if arm.precision is None else base.format(bits=arm.precision.bits)
            theirs = of(other) if other != name else None
            bare = arm.precision is not None and arm.precision.protect == "none" and "{bits}" in base
            line.append("–" if theirs is None or bare else mean_interval(mine - nats(theirs["scores"])))
        body.append(line)
    return ("arm", "entries", "bytes per head", "more than full", *bases), body


# -- needles ----------------------------------------------------------------------------------------------


def _needles(runs: Path) -> Path:
    """The log with most needles."""
    return max(runs.glob("needle*.jsonl"), key=lambda path: len(path.read_text().splitlines()))


def needle_part(runs: Path) -> list[str]:
    """Needles found, and nats per digit."""
    log = _needles(runs)
    found = [json.loads(line) for line in log.read_text().splitlines()]
    head = json.loads(log.with_suffix(".header.json").read_text())
    body = []
    for name, arm in NEEDLE.items():
        if name not in found[0]["arms"]:
            continue
        each = [row["arms"][name] for row in found]
        right = sum(one["correct"] for one in each)
        low, high = stats.binomtest(right, len(each)).proportion_ci(method="wilson")
        cost = [float(np.mean(one["nats"][1:])) for one in each]
        body.append(
            [
                name,
                "all" if arm.budget is None else str(arm.budget),
                f"{right} of {len(each)} [{100 * low:.0f}, {100 * high:.0f}]",
                f"{np.mean(cost):.3f}",
                _more_found(arm, name, found),
                *(_cheaper(arm, name, base, found) for base in ("random", "none", "4 bits, none", "16 bits")),
            ]
        )
    return [
        "## Needles",
        "",
        f"{len(found)} needles at depths spread evenly in {head['length']} tokens, SmolLM2-135M-Instruct. "
        f"KeyDiff at the bytes of {PLAIN} full entries per head; the prompt is evicted, and rounded, when "
        "it has been read. Intervals in percent are Wilson's; nats per digit of the right answer after "
        "its first token. `more than random`: needles found beyond those of a random reserve, in points, "
        "paired (bootstrap, p by flipping signs; [+0, +0] where no needle tells them apart); the columns "
        "after it are differences in nats per digit.",
        "",
        *rows(
            (
                "arm",
                "entries",
                "found",
                "nats per digit",
                "more than random",
                "against random",
                "against none",
                "against 4 bits for all",
                "against 16 bits",
            ),
            body,
        ),
    ]


def _other(arm: Arm, name: str, base: str) -> str | None:
    """The arm at the same bits (or in full precision) to compare with; none if this is no rule."""
    rule = f"{arm.precision.bits} bits, {base}" if arm.precision else name
    other = base if "bits" in base else rule
    bare = arm.budget is None or other == name or (name.endswith("none") and base == "random")
    return None if bare else other


def _more_found(arm: Arm, name: str, found: Sequence[dict[str, Any]]) -> str:
    """Needles found, in points, beyond those of a random reserve; paired."""
    other = _other(arm, name, "random")
    if other is None:
        return "–"
    mine, theirs = (_found(found, each) for each in (name, other))
    one = paired_difference(theirs, mine, rng=np.random.default_rng(0))
    low, high = one.interval
    return f"{100 * one.estimate:+.0f} [{100 * low:+.0f}, {100 * high:+.0f}], p {one.p:.3f}"


def _found(found: Sequence[dict[str, Any]], name: str) -> ProblemMeans:
    """Whether an arm found each needle."""
    ids = tuple(row["id"] for row in found)
    means = np.array([float(row["arms"][name]["correct"]) for row in found])
    return ProblemMeans(
        ids=ids, groups=ids, means=means, draws=np.ones(len(ids), dtype=np.int64), first=means, share=True
    )


def _cheaper(arm: Arm, name: str, base: str, found: Sequence[dict[str, Any]]) -> str:
    """Paired difference in nats per digit."""
    other = _other(arm, name, base)
    if other is None:
        return "–"
    cost = [[float(np.mean(row["arms"][each]["nats"][1:])) for each in (name, other)] for row in found]
    return mean_interval([mine - theirs for mine, theirs in cost])


def page(runs: Path, out: Path) -> None:
    """Write the page, and the headers of its runs beside it."""
    error = json.loads((runs / "error.json").read_text())
    lines = [
        "# Entries in few bits at equal bytes",
        "",
        f"SmolLM2-135M-Instruct (weights {error['model_sha256'][:12]}) and trace-1, float32, one thread. "
        f"Bytes are counted as a model in 16 bits holds them: {2 * 2 * 64} for an entry in full precision, "
        f"{few_bytes(8)}, {few_bytes(4)} and {few_bytes(2)} in 8, 4 and 2 bits with groups of 32, scales "
        f"included; K4 V2 is keys in 4 bits and values in 2, {few_bytes(2, key_bits=4)}. Written by "
        "`python scripts/quantized_results.py run` and `… page`; headers in "
        "`quantized-headers.jsonl`.",
        "",
    ]
    for part in (lambda: error_part(error), lambda: text_part(runs), lambda: needle_part(runs),
                 lambda: reasoner_part(runs)):  # fmt: skip
        lines += part()
    lines += Path(__file__).with_suffix(".md").read_text().splitlines()
    out.write_text("\n".join(lines).rstrip() + "\n")
    heads = [{key: value for key, value in error.items() if key != "rows"}]
    heads += [
        {key: value for key, value in log.items() if key != "scores"} for log in _text_logs(runs).values()
    ]
    heads.append(json.loads(_needles(runs).with_suffix(".header.json").read_text()))
    heads += [header.as_dict() for header in headers(runs)]
    text = "".join(json.dumps(head) + "\n" for head in heads)
    # Folders of the machine that ran it tell a reader nothing.
    text = re.sub(r'"(?:/[^"/]+)+/([^"/]+)"', r'"\1"', text)
    out.with_name("quantized-headers.jsonl").write_text(text)
