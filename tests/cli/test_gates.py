"""`--gates FILE`: the commands that run a policy run the trained ones too."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from kvkeep import gates as kv_gates
from kvkeep.evaluation.runlog import read_log
from kvkeep.testing.models import random_gates, tiny_model

Run = Callable[..., Result]
WORDS = " ".join(f"w{2 + i % 90}" for i in range(40))
SMALL = ("--budget", 16, "--buffer", 4, "--threads", 1, "--json")


@pytest.fixture(scope="module")
def gate_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gates of the tiny model."""
    path = tmp_path_factory.mktemp("gates") / "gates.safetensors"
    kv_gates.save(random_gates(tiny_model("llama")), path)
    return path


def facts(result: Result) -> dict[str, Any]:
    """What a command reported."""
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("policy", ["trimkv", "dbtrimkv(floor=2)", "dbtrimkv + adaptive-heads"])
def test_generate(run: Run, tiny_folder: Path, gate_file: Path, policy: str) -> None:
    """Text comes out, and entries really go."""
    report = facts(
        run(
            "generate",
            WORDS,
            "--model",
            tiny_folder,
            "--policy",
            policy,
            "--gates",
            gate_file,
            "--no-chat",
            "--max-new-tokens",
            24,
            *SMALL,
        )
    )
    assert report["trace"]["evictions"] > 2
    assert report["trace"]["mean_entries"] < 20


def test_perplexity_names_the_gates(run: Run, tiny_folder: Path, gate_file: Path, tmp_path: Path) -> None:
    """Numbers of other gates are numbers of another method."""
    text = tmp_path / "text.txt"
    text.write_text(" ".join([WORDS] * 4))
    arguments = ("perplexity", text, "--model", tiny_folder, "--policy", "dbtrimkv", "--window", 64)
    report = facts(run(*arguments, "--gates", gate_file, *SMALL))
    assert report["gates_sha256"] == kv_gates.load(gate_file).sha256


def test_eval_logs_the_gates(run: Run, tiny_folder: Path, gate_file: Path, tmp_path: Path) -> None:
    """A run can only be repeated with the same gates."""
    task = ("--task", "needle(length=80, count=30)", "--limit", 2, "--max-new-tokens", 8)
    place = ("--model", tiny_folder, "--out", tmp_path / "run")
    found = facts(run("eval", *task, "--policy", "dbtrimkv", "--gates", gate_file, *place, *SMALL))
    assert found["mean_cache"] < 24
    header = read_log(tmp_path / "run").run.header
    assert header.gates_sha256 == kv_gates.load(gate_file).sha256


@pytest.mark.parametrize("command", ["generate", "perplexity", "eval"])
def test_no_gates(run: Run, tiny_folder: Path, tmp_path: Path, command: str) -> None:
    """The message names the flag, before a model is loaded."""
    text = tmp_path / "text.txt"
    text.write_text(WORDS)
    first = {"generate": WORDS, "perplexity": text}.get(command)
    more = ("--out", tmp_path / "run") if command == "eval" else ()
    result = run(
        command,
        *([] if first is None else [first]),
        "--model",
        tiny_folder,
        "--policy",
        "trimkv",
        "--budget",
        16,
        *more,
    )
    assert result.exit_code != 0
    assert "add --gates FILE" in " ".join(result.output.split())


def test_gates_of_another_model(run: Run, tiny_folder: Path, tmp_path: Path) -> None:
    """Refused with what differs."""
    path = tmp_path / "gates.safetensors"
    kv_gates.save(random_gates(tiny_model("qwen3")), path)
    result = run("generate", WORDS, "--model", tiny_folder, "--policy", "trimkv", "--gates", path, *SMALL)
    assert result.exit_code != 0
    assert "made for model_type 'qwen3'" in " ".join(result.output.split())
