"""Runs of different engines: told apart, and never mixed up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvkeep.cli.eval_setup import Setup, read_engine_options
from kvkeep.core.errors import ConfigError, EvidenceError, UnknownNameError
from kvkeep.evaluation.comparability import setting_reasons
from kvkeep.evaluation.draft import draft
from kvkeep.evaluation.matching import match_budget
from kvkeep.evaluation.records import Run, RunHeader
from kvkeep.evaluation.runlog import differences
from kvkeep.policies.compose import policy
from tests.evaluation.runs import header

VLLM = {"engine": "vllm"}


def run(**changes: object) -> Run:
    return Run(header=replace(header(), **changes), samples=())


def test_an_old_header_was_written_by_transformers() -> None:
    """Logs from before there was a choice must stay readable and comparable."""
    saved = header().as_dict()
    del saved["engine"]
    assert RunHeader.from_dict(saved) == header()
    assert header().engine == "transformers"


def test_a_difference_of_engines_must_be_allowed() -> None:
    """Another engine rounds and draws otherwise: a difference between policies would not be theirs alone."""
    (reason,) = setting_reasons(run(), run(**VLLM))
    assert "engine is transformers in the baseline and vllm in the challenger" in reason
    assert "--allow engine" in reason
    assert setting_reasons(run(), run(**VLLM), ["engine"]) == []


def test_a_run_cannot_be_resumed_or_matched_by_another_engine() -> None:
    """Half the samples of a run from one engine and half from another are no run."""
    assert "engine was" in differences(header(), run(**VLLM).header)[0]
    with pytest.raises(EvidenceError, match="engine"):
        match_budget(lambda budget: run(**VLLM), Measured(), low=1, high=9)


class Measured(Run):
    """A reference that was measured."""

    def __init__(self) -> None:
        super().__init__(header=header(), samples=())

    @property
    def mean_cache(self) -> float:
        return 10.0


def test_studies_are_drafted_from_runs_of_transformers() -> None:
    """A plan does not name its engine, so it means the one that all plans before it meant."""
    pair = (run(run="base", **VLLM), run(run="new", **VLLM))
    with pytest.raises(EvidenceError, match="run 'new' was written by vllm"):
        draft("s", "?", [pair], {}, hypothesis="h")


def test_engine_options_are_read_like_policy_options() -> None:
    """vLLM takes numbers and truths, not their names."""
    given = ["max-num-seqs=64", "enforce_eager=false", "kv_cache_dtype=auto"]
    assert dict(read_engine_options(given)) == {
        "max_num_seqs": 64,
        "enforce_eager": False,
        "kv_cache_dtype": "auto",
    }
    with pytest.raises(ConfigError, match="key=value"):
        read_engine_options(["max_num_seqs"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine_options": (("max_num_seqs", 4),), "engine": "transformers"}, "for --engine vllm"),
        ({"prefill_chunk": 64}, "max_num_batched_tokens"),
        ({"threads": 2}, "OMP_NUM_THREADS"),
        ({"attention": "eager"}, "--attention"),
        ({"device": "cpu"}, "--device"),
        ({"gates": Path("gates")}, "--gates"),
        ({"log_evictions": True}, "--log-evictions"),
    ],
)
def test_settings_that_an_engine_cannot_follow_are_refused(changes: dict[str, object], message: str) -> None:
    """A flag without effect is a run that was not what its command says."""
    settings = {"engine": "vllm", **changes}
    with pytest.raises(ConfigError, match=message):
        Setup(task="trace", data=None, model=".", model_name=".", policy=policy("full"), **settings)


def test_an_unknown_engine_is_named() -> None:
    """The nearest name is what was meant."""
    with pytest.raises(UnknownNameError, match="did you mean 'vllm'"):
        Setup(task="trace", data=None, model=".", model_name=".", policy=policy("full"), engine="vlm")
