"""`kvkeep gates train-blocks` as a user types it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

import kvkeep.gates
from kvkeep.cli import gates_resuming
from kvkeep.core.errors import DataFileError
from kvkeep.gates import BlockGates
from kvkeep.gates.block_files import load_blocks
from kvkeep.gates.files import CHECKPOINT
from kvkeep.training import loop
from kvkeep.training.loop import Progress


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
    assert "holds a training already: continue it with --resume" in again.stderr
    files = {path.name: path.read_bytes() for path in (tmp_path / "gates").iterdir()}
    assert run(*train, *small, "--resume").exit_code == 0  # at its end: nothing is left to do
    now = {path.name: path.read_bytes() for path in (tmp_path / "gates").iterdir()}
    assert now.keys() == files.keys()
    assert [name for name in now if now[name] != files[name] and name != CHECKPOINT] == []
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


def test_stopped_and_continued(
    run: Callable[..., Result], tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key that is pressed leaves what can be continued, to the gates of a run that was not stopped."""
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog " * 60)
    train = ("gates", "train-blocks", "--model", tiny_folder, "--data", text, "--block", 4, "--row", 32)
    small = (*train, "--rows", 2, "--steps", 4, "--token-budget", 8)
    assert run(*small, "--out", tmp_path / "whole").exit_code == 0

    def pressed(progress: Progress) -> None:
        if progress.step == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gates_resuming, "lines", lambda steps: pressed)
        stopped = run(*small, "--out", tmp_path / "early")
        assert stopped.exit_code == 130
        assert "step 3 of 4, before the first checkpoint" in stopped.stderr
        # The command takes the function from its room when it runs.
        patch.setattr(loop, "train", functools.partial(loop.train, save_every=0))
        stopped = run(*small, "--out", tmp_path / "parts")
    assert "step 3 of 4: --resume goes on from" in stopped.stderr
    with pytest.raises(DataFileError, match="go on with the command that began it, and --resume"):
        kvkeep.gates.load(tmp_path / "parts")
    refused = run(*small, "--out", tmp_path / "parts", "--rate", "0.5", "--resume")
    assert refused.exit_code == 2
    assert "rate 0.001 there, 0.5 here" in refused.stderr
    assert run(*small, "--out", tmp_path / "parts", "--resume").exit_code == 0
    whole, parts = (load_blocks(tmp_path / name) for name in ("whole", "parts"))
    assert whole.sha256 == parts.sha256
    assert run(*small, "--out", tmp_path / "early", "--resume").exit_code == 0  # from the start
    assert load_blocks(tmp_path / "early").sha256 == whole.sha256
