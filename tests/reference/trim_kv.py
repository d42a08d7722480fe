"""TrimKV's score (methods 6.6) in plain Python numbers."""

from __future__ import annotations

import math

from tests.reference.heads import Head


def score(head: Head, ahead: int = 1) -> list[float]:
    """Log retention at the next query, or of the sum over the next ones, term by term."""
    answer = []
    for log_beta, position in zip(head.log_retention, head.positions, strict=True):
        if ahead == 1:
            answer.append(log_beta * (head.seq_len + 1 - position))
            continue
        first = head.seq_len + 2 - position
        powers = math.fsum(math.exp(log_beta * m) for m in range(ahead))
        answer.append(log_beta * first + math.log(powers))
    return answer
