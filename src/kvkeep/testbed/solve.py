"""Let the tiny reasoner solve TRACE problems, with the whole cache or under a policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvkeep.core.policy import Policy
from kvkeep.engine.generation import generate
from kvkeep.policies.full import Full
from kvkeep.testbed.tokenizer import IDS, decode, encode
from kvkeep.testbed.trace_grade import Grade, grade
from kvkeep.testbed.trace_task import Problem

SLACK = 16  # tokens a chain may be longer than the right one


def pad_left(rows: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Stack rows of token ids, padded on the left, with their attention mask."""
    width = max(len(row) for row in rows)
    ids = torch.tensor([[IDS["PAD"]] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


def solve(
    model: PreTrainedModel,
    problems: Sequence[Problem],
    policy: Policy | None = None,
    *,
    seed: int = 0,
    batch: int = 32,
    **options: Any,
) -> tuple[list[Grade], float]:
    """Write and grade the chains of problems.

    Parameters
    ----------
    model
        The tiny reasoner.
    problems
        What to solve.
    policy
        What the cache keeps; everything by default.
    seed, batch
        Run seed of the policy; problems solved at once.
    options
        For ``model.generate``; greedy by default.

    Returns
    -------
    tuple
        One grade a problem, and the mean entries per KV head over decode steps, prompt included.
    """
    grades: list[Grade] = []
    entries = 0.0
    for first in range(0, len(problems), batch):
        part = problems[first : first + batch]
        inputs = pad_left([encode(problem.prompt) for problem in part])
        output, cache = generate(
            model,
            Full() if policy is None else policy,
            inputs,
            max_new_tokens=max(len(problem.chain) for problem in part) + SLACK,
            seed=seed,
            sequence_ids=range(first, first + len(part)),
            **({"do_sample": False} | options),
        )
        chains = output[:, inputs["input_ids"].shape[1] :].tolist()
        grades += [grade(problem, decode(chain)) for problem, chain in zip(part, chains, strict=True)]
        entries += cache.trace.mean_entries * len(part)
    return grades, entries / len(problems)
