"""Retrieval in the style of RULER: several needles, several values, and variables that follow variables.

Plain RULER says little about eviction while generating, since its answers are short: ``steps=True`` asks
``variables`` for a written chain first.
"""

from __future__ import annotations

import json
import random
from typing import Any, ClassVar, Literal, get_args

from kvkeep.core.errors import ConfigError
from kvkeep.evaluation.tasks.base import Grade, Problem
from kvkeep.evaluation.tasks.generated import KEYS, GeneratedTask, share_found

Kind = Literal["multikey", "multivalue", "multiquery", "variables"]

_FINAL = "Final answer:"


class Ruler(GeneratedTask):
    """Four tasks of one family; the score is the share of the answers found, as in RULER.

    Parameters
    ----------
    length, count, seed
        As in :class:`~kvkeep.evaluation.tasks.generated.GeneratedTask`.
    kind
        ``"multikey"``: many keys, one is asked; ``"multivalue"``: one key with several numbers, all asked;
        ``"multiquery"``: several keys are asked; ``"variables"``: which variables got a value, through
        assignments of one to the next.
    facts
        Needles, or links of the chain.
    steps
        ``"variables"`` only: ask for every assignment in writing before the answer.
    """

    name: ClassVar[str] = "ruler"
    metric: ClassVar[Literal["accuracy", "score"]] = "score"
    version: ClassVar[str] = "1"

    def __init__(
        self,
        *,
        length: int = 2048,
        count: int = 200,
        seed: int = 0,
        kind: Kind = "multikey",
        facts: int = 4,
        steps: bool = False,
    ) -> None:
        super().__init__(length=length, count=count, seed=seed)
        if kind not in get_args(Kind):
            raise ConfigError(f"task ruler: kind {kind!r} is none of {', '.join(get_args(Kind))}.")
        if not 2 <= facts <= len(KEYS) // 2:
            raise ConfigError(f"task ruler: {facts} facts; 2 to {len(KEYS) // 2} can be hidden.")
        self.kind, self.facts, self.steps = kind, facts, steps
        if steps:
            self.max_new = 512

    def options(self) -> dict[str, Any]:
        return super().options() | {"kind": self.kind, "facts": self.facts, "steps": self.steps}

    @property
    def label(self) -> str:
        return f"{super().label}/{self.kind}/{self.facts}" + ("/steps" if self.steps else "")

    def compose(self, rng: random.Random, sentences: list[str]) -> tuple[str, str, dict[str, Any]]:
        if self.kind == "variables":
            facts, question, wanted = self._variables(rng)
        else:
            facts, question, wanted = self._numbers(rng)
        text = list(sentences)
        # In order: an assignment must not stand before the one that it refers to.
        places = sorted(rng.random() for _ in facts)
        for place, fact in reversed(list(zip(places, facts, strict=True))):
            text.insert(round(place * len(sentences)), fact)
        reference = json.dumps(wanted)
        return " ".join(text) + "\n\n" + question, reference, {"depths": [round(p, 4) for p in places]}

    def _numbers(self, rng: random.Random) -> tuple[list[str], str, list[str]]:
        names = rng.sample(KEYS, self.facts)
        keys = [names[0]] * self.facts if self.kind == "multivalue" else names
        numbers = [str(number) for number in rng.sample(range(10**6, 10**7), self.facts)]
        facts = [f"One secret number of {key} is {n}." for key, n in zip(keys, numbers, strict=True)]
        asked = range(1) if self.kind == "multikey" else range(self.facts)
        wanted = [numbers[i] for i in asked]
        about = " and ".join(dict.fromkeys(keys[i] for i in asked))
        rng.shuffle(facts)
        question = f"Question: What are all secret numbers of {about}?\nAnswer: The secret numbers are"
        return facts, question, wanted

    def _variables(self, rng: random.Random) -> tuple[list[str], str, list[str]]:
        names = [name.upper() for name in rng.sample(KEYS, 2 * self.facts)]
        numbers = rng.sample(range(10_000, 100_000), 2)
        facts = []
        chains = [names[: self.facts], names[self.facts :]]
        for links in zip(*chains, strict=True):  # the second chain is a distractor
            for chain, number, name in zip(chains, numbers, links, strict=True):
                place = chain.index(name)
                facts.append(f"VAR {name} = {number if place == 0 else 'VAR ' + chain[place - 1]}.")
        how = (
            f" Write down the assignments one by one, then '{_FINAL}' and the variables."
            if self.steps
            else ""
        )
        question = f"Question: Which {self.facts} variables have the value {numbers[0]}?{how}\nAnswer:"
        return facts, question, chains[0]

    def grade(self, problem: Problem, text: str) -> Grade:
        if self.steps:
            _, mark, text = text.rpartition(_FINAL)
            if not mark:
                return Grade.missing()
        return share_found(problem, text, json.loads(problem.reference))
