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


def test_bytes_in_few_bits_are_those_of_a_real_run(run: Run, tiny_folder: Path) -> None:
    """Who buys memory for two precisions must get both counted, scales too."""
    bits = ("--kv-bits", 2, "--kv-key-bits", 4, "--kv-group", 8)
    spared = ("--kv-reserve", 6, "--kv-sinks", 2, "--kv-recent", 4)
    common = ("plan", "--model", tiny_folder, "--buffer", 8, "--dtype", "float32", "--context", 300, "--json")
    report = facts(run(*common, "--budgets", "32,900", *bits, *spared))
    full, few, bounded, unbounded = report["fits"]
    assert (full["cache"], few["cache"]) == ("full", "full, few bits")
    assert report["precision"]["key_bits"] == 4
    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    precision = kvkeep.Precision(bits=2, key_bits=4, group=8, reserve=6, sinks=2, recent=4)
    policy = kvkeep.policy("key-norm", budget=32, buffer=8)
    cache = kvkeep.RetentionCache(model, policy, precision=precision)
    model.generate(tokens(1, 50), max_new_tokens=30, **{cache_argument(model): cache})
    assert bounded["bytes_per_row"] == cache.trace.kv_bytes
    # Without a bound all but 12 protected entries and 8 new ones have the width of the bounded run's 20.
    width = 1 - (full["bytes_per_row"] - few["bytes_per_row"]) / full["bytes_per_row"] * 300 / 280
    plain = facts(run(*common, "--budgets", 32))["fits"][1]["bytes_per_row"]
    assert width == pytest.approx(1 - (plain - bounded["bytes_per_row"]) / plain * 40 / 20)
    assert unbounded["bytes_per_row"] == few["bytes_per_row"]
    assert "context 300, budgets with 2 bits, keys 4" in run(*common[:-1], *bits).stdout
    result = run("plan", "--model", tiny_folder, "--kv-bits", 4)
    assert result.exit_code == 2
    assert "do not fill: use group=16" in result.stderr


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
