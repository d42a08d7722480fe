"""Entries in few bits at equal bytes: docs/results/quantized.md.

    python scripts/quantized_results.py run --runs runs/quantized     # resumable; --only text, needle ...
    python scripts/quantized_results.py page --runs runs/quantized

Bytes are counted as a model in 16 bits holds them: 256 for an entry of 64 channels in full precision, and
what codes and scales take in few bits. The arithmetic is float32. Keys by channel (KIVI's way) through
transformers' own cache run where optimum-quanto is installed.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from quantized_arms import (
    BOUNDED,
    BUFFER,
    NEEDLE,
    STOCK,
    UNBOUNDED,
    WINDOW,
    Arm,
)
from quantized_error import output_errors
from quantized_page import page
from quantized_reasoner import run_reasoner
from smollm2_results import CHUNK, encode, needles, note, write

import kvkeep
from kvkeep.cli.loading import Loaded, load_model, resolve
from kvkeep.engine.generation import cache_argument
from kvkeep.evaluation.decoding import read
from kvkeep.evaluation.generator import end_tokens
from kvkeep.evaluation.identity import hardware, versions, weights_sha256
from kvkeep.evaluation.jobs import Job
from kvkeep.evaluation.likelihood import read_windows
from kvkeep.evaluation.probing import probe
from kvkeep.evaluation.shared_reading import SharedReading

#: Chapters of the Python reference: as in smollm2.md, two more, the next six by length without common text.
TOPICS = (
    *("specialnames", "compound", "formatstrings", "typesseq", "import", "debugger"),
    *("types", "string-methods", "attribute-access", "typesmapping", "assignment", "comparisons"),
)
ATTENDED = 6  # chapters in which the output of attention is looked at


def load(model: str) -> Loaded:
    """The model, on one thread."""
    return load_model(resolve(model, note), dtype="float32", attention="sdpa", device="cpu", threads=1)


def facts(loaded: Loaded, model: str) -> dict[str, Any]:
    """Who made a figure."""
    return {
        "command": ["python", "scripts/quantized_results.py", *sys.argv[1:]],
        "model": model,
        "model_sha256": weights_sha256(loaded.model),
        "versions": versions(),
        "hardware": hardware(),
    }


def windows(loaded: Loaded) -> torch.Tensor:
    """The first tokens of each chapter, int64 ``[chapters, WINDOW]``."""
    return torch.tensor([encode(loaded, topics[name])[:WINDOW] for name in TOPICS])


def todo(folder: Path, arms: dict[str, Arm]) -> Iterator[tuple[str, Arm, Path]]:
    """The arms that have not read all chapters yet."""
    for name, arm in arms.items():
        out = folder / f"{name.replace(', ', '-').replace(' ', '-')}.json"
        if not _read(out):
            yield name, arm, out


def _read(out: Path) -> bool:
    """Whether an arm has read all chapters."""
    return out.exists() and len(json.loads(out.read_text())["scores"]) == len(TOPICS)


def run_text(runs: Path, model: str) -> None:
    """Log-likelihood of the chapters: each arm reads all of them."""
    loaded = load(model)
    ids, about = windows(loaded), facts(loaded, model)
    read_text(runs, loaded, ids, about, {"full": UNBOUNDED["full"], **BOUNDED})
    for name, settings in STOCK.items():
        out = runs / "text" / f"{name}.json"
        found = [] if _read(out) else stock_scores(loaded, ids, settings)
        if found:
            write(out, json.dumps({**about, "stock": settings, "scores": found}))
    read_text(runs, loaded, ids, about, UNBOUNDED)


def read_text(
    runs: Path, loaded: Loaded, ids: torch.Tensor, about: dict[str, Any], arms: dict[str, Arm]
) -> None:
    """Read the chapters under the arms that have not."""
    for name, arm, out in todo(runs / "text", arms):
        begin = time.monotonic()
        scores = read_windows(
            loaded.model, arm.policy(prefill="chunk"), ids, chunk=BUFFER, precision=arm.precision
        )
        found = [score.as_dict() for score in scores]
        seconds = round(time.monotonic() - begin, 1)
        write(out, json.dumps({**about, "arm": arm.as_dict(), "seconds": seconds, "scores": found}))
        note(f"text {name}: {sum(sum(each.nats) for each in scores) / ids.numel():.4f} nats, {seconds} s")


@torch.inference_mode()
def stock_scores(loaded: Loaded, ids: torch.Tensor, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The same chapters through transformers' own quantized cache; nothing where its back end is missing."""
    try:
        from optimum import quanto  # noqa: F401
        from transformers import QuantizedCache
    except ImportError as error:
        note(f"stock cache left out: {error}")
        return []
    found = []
    for name, row in enumerate(ids):  # one by one: the stock cache rounds all rows of a batch together
        cache = QuantizedCache(config=loaded.model.config, **settings)
        nats, tokens = [], []
        for start in range(0, len(row), BUFFER):
            piece = row[None, start : start + BUFFER]
            where = torch.arange(start, start + piece.shape[1])[None]
            logits = loaded.model(
                input_ids=piece, position_ids=where, **{cache_argument(loaded.model): cache}
            ).logits[0]
            targets = row[start + 1 : start + 1 + len(logits)]
            loss = torch.nn.functional.cross_entropy(logits[: len(targets)], targets, reduction="none")
            nats.append(float(loss.double().sum()))
            tokens.append(len(targets))
        found.append({"name": name, "nats": nats, "tokens": tokens})
    note(f"stock cache {settings}: {sum(sum(each['nats']) for each in found) / ids.numel():.4f} nats")
    return found


