"""The page of `smollm2_results.py`: from logs to docs/results/smollm2.md."""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import kvkeep
from kvkeep.evaluation.likelihood import WindowScore
from kvkeep.evaluation.likelihood_summary import Estimate, difference, summarise
from kvkeep.evaluation.statistics.accuracy import accuracy
from kvkeep.evaluation.statistics.problem_means import ProblemMeans

BUDGETS = (256, 512)
LENGTHS = (1024, 2048, 4096)
BUFFER = 64
WRITTEN = 12  # tokens; an answer has eight


def arms() -> list[str]:
    """Every policy that ships and needs no training, the full cache apart."""
    known = kvkeep.available_policies().items()
    return [name for name, kind in known if kind.bounded and not kind(budget=1024).traits.trained]


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    draft.write_text(text)
    draft.rename(path)


def text_file(runs: Path, name: str, budget: int | None) -> Path:
    """Where the result of one command lies."""
    return runs / "text" / (f"{name}.json" if budget is None else f"{name}-{budget}.json")


def scores(found: dict[str, Any]) -> list[WindowScore]:
    """The windows of a result."""
    as_tuples = ("nats", "tokens", "entries")
    return [
        WindowScore(**{key: tuple(each) if key in as_tuples else each for key, each in one.items()})
        for one in found["scores"]
    ]


def shown(estimate: Estimate | None, sign: str = "") -> str:
    """A figure with its interval."""
    if estimate is None:
        return "–"
    if estimate.interval is None:
        return f"{estimate.nats:{sign}.3f}"
    low, high = estimate.interval
    return f"{estimate.nats:{sign}.3f} [{low:{sign}.3f}, {high:{sign}.3f}]"


def text_part(runs: Path, headers: list[dict[str, Any]], names: Sequence[str]) -> list[str]:
    """Tables of the likelihood, one for each budget."""
    full = json.loads(text_file(runs, "full", None).read_text())
    base = scores(full)
    headers.append({key: value for key, value in full.items() if key != "scores"})
    lines = []
    for budget in BUDGETS:
        found = {}
        for name in names:
            path = text_file(runs, name, budget)
            if path.exists():
                found[name] = json.loads(path.read_text())
        headers += [{key: value for key, value in one.items() if key != "scores"} for one in found.values()]
        if not found:
            continue
        part = scores(next(iter(found.values())))[0].full_at
        whole = summarise(base, part)
        lines += [
            f"### Budget {budget}",
            "",
            "| policy | nats per token | perplexity | more than full | after the first eviction | mean cache "
            "| peak |",
            "|---" * 7 + "|",
            f"| full | {shown(whole.all_tokens)} | {whole.perplexity:.2f} | | ({shown(whole.after)}) | "
            f"{whole.mean_cache:.0f} | {whole.peak_cache} |",
        ]
        rows = []
        for name, one in found.items():
            own = scores(one)
            here = summarise(own)
            more, after = difference(base, own), difference(base, own, own[0].full_at)
            rows.append(
                (
                    more.nats,
                    f"| {name} | {here.all_tokens.nats:.3f} | {here.perplexity:.2f} | {shown(more, '+')} | "
                    f"{shown(after, '+')} | {here.mean_cache:.0f} | {here.peak_cache} |",
                )
            )
        lines += [row for _, row in sorted(rows)] + [""]
    return lines


def proportion(rights: list[bool]) -> str:
    """Right answers and Wilson's interval."""
    if len(rights) < 2:
        return f"{sum(rights)}/{len(rights)}"
    values = np.array(rights, dtype=float)
    names = tuple(str(place) for place in range(len(values)))
    ones = np.ones(len(values), dtype=np.int64)
    of_all = accuracy(ProblemMeans(ids=names, groups=names, means=values, draws=ones, first=values))
    low, high = of_all.wilson or of_all.interval
    return f"{int(values.sum())}/{len(values)} [{100 * low:.0f}, {100 * high:.0f}]"


