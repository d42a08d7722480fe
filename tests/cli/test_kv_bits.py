"""`--kv-bits` on the commands that run a policy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from kvkeep.evaluation.runlog import read_run
from tests.cli.conftest import words

Run = Callable[..., Result]
SHORT = ("--budget", 24, "--buffer", 8)
BITS = ("--kv-bits", 8, "--kv-group", 8, "--kv-reserve", 4)


def facts(result: Result) -> Any:
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_generate_says_what_is_in_few_bits(run: Run, tiny_folder: Path) -> None:
    """Both precisions are in the measured bytes, and the report says which entries are which."""
    common = ("generate", words(40), "--model", tiny_folder, *SHORT, "--max-new-tokens", 40, "--json")
    plain = facts(run(*common))["trace"]
    mixed = facts(run(*common, *BITS, "--protect", "random"))["trace"]
    assert mixed["kv_bytes"] < plain["kv_bytes"]
    assert mixed["few_bits_entries"] == 24 - (4 + 8 + 4)
    assert mixed["precision"] == "8 bits, groups of 8, protect random 16"
    assert plain["precision"] == ""


def test_first_and_newest_tokens_that_are_spared(run: Run, tiny_folder: Path) -> None:
    """A flag that was lost on the way would leave the defaults of 4 and the buffer."""
    common = ("generate", words(40), "--model", tiny_folder, *SHORT, "--max-new-tokens", 40, "--json")
    trace = facts(run(*common, *BITS, "--kv-sinks", 9, "--kv-recent", 2))["trace"]
    assert trace["few_bits_entries"] == 24 - (9 + 2 + 4)


def test_keys_in_more_bits_than_values(run: Run, tiny_folder: Path) -> None:
    """Who asks for exact keys gets them, at their price."""
    common = ("generate", words(40), "--model", tiny_folder, *SHORT, "--max-new-tokens", 40, "--json")
    flags = ("--kv-bits", 2, *BITS[2:])
    both, keys = (facts(run(*common, *flags, *more))["trace"] for more in ((), ("--kv-key-bits", 8)))
    assert keys["precision"].startswith("2 bits, keys 8, groups of 8")
    assert keys["kv_bytes"] > both["kv_bytes"]


def test_who_reads_the_report_sees_what_the_bits_did(run: Run, tiny_folder: Path) -> None:
    """Few bits that nothing is old enough for look like a saving, where only slots were left out."""
    common = ("generate", words(40), "--model", tiny_folder, *SHORT, "--max-new-tokens", 40)
    some = run(*common, *BITS, "--kv-key-bits", 4)
    report = " ".join((some.stdout + some.stderr).split())
    assert "8 entries per head in few bits; 8 bits, keys 4, groups of 8, protect range 16." in report
    none = run(*common, "--kv-bits", 8, "--kv-group", 8, "--kv-reserve", 24)
    assert "0 entries per head in few bits (what is protected and new is all there is)" in " ".join(
        (none.stdout + none.stderr).split()
    )


def test_perplexity_of_the_full_cache_in_few_bits(run: Run, tiny_folder: Path, tmp_path: Path) -> None:
    """The full cache in few bits is compared with the full cache as it is, not with itself."""
    text = tmp_path / "text.txt"
    text.write_text(words(200))
    flags = ("--model", tiny_folder, "--policy", "full", "--buffer", 8, "--window", 64, "--kv-bits", 2)
    result = facts(
        run("perplexity", text, *flags, "--kv-group", 8, "--kv-reserve", 4, "--beside-full", "--json")
    )
    assert result["precision"]["bits"] == 2
    said = run("perplexity", text, *flags, "--kv-group", 8, "--kv-reserve", 4, "--kv-key-bits", 4)
    assert "full, 2 bits, keys 4 but for range, read" in said.stdout
    bare = run("perplexity", text, *flags, "--kv-group", 8, "--protect", "none")
    assert "full, 2 bits, read" in bare.stdout
    assert result["full"]["difference"]["nats"] != 0
    assert result["scores"][0]["kv_bytes"] < result["full"]["scores"][0]["kv_bytes"]


def test_a_run_log_says_the_precision_and_match_can_use_it(
    run: Run, tiny_folder: Path, tmp_path: Path
) -> None:
    """Two runs that differ in bits alone must not look like the same run."""
    common = ("--model", tiny_folder, "--task", "needle(length=64)", "--limit", 2, "--max-new-tokens", 12)
    out = tmp_path / "bits"
    result = run("eval", *common, "--policy", "snapkv", *SHORT, *BITS, "--out", out, "--prompt", "plain")
    assert result.exit_code == 0, result.output
    assert "8 bits, protect range" in result.stdout
    assert "entries per head; the bytes of" in result.stdout
    header = read_run(out).header
    assert header.precision is not None
    assert header.precision["bits"] == 8
    again = run("eval", *common, "--policy", "snapkv", *SHORT, "--out", out, "--prompt", "plain", "--resume")
    assert again.exit_code != 0
    assert "precision" in again.output


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--protect", "range"), "add --kv-bits 4"),
        (("--kv-key-bits", 4), "--kv-key-bits says how entries in few bits are stored"),
        (("--kv-bits", 4, "--kv-key-bits", 3), "key_bits=3 is not offered"),
        (("--kv-prompt", "full"), "--kv-prompt says how entries in few bits are stored"),
        (("--kv-bits", 4, "--kv-group", 8, "--kv-prompt", "full"), "this budget counts the prompt"),
        (("--kv-sinks", 8), "--kv-sinks says how entries in few bits are stored"),
        (("--kv-bits", 4, "--kv-group", 8, "--protect", "none", "--kv-sinks", 8), "spares no entry"),
        (("--kv-bits", 3), "use 8, 4 or 2"),
        (("--kv-bits", 4, "--protect", "best"), "unknown protect rule"),
        (("--kv-bits", 4), "which groups of 32 do not fill: use group=16"),
        (("--kv-bits", 4, "--kv-group", 8, "--policy", "full", "--protect", "policy"), "ranks nothing"),
    ],
)
def test_what_cannot_be(run: Run, tiny_folder: Path, flags: tuple[object, ...], message: str) -> None:
    chosen = flags if "--policy" in flags else (*SHORT, *flags)
    result = run("generate", words(10), "--model", tiny_folder, "--max-new-tokens", 4, *chosen)
    assert result.exit_code != 0
    assert message in " ".join((result.output + str(result.exception)).split())