def run_error(runs: Path, model: str) -> None:
    """What few bits do to the output of attention, layer by layer."""
    out = runs / "error.json"
    if out.exists():
        return
    loaded = load(model)
    found = output_errors(loaded.model, windows(loaded)[:ATTENDED])
    write(out, json.dumps({**facts(loaded, model), "window": WINDOW, "rows": found}))
    note("output errors done")


def run_needles(runs: Path, model: str, count: int, length: int) -> None:
    """Each prompt is read once for all arms that have not answered it, and answered by each on its own cache.

    Depths come in turns of five that span the whole text: a run that is stopped has seen all of it.
    """
    log = runs / f"needles-{count}.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    if len(rows) >= count and all(NEEDLE.keys() <= row["arms"].keys() for row in rows):
        return
    loaded = load(model)
    write(log.with_suffix(".header.json"), json.dumps({**facts(loaded, model), "length": length}))
    found = needles(length, count, loaded)
    turns = max(1, count // 5)
    for task, problem in (found[place] for turn in range(turns) for place in range(turn, count, turns)):
        there = next((row for row in rows if row["id"] == problem.id), {"id": problem.id, "arms": {}})
        missing = {arm: each for arm, each in NEEDLE.items() if arm not in there["arms"]}
        if not missing:
            continue
        ids = torch.tensor([encode(loaded, problem.question)])
        name = Job(problem=problem, draw=0, seed=0).sequence_id
        caches = [
            kvkeep.RetentionCache(
                loaded.model, arm.policy(prefill="after"), sequence_ids=[name], precision=arm.precision
            )
            for arm in missing.values()
        ]
        logits = read(loaded.model, SharedReading(caches), ids, torch.ones_like(ids), CHUNK)
        answers = probe(
            loaded.model,
            caches,
            logits,
            encode(loaded, f" {problem.reference}"),
            limit=12,
            end_tokens=end_tokens(loaded.model, loaded.tokenizer),
        )
        arms = there["arms"]
        for arm, one in zip(missing, answers, strict=True):
            text = loaded.tokenizer.decode(one.written, skip_special_tokens=True)
            arms[arm] = {
                "correct": task.grade(problem, text).answer_class == "correct",
                "nats": [round(each, 5) for each in one.nats],
                "few_bits_entries": one.trace.few_bits_entries,
            }
        there["prompt_tokens"] = ids.shape[1]
        if there not in rows:
            rows.append(there)
        write(log, "".join(json.dumps(row) + "\n" for row in rows))
        note(f"needle {len(rows)}/{count}: {sum(one['correct'] for one in arms.values())}/{len(arms)} right")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("run", "page"))
    parser.add_argument("--runs", type=Path, default=Path("runs/quantized"))
    parser.add_argument("--model", default="demo")
    parser.add_argument("--only", nargs="*", choices=("text", "error", "needle", "reasoner"))
    parser.add_argument("--arms", nargs="*", default=(), help="of the reasoner: only these")
    parser.add_argument("--needles", type=int, default=20)
    parser.add_argument("--length", type=int, default=1000, help="tokens of a needle's prompt")
    parser.add_argument("--problems", type=int, default=200, help="of the reasoner")
    parser.add_argument("--out", type=Path, default=Path("docs/results/quantized.md"))
    given = parser.parse_args()
    if given.what == "page":
        page(given.runs, given.out)
        return
    only = given.only or ("error", "reasoner", "needle", "text")
    for part in only:
        if part == "error":
            run_error(given.runs, given.model)
        elif part == "reasoner":
            run_reasoner(given.runs, given.problems, given.arms)
        elif part == "needle":
            run_needles(given.runs, given.model, given.needles, given.length)
        else:
            run_text(given.runs, given.model)


if __name__ == "__main__":
    main()
