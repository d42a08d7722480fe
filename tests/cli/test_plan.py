"""`kvkeep plan`: numbers that somebody buys machines by."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import Result

import kvkeep
from kvkeep.engine.generation import cache_argument
from kvkeep.testing.models import tiny_model, tokens

Run = Callable[..., Result]


def facts(result: Result) -> Any:
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_weights_and_bytes_are_those_of_the_loaded_model(run: Run, tiny_folder: Path) -> None:
    """The plan is read off the config; the tensors of a real run must agree to the byte."""
    report = facts(
        run("plan", "--model", tiny_folder, "--budgets", 32, "--buffer", 8, "--dtype", "float32", "--json")
    )
    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    assert report["weights"] == sum(p.numel() * p.element_size() for p in model.parameters())
    cache = kvkeep.RetentionCache(model, kvkeep.policy("key-norm", budget=32, buffer=8))
    model.generate(tokens(1, 50), max_new_tokens=30, **{cache_argument(model): cache})
    assert report["fits"][1]["bytes_per_row"] == cache.trace.kv_bytes


def test_rows_fill_the_memory_and_no_more(run: Run, tiny_folder: Path) -> None:
    """One row too many is an out-of-memory error at three in the morning."""
    report = facts(run("plan", "--model", tiny_folder, "--memory", "8MiB", "--context", 1000, "--json"))
    for fit in report["fits"]:
        assert fit["rows"] * fit["bytes_per_row"] == fit["kv_bytes"]
        assert report["weights"] + fit["kv_bytes"] <= 8 * 2**20
        assert report["weights"] + fit["kv_bytes"] + fit["bytes_per_row"] > 8 * 2**20
        assert fit["tokens"] == fit["rows"] * 1000
    assert [fit["cache"] for fit in report["fits"]][:2] == ["full", "budget 512"]
    assert report["fits"][1]["rows"] > report["fits"][0]["rows"]


def test_a_budget_beyond_the_context_is_a_full_cache(run: Run, tiny_folder: Path) -> None:
    """A budget cannot cost more than keeping everything."""
    full, budget = facts(run("plan", "--model", tiny_folder, "--context", 300, "--budgets", 512, "--json"))[
        "fits"
    ]
    assert budget["bytes_per_row"] == full["bytes_per_row"]


def test_sliding_layers_are_charged_for_their_window_only(run: Run, tmp_path: Path) -> None:
    """Gemma's sliding layers keep their own small cache, which no budget changes."""
    model = tiny_model("gemma3")
    model.config.save_pretrained(tmp_path)
    text = model.config.get_text_config()
    full, budget = facts(
        run(
            "plan",
            "--model",
            tmp_path,
            "--context",
            400,
            "--budgets",
            32,
            "--buffer",
            8,
            "--dtype",
            "float32",
            "--json",
        )
    )["fits"]
    kinds = text.layer_types
    entry = 2 * text.num_key_value_heads * text.head_dim * torch.float32.itemsize
    window = kinds.count("sliding_attention") * text.sliding_window * entry
    assert full["bytes_per_row"] == kinds.count("full_attention") * 400 * entry + window
    assert budget["bytes_per_row"] == kinds.count("full_attention") * 40 * entry + window


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--memory", "1KiB"), "nothing fits"),
        (("--context", 1000), "made for 512 positions"),
    ],
)
def test_doubts_are_said_under_the_table(run: Run, tiny_folder: Path, flags: Any, sentence: str) -> None:
    """Zero rows without a reason look like a defect."""
    result = run("plan", "--model", tiny_folder, *flags)
    assert result.exit_code == 0, result.stderr
    assert sentence in result.stdout
    assert "budget 2048" in result.stdout
