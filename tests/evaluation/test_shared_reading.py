"""One reading for many policies: nothing may differ from each reading alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import kvkeep
from kvkeep.calibration import capture
from kvkeep.core.errors import CacheError, ConfigError
from kvkeep.core.policy import Policy
from kvkeep.evaluation.decoding import decode, read
from kvkeep.evaluation.probing import probe
from kvkeep.evaluation.sampling import Sampler, Sampling
from kvkeep.evaluation.shared_reading import SharedReading
from kvkeep.evaluation.side_by_side import SideBySide
from kvkeep.policies.compose import policy as make
from kvkeep.testing.models import left_padded, random_block_gates, random_gates, tiny_model, tokens
from kvkeep.testing.watching import feed

NEW = 20


def policies(prefill: str) -> list[Policy]:
    """Every policy there is."""
    chosen = []
    for name in kvkeep.available_policies():
        options: dict[str, Any] = {"protect_prompt": False} if name in ("triattention", "raas") else {}
        chosen.append(make(name, budget=24, buffer=8, prefill=prefill, **options))
    return chosen


def statistics(model: PreTrainedModel) -> Any:
    """Query statistics of the tiny model."""
    return capture(model, tokens(1, 200)[0])


def caches(model: PreTrainedModel, prefill: str, rows: int = 1) -> list[kvkeep.RetentionCache]:
    """One empty cache for every policy."""
    found, gates, block_gates = statistics(model), random_gates(model), random_block_gates(model, block=64)
    return [
        kvkeep.RetentionCache(
            model,
            policy,
            sequence_ids=list(range(rows)),
            calibration=found,
            gates=gates if policy.traits.reads is None else block_gates,
            trace_rows=True,
        )
        for policy in policies(prefill)
    ]


def write(model: PreTrainedModel, cache: Any, ids: Any, mask: Any, **more: Any) -> list[Any]:
    """Greedy texts of all rows, with what was measured."""
    done = decode(
        model,
        cache,
        ids,
        mask,
        limits=[NEW] * len(ids),
        end_tokens=frozenset(),
        sampler=Sampler(Sampling(max_new=NEW)),
        **more,
    )
    return [(one.row, one.tokens, one.trace) for one in done]


@pytest.mark.parametrize(
    ("prefill", "chunk", "prompts"),
    [("after", None, (45,)), ("after", 11, (30, 45, 7)), ("defer", 11, (45,)), ("defer", None, (30, 45, 7))],
)
def test_every_policy_writes_what_it_would_have_written_alone(
    prefill: str, chunk: int | None, prompts: tuple[int, ...]
) -> None:
    """A saving that changes a single token or entry would make all results of a page wrong."""
    model = tiny_model("llama", dtype=torch.float64)
    ids, mask = left_padded(prompts)
    together, alone = (caches(model, prefill, len(prompts)) for _ in range(2))
    logits = read(model, SharedReading(together), ids, mask, chunk)
    for shared, single in zip(together, alone, strict=True):
        ours = write(model, shared, ids, mask, logits=logits)
        theirs = write(model, single, ids, mask, chunk=chunk)
        assert ours == theirs, shared.policy.name
        assert shared.trace.evictions == single.trace.evictions
        if shared.policy.bounded:
            assert shared.trace.evictions > 0
        for layer in shared.spec.managed:
            for mine, other in zip(shared.kept_positions(layer), single.kept_positions(layer), strict=True):
                assert all(torch.equal(*pair) for pair in zip(mine, other, strict=True)), shared.policy.name


def test_layers_that_keep_their_own_cache_are_shared_too() -> None:
    """A sliding layer that only one cache had filled would leave the others half blind."""
    model = tiny_model("gemma3", dtype=torch.float64)
    ids, mask = left_padded((40,))
    chosen = [kvkeep.Full(), kvkeep.KeyDiff(budget=16, buffer=4, prefill="after")]
    together = [kvkeep.RetentionCache(model, policy, trace_rows=True) for policy in chosen]
    logits = read(model, SharedReading(together), ids, mask, 9)
    for shared, policy in zip(together, chosen, strict=True):
        single = kvkeep.RetentionCache(model, policy, trace_rows=True)
        assert write(model, shared, ids, mask, logits=logits) == write(model, single, ids, mask, chunk=9)


@pytest.mark.parametrize("limit", [NEW, 3])
def test_probes_write_greedily_and_score_the_answer(limit: int) -> None:
    """Rows and caches that go side by side would disturb each other, or the wrong token would be scored."""
    model = tiny_model("llama", dtype=torch.float64)
    ids, mask = left_padded((45,))
    answer = tokens(1, 6, seed=5)[0].tolist()
    together, alone, forced = (caches(model, "after") for _ in range(3))
    logits = read(model, SharedReading(together), ids, mask, 11)
    found = probe(model, together, logits, answer, limit=limit)
    whole = torch.cat([ids, torch.tensor([answer])], 1)
    for one, single, other in zip(found, alone, forced, strict=True):
        [(_, greedy, _)] = write(model, single, ids, mask)
        assert list(one.written) == greedy[:limit], single.policy.name
        given = torch.cat(feed(model, other, whole, torch.ones_like(whole), [45, *[1] * 5]), 1)
        logp = given[0, 44:].log_softmax(-1)
        wanted = [-float(logp[place, token]) for place, token in enumerate(answer)]
        assert one.nats == pytest.approx(wanted, rel=1e-9), single.policy.name
        assert one.trace.policy == single.policy.name
        if single.policy.bounded:
            assert one.trace.evictions >= 1
            assert one.trace.mean_entries < 40


def test_a_probe_stops_at_an_end_token() -> None:
    """What a model says after its end is no answer, and an early end must not cut the score short."""
    model = tiny_model("llama", dtype=torch.float64)
    ids, mask = left_padded((45,))
    answer = tokens(1, 6, seed=5)[0].tolist()

    def probed(end: frozenset[int]) -> Any:
        cache = kvkeep.RetentionCache(model, kvkeep.KeyDiff(budget=24, buffer=8, prefill="after"))
        return probe(model, [cache], read(model, cache, ids, mask), answer, limit=NEW, end_tokens=end)[0]

    free = probed(frozenset())
    ended = probed(frozenset({free.written[2]}))
    assert ended.written == free.written[: free.written.index(free.written[2])]
    assert ended.nats == free.nats
    assert len(free.nats) == 6


def test_what_cannot_be_shared_is_refused() -> None:
    """Caches that had parted would be fed the attention of another."""
    model = tiny_model("llama")
    ids, mask = left_padded((20,))
    with pytest.raises(ConfigError, match="prefill='chunk'"):
        SharedReading([kvkeep.RetentionCache(model, kvkeep.H2O(budget=24, buffer=8, prefill="chunk"))])
    with pytest.raises(ConfigError, match="at least one"):
        SharedReading([])
    cache = kvkeep.RetentionCache(model, kvkeep.H2O(budget=24, buffer=8))
    shared = SharedReading([cache])
    read(model, shared, ids, mask)
    with pytest.raises(CacheError, match="decode with"):
        feed(model, shared, ids[:, :1].repeat(1, 21), torch.ones(1, 21, dtype=torch.int64), [1])
    with pytest.raises(ConfigError, match="empty"):
        SharedReading([cache])
    with pytest.raises(ConfigError, match="one row"):
        probe(model, [cache], torch.zeros(1, 96), [], limit=3)
    with pytest.raises(ConfigError, match="filled"):
        SideBySide([cache, kvkeep.RetentionCache(model, kvkeep.Full())])
    sliding = tiny_model("gemma3")
    other = kvkeep.RetentionCache(sliding, kvkeep.Full())
    read(sliding, other, ids, mask)
    with pytest.raises(ConfigError, match="full attention"):
        SideBySide([other])


def test_few_bits_share_a_reading_when_they_wait_for_its_end() -> None:
    """Rounded while it is read, a prompt would be attended to by one cache and stored by another."""
    model = tiny_model("llama", dtype=torch.float64)
    ids, mask = left_padded((45,))
    precision = kvkeep.Precision(bits=4, group=8, reserve=4, recent=4)
    chosen = [kvkeep.KeyDiff(budget=24, buffer=8, prefill="after"), kvkeep.Full(buffer=8, prefill="after")]

    def make_all() -> list[kvkeep.RetentionCache]:
        return [kvkeep.RetentionCache(model, each, precision=precision, trace_rows=True) for each in chosen]

    together, alone = make_all(), make_all()
    logits = read(model, SharedReading(together), ids, mask, 11)
    for shared, single in zip(together, alone, strict=True):
        assert write(model, shared, ids, mask, logits=logits) == write(model, single, ids, mask, chunk=11)
        assert shared.trace.few_bits_entries > 0
    hasty = kvkeep.RetentionCache(model, kvkeep.Full(buffer=8), precision=precision)
    with pytest.raises(ConfigError, match="writes a prompt down in few bits while it is read"):
        SharedReading([hasty])
