"""What every policy must survive in a real cache on a real model: whole runs, compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from unittest import SkipTest

import torch
from torch import Tensor
from transformers import DynamicCache

from kvkeep.core.errors import ConfigError
from kvkeep.core.policy import Policy
from kvkeep.engine.attention import restore
from kvkeep.engine.fitting import store_kind
from kvkeep.testing.models import left_padded, tokens
from kvkeep.testing.oracle import oracle_gap
from kvkeep.testing.subject import Subject, require, shared_model
from kvkeep.testing.watching import WatchedCache, feed

_TIGHT, _CLOSE = 1e-9, 1e-5


def _oracle(family: str, subject: Subject) -> None:
    """Logits equal those of a full cache in which exactly the evicted entries are masked."""
    gap = oracle_gap(
        shared_model(family, torch.float64),
        subject.policy,
        prompts=subject.prompts,
        new=subject.new,
        **subject.options(family),
    )
    require(gap.largest < _TIGHT, f"logits differ from the oracle's by {gap.largest:.2g}")


def short_prompts(subject: Subject) -> None:
    """Prompts of one token, two, a buffer, and one more: windows that are not full yet."""
    buffer = subject.policy.buffer if subject.policy.bounded else 8
    prompts = sorted({1, 2, buffer, buffer + 1})
    if subject.policy.protects_prompt:
        prompts = [length for length in prompts if length <= subject.prompts[0]]
    gap = oracle_gap(
        shared_model("llama", torch.float64),
        subject.policy,
        prompts=prompts,
        new=subject.new,
        **subject.options(),
    )
    require(gap.largest < _TIGHT, f"logits differ from the oracle's by {gap.largest:.2g}")


def prompts_in_chunks(subject: Subject) -> None:
    """A prompt longer than the budget, read in chunks with an eviction after each: memory stays bounded."""
    subject.must_evict()
    try:
        policy = dataclasses.replace(subject.policy, prefill="chunk")
    except (ConfigError, ValueError) as error:
        raise SkipTest(f"{subject.policy.name} cannot evict between chunks: {error}") from None
    if policy.protects_prompt:
        raise SkipTest(f"{policy.name} protects the prompt")
    chunk, count = 7, policy.amount.count
    run = dataclasses.replace(subject, policy=policy).run(prompts=(2 * count, 3, count), chunk=chunk)
    bound = count + max(chunk, policy.buffer)
    fullest = max(_most_entries(forward) for forward in run.cache.seen)
    require(fullest <= bound, f"{fullest} entries per head at the fullest moment, more than {bound}")
    peak = run.cache.trace.peak_entries
    require(policy.traits.ragged or peak <= bound, f"a head holds {peak} entries, more than {bound}")
    require(
        run.cache.trace.evictions > 3, "a prompt of twice the budget was read without an eviction per chunk"
    )


def _most_entries(seen: dict[int, list[list[Tensor]]]) -> float:
    """Entries of the fullest row while a forward attends: mean over its layers and heads."""
    layers = [[[len(head) for head in row] for row in rows] for rows in seen.values()]
    return float(torch.tensor(layers, dtype=torch.float64).mean(dim=(0, 2)).max())


def alone_as_in_a_batch(subject: Subject) -> None:
    """What a sequence keeps depends on it alone: not on neighbours, padding, or the order of rows."""
    longest, _, shorter = subject.prompts  # these two evict on the same steps, the others on their own
    prompts = (longest, 1, longest // 2, shorter, 4)
    batch = subject.run(prompts=prompts)
    kept, logits = batch.kept(), batch.logits[-1][:, -1]
    for rows in ([3, 0, 4, 1, 2], [0], [1], [3]):
        other = subject.run(prompts=prompts, rows=rows)
        there = other.kept()
        for place, row in enumerate(rows):
            same = all(ours[row] == theirs[place] for ours, theirs in zip(kept, there, strict=True))
            require(same, f"sequence {row} keeps other entries in rows {rows} than in the whole batch")
            gap = float((logits[row] - other.logits[-1][place, -1]).abs().max())
            require(gap < _TIGHT, f"sequence {row} differs by {gap:.2g} in rows {rows}")


def nothing_to_evict_nothing_changed(subject: Subject) -> None:
    """With room for everything, the result is that of the stock cache, bit for bit on the same back end.

    The paged store attends by a kernel of its own: there the logits are close.
    """
    exact = store_kind(subject.store, subject.policy) == "dense"
    policy = _roomy(subject.policy)
    model = shared_model()
    for prompts in ((21, 21), (21, 4)):
        ids, mask = left_padded(prompts)
        ids = torch.cat([ids, tokens(2, 20, seed=1)], dim=1)
        mask = torch.cat([mask, torch.ones(2, 20, dtype=mask.dtype)], dim=1)
        lengths = [21, *[1] * 12, 8]
        cache = WatchedCache(model, policy, **subject.options())
        ours = torch.cat(feed(model, cache, ids, mask, lengths), 1)
        restore(model)
        theirs = torch.cat(feed(model, DynamicCache(config=model.config), ids, mask, lengths), 1)
        require(not cache.noted, "something was evicted although everything fits")
        if prompts[0] == prompts[1] and exact:
            require(
                torch.equal(ours, theirs), "logits differ from DynamicCache's although nothing was evicted"
            )
        else:
            gap = float((ours - theirs)[mask.bool()].abs().max())
            require(gap < _CLOSE, f"logits differ by {gap:.2g} from DynamicCache's")


def _roomy(policy: Policy) -> Policy:
    """The policy with room for everything: to keep, or to read."""
    if policy.bounded:
        return policy.with_budget(300)
    return policy if policy.traits.reads is None else type(policy)(**policy.options() | {"token_budget": 300})


def nothing_leaks(subject: Subject) -> None:
    """A, B, A with one policy object: both A are identical, also after an exception in between."""
    first = subject.run(seed=0)
    subject.run(seed=5)
    _fail_half_way(subject)
    again = subject.run(seed=0)
    require(first.kept() == again.kept(), "the second run of the same prompt keeps other entries")
    require(
        all(torch.equal(a, b) for a, b in zip(first.logits, again.logits, strict=True)),
        "the second run of the same prompt has other logits",
    )


class _Interrupted(Exception):
    pass


def _fail_half_way(subject: Subject) -> None:
    """Stop in the middle of a forward, with one layer served and the other not."""

    class Failing(WatchedCache):
        def after_attention(self, layer: object, step: object) -> None:
            super().after_attention(layer, step)  # type: ignore[arg-type]
            if len(self.seen) == 3:
                raise _Interrupted

    model, (ids, mask) = shared_model("llama", torch.float64), left_padded(subject.prompts)
    cache = Failing(model, subject.policy, **subject.options())
    try:
        feed(model, cache, ids, mask, [ids.shape[1] - 4, 1, 1, 1, 1])
    except _Interrupted:
        return
    raise AssertionError("the interruption was swallowed")


def _named(name: str, check: Callable[[Subject], None]) -> Callable[[Subject], None]:
    check.__name__ = name  # type: ignore[attr-defined]
    return check


CHECKS: tuple[Callable[[Subject], None], ...] = (
    *(_named(f"oracle_{family}", partial(_oracle, family)) for family in ("llama", "qwen3")),
    short_prompts,
    prompts_in_chunks,
    alone_as_in_a_batch,
    nothing_to_evict_nothing_changed,
    nothing_leaks,
)
