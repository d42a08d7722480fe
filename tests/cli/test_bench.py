"""`kvkeep bench` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from kvkeep.cli.bench import app
from kvkeep.core.errors import ConfigError

TINY = ["--shape", "tiny", "--budget", "32", "--buffer", "16", "--prompt", "8"]


def test_decode_prints_json_and_writes_both_files(tmp_path: Path) -> None:
    """Results are recorded from these files; JSON on stdout must not be mixed with a progress bar."""
    table, data = tmp_path / "new" / "cpu.md", tmp_path / "cpu.json"
    arms = ["--policies", "vase-attnv(reserve=8, pool=1),vase-dkv", "--batch", "2", "--context", "100"]
    length = ["--steps", "16", "--full-steps", "2", "--rounds", "1"]
    outputs = ["--json", "--out", str(table), "--out", str(data)]
    result = CliRunner().invoke(app, ["decode", *TINY, *arms, *length, *outputs])
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert printed == json.loads(data.read_text())
    assert [arm["name"] for arm in printed["arms"]][2:] == ["vase-attnv", "vase-dkv"]
    assert "| vase-dkv |" in table.read_text()


def test_a_selector_is_an_arm_of_its_own() -> None:
    """It keeps everything as the full cache does, and must not be taken for it."""
    arms = ["--policies", "full,quest(token_budget=32, page=4, dense_layers=0)", "--stock", "dynamic"]
    length = ["--batch", "2", "--context", "100", "--steps", "2", "--full-steps", "2", "--rounds", "1"]
    result = CliRunner().invoke(app, ["decode", *TINY, *arms, *length, "--json"])
    assert result.exit_code == 0, result.output
    found = {arm["name"]: arm for arm in json.loads(result.stdout)["arms"]}
    assert list(found) == ["DynamicCache", "full (kvkeep)", "quest"]


def test_flat_prints_a_table() -> None:
    """Without --json a person reads it."""
    result = CliRunner().invoke(app, ["flat", *TINY, "--tokens", "64", "--window", "32"])
    assert result.exit_code == 0, result.output
    assert "largest deviation" in result.stdout


def test_the_table_fits_a_terminal() -> None:
    """Twelve columns in eighty characters were unreadable."""
    small = ["--batch", "1", "--context", "50", "--steps", "16", "--full-steps", "1", "--rounds", "1"]
    result = CliRunner().invoke(app, ["decode", *TINY, *small])
    assert result.exit_code == 0, result.output
    assert "…" not in result.stdout
    for cell in ("vase-attnv", "DynamicCache", "× best stock", "beside", "× floor"):
        assert cell in result.stdout


def test_a_result_that_cannot_be_written_is_refused_before_measuring(tmp_path: Path) -> None:
    """An hour of measurement must not end with an error about a path."""
    result = CliRunner().invoke(app, ["decode", *TINY, "--out", str(tmp_path), "--rounds", "100000"])
    assert isinstance(result.exception, ConfigError)
    assert "cannot write a result" in str(result.exception)


def test_flat_takes_one_policy() -> None:
    """Two policies in one run would share its clock."""
    result = CliRunner().invoke(app, ["flat", *TINY, "--policy", "vase-dkv,vase-attnv"])
    assert isinstance(result.exception, ConfigError)
    assert "names 2 policies" in str(result.exception)
