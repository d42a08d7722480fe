"""Heat against loops, and reading the question again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvkeep
from kvkeep.core.errors import ConfigError, UnsupportedError
from kvkeep.core.policy import Policy
from kvkeep.engine.drawing import Draw
from kvkeep.engine.repetition import Repetition
from kvkeep.evaluation.decoding import decode
from kvkeep.evaluation.refeeding import Refeeder, Refeeding
from kvkeep.evaluation.sampling import Sampler, Sampling
from kvkeep.evaluation.vllm_generator import refuse_decoding
from kvkeep.testing.models import left_padded
from tests.evaluation.models import tiny_model
from tests.reference.decoding import answer_with_refeeding, repeated_share, told_with_refeeding


class TestRepetition:
    """The more a text repeats itself, the warmer its next token."""

    @given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 4), st.integers(5, 20))
    def test_the_share_is_that_of_counting(self, written: list[int], ngram: int, window: int) -> None:
        """A share of the wrong window, or of all n-grams, would warm texts that do not loop."""
        heat = Repetition(rise=1.0, ngram=ngram, window=window)
        assert heat.share(written) == pytest.approx(repeated_share(written, ngram, window), abs=1e-12)

    def test_each_row_is_drawn_at_its_own_temperature(self) -> None:
        """A batch must not be warmed by the one row that loops."""
        logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05])).expand(20_000, -1)
        names = torch.arange(20_000) * 7919
        sampling = Sampling(temperature=0.5, repetition_rise=0.8, repetition_ngram=1, repetition_window=9)
        loop, fresh = [3] * 8, list(range(8))
        assert sampling.heat is not None
        assert sampling.heat.temperature(0.5, loop) == pytest.approx(0.5 + 0.8 * 7 / 8)
        written = [loop, fresh] * 10_000
        drawn = Sampler(sampling).choose(logits, names, 8, written)
        for row, temperature in ((0, 1.2), (1, 0.5)):
            shares = torch.bincount(drawn[row::2], minlength=4) / 10_000
            expected = (logits[0].double() / temperature).softmax(-1)
            assert torch.allclose(shares.double(), expected, atol=0.02)

    def test_a_text_without_repeats_is_drawn_as_ever(self) -> None:
        """Law 6: where nothing repeats, each token is the one that the run without heat draws."""
        logits, names = torch.randn(500, 40, generator=torch.Generator().manual_seed(0)), torch.arange(500)
        for temperature in (0.0, 0.7):
            plain = Sampling(temperature=temperature, top_p=0.9)
            warm = Sampling(temperature=temperature, top_p=0.9, repetition_rise=2.0)
            written = [list(range(20))] * 500
            ours = Sampler(warm).choose(logits, names, 20, written)
            assert torch.equal(ours, Sampler(plain).choose(logits, names, 20, written))

    def test_greedy_rows_are_drawn_only_where_they_repeat(self) -> None:
        """A run at temperature 0 with heat is a draw, and must not be called greedy."""
        assert Sampling(temperature=0.0).greedy
        assert not Sampling(temperature=0.0, repetition_rise=1.0).greedy
        logits, names = torch.zeros(200, 10).index_fill_(1, torch.tensor([4]), 0.5), torch.arange(200)
        warm = torch.tensor([0.0, 1.0]).repeat(100)
        drawn = Draw().scores(logits, names, torch.ones(200, dtype=torch.int64), warm).argmax(-1)
        assert (drawn[::2] == 4).all()
        assert len(set(drawn[1::2].tolist())) > 5

    def test_generate_warms_too(self) -> None:
        """model.generate divides by its own temperature: together it must come to T + rise * r."""
        from kvkeep.engine.repetition import RepetitionWarper

        ids = torch.tensor([[9, 9, 9, 5, 5, 5, 5], [9, 9, 9, 1, 2, 3, 4]])
        scores = torch.randn(2, 8)
        warmed = RepetitionWarper(Repetition(rise=0.9, ngram=1, window=8), 0.6, prompt=3)(ids, scores) / 0.6
        assert torch.allclose(warmed[0], scores[0] / (0.6 + 0.9 * 0.75))
        assert torch.allclose(warmed[1], scores[1] / 0.6)

    def test_generate_counts_the_answer_alone_and_refuses_greedy(self) -> None:
        """The prompt repeats itself as it likes; and without a temperature there is nothing to raise."""
        model = tiny_model(eos=None)
        ids = torch.full((1, 12), 7)
        seen: list[torch.Tensor] = []

        class Watch(Repetition):
            def share(self, written: Any) -> float:
                seen.append(torch.tensor(written))
                return super().share(written)

        options: dict[str, Any] = {"max_new_tokens": 6, "repetition": Watch(rise=1.0)}
        full, inputs = kvkeep.Full(budget=64), {"input_ids": ids}
        output, _ = kvkeep.generate(model, full, inputs, do_sample=True, **options)
        assert [len(each) for each in seen] == list(range(6))
        assert torch.equal(seen[-1], output[0, 12:-1])
        with pytest.raises(ConfigError, match="do_sample=True"):
            kvkeep.generate(model, full, inputs, do_sample=False, **options)


POLICIES: list[Policy] = [
    kvkeep.Full(budget=64),
    kvkeep.VaSEAttnV(budget=24, buffer=8),
    kvkeep.SnapKV(budget=kvkeep.Budget(entries=12, prompt="kept"), buffer=4),
]


def write(policy: Policy, ids: Any, mask: Any, names: list[int], refeeding: Refeeding, **more: Any) -> Any:
    """Texts of all rows by name, with what was measured."""
    model = tiny_model(eos=None)
    cache = kvkeep.RetentionCache(model, policy, sequence_ids=names, trace_rows=True)
    limits = more.pop("limits", [40, 25, 33])
    done = decode(
        model,
        cache,
        ids,
        mask,
        limits=limits,
        end_tokens=frozenset(),
        sampler=Sampler(Sampling(temperature=more.pop("temperature", 0.7))),
        refeeding=refeeding,
        **more,
    )
    return {names[one.row]: (one.tokens, one.refed, one.trace) for one in done}, cache


class TestRefeeding:
    """The question is read again, before the token that was written last."""

    def test_the_answer_is_that_of_reading_everything_anew(self) -> None:
        """Tokens at wrong positions, or a last token that is lost, would change the answer."""
        ids, mask = left_padded((7, 12, 4))
        ids = ids % 30 + 2
        done, cache = write(
            POLICIES[0], ids, mask, [0, 1, 2], Refeeding(every=9), temperature=0.0, limits=[25] * 3
        )
        model = tiny_model(eos=None)
        for row, length in enumerate((7, 12, 4)):
            prompt = ids[row, -length:].tolist()
            written, refed, trace = done[row]
            assert written == answer_with_refeeding(model, prompt, new=25, every=9)
            assert refed == 2 * length
            assert trace.steps == 24 + refed
            assert trace.peak_entries == length + 24 + refed  # a full cache holds what was read twice twice
        assert cache.trace.policy == "full"

    @pytest.mark.parametrize("policy", POLICIES, ids=lambda each: each.name)
    @pytest.mark.parametrize("plan", [Refeeding(every=6), Refeeding(evictions=2)], ids=str)
    def test_alone_as_in_a_batch(self, policy: Policy, plan: Refeeding) -> None:
        """Law 4: rows read their own prompts at their own times."""
        ids, mask = left_padded((30, 8, 17))
        ids = ids % 30 + 2
        together, _ = write(policy, ids, mask, [0, 1, 2], plan)
        if policy.bounded or plan.every:
            assert sum(refed for _, refed, _ in together.values()) > 0
        for row, length in enumerate((30, 8, 17)):
            only = ids[row : row + 1, -length:]
            limit = [(40, 25, 33)[row]]
            alone, _ = write(policy, only, torch.ones_like(only), [row], plan, limits=limit)
            assert alone[row] == together[row]

    def test_memory_stays_inside_budget_and_buffer(self) -> None:
        """Law 3: reading a prompt of 30 tokens again must not need room for 30."""
        ids, mask = left_padded((30, 8, 17))
        done, cache = write(POLICIES[1], ids % 30 + 2, mask, [0, 1, 2], Refeeding(every=6))
        assert done[1][1] >= 3 * 8
        assert max(done[row][2].peak_entries for row in (1, 2)) == 32
        cache.check_integrity()

    def test_an_answer_never_ends_earlier_for_it(self) -> None:
        """Positions are finite: a reading that would take those of the answer is left out."""
        plan, prompts = Refeeding(every=2), [[5, 6, 7]]
        again = Refeeder(plan, prompts, spare=[5])
        tokens_read = []
        for written in range(1, 9):
            token = again.after(0, 100 + written, written, 0)
            while again.reads(0):
                tokens_read.append(token)
                token = again.next(0)
            tokens_read.append(token)
        assert tokens_read == [101, 5, 6, 7, 102, *range(103, 109)]
        assert again.read == [3]
        assert again.begun == [[1]]

    def test_nobody_is_surprised_by_the_question(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What the model would have said in the middle of a question is no thought of its answer."""
        told: dict[int, list[float]] = {0: [], 1: [], 2: []}

        def note(cache: kvkeep.RetentionCache, nats: list[float]) -> None:
            for name, each in zip(cache.rows.sequence_ids, nats, strict=True):
                told[name].append(each)

        monkeypatch.setattr(kvkeep.RetentionCache, "wants_entropy", True)
        monkeypatch.setattr(kvkeep.RetentionCache, "note_entropy", note)
        ids, mask = left_padded((7, 12, 4))
        ids = ids % 30 + 2
        write(POLICIES[0], ids, mask, [0, 1, 2], Refeeding(every=9), temperature=0.0, limits=[25] * 3)
        for row, length in enumerate((7, 12, 4)):
            prompt = ids[row, -length:].tolist()
            expected = told_with_refeeding(tiny_model(eos=None), prompt, new=25, every=9)
            assert expected.count(0.0) == 2 * length
            assert told[row] == pytest.approx(expected, abs=1e-4)

    def test_its_own_evictions_do_not_count(self) -> None:
        """A long prompt evicts while it is read; counting that would read it for ever."""
        again = Refeeder(Refeeding(evictions=2), [[5, 6]])
        assert again.after(0, 100, 1, 2) == 5
        while again.reads(0):
            again.next(0)
        assert again.after(0, 101, 2, 6) == 101  # four evictions fell into the reading
        assert again.after(0, 102, 3, 7) == 102
        assert again.after(0, 103, 4, 8) == 5


