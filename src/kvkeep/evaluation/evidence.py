"""Texts whose questions have a known answer in a known place: which token asks, and which tokens tell."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from kvkeep.core.errors import ConfigError
from kvkeep.evaluation.tasks.base import Problem, Task
from kvkeep.evaluation.tasks.needle import Needle, fact
from kvkeep.evaluation.tasks.trace import Trace
from kvkeep.testbed import trace_task
from kvkeep.testbed.tokenizer import encode

Reads = Literal["values", "program"]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A prompt and its right continuation.

    Parameters
    ----------
    id
        Of the problem.
    tokens
        Prompt and right continuation.
    prompt
        Tokens of the prompt.
    queries
        Places of the tokens that have to look something up to predict the next one, ascending, all behind
        the prompt.
    evidence, rivals
        For each query the places, before it, that state what it needs; and those that state the same kind
        of thing and are wrong.
    """

    id: str
    tokens: tuple[int, ...]
    prompt: int
    queries: tuple[int, ...]
    evidence: tuple[tuple[int, ...], ...]
    rivals: tuple[tuple[int, ...], ...]

    def masks(self) -> tuple[Tensor, Tensor]:
        """Evidence and rivals, bool ``[queries, tokens]``."""
        found = []
        for places in (self.evidence, self.rivals):
            mask = torch.zeros(len(self.queries), len(self.tokens), dtype=torch.bool)
            for query, those in enumerate(places):
                mask[query, list(those)] = True
            found.append(mask)
        return found[0], found[1]


def readings(
    task: Task, problems: Sequence[Problem], tokenizer: Any, reads: Reads = "values"
) -> list[Reading]:
    """Problems of a task as readings.

    Parameters
    ----------
    tokenizer
        Of the model under test, a fast one (it says where in the text a token stands).
    reads
        ``"values"``: what a register holds, or the number of a needle. ``"program"`` (trace only): the next
        word of the instruction that is run.

    Raises
    ------
    ConfigError
        If the task does not say where its evidence is, or has no such reads.
    """
    if reads not in get_args(Reads):
        raise ConfigError(f"reads {reads!r} are unknown: use {' or '.join(get_args(Reads))}.")
    if isinstance(task, Trace):
        programs = task.programs("dev")
        find = value_reads if reads == "values" else program_reads
        return [trace_reading(programs[problem.id], find) for problem in problems]
    if isinstance(task, Needle) and reads == "values":
        return [needle_reading(problem, tokenizer) for problem in problems]
    known = "trace (values, program) and needle (values)"
    raise ConfigError(f"task {task.name} does not say where the evidence of {reads!r} stands; {known} do.")


Found = list[tuple[int, list[int], list[int]]]


def trace_reading(problem: trace_task.Problem, find: Callable[[trace_task.Problem], Found]) -> Reading:
    """The right execution of a program, with the reads that ``find`` sees in it."""
    found = find(problem)
    words = problem.prompt + problem.chain
    return Reading(
        id=problem.id,
        tokens=tuple(encode(words)),
        prompt=len(problem.prompt),
        queries=tuple(query for query, _, _ in found),
        evidence=tuple(tuple(places) for _, places, _ in found),
        rivals=tuple(tuple(places) for _, _, places in found),
    )


def value_reads(problem: trace_task.Problem) -> Found:
    """Reads of registers: a register's name that is followed by a copy (``c``) of its value.

    Evidence is every token of the chain that states the present value: the latest write (``w``) and copies
    made since. Rivals are tokens that state an earlier value of the same register.
    """
    start = len(problem.prompt)
    now: dict[str, list[int]] = {}
    before: dict[str, list[int]] = {}
    found: Found = []
    for place, (name, value) in enumerate(zip(problem.chain, problem.chain[1:], strict=False)):
        what = (trace_task.kind(name), trace_task.kind(value))
        if what == ("r", "w"):
            before.setdefault(name, []).extend(now.get(name, []))
            now[name] = [start + place + 1]
        elif what == ("r", "c"):
            found.append((start + place, list(now[name]), list(before.get(name, []))))
            now[name].append(start + place + 1)
    return found


def program_reads(problem: trace_task.Problem) -> Found:
    """Reads of the program: a word of the chain whose next word stands in the instruction that is run.

    Evidence is that word in the prompt. Rivals are the words of the same kind in earlier lines of the chain,
    which look like instructions and are done with.
    """
    start, place = len(problem.prompt), len(problem.prompt)
    line_start = 1
    earlier: dict[str, list[int]] = {}
    found: Found = []
    for instruction, line in zip(problem.program, problem.lines, strict=True):
        written = instruction.tokens(line[0])
        cursor, own = 1, []
        for offset, word in enumerate(line[1:], 1):
            if cursor < len(written) and word == written[cursor]:
                kind = _kind(word)
                found.append((place + offset - 1, [line_start + cursor], list(earlier.get(kind, []))))
                own.append((kind, place + offset))
                cursor += 1
        for kind, where in own:
            earlier.setdefault(kind, []).append(where)
        place, line_start = place + len(line), line_start + len(written)
    assert start + len(problem.chain) == place + 1
    return found


def _kind(word: str) -> str:
    return "operation" if word in trace_task.OPERATIONS else trace_task.kind(word)


def needle_reading(problem: Problem, tokenizer: Any) -> Reading:
    """A haystack and the number asked for.

    Queries are the tokens of the answer but the last, which predict the ones after them. Evidence is the
    number in its needle; rivals are the numbers of the other needles.

    Raises
    ------
    ConfigError
        If the tokenizer does not say where tokens stand, or the number is a single token.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError("this model's tokenizer does not say where in a text a token stands.")
    text = problem.question
    encoded = tokenizer(text, return_offsets_mapping=True, verbose=False)
    spans = encoded["offset_mapping"]
    answer = tokenizer(f" {problem.reference}", add_special_tokens=False)["input_ids"]
    if len(answer) < 2:
        raise ConfigError(f"the answer {problem.reference} is a single token: nothing reads after it.")
    numbers = {m.group(1): m.span(1) for m in re.finditer(fact(r"\w+", r"(\d+)"), text)}

    def places(number: str) -> tuple[int, ...]:
        low, high = numbers[number]
        return tuple(at for at, (begin, end) in enumerate(spans) if begin < high and end > low)

    prompt = len(encoded["input_ids"])
    queries = tuple(range(prompt, prompt + len(answer) - 1))
    others = tuple(at for number in numbers if number != problem.reference for at in places(number))
    return Reading(
        id=problem.id,
        tokens=(*encoded["input_ids"], *answer),
        prompt=prompt,
        queries=queries,
        evidence=(places(problem.reference),) * len(queries),
        rivals=(others,) * len(queries),
    )
