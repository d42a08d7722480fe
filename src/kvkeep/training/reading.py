"""Documents from a file: plain text, or one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvkeep.core.errors import DataFileError
from kvkeep.training.documents import Document

_HOLDS = (
    'A line holds {"messages": [{"role": …, "content": …}, …]}, {"prompt": …, "completion": …} or '
    '{"text": …}.'
)


def read(path: Path, tokenizer: Any, length: int) -> list[Document]:
    """Read documents from a file.

    ``.jsonl`` holds one document a line: ``{"messages": [...]}`` (a chat; learned from its first answer on),
    ``{"prompt": ..., "completion": ...}`` (the completion is learned) or ``{"text": ...}``. Anything else
    is plain text.

    Parameters
    ----------
    length
        Most tokens of a document: longer ones are cut into several (text) or cut off (the others).

    Returns
    -------
    list
        All of them, also those that teach nothing: an empty text, a chat without an answer.

    Raises
    ------
    DataFileError
        Naming the line that cannot be read.
    """
    if path.suffix.lower() == ".json":
        raise DataFileError(f"{path}: write one JSON object a line, and call the file .jsonl. {_HOLDS}")
    try:
        text = path.read_text(encoding="utf-8-sig")  # a byte order mark is no token
    except (OSError, UnicodeDecodeError) as error:
        raise DataFileError(f"cannot read {path} ({error}): give a text file in UTF-8, or .jsonl.") from error
    if path.suffix.lower() != ".jsonl":
        return cut(_ids(tokenizer, text), length)
    found: list[Document] = []
    # By line feeds alone: JSON strings may hold the other ends of lines that splitlines() knows.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            found += _parse(json.loads(line), tokenizer, length)
        except Exception as error:  # a chat template may raise anything
            raise DataFileError(f"{path}, line {number}: {str(error).rstrip('.')}. {_HOLDS}") from error
    return found


def cut(ids: Sequence[int], length: int) -> list[Document]:
    """A long text as documents of at most ``length`` tokens."""
    return [Document(ids[begin : begin + length]) for begin in range(0, len(ids), length)]


def _ids(tokenizer: Any, text: str, **options: Any) -> list[int]:
    """Tokens of a text, however long it is."""
    return list(tokenizer(text, verbose=False, **options)["input_ids"])


def _parse(entry: Any, tokenizer: Any, length: int) -> list[Document]:
    if not isinstance(entry, dict):
        raise TypeError(f"{type(entry).__name__} is no JSON object")
    if "messages" in entry:
        return [_chat(entry["messages"], tokenizer, length)]
    if "prompt" in entry and "completion" in entry:
        prompt = _ids(tokenizer, _string(entry, "prompt"))
        rest = _ids(tokenizer, _string(entry, "completion"), add_special_tokens=False)
        return [Document([*prompt, *rest][:length], len(prompt))]
    if "text" in entry:
        return cut(_ids(tokenizer, _string(entry, "text")), length)
    raise ValueError(f"no known field among {sorted(entry)}")


def _string(entry: dict[str, Any], name: str) -> str:
    """A field that must be text: a tokenizer would take a list for a batch."""
    if not isinstance(entry[name], str):
        raise TypeError(f"{name!r} is no string")
    return str(entry[name])


def _chat(messages: Any, tokenizer: Any, length: int) -> Document:
    """A chat; the losses begin with the first answer."""
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("the tokenizer has no chat template")
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        raise TypeError("'messages' is no list of objects")
    asked = next(
        (place for place, each in enumerate(messages) if each.get("role") == "assistant"), len(messages)
    )

    def ids(part: Sequence[dict[str, Any]], more: bool) -> list[int]:
        text = tokenizer.apply_chat_template(part, tokenize=False, add_generation_prompt=more)
        return _ids(tokenizer, text, add_special_tokens=False)

    begin = len(ids(messages[:asked], True)) if asked else 0
    return Document(ids(messages, False)[:length], begin)
