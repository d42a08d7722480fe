"""The training recipe, in small."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvkeep.testbed.curriculum import IGNORED, Stage, make_batch
from kvkeep.testbed.model import Shape
from kvkeep.testbed.tokenizer import WORDS
from kvkeep.testbed.train import Config, Trainer, rate_scale, train

TINY = Config(
    shape=Shape(layers=2, width=32, heads=2, kv_heads=1, head_dim=16, feed_forward=64),
    steps=50,
    decay=10,
    tokens=256,
)


def test_fifty_steps_learn_something_and_end_in_a_model(tmp_path: Path) -> None:
    """A recipe that no longer runs could not make the shipped weights again."""
    lines: list[str] = []
    trainer = train(TINY, tmp_path, report=lines.append)
    before = Trainer(TINY).train_step()
    assert trainer.train_step() < 0.8 * before
    assert "tokens/s" in lines[-1]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    ids = tokenizer("BOS L0 LD k4 k8 r3 GO", return_tensors="pt")["input_ids"]
    assert tokenizer.decode(ids[0]) == "BOS L0 LD k4 k8 r3 GO"
    assert model(ids).logits.shape == (1, 7, len(WORDS))


def test_a_resumed_run_takes_the_same_steps(tmp_path: Path) -> None:
    """A run that was stopped must end with the weights of one that was not."""
    whole = Trainer(TINY)
    for _ in range(4):
        whole.train_step()
    part = Trainer(TINY)
    part.train_step()
    part.train_step()
    part.save(tmp_path / "checkpoint.pt")
    resumed = Trainer(TINY)
    resumed.resume(tmp_path / "checkpoint.pt")
    resumed.train_step()
    resumed.train_step()
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_only_the_chain_is_learned() -> None:
    """A loss on random programs is noise that hides the loss that matters."""
    ids, targets = make_batch(Stage((3, 4), (3, 6)), 512, 0, 0)
    counted = targets != IGNORED
    assert torch.equal(ids[counted], targets[counted])
    go = (ids == WORDS.index("GO")).int().argmax(-1)
    assert all(not row[: place + 1].any() for row, place in zip(counted, go.tolist(), strict=True))


def test_rates_rise_hold_and_fall() -> None:
    """A rate that never falls leaves the last digits unlearned; one that never rises, all of them."""
    assert rate_scale(Config(), 0) < 0.05
    assert rate_scale(Config(), 2000) == 1.0
    assert rate_scale(Config(), Config().steps - 1) < 0.02
