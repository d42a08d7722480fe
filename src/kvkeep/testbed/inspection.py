"""What must be known about a reasoner before a policy is judged on it: accuracy, leaks, value ranges."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvkeep.engine.generation import cache_argument
from kvkeep.scoring.value_magnitude import value_magnitude
from kvkeep.testbed.tokenizer import WORDS, encode
from kvkeep.testbed.trace_grade import Grade
from kvkeep.testbed.trace_task import Problem, kind

VALUE_KINDS = ("w", "c", "o")


def accuracy_by_role(grades: Sequence[Grade]) -> dict[str, float]:
    """Return the share of right answers: ``all`` of them, and by the role of the register asked for."""
    found: dict[str, list[bool]] = defaultdict(list)
    for graded in grades:
        found["all"] += graded.answers
        for role, answers in graded.by_role().items():
            found[role] += answers
    return {name: sum(answers) / len(answers) for name, answers in found.items()}


def faults(grades: Sequence[Grade]) -> dict[str, float]:
    """Return the share of steps with each fault, judged by the chain's own earlier values; ``""`` is none."""
    steps = [step.fault for graded in grades for step in graded.steps]
    return {name: steps.count(name) / len(steps) for name in ("", "read", "sum", "form", "missing")}


@torch.no_grad()
def leak_test(model: PreTrainedModel, problems: Sequence[Problem]) -> tuple[float, float]:
    """Return how often a register is read right with the chain's values visible, and with all of them masked.

    The chain is given; what counts is the copy (``c``) in the lines that ask for an answer. Masked, no
    token sees any
    ``w``, ``c`` or ``o`` before it, so that only the program could still tell the value. Chance is one tenth.
    """
    open_, masked, reads = 0, 0, 0
    for problem in problems:
        words = problem.prompt + problem.chain
        ids = torch.tensor([encode(words)])
        size = len(words)
        visible = torch.ones(size, size, dtype=torch.bool).tril()
        values = torch.tensor([kind(word) in VALUE_KINDS for word in words])
        hidden = visible & (~values | torch.eye(size, dtype=torch.bool))
        asked = [i for i in range(size) if kind(words[i]) == "c" and words[i - 2] == "OUT"]
        for mask, is_open in ((visible, True), (hidden, False)):
            logits = model(input_ids=ids, attention_mask=mask[None, None], use_cache=False).logits[0]
            right = sum(WORDS[int(logits[i - 1].argmax())] == words[i] for i in asked)
            open_, masked = open_ + right * is_open, masked + right * (not is_open)
        reads += len(asked)
    return open_ / reads, masked / reads


@torch.no_grad()
def value_ranges(model: PreTrainedModel, problems: Sequence[Problem]) -> dict[str, list[float]]:
    """Return the mean value range of chain entries by kind of word, one number a layer (mean of heads)."""
    sums: dict[str, list[Tensor]] = defaultdict(list)
    for problem in problems:
        words = problem.prompt + problem.chain
        cache = DynamicCache(config=model.config)
        model(input_ids=torch.tensor([encode(words)]), **{cache_argument(model): cache})
        ranges = torch.stack(
            [value_magnitude(layer.values)[0].mean(0) for layer in cache.layers]
        )  # [layers, n]
        for place in range(len(problem.prompt), len(words)):
            sums[kind(words[place])].append(ranges[:, place])
    return {name: torch.stack(found).mean(0).tolist() for name, found in sorted(sums.items())}


@torch.no_grad()
def writes_found(model: PreTrainedModel, problems: Sequence[Problem]) -> list[list[float]]:
    """Return how well value ranges tell writes (``w``) from the rest of a chain, ``[layers][kv_heads]``.

    The number is the area under the ROC curve: 0.5 says nothing, 1 finds every write.
    """
    ranges, marks = [], []
    for problem in problems:
        words = problem.prompt + problem.chain
        cache = DynamicCache(config=model.config)
        model(input_ids=torch.tensor([encode(words)]), **{cache_argument(model): cache})
        found = torch.stack([value_magnitude(layer.values)[0] for layer in cache.layers])
        ranges.append(found[..., len(problem.prompt) :])
        marks.append(torch.tensor([kind(word) == "w" for word in problem.chain]))
    scores, is_write = torch.cat(ranges, -1), torch.cat(marks)
    ranks = scores.argsort(-1).argsort(-1).double() + 1
    writes = int(is_write.sum())
    above = ranks[..., is_write].sum(-1) - writes * (writes + 1) / 2
    return (above / (writes * (len(is_write) - writes))).tolist()
