"""Naive float64 references of TriAttention: the five steps per key, and the three selection modes."""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable, Sequence


def complex_pairs(vector: Sequence[float], rotary_dim: int) -> list[complex]:
    """Channel f with f + rotary_dim / 2; channels that do not turn pair among themselves."""
    half = rotary_dim // 2
    rest = (len(vector) - rotary_dim) // 2
    turning = [complex(vector[f], vector[f + half]) for f in range(half)]
    still = [complex(vector[rotary_dim + f], vector[rotary_dim + rest + f]) for f in range(rest)]
    return turning + still


def key_score(
    key: Sequence[float],
    position: int,
    now: int,
    mean: Sequence[complex],
    magnitude: Sequence[float],
    inv_freq: Sequence[float],
    scaling: float,
    offset_max: int = 65536,
    reduce: Callable[[list[float]], float] = lambda values: sum(values) / len(values),
    use_direction: bool = True,
    use_concentration: bool = True,
) -> float:
    """Steps 1 to 5 for one rotated key and one query head."""
    pairs = complex_pairs(key, 2 * len(inv_freq))
    omega = list(inv_freq) + [0.0] * (len(pairs) - len(inv_freq))
    scale = [scaling] * len(inv_freq) + [1.0] * (len(pairs) - len(inv_freq))
    plain = [k * cmath.exp(-1j * w * position) / s for k, w, s in zip(pairs, omega, scale, strict=True)]
    extra = 0.0
    for k, e, a, s in zip(plain, mean, magnitude, scale, strict=True):
        extra += s * s * ((a - abs(e)) if use_concentration else a) * abs(k)
    scores = []
    offset = 1
    while offset <= offset_max:
        total = extra
        for k, e, w, s in zip(plain, mean, omega, scale, strict=True):
            if use_direction:
                phase = cmath.phase(e * k.conjugate()) if e * k else 0.0
                total += s * s * abs(e) * abs(k) * math.cos(w * (now - position + offset) + phase)
        scores.append(total)
        offset *= 2
    return reduce(scores)


def standardized(scores: Sequence[float]) -> list[float]:
    """Mean 0, population standard deviation 1, floor 1e-6."""
    mean = sum(scores) / len(scores)
    deviation = math.sqrt(sum((score - mean) ** 2 for score in scores) / len(scores))
    return [(score - mean) / max(deviation, 1e-6) for score in scores]


def best(scores: Sequence[float], count: int, among: Sequence[int] | None = None) -> list[int]:
    """Indices of the highest scores, lowest index first on ties."""
    pool = range(len(scores)) if among is None else among
    return sorted(pool, key=lambda i: (-scores[i], i))[:count]


def union_choice(z: Sequence[Sequence[float]], count: int) -> list[int]:
    """Every head takes its top-k; the union is cut, or filled up, by the maximum over heads."""
    proposed = sorted({index for head in z for index in best(head, count)})
    highest = [max(head[i] for head in z) for i in range(len(z[0]))]
    chosen = best(highest, count, proposed)
    if len(chosen) < count:
        rest = [i for i in range(len(highest)) if i not in chosen]
        chosen += best(highest, count - len(chosen), rest)
    return sorted(chosen)
