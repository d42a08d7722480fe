"""What block gates say of each block of entries, computed once, when a block is full."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvkeep.cache.dense import DenseStore
from kvkeep.core.view import Rope
from kvkeep.gates.block_gates import BlockGates, pool_blocks
from kvkeep.kernels.rotation import unrotate

# Blocks are added in steps of this size.
_GROWTH = 16


class BlockGateKeys:
    """The key side of the gates of one layer, ``[batch, kv_heads, blocks, width]``.

    Parameters
    ----------
    like
        Keys ``[batch, kv_heads, *, head_dim]``: batch and device.
    gates, layer
        The gates, and the index of the layer in the model.
    rope
        Rotary embedding of the model.
    """

    @torch.inference_mode(False)  # see DenseStore
    def __init__(self, like: Tensor, gates: BlockGates, layer: int, rope: Rope) -> None:
        self.gates, self.layer, self.rope, self.block = gates, layer, rope, gates.shape.block
        self.full = [0] * like.shape[0]  # blocks taken in, per row
        dtype = next(gates.parameters()).dtype
        self.keys = torch.zeros(*like.shape[:2], 0, gates.shape.width, device=like.device, dtype=dtype)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.keys.nbytes

    def catch_up(self, store: DenseStore) -> None:
        """Take in the blocks that have become full since the last call."""
        full = [length // self.block for length in store.lens]
        rows = [row for row, (now, before) in enumerate(zip(full, self.full, strict=True)) if now > before]
        if not rows:
            return
        # One span for all of these rows: a block that is not full in some row is computed again when it is.
        first, end = min(self.full[row] for row in rows), max(full[row] for row in rows)
        self._make_room(end)
        slots = slice(first * self.block, end * self.block)
        index = torch.tensor(rows, device=store.device)
        entries = store.keys[:, :, slots].index_select(0, index).to(self.keys.dtype)
        positions = torch.arange(slots.start, slots.stop, device=store.device).expand(len(rows), -1)
        pooled = pool_blocks(unrotate(entries, positions, self.rope), self.block)
        starts = positions[:, :: self.block]
        self.keys[index, :, first:end] = self.gates.keys(self.layer, pooled, starts, self.rope)
        self.full = [max(now, before) for now, before in zip(full, self.full, strict=True)]

    @torch.inference_mode(False)
    @torch.no_grad()
    def _make_room(self, blocks: int) -> None:
        missing = blocks - self.keys.shape[2]
        if missing > 0:
            batch, heads, _, width = self.keys.shape
            fresh = self.keys.new_zeros(batch, heads, -(-missing // _GROWTH) * _GROWTH, width)
            self.keys = torch.cat([self.keys, fresh], dim=2)

    def show(self, query: Tensor, lens: Tensor, blocks: int) -> dict[str, Tensor]:
        """Logits of the blocks for the newest token; zero where no block of this layer was ever full.

        Parameters
        ----------
        query
            ``[batch, heads, 1, head_dim]``, rotated.
        lens
            int64 ``[batch]``.
        """
        positions = lens[:, None] - 1
        plain = unrotate(query.to(self.keys.dtype), positions, self.rope)
        mine = self.gates.queries(self.layer, plain, positions, self.rope)
        logits = self.gates.logits(mine, self.keys[:, :, :blocks])[:, :, 0]
        return {"gate_logits": torch.nn.functional.pad(logits, (0, blocks - logits.shape[-1])).float()}

    def forget(self, lens: Sequence[int]) -> None:
        """Rows are now so short; blocks that are full no longer are computed again."""
        self.full = [min(full, length // self.block) for full, length in zip(self.full, lens, strict=True)]

    @torch.inference_mode(False)
    @torch.no_grad()
    def select_rows(self, index: Tensor) -> None:
        """Keep the rows ``index``, in that order, repeats allowed."""
        self.keys = self.keys.index_select(0, index)
        self.full = [self.full[row] for row in index.tolist()]
