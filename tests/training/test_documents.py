"""Packed rows: nothing lost, nothing mixed, the same again."""

import pytest
import torch

from kvkeep.core.errors import ConfigError
from kvkeep.training.documents import IGNORED, Document, Documents, shuffled, stack


def test_targets_stay_within_their_document_and_begin_where_learning_does() -> None:
    rows = stack([[Document([5, 6, 7, 8], 2), Document([9, 10])], [Document([1])]], 8)
    assert rows.ids.tolist() == [[5, 6, 7, 8, 9, 10, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0]]
    n = IGNORED
    assert rows.targets.tolist() == [[n, 7, 8, n, 10, n, n, n], [n] * 8]
    assert rows.packing.documents.tolist() == [[0, 0, 0, 0, 1, 1, -1, -1], [0] + [-1] * 7]
    assert rows.packing.positions.tolist()[0] == [0, 1, 2, 3, 0, 1, 0, 0]


def test_a_batch_depends_on_its_number_alone() -> None:
    source = shuffled([Document(list(range(n, n + n % 7 + 2))) for n in range(1, 40)], seed=3)
    documents = Documents(source, 16, 2, "x")
    later = documents.batch(5)
    documents.batch(900)
    assert torch.equal(later.ids, Documents(source, 16, 2, "x").batch(5).ids)
    assert not torch.equal(later.ids, documents.batch(6).ids)


def test_processes_read_what_one_process_would_have() -> None:
    source = shuffled([Document([n] * 4) for n in range(1, 50)], seed=3)
    one, both = Documents(source, 16, 2, "x"), Documents(source, 16, 1, "x")
    halves = [both.batch(3, of=2, rank=rank).ids for rank in (0, 1)]
    assert torch.equal(one.batch(3).ids, torch.cat(halves))


def test_every_document_comes_once_an_epoch() -> None:
    source = shuffled([Document([n]) for n in range(10)], seed=0)
    orders = [[source(epoch * 10 + place).ids[0] for place in range(10)] for epoch in range(3)]
    assert [sorted(order) for order in orders] == [list(range(10))] * 3
    assert orders[0] != orders[1]


def test_what_teaches_nothing_takes_no_room() -> None:
    useless = [Document([]), Document([1]), Document([1, 2], 5)]
    good = Document([7, 8, 9])
    documents = Documents(lambda number: [*useless, good][number % 4], 8, 1, "x")
    assert documents.batch(0).ids.tolist() == [[7, 8, 9, 7, 8, 9, 0, 0]]
    with pytest.raises(ConfigError, match=r"64 documents .* row of 8 tokens.* has 20, .* number 12 on"):
        Documents(lambda number: Document(list(range(20)), 12), 8, 1, "x").batch(0)


def test_short_documents_may_fill_a_row() -> None:
    def source(number: int) -> Document:
        return Document([number % 50, 1])

    def filled(**options: int) -> int:
        return int(Documents(source, 256, 1, "x", **options).batch(3).packing.real.sum())

    assert filled() == 128
    assert filled(most=130) == 256
