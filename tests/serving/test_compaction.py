"""Evictions inside blocks against plain lists of entries, over many evictions of several requests."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from kvkeep.core.errors import ScoreError
from kvkeep.core.policy import Policy
from kvkeep.engine.spec import model_spec
from kvkeep.serving.by_head import HeadCalls
from kvkeep.serving.compaction import Compaction
from kvkeep.serving.contained import CONTAINED
from kvkeep.serving.deployment import Deployment, queries_per_block
from kvkeep.serving.heads import EqualHeads, UnequalHeads
from kvkeep.serving.layout import Layout
from kvkeep.serving.pages import LayerPages
from kvkeep.serving.rounds import Round, RoundPlanner
from kvkeep.serving.schedule import PromptHandling, Schedule
from kvkeep.serving.settings import Settings
from kvkeep.testbed.shipped import shipped_model
from kvkeep.testing.views import kept, make_counts, make_view
from tests.calibrated import make_layer, make_rope
from tests.serving.storage import Kernel

HEADS, KV_HEADS, DIM, SLOTS, LAYER = 4, 2, 8, 8, 1
BUDGET, BUFFER, SEED = 20, 8, 3

POLICIES: dict[str, dict[str, Any]] = {
    "streaming-llm": {},
    "key-norm": {},
    "keydiff": {},
    "snapkv": {"window": 6},
    "tova": {},
    "r-kv": {"window": 4},
    "random": {},
    "vase-dkv": {},
    "vase-attnv": {},
    "triattention": {"mode": "per-layer-per-head"},
    "set-diversity": {"mode": "per-layer-per-head"},
    "snapkv + adaptive-heads": {"window": 6},
    "vase-dkv + adaptive-heads": {},
}


@dataclass
class Row:
    """A request as lists: per KV head, the entries that it holds, oldest first."""

    prompt: int
    blocks: list[int]
    keys: list[Tensor] = field(default_factory=list)  # of every token, [kv_heads, dim]
    values: list[Tensor] = field(default_factory=list)
    queries: list[Tensor] = field(default_factory=list)  # [heads, dim]
    held: list[list[int]] = field(default_factory=lambda: [[] for _ in range(KV_HEADS)])
    evictions: int = 0
    name: int = 0
    broken: int = -1  # a token whose key is no number

    def read(self) -> None:
        """A new token."""
        for tokens, heads in ((self.keys, KV_HEADS), (self.values, KV_HEADS), (self.queries, HEADS)):
            tokens.append(torch.randn(heads, DIM))
        if len(self.keys) == self.broken + 1:
            self.keys[-1][0] = float("nan")
        for head in self.held:
            head.append(len(self.keys) - 1)

    def evict(self, policy: Policy, limit: int, statistics: Any, rope: Any) -> None:
        """One eviction, by a view built from scratch."""
        if any(self.broken in head[: -policy.recent] for head in self.held):
            sinks = policy.sinks
            self.held = [head[:sinks] + head[sinks - limit :] for head in self.held]
            self.evictions += 1
            return
        lengths = [len(head) for head in self.held]
        every, longest = torch.arange(KV_HEADS)[:, None], max(lengths)
        positions = torch.tensor([head + [0] * (longest - len(head)) for head in self.held])
        window, seen = policy.traits.queries, len(self.keys)
        recorded: dict[str, Any] = {"calibration": statistics, "rope": rope}
        if window:
            first = max(0, seen - window)
            found = torch.stack(self.queries[first:], 1)
            blank = torch.zeros(HEADS, window - found.shape[1], DIM)
            recorded["queries"] = torch.cat([blank, found], 1)[None]
            times = torch.arange(seen - window, seen)
            recorded["query_positions"] = torch.where(times < 0, -1, times)[None]
        view = make_view(
            policy,
            lengths=[lengths],
            keys=torch.stack(self.keys, 1)[every, positions][None],
            values=torch.stack(self.values, 1)[every, positions][None],
            positions=positions[None],
            seq_lens=[seen],
            prompt_lens=[limit - BUDGET],
            layer=LAYER,
            run_seed=SEED,
            sequence_ids=[self.name],
            evictions=[self.evictions],
            **recorded,
        )
        decision = policy.decide([view], [make_counts(view, limit)])[0]
        self.held = [[old[i] for i in new] for old, new in zip(self.held, kept(decision)[0], strict=True)]
        self.evictions += 1


class Worker:
    """One layer as the plug-in runs it, without vLLM: plan, evict, write, record."""

    def __init__(self, policy: Policy, schedule: Schedule, order: str, statistics: Any, rope: Any) -> None:
        self.kernel, self.schedule = Kernel(order, SLOTS, DIM), schedule
        cache = 100.0 * torch.randn(80, KV_HEADS, SLOTS, 2 * DIM)  # what others left
        layout = Layout.learn(
            self.kernel.write, slots=SLOTS, dim=DIM, dtype=torch.float32, device=torch.device("cpu")
        )
        window = policy.traits.queries
        per_block = queries_per_block(SLOTS, HEADS, KV_HEADS) if window else 0
        self.pages = LayerPages(cache, layout, HEADS, per_block)
        ragged = policy.traits.ragged
        self.heads = UnequalHeads(self.pages, BUFFER) if ragged else EqualHeads(self.pages)
        self.planner = RoundPlanner(schedule, window, per_block, ragged=ragged)
        deployment = Deployment(
            settings=Settings(policy=policy.name, budget=BUDGET, seed=SEED),
            policy=policy,
            model=model_spec(AutoConfig.from_pretrained(shipped_model("trace-1"))),
            rope=rope,
            statistics={LAYER: statistics},
        )
        self.compaction = Compaction(deployment, LAYER, self.pages, self.heads, 1.0)

    def step(self, rows: list[Row], counts: list[int]) -> None:
        """Store what ``rows`` have just read."""
        width = max(len(row.blocks) for row in rows) + 1
        table = torch.tensor([row.blocks + [0] * (width - len(row.blocks)) for row in rows]).int()
        starts = np.array([len(row.keys) for row in rows]) - counts
        new = [slice(start, None) for start in starts]

        def joined(name: str) -> Tensor:
            tokens = [
                token for row, part in zip(rows, new, strict=True) for token in getattr(row, name)[part]
            ]
            return torch.stack(tokens)

        keys, values, queries = joined("keys"), joined("values"), joined("queries")
        for one in self.planner.plan(starts, np.array(counts), table):
            pick = torch.arange(len(keys)) if one.tokens is None else one.tokens
            if one.cuts is not None:
                owners = {row.blocks[self.schedule.side_blocks]: row.name for row in rows}
                names = [owners[block] for block in one.cuts.blocks[:, 0].tolist()]
                self.compaction.evict(replace(one.cuts, names=torch.tensor(names)))
            self.write(one, keys[pick], values[pick])
            if one.record is not None:
                tokens, blocks, places = one.record
                part = queries[pick] if tokens is None else queries[pick][tokens]
                self.pages.record(blocks, places, part)

    def write(self, one: Round, keys: Tensor, values: Tensor) -> None:
        """Store a round, by blocks or, where heads differ in length, by pages."""
        if one.rows is None:
            self.kernel.write(keys, values, self.pages.cache, one.slots)
            return
        rows = one.rows
        calls = HeadCalls.of(rows, self.heads.of(rows.blocks, rows.before, rows.fresh), SLOTS)
        self.kernel.write(calls.gather(keys), calls.gather(values), self.pages.by_page(), calls.slots)

    def entries(self, row: Row) -> tuple[Tensor, Tensor, list[int]]:
        """What stands in the slots of a row, and how many of them count, per head."""
        blocks = torch.tensor([row.blocks[self.schedule.side_blocks :]])
        mean = torch.tensor([sum(map(len, row.held)) // KV_HEADS])
        heads = self.heads.of(blocks, mean, torch.tensor([row.evictions == 0]))
        keys, values = (self.pages.read(name, heads.table)[0] for name in ("keys", "values"))
        return keys, values, heads.held[0].tolist()


def check(worker: Worker, row: Row) -> None:
    """The slots hold the entries of the list, in whatever order."""
    keys, values, counts = worker.entries(row)
    assert counts == [len(positions) for positions in row.held]
    for head, positions in enumerate(row.held):
        count = counts[head]
        slots = torch.cat([keys[head, :count], values[head, :count]], -1).nan_to_num(1e9)
        found = [torch.cat([row.keys[at][head], row.values[at][head]]) for at in positions]
        wanted = torch.stack(found).nan_to_num(1e9)
        assert sorted(map(tuple, slots.tolist())) == sorted(map(tuple, wanted.tolist()))


def run(
    name: str, prompt: PromptHandling, order: str = "plain", *, broken: int = -1, **options: Any
) -> list[Row]:
    """Three requests of different lengths, in chunks and single tokens, checked after each step."""
    settings = Settings(
        policy=name,
        budget=BUDGET,
        buffer=BUFFER,
        prefill="defer" if prompt == "defer" else "chunk",
        prompt="kept" if prompt == "kept" else "counts",
        options=options,
        seed=SEED,
    )
    policy = settings.make_policy()
    window = policy.traits.queries
    schedule = Schedule(
        budget=BUDGET,
        buffer=BUFFER,
        block_size=SLOTS,
        prompt=prompt,
        side_blocks=-(-window // queries_per_block(SLOTS, HEADS, KV_HEADS)),
        spare=SLOTS - 1 if policy.traits.ragged else 0,
    )
    torch.manual_seed(0)
    statistics, rope = make_layer(HEADS, 5), make_rope(DIM)
    worker = Worker(policy, schedule, order, statistics, rope)
    free = iter((torch.randperm(79) + 1).tolist())
    rows = [
        Row(prompt=length, blocks=[next(free) for _ in range(schedule.blocks(length))], name=7 * length)
        for length in (50, 3, 21)
    ]
    rows[1].broken = broken
    for counts in ([17, 3, 21], [13, 1, 1], [20, 1, 1], *([[1, 1, 1]] * 24), [30, 30, 25]):
        for row, count in zip(rows, counts, strict=True):
            limit, first = schedule.kept(row.prompt), schedule.first(row.prompt)
            for _ in range(count):
                if schedule.cuts(len(row.keys), kept=limit, first=first):
                    row.evict(policy, limit, statistics, rope)
                row.read()
        worker.step(rows, counts)
        for row in rows:
            check(worker, row)
    return rows


@pytest.mark.parametrize("prompt", ["chunk", "defer", "kept"])
@pytest.mark.parametrize("name", POLICIES)
def test_slots_hold_what_the_policy_kept(name: str, prompt: PromptHandling) -> None:
    """A request would attend to other tokens than its policy chose."""
    if prompt == "defer" and "adaptive" in name:
        return  # refused at start: a deferred prompt needs more slots than heads of different length share
    options = dict(POLICIES[name])
    if prompt != "kept" and name in ("triattention", "set-diversity"):
        options["protect_prompt"] = False
    rows = run(name, prompt, **options)
    assert min(row.evictions for row in rows) >= 2


@pytest.mark.parametrize("order", ["side by side", "transposed keys", "interleaved", "scrambled"])
def test_slots_hold_what_the_policy_kept_in_any_layout(order: str) -> None:
    """On another instruction set keys would be moved in pieces."""
    run("vase-attnv", "kept", order)


@pytest.mark.parametrize("name", ["key-norm", "vase-dkv", "snapkv"])
def test_a_request_that_cannot_be_judged_stands_alone(name: str) -> None:
    """One client's broken text would end the engine, and everybody's requests."""
    before = CONTAINED.evictions
    rows = run(name, "chunk", broken=6, **POLICIES[name])
    assert min(row.evictions for row in rows) >= 2
    assert CONTAINED.evictions > before


def test_a_request_that_cannot_be_judged_among_heads_of_different_length() -> None:
    """Its pages would be shared out by numbers that are none."""
    before = CONTAINED.evictions
    run("key-norm + adaptive-heads", "chunk", broken=6)
    assert CONTAINED.evictions > before


def test_scores_of_the_wrong_shape_stop_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that is broken for everybody would be replaced by another one in silence."""
    monkeypatch.setattr("kvkeep.policies.key_norm.KeyNorm.score", lambda self, view: torch.zeros(1))
    with pytest.raises(ScoreError, match="scores of shape"):
        run("key-norm", "chunk")
