"""Every policy on SmolLM2-135M-Instruct: likelihood of text and needles, docs/results/smollm2.md.

    python scripts/smollm2_results.py run --runs runs/smollm2     # resumable
    python scripts/smollm2_results.py page --runs runs/smollm2

Text: one `kvkeep perplexity` command for each policy and budget. Needles: each prompt is read once, for all
policies and budgets together (`kvkeep.evaluation.shared_reading`), and answered by each on its own cache.
"""

import argparse
import ast
import json
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from types import MappingProxyType
from typing import Any

import torch
from kvkeep_command import kvkeep as command
from smollm2_page import BUDGETS, BUFFER, LENGTHS, WRITTEN, arms, page, text_file, write

import kvkeep
from kvkeep.cli.loading import Loaded, load_calibration, load_gates, load_model, resolve
from kvkeep.core.policy import Policy
from kvkeep.evaluation.decoding import read
from kvkeep.evaluation.generator import end_tokens
from kvkeep.evaluation.identity import hardware, plain, versions, weights_sha256
from kvkeep.evaluation.jobs import Job
from kvkeep.evaluation.probing import probe
from kvkeep.evaluation.shared_reading import SharedReading
from kvkeep.evaluation.tasks.base import Problem
from kvkeep.evaluation.tasks.needle import Needle
from kvkeep.policies.compose import policy as make_policy

#: Chapters of the Python reference that are read: long ones that do not contain each other.
TOPICS = ("specialnames", "compound", "formatstrings", "typesseq")
CHUNK = 512  # tokens of a needle's prompt per forward
#: A prompt that counts towards the budget and is longer cannot be protected.
OPTIONS: dict[str, dict[str, Any]] = {"triattention": {"protect_prompt": False}}


def note(text: str) -> None:
    """One line of progress."""
    sys.stderr.write(time.strftime("%H:%M:%S ") + text + "\n")


def left(begin: float, done: int, total: int) -> str:
    """Time left at the pace so far, in words."""
    return f"{(time.monotonic() - begin) / done * (total - done) / 60:.0f} min left"


