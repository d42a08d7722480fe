"""What gates are trained on: a file, or the training problems of a task."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

from kvkeep.cli.report import note
from kvkeep.core.errors import ConfigError
from kvkeep.evaluation.tasks.base import Task
from kvkeep.evaluation.tasks.registry import make_task
from kvkeep.training.block_recipe import BlockRecipe
from kvkeep.training.documents import MOST, Document, Documents, shuffled
from kvkeep.training.reading import read
from kvkeep.training.recipe import Recipe

# Every so many-th document of a file is never trained on; problems of a task have numbers that training
# does not reach.
_HELD_OUT = 20
_FAR, _SEED = 2**39, 2**40


def choose(data: str) -> Path | Task:
    """The file or task that a text names, before anything is loaded.

    Raises
    ------
    ConfigError
        If it is neither, or a task without training problems.
    """
    path = Path(data).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        raise ConfigError(f"--data {data} is a folder: give one file, text or .jsonl.")
    if "(" not in data and (path.suffix or len(path.parts) > 1):
        raise ConfigError(f"--data {data}: there is no such file.")
    task = make_task(data)
    task.training_text(0)
    return task


def documents(
    data: str, chosen: Path | Task, tokenizer: Any, recipe: Recipe | BlockRecipe, limit: int | None = None
) -> tuple[Documents, Documents]:
    """Documents to learn from, and some to measure on.

    Parameters
    ----------
    data
        As the user wrote it.
    chosen
        From :func:`choose`.
    limit
        Positions that the model has: no document is longer.

    Raises
    ------
    ConfigError
        If there is too little.
    DataFileError
        If the file cannot be read.
    """
    length = min(recipe.row, limit or recipe.row)
    if isinstance(chosen, Path):
        return _of_file(chosen, tokenizer, recipe, length)

    def source(number: int) -> Document:
        prompt, completion = chosen.training_text(number)
        ids = tokenizer(prompt)["input_ids"]
        rest = tokenizer(completion, add_special_tokens=False)["input_ids"]
        return Document([*ids, *rest][:length], len(ids))

    name, size = f"task {data}, seed {recipe.seed}", (recipe.row, recipe.rows)
    return (
        Documents(lambda number: source(number + recipe.seed * _SEED), *size, name),
        Documents(lambda number: source(number + recipe.seed * _SEED + _FAR), *size, name),
    )


def _of_file(
    path: Path, tokenizer: Any, recipe: Recipe | BlockRecipe, length: int
) -> tuple[Documents, Documents]:
    """Documents of a file that teach something, in two parts."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    read_all = read(path, tokenizer, length)
    found = [each for each in read_all if each.teaches]
    if found and len(found) < len(read_all):
        note(
            f"{path.name}: {len(read_all) - len(found)} of {len(read_all)} documents teach nothing and are "
            f"left out: no answer in them, or none within {length} tokens."
        )
    if len(found) < 2:
        raise ConfigError(
            f"{path} has {len(found)} documents to learn from ({len(read_all)} in all), and 2 are the least: "
            "one is kept to measure on. Give more text, or a smaller --row, which cuts a text into more "
            f"pieces; what is to be learned must begin within {length} tokens."
        )
    held, rest = found[::_HELD_OUT], [each for place, each in enumerate(found) if place % _HELD_OUT]
    name = f"{path.name} (SHA-256 {digest})"
    # Short documents fill a row only if it may hold more of them.
    mean = sum(len(each.ids) for each in found) / len(found)
    size = (recipe.row, recipe.rows, name, max(MOST, 2 * math.ceil(recipe.row / mean)))
    return Documents(shuffled(rest, recipe.seed), *size), Documents(shuffled(held, recipe.seed), *size)
