"""`kvkeep calibrate`: a file that the policies read, and one clear sentence for everything else."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from kvkeep.calibration import load
from kvkeep.cli.calibrate import bar

TEXT = " ".join(f"w{2 + 7 * i % 94}" for i in range(700))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def test_the_file_is_what_a_policy_needs(
    run: Callable[..., Result], tiny_folder: Path, text: Path, tmp_path: Path
) -> None:
    """The command would succeed and TriAttention would still not run."""
    out = tmp_path / "tiny.safetensors"
    options = ("--model", tiny_folder, "--max-tokens", 600, "--chunk", 100)
    result = run("calibrate", "--text", text, "--out", out, *options)
    assert result.exit_code == 0, result.output
    assert "600 tokens" in result.stdout
    assert "only 600 tokens" in result.stderr
    statistics = load(out)
    assert statistics.provenance.tokens == 600
    assert statistics.provenance.text_sha256 == hashlib.sha256(TEXT.encode()).hexdigest()
    answer = run(
        "generate", "w5 w6 w7", "--model", tiny_folder, "--policy", "triattention", "--budget", 16,
        "--buffer", 4, "--max-new-tokens", 25, "--calibration", out,
    )  # fmt: skip
    assert answer.exit_code == 0, answer.output


def test_json(run: Callable[..., Result], tiny_folder: Path, text: Path, tmp_path: Path) -> None:
    """A script could not read what was measured."""
    out = tmp_path / "tiny.safetensors"
    result = run("calibrate", "--text", text, "--out", out, "--model", tiny_folder, "--json")
    facts = json.loads(result.stdout)
    assert (facts["out"], facts["tokens"], facts["layers"], facts["heads"]) == (str(out), 700, 2, 4)
    assert 0 < facts["concentration"] < 1
    assert facts["tokens_per_second"] > 0


@pytest.mark.parametrize(
    ("change", "code", "sentence"),
    [
        ({"--text": "nowhere.txt"}, 1, "no text file"),
        ({"--text": "empty.txt"}, 1, "is empty"),
        ({"--text": "picture.png"}, 1, "not UTF-8 text"),
        ({"--out": "no/folder/x.safetensors"}, 1, "in a folder that exists"),
        ({"--out": "."}, 1, "in a folder that exists"),
        ({"--chunk": "0"}, 2, "--chunk 0"),
        ({"--max-tokens": "-3"}, 2, "--max-tokens -3"),
        ({"--model": "no-such-model"}, 1, "no-such-model"),
    ],
)
def test_mistakes(
    run: Callable[..., Result],
    tiny_folder: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, str],
    code: int,
    sentence: str,
) -> None:
    """A typo would cost the whole run, or print a traceback."""
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").write_text(" \n")
    Path("picture.png").write_bytes(b"\x89PNG\xff\xfe")
    options = {"--text": str(text), "--out": "x.safetensors", "--model": str(tiny_folder)} | change
    result = run("calibrate", *[part for option in options.items() for part in option])
    assert result.exit_code == code
    assert sentence in result.stderr
    assert "Traceback" not in result.output
    assert not Path("x.safetensors").exists()


def test_progress_shows_rate_and_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Minutes would pass without a sign of life."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    now = iter([50.0, 52.0])  # begun, and 300 tokens later
    monkeypatch.setattr("kvkeep.cli.calibrate.perf_counter", lambda: next(now))
    with bar() as progress:
        progress(300, 900)
    shown = capsys.readouterr().err
    assert "300/900" in shown
    assert "150 tokens/s, 0:00:04 left" in shown
