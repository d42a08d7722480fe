"""`kvkeep generate` as a user types it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from tests.cli.conftest import words

Run = Callable[..., Result]
SHORT = ("--budget", 24, "--buffer", 8, "--max-new-tokens", 20)


def facts(result: Result) -> Any:
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_text_comes_first_and_the_measured_table_after(run: Run, tiny_folder: Path) -> None:
    """A person reads the answer, then what it cost; both are on stdout, so a pipe gets both."""
    result = run("generate", words(40), "--model", tiny_folder, *SHORT)
    assert result.exit_code == 0, result.stderr
    answer, _, table = result.stdout.partition("policy")
    assert len(answer.split()) == 20
    assert "vase-attnv" in table
    assert "24 entries" in table


def test_streamed_text_is_the_text_that_json_reports(run: Run, tiny_folder: Path) -> None:
    """A streamer that swallows or doubles pieces would show another answer than was written."""
    arguments = ("generate", words(40), "--model", tiny_folder, *SHORT)
    report = facts(run(*arguments, "--json"))
    assert run(*arguments).stdout.split("\n", 1)[0] == report["answers"][0]["text"]


def test_json_holds_request_and_measurement(run: Run, tiny_folder: Path) -> None:
    """Scripts compare what was asked for with what was held; both must be there, as numbers."""
    report = facts(run("generate", words(40), "--model", tiny_folder, *SHORT, "--json", "--no-chat"))
    assert report["answers"][0]["prompt_tokens"] == 40
    assert report["answers"][0]["new_tokens"] == 20
    assert report["policy"]["name"] == "vase-attnv"
    assert report["policy"]["options"]["budget"] == 24
    assert report["trace"]["evictions"] == 2
    assert 24 <= report["trace"]["mean_entries"] < 40
    assert report["tokens_per_second"] > 0


def test_the_prompt_may_come_from_a_file_or_a_pipe(run: Run, tiny_folder: Path, tmp_path: Path) -> None:
    """Long prompts do not fit a command line."""
    file = tmp_path / "prompt.txt"
    file.write_text(words(30))
    arguments = ("--model", tiny_folder, *SHORT, "--json")
    given = facts(run("generate", words(30), *arguments))["answers"]
    assert facts(run("generate", "--prompt-file", file, *arguments))["answers"] == given
    assert facts(run("generate", *arguments, stdin=words(30)))["answers"] == given


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_a_batch_file_gives_each_prompt_the_answer_it_gets_alone(
    run: Run, tiny_folder: Path, tmp_path: Path, suffix: str
) -> None:
    """Prompts of different length are padded; padding must neither be read nor counted."""
    prompts = [words(40), words(11, start=5)]
    file = tmp_path / f"prompts{suffix}"
    lines = [json.dumps({"prompt": prompt}) if suffix == ".jsonl" else prompt for prompt in prompts]
    file.write_text("\n\n".join(lines))
    arguments = ("--model", tiny_folder, *SHORT, "--policy", "snapkv", "--json")
    batch = facts(run("generate", "--batch-file", file, *arguments))["answers"]
    alone = [facts(run("generate", prompt, *arguments))["answers"][0] for prompt in prompts]
    assert batch == alone


def test_batch_answers_are_printed_one_after_another(run: Run, tiny_folder: Path, tmp_path: Path) -> None:
    """Without --json a batch is for reading as well."""
    file = tmp_path / "prompts.txt"
    file.write_text(f"{words(20)}\n{words(9)}\n")
    result = run("generate", "--batch-file", file, "--model", tiny_folder, *SHORT)
    assert result.exit_code == 0, result.stderr
    assert "1 of 2" in result.stdout
    assert "2 of 2" in result.stdout
    assert "33+40" in result.stdout


def test_the_chat_template_is_used_unless_told_otherwise(run: Run, tiny_folder: Path) -> None:
    """An instruct model answers badly without its template, a base model with one."""
    arguments = ("generate", words(10), "--model", tiny_folder, *SHORT, "--json")
    assert facts(run(*arguments))["answers"][0]["prompt_tokens"] == 12
    assert facts(run(*arguments, "--no-chat"))["answers"][0]["prompt_tokens"] == 10


@pytest.mark.parametrize(
    ("flags", "entries"),
    [
        (("--budget", 20), 20),
        (("--keep-ratio", 0.5), 30),  # of 40 prompt tokens and 20 new ones
        (("--kv-bytes", "14KiB"), 20),  # 28 entries of 512 bytes hold the budget and a buffer of 8
    ],
)
def test_every_way_to_write_a_budget(run: Run, tiny_folder: Path, flags: Any, entries: int) -> None:
    """A ratio or a size that comes to another count would hold another memory than asked for."""
    base = ("generate", words(40), "--no-chat", "--model", tiny_folder, "--buffer", 8, "--json")
    report = facts(run(*base, "--max-new-tokens", 20, "--policy", "key-norm", *flags))
    request = report["trace"]["requested"]
    assert request.startswith(f"{entries} entries"), request


def test_a_kept_prompt_stays_on_top_of_the_budget(run: Run, tiny_folder: Path) -> None:
    """`--prompt-mode kept` is the strong floor of every comparison; it must not evict the prompt."""
    arguments = (
        "generate",
        words(30),
        "--model",
        tiny_folder,
        "--no-chat",
        "--json",
        "--prompt-mode",
        "kept",
    )
    report = facts(
        run(*arguments, "--policy", "random", "--budget", 16, "--buffer", 8, "--max-new-tokens", 40)
    )
    assert report["trace"]["evictions"] > 0
    assert report["trace"]["peak_entries"] == 30 + 16 + 8


def test_options_reach_the_policy_and_compositions_work(run: Run, tiny_folder: Path) -> None:
    """An option that is dropped silently gives numbers of another method."""
    arguments = ("generate", words(40), "--model", tiny_folder, *SHORT, "--json")
    report = facts(run(*arguments, "--option", "reserve=3", "--option", "magnitude=l2"))
    assert report["policy"]["options"]["reserve"] == 3
    assert report["policy"]["options"]["magnitude"] == "l2"
    composed = facts(run(*arguments, "--policy", "vase-dkv(rank=8) + sample + reserve"))
    assert composed["policy"]["name"] == "vase-dkv + sample + reserve"


def test_prefill_chunks_bound_the_peak(run: Run, tiny_folder: Path) -> None:
    """A prompt longer than the budget must not be held in full while it is read."""
    arguments = ("generate", words(200), "--model", tiny_folder, "--no-chat", *SHORT, "--json")
    whole = facts(run(*arguments))["trace"]["peak_entries"]
    chunked = facts(run(*arguments, "--prefill-chunk", 16))["trace"]["peak_entries"]
    assert whole >= 200
    assert chunked <= 24 + 16


def test_a_seed_repeats_a_sampled_answer(run: Run, tiny_folder: Path) -> None:
    """Without it no run can be shown to somebody else."""
    arguments = ("generate", words(40), "--model", tiny_folder, *SHORT, "--json", "--temperature", 1.0)
    first, again, other = (facts(run(*arguments, "--seed", seed))["answers"] for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_full_needs_no_budget(run: Run, tiny_folder: Path) -> None:
    """The baseline keeps everything; asking for a number would be silly."""
    result = run("generate", words(20), "--model", tiny_folder, "--policy", "full", "--max-new-tokens", 5)
    assert result.exit_code == 0, result.stderr
    assert "0 evicted" in result.stdout


def test_text_beyond_the_models_positions_is_owned_up_to(run: Run, tiny_folder: Path) -> None:
    """A bounded cache never stops by itself; past its positions the model only seems to go on."""
    arguments = ("generate", words(505), "--no-chat", "--model", tiny_folder, *SHORT)
    result = run(*arguments)
    assert result.exit_code == 0, result.stderr
    assert "13 tokens lie beyond the model's positions" in " ".join(result.stdout.split())
    assert facts(run(*arguments, "--json"))["tokens_beyond_positions"] == 13
    assert facts(run("generate", words(9), *arguments[2:], "--json"))["tokens_beyond_positions"] == 0
