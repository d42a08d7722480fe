"""What gates are trained on: a file, or the training problems of a task."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from kvkeep.core.errors import ConfigError
from kvkeep.evaluation.tasks.registry import make_task
from kvkeep.training.documents import Document, Documents, read, shuffled
from kvkeep.training.recipe import Recipe

# Every so many-th document of a file is never trained on; problems of a task have numbers that training
# does not reach.
_HELD_OUT = 20
_FAR, _SEED = 2**39, 2**40


def documents(data: str, tokenizer: Any, recipe: Recipe) -> tuple[Documents, Documents]:
    """Documents to learn from, and some to measure on.

    Parameters
    ----------
    data
        A file, or the text of a task.

    Raises
    ------
    ConfigError
        If it is neither, or too little.
    DataFileError
        If the file cannot be read.
    """
    path, size = Path(data), (recipe.row, recipe.rows)
    if path.is_file():
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        found = read(path, tokenizer, recipe.row)
        held, rest = found[::_HELD_OUT], [each for place, each in enumerate(found) if place % _HELD_OUT]
        if not rest:
            raise ConfigError(
                f"{data} is one document of a row's length: give a longer text, or a smaller --row."
            )
        name = f"{path.name} (SHA-256 {digest})"
        return (
            Documents(shuffled(rest, recipe.seed), *size, name),
            Documents(shuffled(held, recipe.seed), *size, name),
        )
    if path.suffix or path.exists():
        raise ConfigError(f"--data {data}: there is no such file.")
    task = make_task(data)

    def source(number: int) -> Document:
        prompt, completion = task.training_text(number)
        ids = tokenizer(prompt)["input_ids"]
        return Document([*ids, *tokenizer(completion, add_special_tokens=False)["input_ids"]], len(ids))

    source(0)  # a task without training problems says so before anything is loaded
    name = f"task {data}, seed {recipe.seed}"
    return (
        Documents(lambda number: source(number + recipe.seed * _SEED), *size, name),
        Documents(lambda number: source(number + recipe.seed * _SEED + _FAR), *size, name),
    )
