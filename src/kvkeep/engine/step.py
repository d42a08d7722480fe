"""One forward pass, as all layers see it: which tokens are new, where they stand, who sees whom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvkeep.core.errors import UnsupportedError


class Step:
    """The new tokens of one forward.

    Parameters
    ----------
    starts
        Tokens seen before, per row.
    fresh
        Real new tokens per row; they are the last columns, padding comes first.
    query_len
        New columns.
    request
        The mask request that all layers share, or ``None``.
    device
        Where the first layer lives.
    """

    def __init__(
        self,
        starts: Sequence[int],
        fresh: Sequence[int],
        query_len: int,
        request: Any,
        device: torch.device,
    ) -> None:
        self.starts, self.fresh, self.query_len = list(starts), list(fresh), query_len
        self.request = request
        self.padded = any(count < query_len for count in fresh)
        start = torch.tensor(self.starts, device=device)[:, None]
        column = torch.arange(query_len, device=device)
        padding = query_len - torch.tensor(self.fresh, device=device)[:, None]
        positions = start + column - padding
        self._positions = {device: positions.masked_fill(column < padding, -1)}
        self._slots: dict[tuple[torch.device, tuple[int, ...]], Tensor] = {}
        self._masks: dict[tuple[Any, ...], Tensor] = {}

    def positions(self, device: torch.device) -> Tensor:
        """int64 ``[batch, new]``; -1 for padding columns."""
        if device not in self._positions:
            self._positions[device] = next(iter(self._positions.values())).to(device)
        return self._positions[device]

    def slots(self, lens: Sequence[int], device: torch.device) -> Tensor:
        """Row lengths on the device; layers of equal lengths share one transfer."""
        key = (device, tuple(lens))
        if key not in self._slots:
            self._slots[key] = torch.tensor(list(lens), device=device)
        return self._slots[key]

    def mask(self, before: Sequence[int], dtype: torch.dtype, device: torch.device, additive: bool) -> Tensor:
        """Who may see which slot, for rows that held ``before`` entries.

        A new token sees every stored entry and the new tokens up to itself. A padding column sees the
        first slot, so that its softmax is defined; nobody reads its output.

        Returns
        -------
        Tensor
            bool (or 0 / lowest, if ``additive``) ``[batch, 1, new, slots]``.
        """
        key = (device, tuple(before), additive, dtype)
        if key not in self._masks:
            lens = self.slots(before, device)[:, None]
            fresh = torch.tensor(self.fresh, device=device)[:, None]
            column = torch.arange(self.query_len, device=device)
            rank = column - (self.query_len - fresh)  # -1 and below: padding
            visible = (lens + rank + 1).clamp(min=1)
            slots = max(b + f for b, f in zip(before, self.fresh, strict=True))
            mask = torch.arange(slots, device=device) < visible[..., None]
            mask = mask[:, None]
            if additive:
                mask = torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)
            self._masks[key] = mask
        return self._masks[key]


def count_fresh(request: Any, seen: Sequence[int], query_len: int) -> list[int]:
    """Read how many new tokens of each row are real, for rows that have seen so many before.

    Only several tokens at once, or a row that has seen nothing yet, can be padding: a plain decode
    step is not read back from the device.

    Raises
    ------
    UnsupportedError
        If padding stands behind real tokens, the mask hides tokens that are stored already, or it is one
        that kvkeep cannot reproduce.
    """
    padding = getattr(request, "padding", None)
    if isinstance(request, Tensor):
        if request.ndim != 2:
            raise UnsupportedError(
                "this attention mask",
                ["it is a custom 4-D mask: stored entries no longer line up with its columns"],
            )
        padding = request.bool()
    if padding is None or (query_len == 1 and all(seen)):
        return [query_len] * len(seen)
    new = padding[:, -query_len:]
    counts, earlier = torch.stack([new.sum(-1), padding[:, :-query_len].sum(-1)]).tolist()
    suffix = torch.arange(query_len, device=new.device) >= query_len - new.sum(-1, keepdim=True)
    if not torch.equal(suffix, new):
        raise UnsupportedError(
            "this attention mask",
            [
                "padding stands behind or between real tokens: pad prompts on the left "
                "(tokenizer.padding_side = 'left')"
            ],
        )
    for row, (stored, shown) in enumerate(zip(seen, earlier, strict=True)):
        if stored != shown:
            raise UnsupportedError(
                "this attention mask",
                [
                    f"row {row}: {stored} tokens were stored, and the mask now shows {shown}: what is "
                    "stored cannot be hidden later (generate each row alone, or crop the cache)"
                ],
            )
    return [int(count) for count in counts]
