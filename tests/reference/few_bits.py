"""Groups in few bits, one number at a time, with the struct module's half precision."""

from __future__ import annotations

import struct
from collections.abc import Sequence


def half(number: float) -> float:
    """The nearest float16, and what it is worth."""
    return float(struct.unpack("<e", struct.pack("<e", number))[0])


def row(vector: Sequence[float], bits: int, group: int) -> tuple[bytes, list[float]]:
    """The bytes of a vector, and the vector that they stand for."""
    top = 2**bits - 1
    codes: list[int] = []
    lows, steps, back = [], [], []
    for start in range(0, len(vector), group):
        part = vector[start : start + group]
        low = half(min(part))
        step = half((max(part) - low) / top)
        for number in part:
            code = 0 if step == 0 else min(top, max(0, round((number - low) / step)))
            codes.append(code)
            back.append(low + code * step)
        lows.append(low)
        steps.append(step)
    width = len(vector) * bits // 8
    packed = [
        sum(codes[byte + place * width] << (bits * place) for place in range(8 // bits))
        for byte in range(width)
    ]
    scales = b"".join(struct.pack("<e", number) for number in (*lows, *steps))
    return bytes(packed) + scales, back