def docstrings() -> Iterator[str]:
    """Longer docstrings of the standard library's modules, in the order of their names."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node) or ""
                if len(text) >= 400:
                    yield text


def texts(runs: Path) -> list[Path]:
    """The chapters as files."""
    paths = [runs / "texts" / f"{name}.txt" for name in TOPICS]
    for path in paths:
        if not path.exists():
            write(path, topics[path.stem])
    return paths


def calibrate(runs: Path, model: str) -> Path:
    """Statistics on text that is not read later, once."""
    out, text = runs / "calibration.safetensors", runs / "texts" / "docstrings.txt"
    if not out.exists():
        write(text, "\n\n".join(docstrings()))
        note("calibrating")
        words = ("--model", model, "--text", str(text), "--out", str(out), "--max-tokens", "8192")
        command("calibrate", *words, "--threads", "1")
    return out


# -- likelihood of text -----------------------------------------------------------------------------------


def run_text(
    runs: Path,
    model: str,
    window: int,
    budgets: Sequence[int],
    names: Sequence[str],
    files: Mapping[str, tuple[str, Path]],
) -> None:
    """One command for the full cache, and one for each policy and budget.

    ``files``: flag and file of what a policy reads beside its budget, by its name.
    """
    paths = [str(path) for path in texts(runs)]
    common = ["--model", model, "--window", str(window), "--limit", "1", "--threads", "1", "--json"]
    todo: list[tuple[str, int | None]] = [("full", None)]
    todo += [(name, budget) for budget in budgets for name in names]
    todo = [one for one in todo if not text_file(runs, *one).exists()]
    begin = time.monotonic()
    for done, (name, budget) in enumerate(todo, 1):
        flags = ["--policy", name, "--buffer", str(BUFFER)]
        flags += [] if budget is None else ["--budget", str(budget)]
        for key, value in OPTIONS.get(name, {}).items():
            flags += ["--option", f"{key}={str(value).lower()}"]
        flags += [str(word) for word in files.get(name, ())]
        printed = command("perplexity", *paths, *common, *flags)
        write(text_file(runs, name, budget), printed)
        found = json.loads(printed)
        note(
            f"text {done}/{len(todo)} {name} {budget}: {found['all_tokens']['nats']:.4f} nats, mean cache "
            f"{found['mean_cache']:.1f}, {left(begin, done, len(todo))}"
        )


def needs_calibration(name: str) -> bool:
    """Whether a policy reads statistics."""
    return make(name, 512).traits.calibration


def make(name: str, budget: int) -> Policy:
    """A policy for needles: the prompt is evicted once, before the first token of the answer is stored."""
    return make_policy(name, budget=budget, buffer=BUFFER, prefill="after", **OPTIONS.get(name, {}))


# -- needles ----------------------------------------------------------------------------------------------


def needles(length: int, count: int, loaded: Loaded) -> list[tuple[Needle, Problem]]:
    """Needles at depths spread evenly, one for each depth, from the development part of each task."""
    found = []
    for place in range(count):
        task = Needle(length=length, depth=round((place + 0.5) / count, 4), count=20)
        task.bind(lambda text: len(encode(loaded, text)))
        found.append((task, task.problems("dev", 1)[0]))
    return found


def encode(loaded: Loaded, text: str) -> list[int]:
    """Tokens of a text, nothing added."""
    ids: list[int] = loaded.tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def run_needles(
    runs: Path,
    model: str,
    count: int,
    lengths: Sequence[int],
    names: Sequence[str],
    calibration: Path | None = None,
    gates: Mapping[str, Path] = MappingProxyType({}),
) -> None:
    """Read each prompt once, answer under every policy and budget.

    ``gates``: files, by the name of the policy that reads them.
    """
    loaded = load_model(resolve(model, note), dtype="float32", attention="sdpa", device="cpu", threads=1)
    statistics = load_calibration(calibration, loaded)
    trained = {name: load_gates(file, loaded) for name, file in gates.items()}
    chosen = {"full": make_policy("full", prefill="after")}
    chosen |= {f"{name}/{budget}": make(name, budget) for budget in BUDGETS for name in names}
    facts = {
        "command": ["python", f"scripts/{Path(sys.argv[0]).name}", *sys.argv[1:]],
        "model": model,
        "model_sha256": weights_sha256(loaded.model),
        "calibration_sha256": None if statistics is None else statistics.sha256,
        "versions": versions(),
        "hardware": hardware(),
        "prompt": "plain",
        "written": WRITTEN,
        "chunk": CHUNK,
        "policies": {name: plain(policy.options()) for name, policy in chosen.items()},
    }
    if trained:
        facts["gates_sha256"] = {name: found.sha256 for name, found in trained.items()}
    tasks = {length: needles(length, count, loaded) for length in lengths}
    logs = {length: runs / "needle" / f"{length}.jsonl" for length in lengths}
    rows = {
        length: [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        for length, log in logs.items()
    }
    for length, log in logs.items():
        ids = [problem.id for _, problem in tasks[length]]
        header = json.dumps({**facts, "task": "needle", "length": length, "ids": ids})
        write(log.with_suffix(".header.json"), header)
    known = {row["id"] for of_length in rows.values() for row in of_length}
    # Lengths in turns and depths in strides: whenever it is stopped, what is there is balanced.
    order = [place for start in range(3) for place in range(start, count, 3)]
    todo = [(length, *tasks[length][place]) for place in order for length in lengths]
    todo = [one for one in todo if one[2].id not in known]
    begin = time.monotonic()
    for done, (length, task, problem) in enumerate(todo, 1):
        rows[length].append(answer(loaded, chosen, statistics, task, problem, trained))
        write(logs[length], "".join(json.dumps(row) + "\n" for row in rows[length]))
        last = rows[length][-1]
        right = sum(one["correct"] for one in last["arms"].values())
        note(
            f"needle {length} {done}/{len(todo)}: {right}/{len(chosen)} right, full "
            f"{last['arms']['full']['text']!r}, read {last['read_seconds']} s, wrote "
            f"{last['write_seconds']} s, {left(begin, done, len(todo))}"
        )


def answer(
    loaded: Loaded,
    chosen: dict[str, Policy],
    statistics: Any,
    task: Needle,
    problem: Problem,
    gates: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """One problem under all policies."""
    ids = torch.tensor([encode(loaded, problem.question)])
    name = Job(problem=problem, draw=0, seed=0).sequence_id
    caches = [
        kvkeep.RetentionCache(
            loaded.model, policy, sequence_ids=[name], calibration=statistics, gates=gates.get(policy.name)
        )
        for policy in chosen.values()
    ]
    begin = time.monotonic()
    logits = read(loaded.model, SharedReading(caches), ids, torch.ones_like(ids), CHUNK)
    middle = time.monotonic()
    found = probe(
        loaded.model,
        caches,
        logits,
        encode(loaded, f" {problem.reference}"),
        limit=WRITTEN,
        end_tokens=end_tokens(loaded.model, loaded.tokenizer),
    )
    results = {}
    for arm, one in zip(chosen, found, strict=True):
        text = loaded.tokenizer.decode(one.written, skip_special_tokens=True)
        results[arm] = {
            "correct": task.grade(problem, text).answer_class == "correct",
            "text": text,
            "nats": [round(each, 5) for each in one.nats],
            "mean_cache": round(one.trace.mean_entries, 2),
            "peak_cache": one.trace.peak_entries,
            "evictions": one.trace.evictions,
        }
    return {
        "id": problem.id,
        "depth": problem.meta["depth"],
        "prompt_tokens": ids.shape[1],
        "reference": problem.reference,
        "read_seconds": round(middle - begin, 1),
        "write_seconds": round(time.monotonic() - middle, 1),
        "arms": results,
    }


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("run", "page"))
    parser.add_argument("--runs", type=Path, default=Path("runs/smollm2"))
    parser.add_argument("--model", default="demo")
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--problems", type=int, default=10, help="needles of each length")
    parser.add_argument("--lengths", type=int, nargs="*", default=list(LENGTHS), help="of needles")
    parser.add_argument("--only", choices=("text", "needle"), help="only this part")
    parser.add_argument("--budgets", type=int, nargs="*", default=list(BUDGETS), help="of text")
    parser.add_argument("--out", type=Path, default=Path("docs/results/smollm2.md"))
    given = parser.parse_args()
    if given.what == "page":
        page(given.runs, given.out)
        return
    calibration = calibrate(given.runs, given.model)
    files = {name: ("--calibration", calibration) for name in arms() if needs_calibration(name)}
    if given.only != "needle":
        run_text(given.runs, given.model, given.window, given.budgets, arms(), files)
    if given.only != "text":
        run_needles(given.runs, given.model, given.problems, given.lengths, arms(), calibration)


if __name__ == "__main__":
    main()
