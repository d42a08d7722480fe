"""`kvkeep analyze values` and `quantization` as a user types them."""

from __future__ import annotations

import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import Result

from kvkeep.testbed.model import Shape, make_model
from kvkeep.testbed.tokenizer import make_tokenizer
from kvkeep.testbed.trace_task import problems, size
from tests.cli.conftest import words

Run = Callable[..., Result]


class Page(HTMLParser):
    """Counts what a page holds, and refuses one that reaches out or does not close what it opens."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.count: dict[str, int] = {}
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Every attribute that could load something is refused."""
        assert not {"src", "href"} & {name for name, _ in attributes}, (tag, attributes)
        assert tag != "script"
        self.count[tag] = self.count.get(tag, 0) + 1
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Shapes without content."""
        self.count[tag] = self.count.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        """Tags close in order."""
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained reasoner whose values have 32 channels."""
    folder = tmp_path_factory.mktemp("wide")
    make_model(Shape(layers=2, width=64, head_dim=32, feed_forward=64), 0).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Sixty words of the tiny model."""
    file = tmp_path / "text.txt"
    file.write_text(words(60))
    return file


def test_values_are_told_in_json_and_on_a_page(
    run: Run, tiny_folder: Path, text: Path, tmp_path: Path
) -> None:
    """The page is made of what the JSON says, and needs no network."""
    page = tmp_path / "values.html"
    given = ("analyze", "values", "--model", tiny_folder, "--text", text, "--portion", 32, "--window", 4)
    result = run(*given, "--reserve", 5, "--page", page, "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["portions"] == [32, 28]
    assert set(facts["magnitudes"]) == {"range", "variance", "l2"}
    for found in facts["magnitudes"].values():
        assert len(found["layers"]) == len(facts["layers"]) == len(found["heads"])
        assert found["all"]["tail"] == pytest.approx(found["all"]["p99"] / found["all"]["p50"], rel=1e-3)
        assert len(found["stretches_relative"]) == 16
    pairs = {(one["one"], one["other"]) for one in facts["overlaps"]}
    assert len(pairs) == 6
    assert ("range", "attention") in pairs
    assert all(0 <= one["share"] <= 1 and one["entries"] == [5, 5] for one in facts["overlaps"])
    seen = Page(page.read_text())
    assert seen.count["svg"] == 13
    assert seen.count["table"] == 3


def test_quantization_in_words_and_on_a_page(run: Run, wide: Path, tmp_path: Path) -> None:
    """Schemes that do not fit the head are left out; the law is met by plain rounding."""
    program = tmp_path / "program.txt"
    solved = next(problems(size("S"), "dev"))
    program.write_text(" ".join([*solved.prompt, *solved.chain]))
    page = tmp_path / "quantization.html"
    result = run("analyze", "quantization", "--model", wide, "--text", program, "--page", page, "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert set(facts["schemes"]) == {"hqq-b2g32", "hqq-b4g32", "minmax-b2g32", "minmax-b4g32"}
    plain = facts["schemes"]["minmax-b4g32"]
    assert [line["layer"] for line in plain["layers"]] == facts["layers"]
    assert plain["mean"]["over_law"]["value"] == pytest.approx(1, abs=0.3)
    assert plain["noise"] < facts["schemes"]["minmax-b2g32"]["noise"]
    assert plain["mean"]["spearman"]["value"] > 0.3
    assert Page(page.read_text()).count["svg"] == 3 + 4


@pytest.mark.parametrize("command", ["values", "quantization"])
def test_tables_on_a_terminal(run: Run, tiny_folder: Path, text: Path, command: str) -> None:
    """A first look needs no flags but the text (and groups that fit so small a head)."""
    extra = ("--scheme", "minmax-b4g4") if command == "quantization" else ()
    result = run("analyze", command, "--model", tiny_folder, "--text", text, *extra)
    assert result.exit_code == 0, result.output
    assert "60 tokens of text.txt" in result.stdout


@pytest.mark.parametrize(
    ("command", "flags", "message"),
    [
        ("values", ("--limit", "0"), "at least 1"),
        ("values", ("--reserve", "0"), "at least 1"),
        ("values", ("--run", "somewhere"), "give one of them"),
        ("values", ("--page", "missing/page.html"), "a folder that exists"),
        ("quantization", ("--scheme", "b2g32"), "hqq-b2g32"),
        ("quantization", ("--scheme", "hqq-b2g64"), "do not fill a value"),
        ("quantization", (), "name a --scheme"),
    ],
)
def test_mistakes_are_explained(
    run: Run, tiny_folder: Path, text: Path, command: str, flags: tuple[str, ...], message: str
) -> None:
    """One sentence each."""
    result = run("analyze", command, "--model", tiny_folder, "--text", text, *flags)
    assert result.exit_code != 0
    assert message in " ".join(result.output.split())


def test_a_run_is_read_with_its_prompts(run: Run, wide: Path, tmp_path: Path) -> None:
    """What was written is read again, behind the question it answers."""
    out = tmp_path / "run"
    made = run(
        "eval", "--task", "trace(size=S, count=5)", "--model", wide, "--policy", "full", "--limit", 2,
        "--batch-size", 2, "--out", out,
    )  # fmt: skip
    assert made.exit_code == 0, made.output
    result = run("analyze", "values", "--model", wide, "--run", out, "--samples", 1, "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    sample = next(
        json.loads(line) for line in (out / "run.jsonl").read_text().splitlines() if '"sample"' in line
    )
    assert facts["tokens"][0] == pytest.approx(sample["prompt_tokens"] + sample["tokens"], abs=1)
