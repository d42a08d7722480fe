"""Training of gates: what learns, what stays, and that stopping changes nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvkeep.core.errors import ConfigError, DataFileError, KvkeepError, UnsupportedError
from kvkeep.engine.attention import attention_name
from kvkeep.gates.files import CHECKPOINT
from kvkeep.testing.models import FAMILIES, tiny_model
from kvkeep.training import Document, Documents, Progress, Recipe, Trainer, train, training
from kvkeep.training.checkpoint import LOG, read_checkpoint

RECIPE = Recipe(
    memory=4, row=24, rows=2, accumulate=2, steps=4, warmup=1, rate=5e-2, bias=2.0, width=8, block=16
)


def source(number: int) -> Document:
    generator = torch.Generator().manual_seed(number)
    length = 7 + number % 13
    return Document(torch.randint(0, 60, (length,), generator=generator).tolist(), 2)


def documents(recipe: Recipe = RECIPE) -> Documents:
    return Documents(source, recipe.row, recipe.rows, "random")


def run(
    folder: Path, model: Any = None, recipe: Recipe = RECIPE, steps: int | None = None, **options: Any
) -> Trainer:
    """Train; ``steps`` stops early, as a machine would."""
    with training(model or tiny_model("llama"), documents(recipe), recipe, "base") as trainer:
        if steps is not None:
            for _ in range(steps):
                trainer.train_step()
            trainer.save(folder)
        else:
            train(trainer, folder, **options)
        return trainer


def test_gates_learn_and_nothing_else_changes(tmp_path: Path) -> None:
    model = tiny_model("llama")
    before = {name: each.clone() for name, each in model.state_dict().items()}
    asked = {name: each.requires_grad for name, each in model.named_parameters()}
    attention = attention_name(model)
    ids = torch.arange(9)[None]
    logits = model(input_ids=ids).logits
    trainer = run(tmp_path, model, dataclasses.replace(RECIPE, steps=20))
    log = [json.loads(line)["terms"] for line in (tmp_path / LOG).read_text().splitlines()]
    assert len(log) == 20
    assert log[-1]["capacity"] < log[0]["capacity"]
    assert log[-1]["alive"] < log[0]["alive"]
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert {name: each.requires_grad for name, each in model.named_parameters()} == asked
    assert attention_name(model) == attention
    assert torch.equal(model(input_ids=ids).logits, logits)
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert trainer.step == 20


def test_training_goes_on_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole")
    (tmp_path / "parts").mkdir()
    run(tmp_path / "parts", steps=2)
    parts = run(tmp_path / "parts", resume=True)
    read = sum(int(documents().batch(number).packing.real.sum()) for number in range(4 * RECIPE.accumulate))
    assert (parts.step, parts.tokens) == (whole.step, whole.tokens) == (4, read)
    states = [each.student.gates.state_dict() for each in (whole, parts)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def steps_of_log(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / LOG).read_text().splitlines()]


def interrupted(folder: Path, after: int, **options: Any) -> None:
    """Train until someone presses a key after some steps; checkpoints as ``options`` say."""

    def report(progress: Progress) -> None:
        if progress.step == after:
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        run(folder, report=report, **options)


class TestTheLogGoesOnToo:
    """Steps after the last checkpoint are done again, and stand in the log once."""

    def test_from_a_checkpoint_before_its_end(self, tmp_path: Path) -> None:
        interrupted(tmp_path, after=2, save_every=0)
        interrupted(tmp_path, after=3, resume=True)  # one more step, and no checkpoint of it
        assert steps_of_log(tmp_path) == [1, 2, 3]
        run(tmp_path, resume=True)
        assert steps_of_log(tmp_path) == [1, 2, 3, 4]
        whole = tmp_path / "whole"
        run(whole)
        terms = [
            [json.loads(line)["terms"] for line in (folder / LOG).read_text().splitlines()]
            for folder in (tmp_path, whole)
        ]
        assert terms[0] == terms[1]

    def test_before_any_checkpoint(self, tmp_path: Path) -> None:
        interrupted(tmp_path, after=2)
        assert not (tmp_path / CHECKPOINT).exists()
        run(tmp_path, resume=True)
        assert steps_of_log(tmp_path) == [1, 2, 3, 4]

    def test_after_a_line_that_was_not_finished(self, tmp_path: Path) -> None:
        interrupted(tmp_path, after=3, save_every=0)
        log = tmp_path / LOG
        log.write_bytes(log.read_bytes()[:-20])
        run(tmp_path, resume=True)
        assert steps_of_log(tmp_path) == [1, 2, 3, 4]

    def test_after_the_last_step(self, tmp_path: Path) -> None:
        first = run(tmp_path)
        log = (tmp_path / LOG).read_bytes()
        again = run(tmp_path, resume=True)
        assert (tmp_path / LOG).read_bytes() == log
        states = [each.student.gates.state_dict() for each in (first, again)]
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize("state", [b"", b"not one", [1], {"gates": {}}])
def test_a_checkpoint_that_is_none(tmp_path: Path, state: Any) -> None:
    if isinstance(state, bytes):
        (tmp_path / CHECKPOINT).write_bytes(state)
    else:
        torch.save(state, tmp_path / CHECKPOINT)
    with pytest.raises(DataFileError, match=r"Delete .* and train without --resume"):
        run(tmp_path, resume=True)


def test_a_checkpoint_cut_short(tmp_path: Path) -> None:
    run(tmp_path, steps=1)
    path = tmp_path / CHECKPOINT
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(DataFileError, match=r"Delete .* and train without --resume"):
        run(tmp_path, resume=True)


def test_other_data_weights_or_processes_cannot_go_on(tmp_path: Path) -> None:
    def going_on(name: str = "random", base: str = "base", processes: int = 1) -> None:
        given = Documents(source, RECIPE.row, RECIPE.rows, name)
        with training(tiny_model("llama"), given, RECIPE, base) as trainer:
            facts = trainer.facts | {"processes": processes}
            read_checkpoint(tmp_path, "retention gates", facts)

    run(tmp_path, steps=1)
    going_on()
    with pytest.raises(ConfigError, match="data random there, others here"):
        going_on(name="others")
    with pytest.raises(ConfigError, match="the model has other weights"):
        going_on(base="another")
    with pytest.raises(ConfigError, match="processes 1 there, 2 here"):
        going_on(processes=2)


@pytest.mark.parametrize(("rate", "said"), [(1e30, "train anew with a lower rate"), (None, "float32")])
def test_numbers_that_are_none_say_whose_they_are(rate: float | None, said: str) -> None:
    model = tiny_model("llama")
    recipe = dataclasses.replace(RECIPE, rate=rate or RECIPE.rate, warmup=0)
    with training(model, documents(), recipe, "base") as trainer:
        if rate is None:
            model.lm_head.register_forward_hook(lambda module, args, out: out * float("nan"))
        else:
            trainer.train_step()
        with pytest.raises(KvkeepError, match=said):
            trainer.train_step()


@pytest.mark.parametrize("change", [{"rate": 1e-2}, {"memory": 5.0}, {"scalar": True}])
def test_another_recipe_cannot_go_on(tmp_path: Path, change: dict[str, Any]) -> None:
    run(tmp_path, steps=1)
    with pytest.raises(ConfigError, match=f"{next(iter(change))} .* there, .* here"):
        run(tmp_path, recipe=dataclasses.replace(RECIPE, **change), resume=True)


def test_accumulating_is_reading_more_rows(tmp_path: Path) -> None:
    # Losses of prediction are means over tokens: equal lengths make the two the same.
    def even(number: int) -> Document:
        generator = torch.Generator().manual_seed(number)
        return Document(torch.randint(0, 60, (24,), generator=generator).tolist())

    gates = []
    for rows, accumulate in ((1, 2), (2, 1)):
        recipe = dataclasses.replace(RECIPE, rows=rows, accumulate=accumulate, capacity=0, steps=2)
        packed = Documents(even, recipe.row, rows, "even")
        with training(tiny_model("llama"), packed, recipe, "base") as trainer:
            trainer.train_step()
            trainer.train_step()
            gates.append(trainer.student.gates.state_dict())
    for name, mine in gates[0].items():
        torch.testing.assert_close(mine, gates[1][name], rtol=1e-4, atol=1e-6)


def test_checkpointing_and_blocks_change_no_gradient() -> None:
    found = []
    for changes in ({}, {"checkpointing": True}, {"block": 3}):
        recipe = dataclasses.replace(RECIPE, **changes)  # type: ignore[arg-type]
        with training(tiny_model("llama"), documents(), recipe, "base") as trainer:
            trainer.student(documents().batch(0)).total.backward()
            found.append({name: each.grad for name, each in trainer.student.gates.named_parameters()})
    for other in found[1:]:
        for name, grad in found[0].items():
            assert grad is not None
            assert bool(grad.any())
            torch.testing.assert_close(other[name], grad, rtol=1e-4, atol=1e-8)


def test_learned_sinks_are_refused() -> None:
    with (
        pytest.raises(UnsupportedError, match="logits differ"),
        training(tiny_model("gpt-oss"), documents(), RECIPE, "base"),
    ):
        pass


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"gpt-oss", "llama"}))
def test_families(family: str) -> None:
    model = tiny_model(family)
    with training(model, documents(), RECIPE, "base") as trainer:
        trainer.train_step()
        again = [each for each in trainer.student.gates.parameters()]
    assert all(bool(each.isfinite().all()) for each in again)


def test_open_gates_are_the_full_cache() -> None:
    recipe = dataclasses.replace(RECIPE, bias=18.0)
    with training(tiny_model("llama"), documents(), recipe, "base") as trainer, torch.no_grad():
        terms = trainer.student(documents().batch(0))
    assert float(terms.kl) < 1e-7  # float32 sums in another order
    assert float(terms.next_token) == pytest.approx(float(terms.full), abs=1e-6)


def test_documents_do_not_see_each_other() -> None:
    alone, packed = Document([3, 4, 5, 6, 7]), Document([9, 8, 7])
    model = tiny_model("llama")
    with training(model, documents(), RECIPE, "base") as trainer, torch.no_grad():
        one = Documents(lambda number: [alone, packed][number % 64 % 2], 8, 1, "x").batch(0)
        gates = trainer.student.gates
        behind = trainer.student.reader.hidden(one, gates)[0, 5:]
        alone_again = Documents(lambda number: packed, 3, 1, "x").batch(0)
        torch.testing.assert_close(
            behind, trainer.student.reader.hidden(alone_again, gates)[0], rtol=1e-4, atol=1e-5
        )


def test_the_checkpoint_is_whole_or_not_there(tmp_path: Path) -> None:
    run(tmp_path, steps=1)
    assert [each.name for each in tmp_path.iterdir()] == [CHECKPOINT]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"memory": 30}, "would ever fill"),
        ({"memory": 0}, "memory"),
        ({"kl": 0, "next_token": 0}, "both 0"),
        ({"steps": 0}, "steps 0 is below 1"),
        ({"rate": float("nan")}, "rate"),
    ],
)
def test_recipes_out_of_range(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        dataclasses.replace(RECIPE, **change)
