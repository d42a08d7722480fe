"""The training recipe, in small."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvkeep.testbed.curriculum import IGNORED, STAGES, Stage, make_batch, make_rows
from kvkeep.testbed.guidance import guidance_loss, guides, pairs, wanted
from kvkeep.testbed.model import Shape
from kvkeep.testbed.tokenizer import WORDS
from kvkeep.testbed.trace_task import OPERATIONS, kind
from kvkeep.testbed.train import Config, Trainer, rate_scale, train

TINY = Config(
    shape=Shape(layers=2, width=32, heads=2, kv_heads=1, head_dim=16, feed_forward=64),
    steps=50,
    decay=10,
    tokens=256,
    guided=10,
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
    ids, targets = make_batch(make_rows(Stage((3, 4), (3, 6)), 512, 0, 0))
    counted = targets != IGNORED
    assert torch.equal(ids[counted], targets[counted])
    go = (ids == WORDS.index("GO")).int().argmax(-1)
    assert all(not row[: place + 1].any() for row, place in zip(counted, go.tolist(), strict=True))


def test_rates_rise_hold_and_fall() -> None:
    """A rate that never falls leaves the last digits unlearned; one that never rises, all of them."""
    assert rate_scale(Config(), 0) < 0.05
    assert rate_scale(Config(), Config().steps - Config().decay) == 1.0
    assert rate_scale(Config(), Config().steps - 1) < 0.02


def test_guides_point_at_what_must_be_seen() -> None:
    """A wrong guide would teach a model to look at the wrong place."""
    for problem in make_rows(STAGES[2], 2048, 0, 0):
        words, found = problem.prompt + problem.chain, pairs(problem)
        copied = [w for w in problem.chain if kind(w) in ("k", "r") or w in OPERATIONS]
        assert len(found["source"]) == len(copied)
        for who, what in found["source"]:
            assert words[who + 1] == words[what]
            assert what < len(problem.prompt) <= who
        for who, what in found["value"]:
            assert words[who + 1][1:] == words[what][1:]  # the same digit
            assert words[what - 1] == words[who]  # behind the same register
        for who, what in found["label"]:
            assert kind(words[what]) == "L"
            assert not any(kind(word) == "L" for word in words[what + 1 : who + 1])


def test_guidance_rewards_heads_that_look_right() -> None:
    """The loss is zero for heads that see only what they should, and large for heads that do not."""
    rows = make_rows(Stage((3, 4), (3, 6)), 256, 0, 0)
    length = make_batch(rows)[0].shape[1]
    masks = wanted(rows, length)
    good = [torch.zeros(len(rows), 4, length, length) for _ in range(2)]
    for guide in guides(4):
        mask = masks[guide.look].float()
        good[guide.layer][:, guide.head] = mask / mask.sum(-1, keepdim=True).clamp_min(1)
    bad = [torch.full_like(weights, 1 / length) for weights in good]
    assert guidance_loss(tuple(good), masks).item() == pytest.approx(0, abs=1e-5)
    assert guidance_loss(tuple(bad), masks).item() > 4
