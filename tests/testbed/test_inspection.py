"""What is asked of a reasoner before a policy is judged on it: the questions, and the shipped answers."""

from __future__ import annotations

from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvkeep.testbed.inspection import accuracy_by_role, leak_test
from kvkeep.testbed.model import load
from kvkeep.testbed.solve import solve
from kvkeep.testbed.tokenizer import IDS, WORDS
from kvkeep.testbed.trace_task import Problem, kind, problems, size

NAMES = ("trace-1", "trace-2")  # by name: a copy without its weights must fail, not skip


def first(count: int, name: str = "S") -> list[Problem]:
    return list(islice(problems(size(name), "dev", seed="inspection"), count))


class Reader:
    """Copies the last value that was written to a register: of those it sees, or of all (a leak)."""

    def __init__(self, *, leaks: bool) -> None:
        self.leaks = leaks

    def __call__(self, *, input_ids: Tensor, attention_mask: Tensor, use_cache: bool) -> Any:
        words = [WORDS[index] for index in input_ids[0].tolist()]
        logits = torch.zeros(1, len(words), len(WORDS))
        for place, word in enumerate(words):
            sees = range(place) if self.leaks else attention_mask[0, 0, place].nonzero().flatten().tolist()
            written = [i for i in sees if kind(words[i]) == "w" and words[i - 1] == word]
            digit = words[written[-1]][1:] if written else "0"
            logits[0, place, IDS[f"c{digit}"]] = 1.0
        return SimpleNamespace(logits=logits)


def test_a_reader_of_the_chain_passes_the_leak_test_and_a_leak_fails() -> None:
    """If values could be told from the program alone, forgetting the chain would cost nothing."""
    lot = first(12)
    seen, masked = leak_test(Reader(leaks=False), lot)  # type: ignore[arg-type]
    assert seen == 1.0
    assert masked < 0.2  # chance is one tenth
    assert leak_test(Reader(leaks=True), lot) == (1.0, 1.0)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_reasoner_reasons_and_does_not_leak(name: str) -> None:
    """A policy can only be judged on a model that is right with everything and lost without its chain."""
    model = load(name)
    grades, _ = solve(model, first(24, "M"))
    assert accuracy_by_role(grades)["all"] >= 0.95  # 97 % is the promise; 24 problems scatter
    seen, masked = leak_test(model, first(12))
    assert seen >= 0.95
    assert masked < 0.2
