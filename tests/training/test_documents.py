"""Packed rows: nothing lost, nothing mixed, the same again."""

import json
from pathlib import Path

import pytest
import torch

from kvkeep.core.errors import DataFileError
from kvkeep.testbed.tokenizer import make_tokenizer
from kvkeep.training.documents import IGNORED, Document, Documents, read, shuffled, stack


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


def test_files(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    ids = tokenizer("GO r1 r2 r3 END")["input_ids"]
    text = tmp_path / "a.txt"
    text.write_text("GO r1 r2\nr3 END")
    assert [list(each.ids) for each in read(text, tokenizer, 3)] == [ids[:3], ids[3:]]
    lines = tmp_path / "a.jsonl"
    entries = [{"prompt": "GO r1", "completion": "r2 r3 END"}, {"text": "GO r1 r2 r3 END"}]
    lines.write_text("\n".join(json.dumps(entry) for entry in entries) + "\n\n")
    assert read(lines, tokenizer, 9) == [Document(ids, 2), Document(ids, 0)]


def test_a_chat_is_learned_from_its_first_answer_on(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ 'GO ' if m.role == 'user' else 'r9 ' }}{{ m.content }} {% endfor %}"
        "{% if add_generation_prompt %}r9 {% endif %}"
    )
    lines = tmp_path / "a.jsonl"
    talk = [{"role": "user", "content": "r1 r2"}, {"role": "assistant", "content": "r3"}]
    lines.write_text(json.dumps({"messages": talk}))
    (document,) = read(lines, tokenizer, 9)
    assert tokenizer.decode(document.ids).split() == ["GO", "r1", "r2", "r9", "r3"]
    assert document.learned_from == 4


@pytest.mark.parametrize(
    "line", ["{", '{"words": 1}', '{"messages": [{"role": "user", "content": "x"}]}', "[]"]
)
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "GO"}\n' + line)
    with pytest.raises(DataFileError, match="line 2"):
        read(path, make_tokenizer(), 9)
