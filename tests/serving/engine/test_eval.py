"""`kvkeep eval --engine vllm` as a user types it, on the built-in reasoner, beside transformers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

vllm = pytest.importorskip("vllm", reason="runs in the environment of `make test-vllm`")

from kvkeep.cli.app import app  # noqa: E402
from kvkeep.evaluation.comparison import compare  # noqa: E402
from kvkeep.evaluation.records import Run, SampleRecord  # noqa: E402
from kvkeep.evaluation.runlog import read_log  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")  # vLLM's own are not ours to mend
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
COMMON = ("eval", "--task", "trace(size=S)", "--limit", "20", "--batch-size", "20", "--buffer", "32")
VLLM = ("--engine", "vllm")
# More than any prompt and answer have together: nothing is ever evicted.
AMPLE = ("--policy", "snapkv", "--budget", "800", "--prompt-mode", "counts", "--temperature", "0")
# Both engines evict at the same steps here.
TIGHT = ("--policy", "keydiff", "--budget", "160", "--prompt-mode", "counts", "--prefill", "defer")
DRAWING = ("--policy", "vase-attnv", *TIGHT[2:])

Answer = Callable[..., Run]


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> Answer:
    """Run the command, each set of arguments once."""
    known: dict[tuple[str, ...], Run] = {}

    def run(*arguments: str) -> Run:
        if arguments not in known:
            place = tmp_path_factory.mktemp("run")
            done = CliRunner().invoke(app, [*COMMON, *arguments, "--out", str(place)])
            assert done.exit_code == 0, done.output
            known[arguments] = read_log(place).run
        return known[arguments]

    return run


def pairs(one: Run, other: Run) -> list[tuple[SampleRecord, SampleRecord]]:
    """The samples of two runs by problem: a log holds them as they ended."""
    theirs = {sample.key: sample for sample in other.samples}
    return [(sample, theirs[sample.key]) for sample in one.samples]


def texts(run: Run) -> dict[tuple[str, int], str]:
    return {sample.key: sample.extra["text"] for sample in run.samples}


def test_greedy_answers_are_those_of_transformers(answer: Answer) -> None:
    """Another engine that writes other texts could not stand in for the first one."""
    one, other = answer(*AMPLE), answer(*AMPLE, *VLLM)
    assert texts(one) == texts(other)
    assert {sample.extra["evictions"] for sample in other.samples} == {0}
    for ours, theirs in pairs(one, other):
        for name in (
            "steps",
            "tokens",
            "prompt_tokens",
            "mean_cache",
            "peak_cache",
            "prefill_cache",
            "correct",
        ):
            assert getattr(ours, name) == getattr(theirs, name), name


def test_drawn_answers_under_evictions_are_nearly_all_the_same(answer: Answer) -> None:
    """Same noise, same entries; a token whose lead is a rounding error may differ, and then all after it."""
    one, other = answer(*TIGHT), answer(*TIGHT, *VLLM)
    assert min(sample.extra["evictions"] for sample in other.samples) >= 1
    same = [key for key, text in texts(one).items() if texts(other)[key] == text]
    assert len(same) >= 17
    for ours, theirs in pairs(one, other):
        if ours.key in same:
            assert ours.mean_cache == pytest.approx(theirs.mean_cache)
            assert ours.peak_cache == theirs.peak_cache


def test_a_policy_that_draws_draws_the_same_for_each_sample(
    answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All samples of vLLM would keep the same places, and two draws of a problem would fail together."""
    one, other = answer(*DRAWING), answer(*DRAWING, *VLLM)
    assert min(sample.extra["evictions"] for sample in other.samples) >= 1
    assert sum(texts(other)[key] == text for key, text in texts(one).items()) >= 17
    monkeypatch.setattr("kvkeep.serving.listening.name_of", lambda params, prompt: 0)
    nameless = answer(*DRAWING, *VLLM, "--seed", "0")  # the default, so that it runs again
    assert sum(texts(nameless)[key] == text for key, text in texts(one).items()) < 17


def test_a_measurement_of_another_policy_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A server goes on with the newest entries; a table would name them after the policy."""
    monkeypatch.setattr(
        "kvkeep.policies.keydiff.KeyDiff.score",
        lambda self, view: torch.full(view.shape, float("nan")),
    )
    done = CliRunner().invoke(app, [*COMMON, *TIGHT, *VLLM, "--out", str(tmp_path / "run")])
    assert done.exit_code != 0
    assert "nothing of this batch is used" in str(done.exception) + done.output


def test_the_header_says_who_wrote(answer: Answer, tmp_path: Path) -> None:
    """A comparison across engines must be asked for by name."""
    one, other = answer(*TIGHT), answer(*TIGHT, *VLLM)
    header = other.header
    assert (one.header.engine, header.engine) == ("transformers", "vllm")
    assert header.versions["vllm"].startswith("0.")
    assert header.extra["schedule"]["budget"] == 160
    assert header.model_sha256 == one.header.model_sha256
    assert header.prompt_sha256 == one.header.prompt_sha256
    found = compare(one, other, allow=["engine", "versions", "cache"])
    assert abs(found.difference.estimate) < 0.1


def test_what_vllm_cannot_serve_is_told_before_a_log_begins(tmp_path: Path) -> None:
    """With every reason, and exit code 2."""
    place = tmp_path / "run"
    arguments = [
        *COMMON,
        *VLLM,
        "--policy",
        "h2o",
        "--budget",
        "320",
        "--prefill",
        "after",
        "--out",
        str(place),
    ]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code != 0
    assert not place.exists()
    text = str(done.exception) + done.output
    assert "adds up the attention of every step" in text
