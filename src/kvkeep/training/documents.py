"""Token rows for training: documents packed one behind the other, in an order that a step number decides."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.core.errors import ConfigError
from kvkeep.kernels.retention_attention import Packing

IGNORED = -100
#: Documents of a row at most, unless they are so short that more would fit.
MOST = 64


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

    @property
    def teaches(self) -> bool:
        """Whether any token of it is learned: the first one of a text is never predicted."""
        return max(self.learned_from, 1) < len(self.ids)


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
    most
        Documents of a row at most: numbers of different rows must not meet.
    """

    def __init__(self, source: Source, row: int, rows: int, name: str, most: int = MOST) -> None:
        self.source, self.row, self.rows, self.name, self.most = source, row, rows, name, most

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

        Raises
        ------
        ConfigError
            If there is nothing to learn in a row.
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
            part = Document(document.ids[:free], document.learned_from)
            if not part.teaches:
                continue
            found.append(part)
            free -= len(part.ids)
            if free < 2:
                break
        if not found:
            first = next(self._drawn(number))
            raise ConfigError(
                f"{self.name}: {self.most} documents in succession have nothing to learn within a row of "
                f"{self.row} tokens. The first has {len(first.ids)}, and is learned from number "
                f"{first.learned_from} on: take longer rows."
            )
        return found

    def _drawn(self, number: int) -> Iterator[Document]:
        for index in range(self.most):
            yield self.source(number * self.most + index)


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
