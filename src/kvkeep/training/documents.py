"""Token rows for training: documents packed one behind the other, in an order that a step number decides."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvkeep.core.errors import ConfigError, DataFileError
from kvkeep.kernels.retention_attention import Packing

IGNORED = -100


@dataclass(frozen=True)
class Document:
    """One text.

    Parameters
    ----------
    ids
        Tokens.
    learned_from
        First token that the losses of prediction count; those before are only read.
    """

    ids: Sequence[int]
    learned_from: int = 0


@dataclass(frozen=True)
class Rows:
    """What one forward reads.

    Parameters
    ----------
    ids
        int64 ``[rows, tokens]``.
    targets
        int64 ``[rows, tokens]``: the next token, where it counts, else ``-100``.
    packing
        Documents.
    """

    ids: Tensor
    targets: Tensor
    packing: Packing

    def to(self, device: torch.device | str) -> Rows:
        """The same on a device."""
        return Rows(self.ids.to(device), self.targets.to(device), self.packing.to(device))


#: The document of a number; data are a function of it, so that a resumed run reads what it would have read.
Source = Callable[[int], Document]


class Documents:
    """A stream of documents that can be entered anywhere.

    Parameters
    ----------
    source
        Gives the document of any number, always the same one.
    row
        Tokens of a row. Longer documents are cut.
    rows
        Rows of a batch.
    name
        What it is, for the card.
    """

    def __init__(self, source: Source, row: int, rows: int, name: str) -> None:
        self.source, self.row, self.rows, self.name = source, row, rows, name

    def batch(self, number: int, of: int = 1, rank: int = 0) -> Rows:
        """The rows of one forward.

        Each row draws its own documents, from a number that no other row has: nothing depends on what was
        drawn before.

        Parameters
        ----------
        number
            Forwards of each process so far.
        of, rank
            Processes, and which of them asks.
        """
        first = (number * of + rank) * self.rows
        return stack([self._fill(first + index) for index in range(self.rows)], self.row)

    def _fill(self, number: int) -> list[Document]:
        """Documents that fit a row: the first is cut if it must be, a further one must fit whole."""
        found: list[Document] = []
        free = self.row
        for document in self._drawn(number):
            if found and len(document.ids) > free:
                break
            found.append(Document(document.ids[:free], document.learned_from))
            free -= len(found[-1].ids)
            if free < 2:
                break
        return found

    def _drawn(self, number: int) -> Iterator[Document]:
        most = 64  # documents of a row; numbers of different rows must not meet
        for index in range(most):
            yield self.source(number * most + index)


def stack(rows: Sequence[Sequence[Document]], length: int) -> Rows:
    """Pack documents into rows of ``length`` tokens, padding behind."""
    ids = torch.zeros(len(rows), length, dtype=torch.int64)
    targets = torch.full_like(ids, IGNORED)
    documents, positions = torch.full_like(ids, -1), torch.zeros_like(ids)
    for row, packed in enumerate(rows):
        begin = 0
        for nth, document in enumerate(packed):
            end = begin + len(document.ids)
            ids[row, begin:end] = torch.as_tensor(document.ids)
            first = max(document.learned_from, 1)
            if begin + first < end:
                targets[row, begin + first - 1 : end - 1] = ids[row, begin + first : end]
            documents[row, begin:end] = nth
            positions[row, begin:end] = torch.arange(end - begin)
            begin = end
    return Rows(ids, targets, Packing(documents, positions))


def shuffled(documents: Sequence[Document], seed: int) -> Source:
    """Go through documents again and again, in another order each time."""
    if not documents:
        raise ConfigError("there is no document to train on.")
    orders: dict[int, list[int]] = {}

    def source(number: int) -> Document:
        epoch, place = divmod(number, len(documents))
        if epoch not in orders:
            orders.clear()
            orders[epoch] = list(range(len(documents)))
            random.Random(f"gates/{seed}/{epoch}").shuffle(orders[epoch])
        return documents[orders[epoch][place]]

    return source


def cut(ids: Sequence[int], length: int) -> list[Document]:
    """A long text as documents of at most ``length`` tokens."""
    return [Document(ids[begin : begin + length]) for begin in range(0, len(ids), length)]


def read(path: Path, tokenizer: Any, length: int) -> list[Document]:
    """Read documents from a file.

    ``.jsonl`` holds one document a line: ``{"messages": [...]}`` (a chat; learned from its first answer on),
    ``{"prompt": ..., "completion": ...}`` (the completion is learned) or ``{"text": ...}``. Anything else
    is plain text.

    Parameters
    ----------
    length
        Most tokens of a document: longer ones are cut into several (text) or cut off (the others).

    Raises
    ------
    DataFileError
        Naming the line that cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataFileError(f"cannot read {path} ({error}): give a text file in UTF-8, or .jsonl.") from error
    if path.suffix != ".jsonl":
        return cut(tokenizer(text)["input_ids"], length)
    found: list[Document] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            found += _parse(json.loads(line), tokenizer, length)
        except (ValueError, KeyError, TypeError) as error:
            raise DataFileError(
                f"{path}, line {number}: {error}. A line holds 'messages', 'prompt' and 'completion', or "
                "'text'."
            ) from error
    return found


def _parse(entry: dict[str, Any], tokenizer: Any, length: int) -> list[Document]:
    if "messages" in entry:
        return [_chat(entry["messages"], tokenizer, length)]
    if "prompt" in entry and "completion" in entry:
        prompt = tokenizer(entry["prompt"])["input_ids"]
        rest = tokenizer(entry["completion"], add_special_tokens=False)["input_ids"]
        return [Document([*prompt, *rest][:length], len(prompt))]
    if "text" in entry:
        return cut(tokenizer(entry["text"])["input_ids"], length)
    raise KeyError("no known field")


def _chat(messages: Sequence[dict[str, str]], tokenizer: Any, length: int) -> Document:
    """A chat; the losses begin with the first answer."""
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("the tokenizer has no chat template")
    asked = next((place for place, each in enumerate(messages) if each["role"] == "assistant"), len(messages))

    def ids(part: Sequence[dict[str, str]], more: bool) -> list[int]:
        text = tokenizer.apply_chat_template(part, tokenize=False, add_generation_prompt=more)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    begin = len(ids(messages[:asked], True)) if asked else 0
    return Document(ids(messages, False)[:length], begin)
