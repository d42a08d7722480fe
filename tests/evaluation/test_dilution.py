"""Dilution: the bound holds, the odds form is the masked softmax, and the evidence is where it is said."""

from __future__ import annotations

import math
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import kvkeep
from kvkeep.core.errors import ConfigError, UnsupportedError
from kvkeep.engine.attention import restore
from kvkeep.evaluation.dilution import attention, bound, mass_after, retained
from kvkeep.evaluation.dilution_run import measure
from kvkeep.evaluation.dilution_summary import mean, reading_head, summarise
from kvkeep.evaluation.evidence import Reading, program_reads, readings, trace_reading, value_reads
from kvkeep.evaluation.tasks.registry import make_task
from kvkeep.testbed.tokenizer import WORDS
from kvkeep.testbed.trace_task import problems, size
from kvkeep.testing.models import tiny_model, tokens


def some_logits(queries: int = 50, entries: int = 40, spread: float = 3.0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of queries that see from half to all of the entries, evidence, and what an eviction keeps."""
    make = torch.Generator().manual_seed(3)
    logits = spread * torch.randn(2, queries, entries, generator=make)
    seen = torch.arange(entries) < torch.linspace(entries / 2, entries, queries)[:, None]
    evidence = torch.rand(queries, entries, generator=make) < 0.15
    kept = torch.rand(2, queries, entries, generator=make) < 0.5
    return logits.masked_fill(~seen, -torch.inf), evidence, kept


def test_mass_is_the_share_of_a_plain_loop() -> None:
    """Every figure of the page rests on this sum."""
    logits, evidence, _ = some_logits(queries=9, entries=12)
    found = attention(logits, evidence, rivals=~evidence)
    for head in range(2):
        for query in range(9):
            weights = [math.exp(float(z)) for z in logits[head, query]]
            useful = sum(w for w, is_in in zip(weights, evidence[query], strict=True) if is_in)
            assert float(found.mass[head, query]) == pytest.approx(useful / sum(weights), abs=1e-6)
            assert float(found.rivals[head, query]) == pytest.approx(1 - useful / sum(weights), abs=1e-6)


@pytest.mark.parametrize("spread", [0.1, 3.0, 30.0])
def test_mass_never_exceeds_the_bound_and_the_gap_gives_it_exactly(spread: float) -> None:
    """A bound that is broken would be printed beside a mass above it."""
    logits, evidence, _ = some_logits(spread=spread)
    found = attention(logits, evidence)
    assert bool((found.mass <= found.bound + 1e-12).all())
    seen = ~logits.isneginf()
    exact = bound((evidence & seen).sum(-1), (~evidence & seen).sum(-1), found.gap)
    assert torch.allclose(found.mass, exact, rtol=1e-9, atol=0)
    if spread == 0.1:
        assert bool((found.bound < found.mass * 2).logical_or(found.mass == 0).all())  # and it says something


def test_mass_falls_as_distractors_grow_unless_the_gap_grows() -> None:
    """The claim of the proposition, on logits where everything is known."""
    masses = []
    for distractors in (1, 10, 100, 1000):
        logits = torch.cat([torch.tensor([2.0]), torch.zeros(distractors)])
        evidence = torch.arange(distractors + 1) == 0
        masses.append(float(attention(logits, evidence).mass))
        assert masses[-1] == pytest.approx(float(attention(logits, evidence).bound))  # all distractors alike
    assert masses == sorted(masses, reverse=True)
    assert masses[-1] < 0.01 < 0.8 < masses[0]


def test_the_odds_form_is_the_softmax_over_what_is_kept() -> None:
    """The law: from what is kept of both sets, the mass after eviction follows."""
    logits, evidence, kept = some_logits()
    found = retained(logits, evidence, kept)
    masked = attention(logits.masked_fill(~kept, -torch.inf), evidence).mass
    assert torch.allclose(found.mass, masked, rtol=1e-9, atol=1e-12)
    before = attention(logits, evidence).mass
    inside = (before > 0) & (before < 1) & (found.distracting > 0)
    odds = (masked / (1 - masked))[inside] / (before / (1 - before))[inside]
    assert torch.allclose(odds, (found.useful / found.distracting)[inside], rtol=1e-6)
    grew = masked > before
    assert torch.equal(grew[inside], (found.useful > found.distracting)[inside])
    assert bool(grew[inside].any())
    assert bool((~grew[inside]).any())


def test_edges_have_a_meaning() -> None:
    """Evidence that is gone, or never was, must not become a NaN in a mean."""
    logits = torch.tensor([[0.0, 1.0, 2.0], [0.0, -torch.inf, -torch.inf]])
    evidence = torch.tensor([False, False, True])
    found = attention(logits, evidence)
    assert found.mass[1] == 0
    assert found.bound[1] == 0
    gone = retained(logits, evidence, torch.tensor([True, True, False]))
    assert (float(gone.useful[0]), float(gone.mass[0])) == (0.0, 0.0)
    nothing = retained(logits, evidence, torch.tensor([False, False, False]))
    assert nothing.mass.tolist() == [0.0, 0.0]
    assert float(mass_after(torch.tensor(1.0), torch.tensor(0.5), torch.tensor(0.0))) == 1.0
    alone = attention(torch.tensor([[3.0]]), torch.tensor([True]))
    assert (alone.mass.tolist(), alone.bound.tolist()) == ([1.0], [1.0])


# -- evidence ---------------------------------------------------------------------------------------------


def test_reads_of_values_know_every_token_that_states_the_value() -> None:
    """An evidence that leaves out a copy would call a head that reads it distracted."""
    checked = 0
    for problem in islice(problems(size("S", distractors=6), "dev"), 30):
        words = problem.prompt + problem.chain
        reading = trace_reading(problem, value_reads)
        assert reading.tokens == tuple(WORDS.index(word) for word in words)
        for query, evidence, rivals in zip(reading.queries, reading.evidence, reading.rivals, strict=True):
            register, wanted = words[query], words[query + 1]
            assert wanted[0] == "c"
            stated = [
                place
                for place in range(reading.prompt + 1, query)
                if words[place - 1] == register and words[place][0] in "wc" and words[place] not in ("so",)
            ]
            latest = max(place for place in stated if words[place][0] == "w")
            assert list(evidence) == [place for place in stated if place >= latest]
            assert {words[place][1:] for place in evidence} == {wanted[1:]}
            assert set(rivals) == {place for place in stated if place < latest}
            checked += 1
    assert checked > 300


def test_reads_of_the_program_point_at_the_word_that_comes_next() -> None:
    """One line off, and the mass on the evidence would be that of something else."""
    for problem in islice(problems(size("S"), "dev"), 20):
        words = problem.prompt + problem.chain
        reading = trace_reading(problem, program_reads)
        copied = sum(len(line.tokens("")) - 1 for line in problem.program)
        assert len(reading.queries) == copied
        for query, (place,), rivals in zip(reading.queries, reading.evidence, reading.rivals, strict=True):
            assert place < reading.prompt <= query
            assert words[place] == words[query + 1]
            assert all(reading.prompt <= rival < query for rival in rivals)
        label = next(word for word in reversed(words[: reading.queries[-1] + 1]) if word[0] == "L")
        assert label in words[reading.evidence[-1][0] - 5 : reading.evidence[-1][0]]


class Letters:
    """A fast tokenizer of single characters."""

    is_fast = True

    def __call__(self, text: str, **_: Any) -> dict[str, Any]:
        return {
            "input_ids": [ord(letter) for letter in text],
            "offset_mapping": [(place, place + 1) for place in range(len(text))],
        }


def test_needles_are_found_by_their_letters() -> None:
    """The evidence is the number asked for; the other numbers are its rivals."""
    task = make_task("needle(length=300, count=6, distractors=3)")
    for problem, reading in zip(
        task.all_problems(), readings(task, task.all_problems(), Letters()), strict=True
    ):
        text = "".join(map(chr, reading.tokens))
        assert text == f"{problem.question} {problem.reference}"
        assert "".join(text[place] for place in reading.evidence[0]) == problem.reference
        assert len(reading.rivals[0]) == 3 * 7
        assert all(text[place].isdigit() for place in reading.rivals[0])
        assert not set(reading.rivals[0]) & set(reading.evidence[0])
        assert [text[query + 1] for query in reading.queries] == list(problem.reference)


def test_other_tasks_and_reads_are_refused() -> None:
    """A task whose evidence is unknown would give a figure of nothing."""
    with pytest.raises(ConfigError, match="ruler does not say"):
        readings(make_task("ruler(count=2)"), [], Letters())
    with pytest.raises(ConfigError, match="reads 'all' are unknown"):
        readings(make_task("trace(count=2)"), [], None, "all")  # type: ignore[arg-type]


# -- on a model -------------------------------------------------------------------------------------------


def a_reading(row: Tensor, name: str, prompt: int = 20) -> Reading:
    """A text with questions at some places; any earlier entries may be called its evidence."""
    length = len(row)
    queries = tuple(range(prompt, length - 1, 3))
    return Reading(
        id=name,
        tokens=tuple(row.tolist()),
        prompt=prompt,
        queries=queries,
        evidence=tuple((4, query // 2, query - 1) for query in queries),
        rivals=tuple((1, 2) for _ in queries),
    )


def eager_masses(model: PreTrainedModel, reading: Reading) -> tuple[Tensor, Tensor]:
    """Mass and rivals from the attention weights that transformers itself returns."""
    restore(model)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(torch.tensor([reading.tokens]), output_attentions=True).attentions
    whole = torch.stack([layer[0] for layer in weights])[:, :, list(reading.queries)]
    evidence, rivals = reading.masks()
    return (whole * evidence).sum(-1), (whole * rivals).sum(-1)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_full_cache_is_the_model_itself(family: str) -> None:
    """Mass that is not the model's own attention says nothing of the model; rows are padded here."""
    model = tiny_model(family)
    rows = tokens(2, 60)
    batch = [a_reading(rows[0], "a"), a_reading(rows[1, :51], "b", prompt=17)]
    found = measure(model, kvkeep.Full(), batch)
    for one, reading in zip(found, batch, strict=True):
        mass, rivals = eager_masses(model, reading)
        assert torch.allclose(one.full.mass, mass.double(), atol=1e-5)
        assert torch.allclose(one.full.rivals, rivals.double(), atol=1e-5)
        assert torch.allclose(one.evicted.mass, mass.double(), atol=1e-5)  # read token by token
        assert torch.equal(one.right_full, one.right_evicted)
        assert one.distractors.tolist() == [query + 1 - 3 for query in reading.queries]


@pytest.mark.parametrize(
    "policy",
    [
        kvkeep.KeyDiff(budget=24, buffer=8),
        kvkeep.SnapKV(budget=24, buffer=8),
        kvkeep.policy("snapkv + adaptive-heads", budget=24, buffer=8),  # ragged, on pages
        kvkeep.RandomEviction(budget=kvkeep.Budget(entries=12, prompt="kept"), buffer=8),
    ],
    ids=["keydiff", "snapkv", "adaptive heads", "random"],
)
def test_where_inputs_are_equal_the_odds_form_predicts_the_run(policy: Any) -> None:
    """In the first layer the run under a policy is the full run, masked: other mass is a wrong position."""
    model, rows = tiny_model("llama"), tokens(2, 70)
    batch = [a_reading(rows[0], "a"), a_reading(rows[1, :58], "b")]
    moved = 0.0
    for one in measure(model, policy, batch, names=[5, 9]):
        assert torch.allclose(one.evicted.mass[0], one.retained.mass[0], atol=1e-5)
        assert bool((one.retained.distracting[:, :, -1] < 1).all())
        assert bool((one.retained.useful <= 1 + 1e-9).all())
        moved += float((one.evicted.mass[0] - one.full.mass[0]).abs().max())
        assert one.mean_cache < 60
    assert moved > 0.01


def test_layers_with_a_cache_of_their_own_are_refused() -> None:
    """Half of a model's layers would be left out without a word."""
    with pytest.raises(UnsupportedError, match="cache of their own"):
        measure(tiny_model("gemma3"), kvkeep.Full(), [a_reading(tokens(1, 40)[0], "a")])


def test_the_summary_is_a_mean_over_problems() -> None:
    """A problem with many reads must not outvote the others, and the interval must be over problems."""
    model, rows = tiny_model("llama"), tokens(3, 60)
    batch = [a_reading(rows[0], "a"), a_reading(rows[1], "b", prompt=50), a_reading(rows[2], "c")]
    found = measure(model, kvkeep.KeyDiff(budget=24, buffer=8), batch)
    head = reading_head(found)
    setting = summarise(7, found, [60, 60, 60], head)
    whole = torch.cat([one.full.mass for one in found], -1).mean(-1)
    assert whole[head] == whole.max()
    own = [float(one.full.mass[head].mean()) for one in found]
    assert setting.heads[0].mass_full == mean(own)
    assert setting.heads[0].mass_full.value == pytest.approx(sum(own) / 3)
    assert setting.heads[0].head == f"{head[0]}.{head[1]}"
    assert setting.heads[1].mass_full.value == pytest.approx(
        sum(float(one.full.mass.mean()) for one in found) / 3
    )
    assert setting.queries == sum(len(reading.queries) for reading in batch)
    assert mean([0.25]).interval is None
    low, high = mean([0.0, 1.0, 0.5]).interval or (0.0, 0.0)
    assert low == pytest.approx(0.5 - 4.302653 * 0.5 / math.sqrt(3), rel=1e-5)
    assert high == pytest.approx(1 - low)
