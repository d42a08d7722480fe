"""One head of a view as plain Python numbers (float64), and the arithmetic that the references share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvkeep.core.view import LayerView

Vector = list[float]


@dataclass
class Head:
    """What one KV head of one sequence holds; empty slots are gone."""

    row: int
    number: int
    keys: list[Vector]
    values: list[Vector]
    positions: list[int]
    protected: list[bool]
    seq_len: int
    queries: list[list[Vector]]  # [query head of the group][window]
    query_positions: list[int]
    attention_sum: list[float]
    log_retention: list[float]

    @property
    def size(self) -> int:
        """Entries stored."""
        return len(self.positions)

    def older_than(self, recent: int) -> list[int]:
        """Indices of the entries that are not among the newest ``recent`` tokens."""
        return [i for i, position in enumerate(self.positions) if position < self.seq_len - recent]


def heads(view: LayerView) -> list[list[Head]]:
    """Take a view apart, ``[batch][kv_heads]``."""
    batch, count, _ = view.shape
    traits = view.traits
    answer = []
    for row in range(batch):
        answer.append([])
        for number in range(count):
            size = int(view.valid[row, number].sum())
            queries: list[list[Vector]] = []
            times: list[int] = []
            if traits.queries:
                group = view.queries.shape[1] // count
                mine = view.queries[row, number * group : (number + 1) * group]
                queries, times = mine.double().tolist(), view.query_positions[row].tolist()
            sums = view.attention_sum[row, number, :size].tolist() if traits.attention_sum else []
            decay = view.log_retention[row, number, :size].tolist() if traits.log_retention else []
            answer[-1].append(
                Head(
                    row=row,
                    number=number,
                    keys=view.keys[row, number, :size].double().tolist(),
                    values=view.values[row, number, :size].double().tolist(),
                    positions=view.positions[row, number, :size].tolist(),
                    protected=view.protected[row, number, :size].tolist(),
                    seq_len=int(view.seq_lens[row]),
                    queries=queries,
                    query_positions=times,
                    attention_sum=sums,
                    log_retention=decay,
                )
            )
    return answer


def dot(a: Sequence[float], b: Sequence[float]) -> float:
    """Scalar product."""
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def length(a: Sequence[float]) -> float:
    """Euclidean length."""
    return math.sqrt(dot(a, a))


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    """Cosine of the angle between two vectors."""
    return dot(a, b) / (length(a) * length(b))


def softmax(logits: Sequence[float]) -> list[float]:
    """Softmax."""
    peak = max(logits)
    weights = [math.exp(x - peak) for x in logits]
    total = math.fsum(weights)
    return [w / total for w in weights]


def keep_top(scores: Sequence[float], count: int, kept: Iterable[int], among: Iterable[int]) -> list[int]:
    """``kept``, then the best of ``among`` (ties: lowest index) until ``count`` are kept; sorted."""
    chosen = set(kept)
    rest = sorted((i for i in among if i not in chosen), key=lambda i: (-scores[i], i))
    return sorted(chosen | set(rest[: max(0, count - len(chosen))]))


def keep_by_score(head: Head, scores: Sequence[float], count: int) -> list[int]:
    """Protected entries, then the best of the others."""
    protected = [i for i in range(head.size) if head.protected[i]]
    return keep_top(scores, count, protected, range(head.size))
