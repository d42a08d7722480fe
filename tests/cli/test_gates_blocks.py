"""`kvkeep gates train-blocks` as a user types it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from typer.testing import Result

import kvkeep.gates
from kvkeep.gates import BlockGates


def test_the_command(run: Callable[..., Result], tiny_folder: Path, tmp_path: Path) -> None:
    """As a user types it, and then the gates are used."""
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog " * 60)
    train = ("gates", "train-blocks", "--model", tiny_folder, "--data", text, "--out", tmp_path / "gates")
    small = ("--block", 4, "--row", 32, "--rows", 2, "--steps", 3, "--token-budget", 8)
    result = run(*train, *small)
    assert result.exit_code == 0, result.stderr
    assert "by the gates" in result.stdout
    assert isinstance(kvkeep.gates.load(tmp_path / "gates"), BlockGates)
    again = run(*train, *small)
    assert again.exit_code == 2
    assert "holds block gates already" in again.stderr
    generate = ("generate", "--model", tiny_folder, "--policy", "seer-attention", "--option", "block=4")
    asked = ("--token-budget", 8, "the quick brown fox jumps over", "--max-new-tokens", 20)
    written = run(*generate, *asked, "--gates", tmp_path / "gates")
    assert written.exit_code == 0, written.stderr
    without = run(*generate, *asked)
    assert without.exit_code == 2
    assert "kvkeep gates train-blocks" in without.stderr
    shown = run("gates", "inspect", "--model", tiny_folder, "--gates", tmp_path / "gates")
    assert shown.exit_code == 2
    assert "block gates" in shown.stderr
