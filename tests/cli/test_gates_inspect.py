"""`kvkeep gates inspect`: numbers of the gates in tables that fit a terminal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import Result

from kvkeep import gates as kv_gates
from kvkeep.cli.gates_tables import count
from kvkeep.evaluation.identity import weights_sha256
from kvkeep.evaluation.retention_reading import read_log_betas
from kvkeep.gates.inspection import summarise
from kvkeep.testing.models import random_gates, tiny_model
from tests.gates.published import publish

Run = Callable[..., Result]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gates of the tiny model, and a text."""
    folder, model = tmp_path_factory.mktemp("gates"), tiny_model("llama")
    kv_gates.save(random_gates(model), folder / "gates", base_sha256=weights_sha256(model))
    (folder / "text.txt").write_text(" ".join(f"w{2 + i * i % 90}" for i in range(50)))
    return folder


def inspect(run: Run, folder: Path, place: Path, *more: object, gates: str = "gates") -> Result:
    """Call the command on the text."""
    files = ("--gates", place / gates, "--text", place / "text.txt")
    return run("gates", "inspect", "--model", folder, *files, "--threads", 1, *more)


def test_json_holds_what_the_gates_say(run: Run, tiny_folder: Path, place: Path) -> None:
    """Per layer and head, against the same by hand."""
    result = inspect(run, tiny_folder, place, "--json", "--memory", 8)
    assert result.exit_code == 0, result.output
    facts: dict[str, Any] = json.loads(result.stdout)
    gates = kv_gates.load(place / "gates")
    ids = torch.tensor([2 + i * i % 90 for i in range(50)])
    log_beta = read_log_betas(tiny_model("llama"), gates, ids)
    assert facts["tokens"] == 50
    assert [(head["layer"], head["head"]) for head in facts["heads"]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for head in facts["heads"]:
        wanted = summarise(log_beta[head["layer"], head["head"]])
        assert head["half_life"]["median"] == pytest.approx(wanted.median, rel=1e-3)
        assert head["half_life"]["mean"] == pytest.approx(wanted.mean, rel=1e-3)
    assert facts["capacity"]["tokens"][-1] == 50
    assert len(facts["ranked"]) == 50
    assert all(token["token"] == f"w{ids[token['position']]}" for token in facts["ranked"])
    assert facts["gates"]["sha256"] == gates.sha256
    assert facts["gates"]["base_weights_sha256"] == gates.base == weights_sha256(tiny_model("llama"))


def test_the_tables_fit(run: Run, tiny_folder: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """80 columns, every part there, and the ends of the ranking."""
    monkeypatch.setenv("COLUMNS", "80")
    result = inspect(run, tiny_folder, place, "--memory", 8, "--top", 3)
    assert result.exit_code == 0, result.output
    ranked = json.loads(inspect(run, tiny_folder, place, "--json").stdout)["ranked"]
    assert max(map(len, result.stdout.splitlines())) <= 80
    for part in ("Half-life in tokens", "Live entries after 50 tokens", "heads above M", "kept longest"):
        assert part in result.stdout
    assert f'"{ranked[0]["token"]}"' in result.stdout
    assert f'"{ranked[-1]["token"]}"' in result.stdout


def test_a_long_text_is_cut_aloud(run: Run, tiny_folder: Path, place: Path) -> None:
    """Nothing is left out silently."""
    result = inspect(run, tiny_folder, place, "--json", "--limit", 20)
    assert json.loads(result.stdout)["tokens"] == 20
    assert "the first 20 are read" in result.stderr


def test_gates_of_other_weights(run: Run, tiny_folder: Path, place: Path) -> None:
    """The same shape is not the same model."""
    kv_gates.save(random_gates(tiny_model("llama")), place / "other", base_sha256="0" * 64)
    result = inspect(run, tiny_folder, place, gates="other")
    assert result.exit_code == 1
    assert "weights have SHA-256 000000000000…" in result.output


def test_gates_that_do_not_say(run: Run, tiny_folder: Path, place: Path) -> None:
    """Accepted, and said."""
    kv_gates.save(random_gates(tiny_model("llama")), place / "silent")
    result = inspect(run, tiny_folder, place, gates="silent")
    assert result.exit_code == 0
    assert "does not say by which weights it was trained" in " ".join(result.stderr.split())


def test_the_same_weights_in_another_type(run: Run, tiny_folder: Path, place: Path) -> None:
    """Gates trained in bfloat16 serve the model loaded as float32."""
    half = weights_sha256(tiny_model("llama"), torch.bfloat16)
    kv_gates.save(random_gates(tiny_model("llama")), place / "half", base_sha256=half)
    assert inspect(run, tiny_folder, place, gates="half").exit_code == 0


@pytest.mark.parametrize("flag", ["--memory", "--top", "--limit"])
def test_flags_that_show_nothing(run: Run, tiny_folder: Path, place: Path, flag: str) -> None:
    result = inspect(run, tiny_folder, place, flag, 0)
    assert result.exit_code == 2
    assert f"{flag} 0 shows nothing" in result.output


def test_numbers_in_four_characters() -> None:
    """A column of half-lives from a token to the published start."""
    numbers = (0.31, 9.94, 27.4, 999.4, 1440, 46_000_000, 3e40)
    assert [count(each) for each in numbers] == ["0.3", "9.9", "27", "999", "1.4k", "46M", ">1T"]


def test_a_published_folder(run: Run, tiny_folder: Path, place: Path) -> None:
    """What the authors release goes where kvkeep's own file goes."""
    gates = random_gates(tiny_model("llama")).float()
    publish(gates, place / "published")
    result = inspect(run, tiny_folder, place, "--json", gates="published")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["gates"]["sha256"] == gates.sha256
    assert "does not say by which weights" in " ".join(result.stderr.split())
