"""Writing a batch token by token; a sequence that has ended leaves the batch at once.

``model.generate`` goes on until the longest sequence of a batch has ended, which under a policy that
makes models loop is always the length limit. Here the rest of the batch shrinks, every sequence is handed
out when it ends, and what it held is measured up to its own end.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from kvkeep.engine.generation import cache_argument
from kvkeep.engine.retention_cache import RetentionCache
from kvkeep.engine.row_trace import RowTrace
from kvkeep.engine.surprise import entropy_of
from kvkeep.evaluation.refeeding import Refeeder, Refeeding
from kvkeep.evaluation.sampling import Sampler


@dataclass(frozen=True, kw_only=True)
class Written:
    """One sequence that has ended.

    Parameters
    ----------
    row
        Its row in the batch that went in.
    tokens
        What was written, the end token left out.
    ended
        By an end token, not at its length limit.
    trace
        Its measured cache.
    read_seconds, write_seconds
        Its share of the time that the batch took.
    refed
        Tokens of the prompt that it read again.
    readings
        Tokens of the answer that were stored when each of these readings began.
    """

    row: int
    tokens: list[int]
    ended: bool
    trace: RowTrace
    read_seconds: float
    write_seconds: float
    refed: int = 0
    readings: tuple[int, ...] = ()


@torch.inference_mode()
def decode(
    model: PreTrainedModel,
    cache: RetentionCache,
    ids: Tensor,
    mask: Tensor,
    *,
    limits: Sequence[int],
    end_tokens: frozenset[int],
    sampler: Sampler,
    chunk: int | None = None,
    logits: Tensor | None = None,
    refeeding: Refeeding | None = None,
    spare: Sequence[int] | None = None,
) -> Iterator[Written]:
    """Write every sequence of a batch to its end.

    Parameters
    ----------
    cache
        Empty, built with ``trace_rows=True`` and with the sequence ids that decide the random numbers.
    ids, mask
        int64 ``[batch, tokens]``, padded on the left.
    limits
        Most tokens to write, per row.
    end_tokens
        Tokens that end a sequence.
    sampler
        Chooses the tokens.
    chunk
        Read the prompt so many tokens at a time.
    logits
        What :func:`read` returned, if the cache has read the prompt already.
    refeeding, spare
        When rows read their prompts again, and positions that each of them can spare for it.

    Yields
    ------
    Written
        As soon as a sequence ends.
    """
    clock = _Clock(ids.device)
    logits = read(model, cache, ids, mask, chunk) if logits is None else logits
    read_seconds = clock.lap() / len(ids)
    rows = list(range(len(ids)))
    written: list[list[int]] = [[] for _ in rows]
    lengths = mask.sum(-1)
    prompts = [row[seen.bool()].tolist() for row, seen in zip(ids, mask, strict=True)]
    again = Refeeder(refeeding or Refeeding(), prompts, spare)
    spent = 0.0
    while True:
        names = torch.tensor(cache.rows.sequence_ids, device=ids.device)
        texts = [written[row] for row in rows]
        steps = torch.tensor([len(text) for text in texts], device=ids.device)
        tokens = sampler.choose(logits, names, steps, texts).tolist()
        rounds = cache.evictions_by_row if refeeding is not None else [0] * len(rows)
        ended = {}
        for place, row in enumerate(rows):
            if again.reads(row):
                tokens[place] = again.next(row)
                continue
            token = tokens[place]
            if token not in end_tokens:
                written[row].append(token)
            if token in end_tokens or len(written[row]) == limits[row]:
                ended[place] = token in end_tokens
            elif refeeding is not None:
                tokens[place] = again.after(row, token, len(written[row]), rounds[place])
        spent += clock.lap() / len(rows)
        traces = cache.row_traces if ended else []
        for place, by_itself in ended.items():
            row = rows[place]
            yield Written(
                row=row,
                tokens=written[row],
                ended=by_itself,
                trace=traces[place],
                read_seconds=read_seconds,
                write_seconds=spent,
                refed=again.read[row],
                readings=tuple(again.begun[row]),
            )
        if cache.wants_entropy:
            told = entropy_of(logits).tolist()
            cache.note_entropy([again.entropy(row, nats) for row, nats in zip(rows, told, strict=True)])
        clock.lap()  # what the consumer did with the texts is not ours
        live = [place for place in range(len(rows)) if place not in ended]
        if not live:
            return
        if ended:
            index = torch.tensor(live, device=ids.device)
            cache.batch_select_indices(index)
            rows, tokens = [rows[place] for place in live], [tokens[place] for place in live]
            mask, lengths = mask[index], lengths[index]
        mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=-1)
        logits = _forward(model, cache, ids.new_tensor(tokens)[:, None], mask, lengths[:, None])
        lengths = lengths + 1


@torch.inference_mode()
def read(model: PreTrainedModel, cache: Cache, ids: Tensor, mask: Tensor, chunk: int | None = None) -> Tensor:
    """Read the prompts of a batch.

    Parameters
    ----------
    cache
        Empty; a :class:`~kvkeep.RetentionCache`, or a
        :class:`~kvkeep.evaluation.shared_reading.SharedReading` of several.
    ids, mask, chunk
        As for :func:`decode`.

    Returns
    -------
    Tensor
        Logits of the last tokens, ``[batch, vocabulary]``.
    """
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    columns = ids.shape[1]
    starts = list(range(0, columns, chunk or columns))
    if len(starts) > 1 and columns - starts[-1] == 1:
        starts.pop()  # a chunk of one token would pass for a decode step
    for start, stop in zip(starts, [*starts[1:], columns], strict=True):
        logits = _forward(model, cache, ids[:, start:stop], mask[:, :stop], positions[:, start:stop])
    return logits


def _forward(model: PreTrainedModel, cache: Cache, ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
    options: dict[str, Any] = {cache_argument(model): cache, "use_cache": True}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        options["logits_to_keep"] = 1
    output = model(input_ids=ids, attention_mask=mask, position_ids=positions, **options)
    return output.logits[:, -1]  # type: ignore[no-any-return]


class _Clock:
    """Seconds between calls; waits for a GPU first, whose work would be billed to the next call."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last call."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        last, self._last = self._last, time.perf_counter()
        return self._last - last