def needle_part(runs: Path, headers: list[dict[str, Any]], names: Sequence[str]) -> list[str]:
    """Tables of the needles, one for each length."""
    lines = []
    for length in LENGTHS:
        log = runs / "needle" / f"{length}.jsonl"
        if not log.exists():
            continue
        rows = [json.loads(line) for line in log.read_text().splitlines()]
        headers.append(json.loads(log.with_suffix(".header.json").read_text()) | {"problems": len(rows)})
        prompt = np.mean([row["prompt_tokens"] for row in rows])
        lines += [
            f"### {length} tokens (needles: {len(rows)}; prompts of {prompt:.0f} tokens on average)",
            "",
            "| policy | "
            + " | ".join(f"found, {b} | nats per digit, {b} | mean cache, {b}" for b in BUDGETS)
            + " |",
            "|---" * (1 + 3 * len(BUDGETS)) + "|",
        ]

        def cells(arm: str, rows: list[dict[str, Any]] = rows) -> tuple[float, str]:
            mine = [row["arms"][arm] for row in rows]
            # The first token, a space, is predicted before anything is evicted.
            nats = float(np.mean([np.mean(one["nats"][1:]) for one in mine]))
            cache = np.mean([one["mean_cache"] for one in mine])
            return nats, f"{proportion([one['correct'] for one in mine])} | {nats:.2f} | {cache:.0f}"

        empty = " | | | " * (len(BUDGETS) - 1)
        lines.append(f"| full | {cells('full')[1]}{empty}|".replace("  ", " "))
        ranked = [name for name in names if f"{name}/{BUDGETS[0]}" in rows[0]["arms"]]
        ranked = sorted(ranked, key=lambda name, of=cells: sum(of(f"{name}/{b}")[0] for b in BUDGETS))
        lines += [
            f"| {name} | " + " | ".join(cells(f"{name}/{budget}")[1] for budget in BUDGETS) + " |"
            for name in ranked
        ]
        lines.append("")
    return lines


def without_places(lines: Iterable[dict[str, Any]]) -> str:
    """Headers without folders of the machine that ran them, which tell a reader nothing."""
    text = "".join(json.dumps(one) + "\n" for one in lines)
    return re.sub(r'"(?:/[^"/]+)+/([^"/]+)"', r'"\1"', text)


def page(runs: Path, out: Path) -> None:
    """Write the page and the headers of its runs."""
    headers: list[dict[str, Any]] = []
    text, needle = text_part(runs, headers, arms()), needle_part(runs, headers, arms())
    full = headers[0]
    listed = ", ".join(f"`{one['name']}` ({one['sha256'][:12]})" for one in full["texts"])
    reading = [
        "## Log-likelihood of text",
        "",
        f"The first {full['window']} tokens of {len(full['texts'])} chapters of the Python reference that "
        f"come with CPython {full['versions']['python']} (`pydoc_data.topics`; file and sha256: {listed}). "
        f"Read {full['chunk']} tokens at a time with an eviction after each, which gives the likelihood of "
        "decoding token by token. `more than full` is the paired difference in nats per token with a 95 % "
        "interval over windows (Student's t; few windows make it wide). `after the first eviction` is the "
        "same for the tokens that were predicted after something had been evicted; in the row of the full "
        "cache it is its own nats on those tokens.",
        "",
        *text,
    ]
    lines = [
        "# SmolLM2-135M-Instruct under every policy",
        "",
        f"Model {full['model']}, weights {full['model_sha256'][:12]}, float32, one thread. Buffer {BUFFER}, "
        "prompt counted in the budget, options otherwise the policies' own (`triattention` without its "
        "protection of prompts, which a prompt above the budget rules out). Statistics for `triattention` "
        "and `set-diversity`: docstrings of the standard library. `random` may evict the first tokens, on "
        "which this model leans ([loops.md](loops.md)): it is not a neutral control here. Written by "
        "`python scripts/smollm2_results.py run` and `… page`; the headers of all runs, commands included, "
        "are in `smollm2-headers.jsonl`.",
        "",
        *(reading if text else []),
        "## Needles",
        "",
        "Task `needle` (a seven-digit number among plain sentences, asked for at the end of the prompt; "
        f"depths spread evenly), greedy, at most {WRITTEN} tokens. The prompt is read with the full cache "
        "and evicted once, after the question and before the answer is written. Intervals are Wilson's, "
        "95 %, in percent. `nats per digit` is minus the mean log-likelihood of the right digits, "
        "teacher-forced; "
        f"a blind guess among ten digits costs {np.log(10):.2f}.",
        "",
        *needle,
    ]
    write(out, "\n".join(lines).rstrip("\n") + "\n")
    write(out.with_name(f"{out.stem}-headers.jsonl"), without_places(headers))
