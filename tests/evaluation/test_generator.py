"""The model's side: a sample depends on its own prompt and seed, and on nothing else in the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kvkeep
from kvkeep.core.errors import ConfigError
from kvkeep.engine.generation import cache_argument
from kvkeep.engine.row_trace import RowTrace
from kvkeep.evaluation.decoding import Written
from kvkeep.evaluation.generator import ModelGenerator, end_tokens, pad_left
from kvkeep.evaluation.identity import weights_hashes, weights_sha256
from kvkeep.evaluation.jobs import Completion, Job
from kvkeep.evaluation.prompts import PromptTemplate, prompt_template
from kvkeep.evaluation.runlog import differences
from kvkeep.evaluation.sampling import Sampler, Sampling, sampling_preset
from kvkeep.evaluation.tasks.base import Problem
from tests.evaluation.models import WORDS, tiny_model, word_tokenizer
from tests.evaluation.runs import header

PROMPTS = ("w5 w6 w7", "w9", "w3 w4 w5 w6 w7 w8 w9 w10 w11", "w20 w21", "w30 w29 w28 w27 w26")
POLICIES = {
    "full": kvkeep.Full(),
    "random": kvkeep.RandomEviction(budget=10, buffer=4),
    "vase": kvkeep.VaSEAttnV(budget=12, buffer=4, sinks=1),
    "snapkv": kvkeep.SnapKV(budget=12, buffer=4),
}


def jobs(prompts: Sequence[str] = PROMPTS, draws: int = 1) -> list[Job]:
    return [
        Job(problem=Problem(id=text, question=text, reference=""), draw=draw, seed=draw)
        for text in prompts
        for draw in range(draws)
    ]


def generator(policy: Any = None, model: Any = None, **changes: Any) -> ModelGenerator:
    settings = {"temperature": 1.0, "max_new": 24} | changes
    return ModelGenerator(
        model or tiny_model(),
        word_tokenizer(),
        name="tiny",
        policy=policy or kvkeep.Full(),
        template=prompt_template("plain"),
        sampling=Sampling(**settings),
    )


def texts(completions: list[Completion]) -> dict[tuple[str, int], Any]:
    return {
        c.job.key: (c.text, c.ended, c.prompt_tokens, c.steps, c.mean_cache, c.peak_cache, c.evictions)
        for c in completions
    }


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_sample_is_the_same_alone_and_in_any_batch(name: str) -> None:
    """Otherwise accuracy depends on the batch size, and no run can be resumed or repeated."""
    writer = generator(POLICIES[name])
    work = jobs(draws=2)
    together = texts(list(writer.generate(work)))
    alone = texts([done for job in work for done in writer.generate([job])])
    turned = texts(list(writer.generate(work[::-1])))
    assert together == alone == turned
    assert len({text for text, *_ in together.values()}) > 5
    assert any(ended for _, ended, *_ in together.values())
    assert any(not ended for _, ended, *_ in together.values())


def test_greedy_writing_equals_the_generate_of_transformers() -> None:
    """The loop that drops finished rows must be nothing but a faster generate."""
    model, tokenizer = tiny_model(), word_tokenizer()
    policy = POLICIES["snapkv"]
    ours = {
        c.job.problem.id: list(c.tokens) for c in generator(policy, model, temperature=0.0).generate(jobs())
    }
    inputs = tokenizer(list(PROMPTS), return_tensors="pt", padding=True)
    cache = kvkeep.RetentionCache(model, policy)
    written = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=24,
        do_sample=False,
        **{cache_argument(model): cache},
    )[:, inputs["input_ids"].shape[1] :].tolist()
    for prompt, tokens in zip(PROMPTS, written, strict=True):
        end = tokens.index(1) if 1 in tokens else len(tokens)
        assert ours[prompt] == tokens[:end]


def test_reading_the_prompt_in_chunks_changes_nothing() -> None:
    """Long prompts are read in pieces to bound memory; a last piece of one token is a trap."""
    model = tiny_model()
    whole = texts(list(generator(POLICIES["random"], model).generate(jobs())))
    for chunk in (2, 4, 8):
        writer = generator(POLICIES["random"], model)
        writer.prefill_chunk = chunk
        assert texts(list(writer.generate(jobs()))) == whole


def test_the_measured_cache_ends_with_the_sequence() -> None:
    """A short answer in a batch with a long one must not be billed for the other's steps."""
    for done in generator().generate(jobs()):
        written = len(done.tokens) + done.ended
        assert done.steps == written - 1
        expected = [done.prompt_tokens + step for step in range(1, done.steps + 1)]
        assert done.mean_cache == (sum(expected) / len(expected) if expected else done.prompt_tokens)
        assert done.peak_cache == done.prompt_tokens + done.steps
        assert done.prefill_cache == done.prompt_tokens


def test_draws_differ_and_seeds_repeat() -> None:
    """Draws that are copies make intervals too narrow; draws that do not repeat make results unrepeatable."""
    writer = generator()
    first = texts(list(writer.generate(jobs(draws=3))))
    assert first == texts(list(writer.generate(jobs(draws=3))))
    assert len({first["w5 w6 w7", draw][0] for draw in range(3)}) == 3


