"""`kvkeep bench` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from kvkeep.cli.bench import app

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


def test_flat_prints_a_table() -> None:
    """Without --json a person reads it."""
    result = CliRunner().invoke(app, ["flat", *TINY, "--tokens", "64", "--window", "32"])
    assert result.exit_code == 0, result.output
    assert "largest deviation" in result.stdout
