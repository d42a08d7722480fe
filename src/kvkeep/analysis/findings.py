"""What portions of text say together: the numbers behind `kvkeep analyze values`, ready for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvkeep.analysis.overlap import Overlap, overlaps
from kvkeep.analysis.reading import MAGNITUDES, Portion
from kvkeep.analysis.spread import SINKS, STRETCHES, Spread, spread, stretch

_RESAMPLES = 2000


def values_findings(portions: Sequence[Portion], reserve: int | None = None) -> dict[str, Any]:
    """Spreads of all magnitudes, and overlaps of the top sets.

    Parameters
    ----------
    portions
        Of one model.
    reserve
        Entries in each top set; by default a sixteenth of the portion, what VaSE reserves when a quarter of
        the text is kept.
    """
    return {
        "layers": list(portions[0].layers),
        "kv_heads": portions[0].attention.shape[1],
        "portions": [portion.tokens for portion in portions],
        "sinks": SINKS,
        "recent": [_recent(portion) for portion in portions],
        "magnitudes": {kind: _magnitude([one.magnitudes[kind] for one in portions]) for kind in MAGNITUDES},
        "overlaps": _overlaps(portions, reserve),
    }


def _magnitude(parts: Sequence[Tensor]) -> dict[str, Any]:
    """One magnitude: all entries, by layer, by head, by stretch of the text; sinks stand apart."""
    body = torch.cat([part[..., SINKS:] for part in parts], -1)
    sinks = torch.cat([part[..., :SINKS] for part in parts], -1)
    middle = body.median(-1, keepdim=True).values
    places = torch.cat([stretch(part.shape[-1])[SINKS:] for part in parts])
    relative = body / middle.clamp(min=torch.finfo(torch.float32).tiny)
    return {
        "all": _facts(spread(body)),
        "sinks": _facts(spread(sinks)),
        "layers": [
            {**_facts(spread(body[place])), "sinks": _middle(sinks[place])} for place in range(len(body))
        ],
        "heads": [[_facts(spread(head)) for head in layer] for layer in body],
        # Beside the middle of each head: heads differ more than stretches do.
        "sinks_relative": _facts(spread(sinks / middle.clamp(min=torch.finfo(torch.float32).tiny))),
        "stretches_relative": [
            _facts(spread(relative[..., places == number])) for number in range(STRETCHES)
        ],
        "stretches_by_layer": [
            [_middle(layer[:, places == number]) for number in range(STRETCHES)] for layer in body
        ],
    }


def _facts(found: Spread | None) -> dict[str, float]:
    """A spread and its tail ratio; empty where there is nothing."""
    if found is None:
        return {}
    return {name: round_to(number) for name, number in {**asdict(found), "tail": found.tail}.items()}


def _middle(numbers: Tensor) -> float | None:
    found = spread(numbers)
    return None if found is None else round_to(found.p50)


def round_to(number: float, digits: int = 5) -> float:
    """So many significant digits: what a reader of JSON needs."""
    return float(f"{number:.{digits}g}")


def _overlaps(portions: Sequence[Portion], reserve: int | None) -> list[dict[str, Any]]:
    """Every pair of rankings, mean over portions; sinks and the newest entries do not take part."""
    found: dict[tuple[str, str], list[tuple[Overlap, int]]] = {}
    for portion in portions:
        scores: dict[str, Tensor] = {str(kind): each for kind, each in portion.magnitudes.items()}
        scores["attention"] = portion.attention
        if portion.retention is not None:
            scores["retention"] = portion.retention
        stop = portion.tokens - _recent(portion)
        body = {name: score[..., SINKS:stop] for name, score in scores.items()}
        entries = stop - SINKS
        count = min(entries, max(1, reserve if reserve is not None else portion.tokens // 16))
        for pair in overlaps(body, count):
            found.setdefault((pair.one, pair.other), []).append((pair, count))
    lines = []
    for (one, other), pairs in found.items():
        share = torch.stack([pair.share for pair, _ in pairs]).mean(0)
        jaccard = torch.stack([pair.jaccard for pair, _ in pairs]).mean(0)
        lines.append(
            {
                "one": one,
                "other": other,
                "share": round_to(float(share.mean())),
                "interval": mean_interval(share),
                "jaccard": round_to(float(jaccard.mean())),
                "chance": round_to(float(np.mean([pair.chance for pair, _ in pairs]))),
                "entries": [count for _, count in pairs],
                "heads": [[round_to(each) for each in layer] for layer in share.tolist()],
            }
        )
    return lines


def _recent(portion: Portion) -> int:
    """Newest entries that the top sets leave out: those whose queries measured the attention.

    Policies keep them anyway, and queries look at themselves. A text that would lose more than half keeps
    them.
    """
    return portion.window if 2 * portion.window <= portion.tokens - SINKS else 0


def mean_interval(numbers: Tensor, seed: int = 0) -> list[float] | None:
    """95 % of a mean, by resampling its terms; ``None`` for a single one.

    Heads (or layers) of one model are what is drawn: the interval says how much they differ, not what another
    model would show.
    """
    flat = numbers.flatten().double().numpy()
    if len(flat) < 2:
        return None
    draws = np.random.default_rng(seed).integers(0, len(flat), (_RESAMPLES, len(flat)))
    return [round_to(each) for each in np.quantile(flat[draws].mean(-1), (0.025, 0.975)).tolist()]