def test_a_draw_follows_the_probabilities() -> None:
    """Noise that is not Gumbel noise would sample from another distribution than the model's."""
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05])).expand(20_000, -1)
    names = torch.arange(20_000) * 7919
    drawn = Sampler(Sampling(temperature=1.0, max_new=1)).choose(logits, names, 3)
    shares = torch.bincount(drawn, minlength=4) / 20_000
    assert torch.allclose(shares, torch.tensor([0.5, 0.3, 0.15, 0.05]), atol=0.012)
    cold = Sampler(Sampling(temperature=0.5, max_new=1)).choose(logits, names, 3)
    squared = torch.tensor([0.25, 0.09, 0.0225, 0.0025])
    assert torch.allclose(torch.bincount(cold, minlength=4) / 20_000, squared / squared.sum(), atol=0.012)
    nucleus = Sampler(Sampling(temperature=1.0, top_p=0.75, max_new=1)).choose(logits, names, 3)
    assert set(nucleus.tolist()) == {0, 1}
    assert set(Sampler(Sampling(temperature=1.0, top_k=3, max_new=1)).choose(logits, names, 3).tolist()) == {
        0,
        1,
        2,
    }
    other = Sampler(Sampling(temperature=1.0, max_new=1)).choose(logits, names, 4)
    assert 0.5 < (other != drawn).float().mean() < 0.75  # two independent draws differ in 63.5 %


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": -1.0}, "negative"),
        ({"top_p": 0.0}, "outside"),
        ({"top_k": -1}, "negative"),
        ({"max_new": 0}, "no room"),
    ],
)
def test_impossible_sampling_is_refused(changes: dict[str, Any], message: str) -> None:
    """torch would answer with NaN, or with nothing."""
    with pytest.raises(ConfigError, match=message):
        Sampling(**changes)


def test_lengths_come_from_preset_task_and_model() -> None:
    """The VaSE limit counts the prompt; GSM8K has its own; a model has an end."""
    vase = sampling_preset("vase")
    assert vase.for_task("math500", None).new_tokens(1000, None) == 31_768
    assert vase.for_task("gsm8k", None).new_tokens(96, None) == 4_000
    assert vase.for_task("gsm8k", None).new_tokens(96, 2048) == 1_952
    assert sampling_preset("greedy").for_task("needle", 32).new_tokens(96, None) == 32
    assert sampling_preset("rkv").greedy
    with pytest.raises(ConfigError, match="leaves no room"):
        vase.for_task("gsm8k", None).new_tokens(5000, None)
    with pytest.raises(ConfigError, match="nothing limits"):
        sampling_preset("greedy").new_tokens(5, None)


def test_a_ratio_is_refused_as_a_budget() -> None:
    """It would come to another count in every batch: no result could be repeated."""
    with pytest.raises(ConfigError, match="in every batch"):
        generator(kvkeep.RandomEviction(budget=kvkeep.Budget.from_keep_ratio(0.5), buffer=4))


def test_the_generator_says_whether_draws_can_differ() -> None:
    """Greedy draws differ only by the chances of the policy, and the header says so."""
    assert generator().random
    assert not generator(temperature=0.0).random
    assert generator(POLICIES["vase"], temperature=0.0).random
    facts = generator(POLICIES["vase"], temperature=0.0).facts()
    assert facts["extra"]["draws_differ_by"] == "policy"
    assert facts["budget"] == {"entries": 12, "prompt": "counts"}


def test_the_header_names_the_calibration_that_was_read() -> None:
    """Scores of another calibration are another policy; a policy that reads none is not bound to any."""
    writer = generator(kvkeep.TriAttention(budget=12, buffer=4))
    writer.calibration = SimpleNamespace(sha256="c" * 64)
    assert writer.facts()["calibration_sha256"] == "c" * 64
    assert writer.with_policy(POLICIES["snapkv"]).facts()["calibration_sha256"] is None
    one, other = (header(calibration_sha256=letter * 64) for letter in "cd")
    assert "calibration_sha256 was cccc" in differences(one, other)[0]


def test_the_header_names_the_gates_that_were_read() -> None:
    """A log that is gone on with under other gates would mix two methods."""
    writer = generator(kvkeep.TrimKV(budget=12, buffer=4))
    writer.gates = SimpleNamespace(sha256="c" * 64)
    assert writer.facts()["gates_sha256"] == "c" * 64
    assert writer.with_policy(POLICIES["snapkv"]).facts()["gates_sha256"] is None
    one, other = (header(gates_sha256=letter * 64) for letter in "cd")
    assert "gates_sha256 was cccc" in differences(one, other)[0]


def test_templates_are_filled_without_reading_braces() -> None:
    """LaTeX is full of braces; str.format would fail or drop them."""
    template = prompt_template("vase")
    assert template.fill("\\frac{1}{2}").startswith("\\frac{1}{2}\n")
    assert template.fill("x").endswith("\\boxed{}.")
    with pytest.raises(ConfigError, match="has none"):
        template.render("x", word_tokenizer())


