"""Documents from files: every kind of line, and a reason for every line that is none."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from kvkeep.core.errors import DataFileError
from kvkeep.testbed.tokenizer import make_tokenizer
from kvkeep.training import Document
from kvkeep.training.reading import read

TEMPLATE = (
    "{% for m in messages %}{{ 'GO ' if m.role == 'user' else 'r9 ' }}{{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}r9 {% endif %}"
)


def chatting(template: str = TEMPLATE) -> PreTrainedTokenizerBase:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def test_plain_text_is_cut(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    ids = tokenizer("GO r1 r2 r3 END")["input_ids"]
    text = tmp_path / "a.txt"
    text.write_text("\ufeffGO r1 r2\nr3 END", encoding="utf-8")
    assert [list(each.ids) for each in read(text, tokenizer, 3)] == [ids[:3], ids[3:]]


@pytest.mark.parametrize("name", ["a.jsonl", "a.JSONL"])
def test_lines(tmp_path: Path, name: str) -> None:
    tokenizer = make_tokenizer()
    ids = tokenizer("GO r1 r2 r3 END")["input_ids"]
    lines = tmp_path / name
    # Line separators that JSON allows in a string end no line of the file.
    entries = [{"prompt": "GO r1", "completion": "r2 r3 END"}, {"text": "GO r1 r2\u2028\x85r3 END"}]
    written = "\r\n".join(json.dumps(entry, ensure_ascii=False) for entry in entries)
    lines.write_bytes(("\ufeff" + written + "\n\n").encode())
    assert read(lines, tokenizer, 9) == [Document(ids, 2), Document(ids, 0)]


def test_a_chat_is_learned_from_its_first_answer_on(tmp_path: Path) -> None:
    tokenizer, lines = chatting(), tmp_path / "a.jsonl"
    talk = [{"role": "user", "content": "r1 r2"}, {"role": "assistant", "content": "r3"}]
    lines.write_text(json.dumps({"messages": talk}))
    (document,) = read(lines, tokenizer, 9)
    assert tokenizer.decode(document.ids).split() == ["GO", "r1", "r2", "r9", "r3"]
    assert document.learned_from == 4
    assert document.teaches


@pytest.mark.parametrize(
    "entry",
    [
        {"messages": [{"role": "user", "content": "r1"}]},
        {"messages": [{"role": "user", "content": "r1 " * 9}, {"role": "assistant", "content": "r3"}]},
        {"prompt": "GO r1", "completion": ""},
        {"prompt": "GO " * 9, "completion": "r1"},
        {"prompt": "", "completion": "r1"},
        {"text": "GO"},
    ],
)
def test_what_teaches_nothing_says_so(tmp_path: Path, entry: dict[str, Any]) -> None:
    lines = tmp_path / "a.jsonl"
    lines.write_text(json.dumps(entry))
    assert not any(document.teaches for document in read(lines, chatting(), 9))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: Expecting"),
        ('{"words": 1}', "no known field among ['words']"),
        ("[]", "list is no JSON object"),
        ('"messages"', "str is no JSON object"),
        ('{"text": null}', "'text' is no string"),
        ('{"text": ["GO", "r1"]}', "'text' is no string"),
        ('{"prompt": ["GO"], "completion": "r1"}', "'prompt' is no string"),
        ('{"messages": {"role": "user"}}', "'messages' is no list of objects"),
        ('{"messages": ["GO"]}', "'messages' is no list of objects"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "GO"}\n' + line)
    with pytest.raises(DataFileError, match="line 2") as caught:
        read(path, chatting(), 9)
    assert said in str(caught.value)
    assert '{"prompt": …, "completion": …}' in str(caught.value)  # what is allowed


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('roles must alternate') }}", "{{ messages[0].nothing.more }}", "{% for %}"],
)
def test_whatever_a_chat_template_raises_is_named(tmp_path: Path, template: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "r1"}]}))
    with pytest.raises(DataFileError, match="line 1"):
        read(path, chatting(template), 9)


def test_without_a_template_there_are_no_chats(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "r1"}]}))
    with pytest.raises(DataFileError, match="no chat template"):
        read(path, make_tokenizer(), 9)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [("a.txt", b"caf\xe9", "UTF-8"), ("a.json", b"[]", "call the file .jsonl")],
)
def test_files_that_are_something_else(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataFileError, match=said):
        read(path, make_tokenizer(), 9)
