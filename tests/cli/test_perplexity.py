"""`kvkeep perplexity`: the figures of a text file, and one sentence for what cannot be measured."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import Result

from tests.cli.conftest import words

Run = Callable[..., Result]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Three windows of 64 tokens, and a rest."""
    path = tmp_path / "text.txt"
    path.write_text(words(200))
    return path


def plain_nats(folder: Path, text: Path, window: int, count: int) -> float:
    """What transformers makes of the same windows."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = AutoTokenizer.from_pretrained(folder)(text.read_text(), return_tensors="pt")["input_ids"]
    windows = ids[:, : window * count].view(count, window)
    with torch.no_grad():
        # The loss of a causal model is the mean over all tokens but the first of each row.
        return float(model(windows, labels=windows).loss)


def test_json_holds_what_was_measured(run: Run, tiny_folder: Path, text: Path, tmp_path: Path) -> None:
    """The script behind the results page reads these fields."""
    second = tmp_path / "second.txt"
    second.write_text(words(70, start=5))
    result = run(
        "perplexity", text, second, "--model", tiny_folder, "--policy", "vase-attnv", "--budget", 24,
        "--buffer", 8, "--window", 64, "--limit", 2, "--beside-full", "--batch-size", 2, "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert [each["windows"] for each in facts["texts"]] == [2, 1]
    assert facts["texts"][0]["sha256"] == hashlib.sha256(text.read_bytes()).hexdigest()
    assert (facts["windows"], facts["chunk"], facts["peak_cache"]) == (3, 8, 32)
    assert [len(score["nats"]) for score in facts["scores"]] == [8] * 3
    assert facts["perplexity"] == pytest.approx(math.exp(facts["all_tokens"]["nats"]))
    full = facts["full"]
    assert facts["all_tokens"]["nats"] - full["all_tokens"]["nats"] == pytest.approx(
        full["difference"]["nats"]
    )
    assert facts["before"]["nats"] == pytest.approx(full["before"]["nats"], rel=1e-5)
    assert facts["after"]["nats"] != pytest.approx(full["after"]["nats"], rel=1e-3)
    assert len(facts["model_sha256"]) == 64


def test_the_full_cache_is_the_plain_model(run: Run, tiny_folder: Path, text: Path) -> None:
    """A baseline that is not the model's own would shift every comparison."""
    result = run(
        "perplexity",
        text,
        "--model",
        tiny_folder,
        "--policy",
        "full",
        "--window",
        64,
        "--chunk",
        13,
        "--json",
    )
    facts = json.loads(result.stdout)
    assert facts["windows"] == 3
    assert facts["all_tokens"]["nats"] == pytest.approx(plain_nats(tiny_folder, text, 64, 3), rel=1e-5)


def test_the_words_say_what_was_evicted(run: Run, tiny_folder: Path, text: Path) -> None:
    """A policy that never came into play would look harmless."""
    common = ("perplexity", text, "--model", tiny_folder, "--window", 64, "--buffer", 8)
    result = run(*common, "--policy", "keydiff", "--budget", 24, "--beside-full")
    assert result.exit_code == 0, result.output
    assert "before the first eviction" in result.stdout
    assert "keydiff pays" in result.stdout
    assert "0 evicted" in run(*common, "--policy", "keydiff", "--budget", 64).stdout
    assert "before the first" not in run(*common, "--policy", "full").stdout


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--policy", "snapkv"), "needs budget"),
        (("--budget", 24, "--buffer", 8, "--window", 600), "512 positions"),
        (("--budget", 24, "--buffer", 8, "--window", 300), "fewer than one window of 300"),
        (("--budget", 24, "--buffer", 8, "--window", 64, "--chunk", 0), "at least 1"),
        (("--budget", 24, "--buffer", 8, "--window", 64, "--limit", 0), "at least 1"),
        (("--budget", 24, "--buffer", 8, "--window", 64, "--batch-size", 0), "at least 1"),
        (("--policy", "triattention", "--budget", 24, "--buffer", 8), "kvkeep calibrate"),
    ],
)
def test_mistakes_are_explained(
    run: Run, tiny_folder: Path, text: Path, flags: tuple[object, ...], sentence: str
) -> None:
    """A traceback teaches nobody which number to change."""
    result = run("perplexity", text, "--model", tiny_folder, *flags)
    assert result.exit_code != 0
    assert sentence in " ".join(result.stderr.split()), result.stderr
    assert not result.stdout


def test_a_missing_text_is_named(run: Run, tiny_folder: Path, tmp_path: Path) -> None:
    """The model would be loaded before the mistake is found."""
    result = run("perplexity", tmp_path / "none.txt", "--model", tiny_folder, "--budget", 99)
    assert result.exit_code != 0
    assert "there is no text file at" in result.stderr
