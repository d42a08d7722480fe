"""Where prompts come from: the argument, a file, standard input, or a file of many."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from kvkeep.core.errors import ConfigError, DataFileError


def read_prompts(text: str | None, prompt_file: Path | None, batch_file: Path | None) -> list[str]:
    """Collect the prompts, from exactly one place.

    Raises
    ------
    ConfigError
        If no prompt, more than one source, or an empty prompt is given.
    DataFileError
        If a file is missing or cannot be read.
    """
    sources = [source for source in (text, prompt_file, batch_file) if source is not None]
    if len(sources) > 1:
        raise ConfigError("give one prompt: as argument, with --prompt-file, or many with --batch-file.")
    if batch_file is not None:
        return _many(batch_file)
    if text is None and prompt_file is None and sys.stdin.isatty():
        raise ConfigError("no prompt: give it as argument, with --prompt-file, or on standard input.")
    prompt = text if text is not None else _read(prompt_file) if prompt_file else sys.stdin.read()
    if not prompt.strip():
        raise ConfigError("the prompt is empty: give at least one word.")
    return [prompt]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataFileError(f"{path} is not UTF-8 text (byte {error.start}): convert it first.") from error
    except OSError as error:
        raise DataFileError(f"cannot read {path}: {error.strerror}.") from error


def _many(path: Path) -> list[str]:
    """One prompt a line; a .jsonl file holds {"prompt": "..."} a line."""
    prompts = []
    for number, line in enumerate(_read(path).splitlines(), start=1):
        if line.strip():
            prompts.append(_record(line, f"{path}, line {number}") if path.suffix == ".jsonl" else line)
    if not prompts:
        raise ConfigError(f"{path} holds no prompt: write one a line.")
    return prompts


def _record(line: str, place: str) -> str:
    try:
        prompt = json.loads(line)["prompt"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise DataFileError(
            f'{place} is not a JSON object with a "prompt": write {{"prompt": "..."}}.'
        ) from error
    if not isinstance(prompt, str) or not prompt.strip():
        raise ConfigError(f"{place} holds an empty prompt: give at least one word.")
    return prompt
