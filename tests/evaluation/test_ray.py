"""Runs on a Ray cluster: the same samples, also when workers die."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvkeep.core.errors import ConfigError, KvkeepError
from kvkeep.evaluation.jobs import Job
from kvkeep.evaluation.records import Run
from kvkeep.evaluation.runlog import read_run
from kvkeep.evaluation.runner import Plan, evaluate
from tests.evaluation.models import tiny_model, word_tokenizer
from tests.evaluation.scripted import Script, Sums

ray = pytest.importorskip("ray")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of Ray itself
]

PLAN = Plan(draws=2, batch_size=4)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Two workers on this machine."""
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 * 2**20,
        logging_level="error",
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}},
    )
    yield
    ray.shutdown()


class DiesOnce:
    """Ends its process on one sample, the first time that it meets it."""

    def __init__(self, mark: Path, key: tuple[str, int], always: bool = False) -> None:
        self.mark, self.key, self.always = mark, key, always

    def __call__(self, job: Job) -> None:
        if job.key == self.key and (self.always or not self.mark.exists()):
            self.mark.touch()
            os._exit(1)


def spread(place: Path, on_text: DiesOnce, workers: int) -> Run:
    from kvkeep.evaluation.ray_backend import RayGenerator

    with RayGenerator(lambda: Script(on_text=on_text), workers=workers) as generator:
        return evaluate(Sums(12), generator, place, PLAN, batches=generator.write)


def test_a_dead_worker_costs_nothing(tmp_path: Path) -> None:
    """Machines of a cluster disappear; their samples must be neither lost nor counted twice."""
    alone = evaluate(Sums(12), Script(), tmp_path / "alone", PLAN)
    victim = alone.samples[6].key  # in the middle of a batch: its neighbours were handed out before
    run = spread(tmp_path / "ray", DiesOnce(tmp_path / "died", victim), workers=2)
    assert (tmp_path / "died").exists()
    assert list(run.samples) == list(alone.samples)


def test_a_batch_that_kills_every_worker_ends_the_run(tmp_path: Path) -> None:
    """Endless retries would look like a slow run; what was done must survive for --resume."""
    alone = evaluate(Sums(12), Script(), tmp_path / "alone", PLAN)
    victim = alone.samples[9].key
    with pytest.raises(KvkeepError, match=r"lost 3 workers .*--resume"):
        spread(tmp_path / "ray", DiesOnce(tmp_path / "died", victim, always=True), workers=1)
    assert len(read_run(tmp_path / "ray").samples) in (8, 9)  # the ninth may die on its way
    rest = evaluate(Sums(12), Script(), tmp_path / "ray", PLAN, resume=True)
    assert list(rest.samples) == list(alone.samples)


def test_no_workers_are_refused() -> None:
    """Zero workers would wait for ever."""
    from kvkeep.evaluation.ray_backend import RayGenerator

    with pytest.raises(ConfigError, match="at least 1"):
        RayGenerator(Script, workers=0)


def test_the_command_spreads_a_real_model(tmp_path: Path) -> None:
    """`kvkeep eval --ray` as it is typed: policy, task and model travel to the workers."""
    from typer.testing import CliRunner

    from kvkeep.cli.app import app

    tiny_model().to(torch.float32).save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    arguments = ["eval", "--task", "needle(length=80, count=6)", "--draws", "2"]
    arguments += ["--model", str(tmp_path / "model")]
    arguments += ["--policy", "vase-attnv", "--budget", "24", "--buffer", "8", "--temperature", "1"]
    arguments += ["--batch-size", "3", "--max-new-tokens", "8", "--json"]
    alone = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "alone")])
    spread = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "ray"), "--ray", "--workers", "2"])
    assert spread.exit_code == alone.exit_code == 0, spread.stderr
    runs = [{s.key: s for s in read_run(tmp_path / name).samples} for name in ("alone", "ray")]
    assert runs[0].keys() == runs[1].keys()
    for key, sample in runs[0].items():
        assert runs[1][key].extra["text"] == sample.extra["text"]
        assert runs[1][key].mean_cache == sample.mean_cache
    assert read_run(tmp_path / "ray").header.extra["ray_workers"] == 2
