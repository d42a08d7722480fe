"""vase-attnv: every mode of the official code, and the reductions between them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvkeep
from kvkeep.core.errors import ConfigError
from kvkeep.scoring.value_magnitude import MAGNITUDES, value_magnitude
from kvkeep.testing.views import SHAPES, decide, kept, make_view
from tests.reference import vase
from tests.reference.heads import heads

# The official names (methods 2.3) and what they are here.
MODES: dict[str, dict[str, Any]] = {
    "attn": {"reserve": 0, "sample": False, "sinks": 0},
    "attn_sample": {"reserve": 0, "sinks": 0},
    "range_attn": {"reserve": 6, "sample": False, "sinks": 0},
    "range_sample_attn": {"reserve": 6, "sinks": 0},
    "range_sink_sample_attn": {"reserve": 6},
    "var_sink_sample_attn": {"reserve": 6, "magnitude": "variance"},
    "l2_sink_sample_attn": {"reserve": 6, "magnitude": "l2"},
    "attn_random": {"reserve": 6, "magnitude": "random", "sample": False, "sinks": 0},
    "evict_large_range": {"select_by": "smallest", "sinks": 0},
    "evict_random": {"select_by": "random", "sinks": 0},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("mode", MODES)
def test_official_modes(shape: dict[str, Any], mode: str) -> None:
    """A table of ablations is only worth something if each row is the rule it is named after."""
    policy = kvkeep.VaSEAttnV(budget=24, buffer=8, **MODES[mode])
    view = make_view(policy, **shape)
    lots = view.random.uniform(view.positions) if policy.traits.random else None
    second = view.random.uniform(view.positions, purpose=1) if policy.magnitude == "random" else None
    expected = []
    for row in heads(view):
        expected.append([])
        for head in row:
            pick = slice(0, head.size)
            expected[-1].append(
                vase.kept(
                    head,
                    count=24,
                    buffer=8,
                    mode=mode,
                    reserve=6,
                    lots=[] if lots is None else lots[head.row, head.number, pick].tolist(),
                    reserve_lots=[] if second is None else second[head.row, head.number, pick].tolist(),
                )
            )
    assert kept(decide(policy, view)) == expected


@pytest.mark.parametrize(("pool", "temperature"), [(1, 1.0), (7, 1.0), (5, 0.25)])
def test_pool_and_temperature(pool: int, temperature: float) -> None:
    """The switches of the attention score reach it."""
    policy = kvkeep.VaSEAttnV(budget=24, buffer=8, pool=pool, temperature=temperature)
    view = make_view(policy, lengths=(40,), group=3)
    lots = view.random.uniform(view.positions)
    expected = [
        vase.kept(
            head,
            count=24,
            buffer=8,
            mode="range_sink_sample_attn",
            reserve=6,
            lots=lots[0, head.number].tolist(),
            pool=pool,
            temperature=temperature,
        )
        for head in heads(view)[0]
    ]
    assert kept(decide(policy, view))[0] == expected


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
class TestReductions:
    """Law 6 and methods 2.9: switches that are off leave the simpler method, entry by entry."""

    def test_nothing_on_is_snapkv(self, shape: dict[str, Any]) -> None:
        """No reserve, no sampling, no sinks."""
        policy = kvkeep.VaSEAttnV(budget=24, buffer=8, reserve=0, sample=False, sinks=0)
        snapkv = kvkeep.SnapKV(budget=24, buffer=8)
        view, same = make_view(policy, **shape), make_view(snapkv, **shape)
        assert torch.equal(policy.score(view), snapkv.score(same))
        assert kept(decide(policy, view)) == kept(decide(snapkv, same))

    def test_reserve_of_all_slots_is_top_range(self, shape: dict[str, Any]) -> None:
        """With N_v = C - B nothing is left for attention or chance."""
        for sample in (True, False):
            policy = kvkeep.VaSEAttnV(budget=24, buffer=8, reserve=16, sample=sample, sinks=0)
            view = make_view(policy, **shape)
            low, high = view.values.double().amin(-1), view.values.double().amax(-1)
            for row, parts in enumerate(kept(decide(policy, view))):
                size = shape["lengths"][row]
                for head, chosen in enumerate(parts):
                    ranges = (high - low)[row, head, : size - 8]
                    # bfloat16 ranges tie; the lowest index wins, as in a stable sort.
                    best = ranges.sort(descending=True, stable=True).indices[:16].sort().values.tolist()
                    assert chosen == best + list(range(size - 8, size))

    def test_the_reserve_is_kept_whatever_the_draw(self, shape: dict[str, Any]) -> None:
        """Different seeds change the sample, never the reserve, the sinks or the buffer."""
        policy, kinds = kvkeep.VaSEAttnV(budget=24, buffer=8), []
        only = kvkeep.VaSEAttnV(budget=24, buffer=8, sample=False)
        for seed in range(8):
            kinds.append(kept(decide(policy, make_view(policy, **shape, run_seed=seed))))
        view = make_view(only, **shape)
        ranges = value_magnitude(view.values).masked_fill(~view.candidates, -1)
        # N_v = 24 / 4 = 6 slots, 4 of them sinks.
        for row in range(len(shape["lengths"])):
            for head in range(view.shape[1]):
                largest = ranges[row, head].topk(2).indices.tolist()
                always = set.intersection(*(set(answer[row][head]) for answer in kinds))
                assert {0, 1, 2, 3, *largest} <= always

    def test_protected_when_everything_ties(self, shape: dict[str, Any]) -> None:
        """Law 5: sinks and newest stay also when no score says anything."""
        shape = {k: v for k, v in shape.items() if k not in ("head_dim", "value_dim")}
        size = (len(shape["lengths"]), shape.get("kv_heads", 2), max(shape["lengths"]), 4)
        for policy in (kvkeep.VaSEAttnV(budget=24, buffer=8), kvkeep.VaSEDKV(budget=24, buffer=8)):
            ties = torch.ones(size)
            decide(policy, make_view(policy, **shape | {"keys": ties, "values": ties}))


class TestMagnitudes:
    """How large a value is."""

    def test_by_hand(self) -> None:
        """Range 5, unbiased variance 19/3, norm sqrt(14)."""
        value = torch.tensor([[[[3.0, -2.0, 1.0]]]])
        assert value_magnitude(value, "range").item() == 5
        assert value_magnitude(value, "variance").item() == pytest.approx(19 / 3)
        assert value_magnitude(value, "l2").item() == pytest.approx(14**0.5)

    @pytest.mark.parametrize("kind", MAGNITUDES)
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision_is_measured_in_float32(self, kind: Any, dtype: torch.dtype) -> None:
        """A range of 2 * 60000 overflows float16; rounding to bfloat16 makes ties."""
        values = torch.tensor([[[[60000.0, -60000.0]]]]).to(dtype)
        answer = value_magnitude(values, kind)
        assert answer.dtype == torch.float32
        assert bool(answer.isfinite().all())
        torch.testing.assert_close(answer, value_magnitude(values.float(), kind))


class TestConfiguration:
    """Defaults and refusals."""

    @pytest.mark.parametrize(("budget", "slots"), [(4096, 1024), (2048, 512), (1024, 256), (80, 16)])
    def test_reserve_is_a_quarter(self, budget: int, slots: int) -> None:
        """The paper's N_v = C/4, cut to what the buffer leaves."""
        assert kvkeep.VaSEAttnV(budget=budget).reserve_slots(budget) == slots

    def test_records_only_what_it_reads(self) -> None:
        """A control that ignores attention must not cost a query ring."""
        assert kvkeep.VaSEAttnV(budget=24, buffer=8).traits.queries == 8
        assert kvkeep.VaSEAttnV(budget=24, buffer=8, select_by="random").traits.queries == 0
        assert not kvkeep.VaSEAttnV(budget=24, buffer=8, sample=False).traits.random
        assert kvkeep.VaSEAttnV(budget=24, buffer=8, sample=False, magnitude="random").traits.random

    def test_smallest_random_magnitude_runs(self) -> None:
        """The traits must declare the random source also for this odd pair of switches."""
        policy = kvkeep.VaSEAttnV(budget=24, buffer=8, select_by="smallest", magnitude="random")
        decide(policy, make_view(policy))

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (
                {"magnitude": "l1"},
                "vase-attnv: magnitude 'l1' is none of ('range', 'variance', 'l2', 'random').",
            ),
            (
                {"select_by": "largest"},
                "vase-attnv: select_by 'largest' is none of 'attention', 'smallest', 'ra",
            ),
            ({"pool": 4}, "vase-attnv: pool 4 is not odd."),
            ({"temperature": 0}, "vase-attnv: temperature 0 is not positive."),
            ({"reserve": -1}, "vase-attnv: reserve -1 is negative."),
            (
                {"reserve": 17},
                "vase-attnv: a reserve of 17 does not fit the 16 slots that a budget of 24 leaves",
            ),
            (
                {"sinks": 17},
                "vase-attnv: 17 sinks and 8 newest entries are always kept, more than the budget",
            ),
            ({"buffer": 24}, "vase-attnv: the 24 newest entries are always kept, which leaves nothing"),
        ],
    )
    def test_errors(self, options: dict[str, Any], message: str) -> None:
        """A setting that cannot be right must be named, not run."""
        with pytest.raises(ConfigError) as error:
            kvkeep.VaSEAttnV(**{"budget": 24, "buffer": 8} | options)
        assert str(error.value).startswith(message)