def test_the_prompt_hash_sees_template_and_chat_template() -> None:
    """Two templates give two accuracies; runs under both must not be compared by accident."""
    plain, chat = word_tokenizer(), word_tokenizer()
    chat.chat_template = "{{ messages[0].content }}"
    one = PromptTemplate(name="x", text="{question}", chat=True, source="")
    assert one.fingerprint(plain) != one.fingerprint(chat)
    assert one.render("hello", chat) == "hello"
    assert prompt_template("plain").fingerprint(plain) != prompt_template("rkv").fingerprint(plain)


def test_texts_keep_the_space_before_a_question_mark() -> None:
    """In the built-in reasoner "?3" is a word; the usual cleaning of texts glues it to the one before."""
    tokenizer = word_tokenizer()
    tokenizer.add_tokens(["?3"])
    tokenizer.clean_up_tokenization_spaces = True
    writer = generator()
    writer.tokenizer = tokenizer
    trace = RowTrace(
        sequence_id=0,
        steps=1,
        mean_entries=1,
        peak_entries=1,
        mean_read=1,
        peak_read=1,
        mean_read_by_query=1,
        mean_memory=1,
        peak_memory=1,
        prefill_memory=1,
        prefill_entries=1,
        evictions=0,
    )
    tokens = tokenizer.convert_tokens_to_ids(["w5", "?3", "w6"])
    written = Written(row=0, tokens=tokens, ended=True, trace=trace, read_seconds=0, write_seconds=0)
    cache = kvkeep.RetentionCache(writer.model, kvkeep.Full())
    assert writer._completion(jobs()[0], 1, written, cache, 1).text == "w5 ?3 w6"


def test_one_changed_weight_changes_the_hash() -> None:
    """The hash is the only proof that two runs used the same model."""
    model = tiny_model()
    before = weights_sha256(model)
    assert before == weights_sha256(tiny_model())
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1e-6
    assert weights_sha256(model) != before


def test_a_model_is_known_by_its_weights_in_other_types_too() -> None:
    """Weights published in bfloat16 are the same model when they are loaded as float32."""
    half = tiny_model().bfloat16()
    names = list(weights_hashes(half.float()))
    assert weights_sha256(tiny_model().bfloat16()) in names
    assert names == [weights_sha256(half), weights_sha256(tiny_model().bfloat16())]
    assert weights_sha256(tiny_model()) not in names


def test_end_tokens_are_those_of_model_and_tokenizer() -> None:
    """Qwen lists two; stopping at one of them only lets texts run on to the limit."""
    model = tiny_model(eos=None)
    model.generation_config.eos_token_id = [5, 6]
    assert end_tokens(model, word_tokenizer()) == {1, 5, 6}


def test_empty_prompts_are_refused() -> None:
    """A row of padding alone makes the model answer nothing to anybody."""
    ids, mask = pad_left([[4], [5, 6]], 0)
    assert ids.tolist() == [[0, 4], [5, 6]]
    assert mask.tolist() == [[0, 1], [1, 1]]
    with pytest.raises(ConfigError, match="empty"):
        pad_left([[4], []], 0)
    assert WORDS > 4


@pytest.mark.parametrize("policy", ["random", "vase", "snapkv"])
def test_evictions_are_noted_and_change_nothing(policy: str) -> None:
    """Each text has the evictions that its own trace counts, whoever shares its batch."""
    plain, noting = generator(POLICIES[policy]), generator(POLICIES[policy])
    noting.log_evictions = True
    wanted = jobs()
    bare, noted = list(plain.generate(wanted)), list(noting.generate(wanted))
    assert texts(bare) == texts(noted)
    assert not any("evicted" in completion.extra for completion in bare)
    layers_and_heads = 4
    for completion in noted:
        found = completion.extra["evicted"]
        assert len(found) == completion.evictions
        stored = completion.prompt_tokens
        budget = POLICIES[policy].budget
        for one in found:
            # The rule alone says when: at budget plus a multiple of the buffer.
            held = stored + one["at"]
            assert held > budget.entries
            assert one["entries"] == layers_and_heads * (held - budget.entries)
            stored -= held - budget.entries
            assert 0 <= one["range"] <= 1
    (first,) = noting.generate(wanted[:1])
    together = next(one for one in noted if one.job.key == first.job.key)
    assert first.extra["evicted"] == together.extra["evicted"]
    assert any(completion.extra["evicted"] for completion in noted)


def test_evictions_are_placed_in_the_answer_though_the_question_is_read_again() -> None:
    """Counted with the tokens read again, none would stand before the loop that it came before."""
    noting = generator(POLICIES["snapkv"])
    noting = noting.with_sampling(replace(noting.sampling, refeed_every=6))
    noting.log_evictions = True
    seen = 0
    for completion in noting.generate(jobs()):
        assert completion.extra["refed"] > 0
        places = [one["at"] for one in completion.extra["evicted"]]
        assert places == sorted(places)
        assert all(0 < at <= len(completion.tokens) for at in places)
        seen += len(places)
    assert seen > 0