class TestSettings:
    """What headers say, and what is refused."""

    def test_headers_say_it_and_old_logs_stay_comparable(self) -> None:
        """Logs with different ways of writing must never mix; those without one must not change."""
        names = {"preset", "temperature", "top_p", "top_k", "max_total", "max_new"}
        assert set(Sampling().as_dict()) == names
        warm = Sampling(repetition_rise=0.5).as_dict()
        assert (warm["repetition_rise"], warm["repetition_ngram"], warm["repetition_window"]) == (0.5, 4, 64)
        assert set(Sampling(refeed_every=9).as_dict()) == names | {"refeed_every"}

    @pytest.mark.parametrize(
        ("options", "problem"),
        [
            ({"repetition_rise": -1}, "0 is off"),
            ({"repetition_rise": 1, "repetition_ngram": 0}, "below 1 token"),
            ({"repetition_rise": 1, "repetition_window": 4}, "use at least 5"),
            ({"repetition_window": 32}, "without repetition_rise"),
            ({"refeed_every": 0}, "below 1"),
            ({"refeed_every": 5, "refeed_evictions": 2}, "give one of them"),
        ],
    )
    def test_mistakes(self, options: dict[str, Any], problem: str) -> None:
        """Each says what is allowed."""
        with pytest.raises(ConfigError) as error:
            Sampling(**options)
        assert problem in str(error.value)

    def test_vllm_refuses_with_every_reason(self) -> None:
        """A run that silently wrote in another way would be compared as if it had not."""
        refuse_decoding(Sampling(temperature=0.6))
        with pytest.raises(UnsupportedError) as error:
            refuse_decoding(Sampling(repetition_rise=1.0, refeed_every=3))
        assert len(error.value.reasons) == 2
