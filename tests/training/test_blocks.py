"""Training of block gates: what is learned, against plain loops; that it is learned; nothing else moves."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import kvkeep.gates.block_gates
from kvkeep.core.errors import ConfigError, UnsupportedError
from kvkeep.gates.files import CHECKPOINT
from kvkeep.testing.models import tiny_model, tokens
from kvkeep.training.block_recipe import BlockRecipe
from kvkeep.training.block_target import block_mass, block_target, covered, divergence
from kvkeep.training.block_training import BlockTrainer, block_training
from kvkeep.training.checkpoint import LOG
from kvkeep.training.documents import Document
from kvkeep.training.loop import Progress, train
from tests.reference import seer

BLOCK = 4
SMALL: dict[str, Any] = {"block": BLOCK, "rows": 3, "row": 48, "steps": 3, "warmup": 1}


def source(number: int) -> Document:
    """Random documents of different lengths, in whole blocks."""
    return Document(tokens(1, 28 + number % 3 * 8, seed=number)[0].tolist())


def attention(queries: int = 11) -> Tensor:
    """Causal probabilities ``[2, 4, queries, queries]``."""
    logits = torch.randn(2, 4, queries, queries, generator=torch.Generator().manual_seed(0))
    newer = torch.ones(queries, queries).triu(1).bool()
    return logits.masked_fill(newer, -math.inf).softmax(-1)


def test_the_target_is_that_of_the_reference() -> None:
    """Pooled over block and group, and then a share."""
    shares = attention()
    found = block_target(shares, BLOCK, 2)
    for row in range(2):
        for head in range(2):
            for query in range(11):
                group = shares[row, 2 * head : 2 * head + 2, query].tolist()
                assert found[row, head, query].tolist() == pytest.approx(seer.target(group, BLOCK), abs=1e-6)


def test_the_divergence_is_a_mean_over_elements() -> None:
    """Blocks that have not begun say nothing; queries that do not count weigh nothing."""
    target, queries = block_target(attention(), BLOCK, 2), torch.arange(11)
    logits = torch.randn(target.shape, generator=torch.Generator().manual_seed(2))
    begun = torch.arange(0, 11, BLOCK) <= queries[:, None]
    counted = queries >= torch.tensor([5, 9])[:, None]
    total = 0.0
    for row, first in ((0, 5), (1, 9)):
        for head in range(2):
            for query in range(first, 11):
                there = query // BLOCK + 1
                said = logits[row, head, query, :there].double().softmax(-1)
                wanted = target[row, head, query, :there].double()
                total += sum(float(t * math.log(t / s)) for t, s in zip(wanted, said, strict=True) if t > 0)
    assert float(divergence(target, logits, begun, counted)) == pytest.approx(total / ((6 + 2) * 2 * 3))
    exact = target.clamp(min=1e-30).log()
    assert float(divergence(target, exact, begun, counted)) == pytest.approx(0.0, abs=1e-6)


def test_what_is_covered_is_attention_in_the_blocks_read() -> None:
    """The own block and the first are read in any case, then the best ranked."""
    shares, queries = attention(), torch.arange(11)
    mass, begun = block_mass(shares, BLOCK, 2), torch.arange(0, 11, BLOCK) <= queries[:, None]
    assert torch.allclose(mass.sum(-1), torch.ones(2, 2, 11))
    everything = covered(mass, mass, queries // BLOCK, begun, 3)
    assert torch.allclose(everything, torch.ones(2, 2, 11))
    two = covered(mass, -mass, queries // BLOCK, begun, 2)
    own = mass.gather(-1, (queries // BLOCK).expand(2, 2, 11)[..., None])[..., 0]
    expected = mass[..., 0] + torch.where(queries >= BLOCK, own, mass[..., 1])
    assert torch.allclose(two, expected)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_gates_learn_where_queries_look(tmp_path: Path, family: str) -> None:
    """The loss falls, more attention is covered, and the model is as it was before."""
    model = tiny_model(family)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    name = model.config.get_text_config()._attn_implementation
    recipe = BlockRecipe(**SMALL | {"steps": 60, "rate": 1e-2, "share": 0.7})
    with block_training(model, lambda number: source(number % 6), recipe) as trainer:
        untrained = trainer.measure(source, 2, token_budget=12)
        train(trainer, tmp_path)
        trained = trainer.measure(source, 2, token_budget=12)
    assert trained["loss"] < 0.8 * untrained["loss"]
    assert untrained["covered"]["gates"] < trained["covered"]["gates"] <= trained["covered"]["best"]
    assert all(torch.equal(weight, before[key]) for key, weight in model.state_dict().items())
    assert all(weight.requires_grad for weight in model.parameters())
    assert model.config.get_text_config()._attn_implementation == name


def test_the_loss_is_that_of_attention_as_the_model_computes_it() -> None:
    """Queries and keys un-rotated, with padding behind the shorter documents, against eager attention."""
    model: PreTrainedModel = tiny_model("qwen3", attention="eager", dtype=torch.float64)
    recipe = BlockRecipe(**SMALL)
    with block_training(model, source, recipe) as trainer:
        lesson = trainer._read(trainer._documents(source, 0), None)
        found = {layer: float(loss.detach()) for layer, loss in lesson.losses.items()}
        gates, rope = trainer.gates, trainer.rope
    assert rope is not None
    for layer in gates.shape.layers:
        total, count = 0.0, 0
        for number in range(3):
            ids = torch.tensor([source(number).ids])
            shares = model(input_ids=ids, output_attentions=True).attentions[layer].detach()
            keys, queries = _plain(model, ids, layer)
            target = block_target(shares, BLOCK, gates.shape.kv_heads)
            starts = torch.arange(0, ids.shape[1], BLOCK)[None]
            pooled = kvkeep.gates.block_gates.pool_blocks(keys, BLOCK)
            logits = gates.logits(
                gates.queries(layer, queries, torch.arange(ids.shape[1])[None], rope),
                gates.keys(layer, pooled, starts, rope),
            )
            positions = torch.arange(ids.shape[1])
            counted = (positions >= 0.5 * ids.shape[1])[None]
            mean = divergence(target, logits, starts[0] <= positions[:, None], counted)
            elements = int(counted.sum())
            total, count = total + float(mean.detach()) * elements * target.shape[-1], count + elements
        blocks = -(-max(len(source(number).ids) for number in range(3)) // BLOCK)
        assert found[layer] == pytest.approx(total / count / blocks, rel=1e-4)


def _plain(model: Any, ids: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """Keys and queries of a layer after their norms, as they are before the rotation."""
    noted: dict[str, Tensor] = {}
    attention_module = model.model.layers[layer].self_attn
    hooks = [
        getattr(attention_module, f"{kind}_norm").register_forward_hook(
            lambda module, args, out, kind=kind: noted.__setitem__(kind, out.detach().transpose(1, 2))
        )
        for kind in ("k", "q")
    ]
    model(input_ids=ids)
    for hook in hooks:
        hook.remove()
    return noted["k"], noted["q"]


def run(folder: Path, stop: int | None = None, base: str = "base", **options: Any) -> BlockTrainer:
    """Train six steps; ``stop``: someone presses a key after so many."""

    def report(progress: Progress) -> None:
        if progress.step == stop:
            raise KeyboardInterrupt

    recipe = BlockRecipe(**SMALL | {"steps": 6, "rate": 1e-2})
    with block_training(tiny_model("llama"), source, recipe, data="random", base=base) as trainer:
        with contextlib.suppress(KeyboardInterrupt):
            train(trainer, folder, report=report, **options)
        return trainer


def steps_and_losses(folder: Path) -> list[tuple[int, float]]:
    """What the log of a training says."""
    entries = [json.loads(line) for line in (folder / LOG).read_text().splitlines()]
    return [(entry["step"], entry["terms"]["loss"]) for entry in entries]


def test_training_goes_on_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    """Gates, optimizer, counts and log, bit by bit; the steps after the last checkpoint are done again."""
    whole = run(tmp_path / "whole")
    parts = tmp_path / "parts"
    stopped = run(parts, stop=3, save_every=0)
    assert (stopped.step, run(parts, stop=5, resume=True).step) == (3, 5)  # the second leaves no checkpoint
    found = run(parts, resume=True)
    assert (found.step, found.tokens) == (whole.step, whole.tokens)
    states = [(each.gates.state_dict(), each.optimizer.state_dict()["state"]) for each in (whole, found)]
    assert all(torch.equal(weight, states[0][0][name]) for name, weight in states[1][0].items())
    for place, moments in states[0][1].items():
        assert all(torch.equal(moment, states[1][1][place][name]) for name, moment in moments.items())
    logs = [steps_and_losses(folder) for folder in (tmp_path / "whole", parts)]
    assert logs[0] == logs[1]
    assert [step for step, _ in logs[0]] == [1, 2, 3, 4, 5, 6]
    name, weight = next(iter(states[0][0].items()))
    assert not torch.equal(stopped.gates.state_dict()[name], weight)


def test_checkpoints_of_other_trainings(tmp_path: Path) -> None:
    """Other weights; and gates of the other kind, also from before checkpoints named theirs."""
    run(tmp_path, stop=2, save_every=0)
    with pytest.raises(ConfigError, match="the model has other weights"):
        run(tmp_path, base="other", resume=True)
    for change in ({"kind": "retention gates"}, {}):
        state = torch.load(tmp_path / CHECKPOINT, weights_only=True)
        state.pop("kind", None)
        torch.save(state | change, tmp_path / CHECKPOINT)
        with pytest.raises(ConfigError, match="a training of retention gates, not of block gates"):
            run(tmp_path, resume=True)


def test_what_cannot_be_trained() -> None:
    """Learned sinks are no part of what a gate of blocks learns."""
    with (
        block_training(tiny_model("gpt-oss"), source, BlockRecipe(**SMALL)) as trainer,
        pytest.raises(UnsupportedError, match="learned sinks"),
    ):
        trainer.train_step()
    with (
        pytest.raises(UnsupportedError, match="give a width of at least 16"),
        block_training(tiny_model("llama"), source, BlockRecipe(**SMALL | {"width": 8})),
    ):
        pass


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"block": 0}, "block 0 is below 1"),
        ({"rate": 0.0}, "rate 0.0 is not a positive number"),
        ({"share": 0.0}, "share 0.0 is outside"),
        ({"row": 7, "block": 4}, "less than two blocks of 4"),
        ({"least_rate": 1.0}, "least_rate 1.0 is not between"),
    ],
)
def test_recipes_that_are_wrong(setting: dict[str, Any], message: str) -> None:
    """Before a model is loaded."""
    with pytest.raises(ConfigError, match=message):
        BlockRecipe(**setting)
