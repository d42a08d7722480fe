"""TRACE: programs, their execution and their grades."""

from collections import Counter
from dataclasses import replace
from itertools import islice
from random import Random

import pytest

from kvkeep.testbed.trace_grade import grade, interpret
from kvkeep.testbed.trace_task import (
    LABELS,
    SIZES,
    Dials,
    Problem,
    execute,
    kind,
    make_program,
    problems,
    size,
)


def first(count: int, name: str = "M", split: str = "dev", seed: int = 0) -> list[Problem]:
    return list(islice(problems(SIZES[name], split, seed=seed), count))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", SIZES)
def test_answers_are_those_of_an_independent_interpreter(name: str) -> None:
    """A wrong answer key would make every policy look bad, and the right model worst of all."""
    for problem in first(1000, name):
        assert [int(answer[1:]) for answer in problem.answers] == interpret(problem.prompt)


def test_default_chain_is_long_and_asks_every_role() -> None:
    """Short chains would fit any budget; a missing role would leave its column empty."""
    lot = first(200)
    assert all(256 <= len(problem.chain) <= 1024 for problem in lot)
    roles = Counter(role for problem in lot for role in problem.roles)
    assert min(roles.values()) > 0.15 * sum(roles.values())
    assert all(problem.roles.count("dormant") == SIZES["M"].dormant for problem in lot)


def test_answers_are_balanced() -> None:
    """A digit that is right more often than others could be guessed without the cache."""
    digits = Counter(answer for problem in first(300) for answer in problem.answers)
    total = sum(digits.values())
    assert len(digits) == 10
    assert all(0.08 < count / total < 0.12 for count in digits.values())


def test_splits_are_disjoint_and_renumbering_keeps_the_split() -> None:
    """A problem met in training, or tuned on, must never confirm a claim."""
    ids = {split: {p.id for p in first(200, "S", split)} for split in ("train", "dev", "confirm")}
    assert not ids["train"] & ids["dev"] | ids["dev"] & ids["confirm"] | ids["train"] & ids["confirm"]
    problem = first(1)[0]
    moved = execute(problem.program, (problem.offset + 31) % LABELS)
    assert moved.prompt != problem.prompt
    assert (moved.id, moved.split, moved.answers) == (problem.id, problem.split, problem.answers)
    harder = islice(problems(size("S", distractors=4), "dev"), 100)  # another dial, other problems
    assert not {p.id for p in harder} & set.union(*ids.values())


def test_same_seed_same_problems() -> None:
    """Two runs that say the same seed must be comparable problem by problem."""
    assert first(5, seed=3) == first(5, seed=3) != first(5, seed=4)


def test_every_result_follows_from_the_words_just_written() -> None:
    """A sum whose operands stand far away asks one token for two hops, which a tiny model does not learn."""
    for line in first(1)[0].lines:
        operands = [int(word[1:]) for word in line[1:-1] if kind(word) in ("c", "k")]
        result = [int(word[1:]) for word in line if kind(word) in ("w", "o")]
        assert len(operands) == 2
        assert result == [sum(operands) % 10]


def test_dials_that_cannot_be_are_refused() -> None:
    """An impossible size would otherwise fail deep inside the generator."""
    with pytest.raises(ValueError, match="at least one hot"):
        Dials(registers=4, hot=3, dormant=1)
    with pytest.raises(ValueError, match="Lower steps"):
        size("M", steps=90)
    with pytest.raises(ValueError, match="52 distractors need more than the 100 labels"):
        size("M", steps=31, distractors=52)
    with pytest.raises(ValueError, match="negative"):
        size("M", distractors=-1)
    with pytest.raises(ValueError, match="Choose one of S, M, L"):
        size("XL")


@pytest.mark.parametrize("name", ["S", "M"])
def test_distractors_add_stale_values_and_change_no_answer(name: str) -> None:
    """A dial that also changed the questions would mix two causes; one that did nothing would show none."""
    for seed in range(40):
        plain = make_program(Random(seed), size(name))
        more = make_program(Random(seed), size(name, distractors=25))
        assert len(more) == len(plain) + 25
        assert execute(more).answers == execute(plain).answers
        assert execute(more).roles == execute(plain).roles
        rest = iter(more)
        assert all(line in rest for line in plain)  # the same lines in the same order
        for place, line in enumerate(more[:-1]):
            after = more[place + 1]
            if line not in plain:  # nobody reads it before it is gone
                assert line.operation == "LD"
                assert line.target == after.target
                assert line.target not in after.operands


def test_the_right_chain_is_right() -> None:
    """A grader that marks the right execution down would bound every accuracy from above."""
    for problem in first(50):
        graded = grade(problem, problem.chain)
        assert graded.accuracy == 1.0
        assert graded.first_error is None
        assert graded.ended
        assert all(step.right and step.fault == "" for step in graded.steps)


def position(problem: Problem, letter: str) -> int:
    """Return the place of the first register value of a kind, far enough from the end to matter."""
    return next(i for i, word in enumerate(problem.chain) if kind(word) == letter)


@pytest.mark.parametrize(("letter", "fault"), [("c", "read"), ("w", "sum"), ("r", "form")])
def test_the_first_error_is_found_and_named(letter: str, fault: str) -> None:
    """A lost value and wrong arithmetic are different failures: only the first is the cache's."""
    problem = first(1)[0]
    chain, place = list(problem.chain), position(problem, letter)
    number = int(chain[place][1:])
    chain[place] = f"{letter}{(number + 1) % 10}"
    graded = grade(problem, chain)
    assert graded.first_error == place
    assert next(step.fault for step in graded.steps if step.fault) == fault


def test_an_error_is_not_counted_again_in_the_steps_that_build_on_it() -> None:
    """The local grade must separate one lost value from the many wrong answers that follow it."""
    problem = first(1)[0]
    wrong = list(problem.program)
    wrong[0] = replace(
        wrong[0], operands=(wrong[0].operands[0], f"k{(int(wrong[0].operands[1][1:]) + 1) % 10}")
    )
    graded = grade(problem, execute(tuple(wrong), problem.offset).chain)
    assert sum(bool(step.fault) for step in graded.steps) == 1
    assert sum(not step.right for step in graded.steps) > 1


def test_a_chain_that_stops_loses_the_rest() -> None:
    """A truncated chain must neither crash the grader nor be given what it never wrote."""
    problem = first(1)[0]
    graded = grade(problem, problem.chain[:40])
    assert graded.first_error == 40
    assert not graded.ended
    assert graded.steps[-1].fault == "missing"
    assert not graded.answers[-1]
    assert grade(problem, []).accuracy == 0.0
