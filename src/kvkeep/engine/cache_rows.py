"""What transformers asks of the rows of a cache: to be counted, chosen, repeated, cropped and emptied."""

from __future__ import annotations

import torch
from torch import Tensor

from kvkeep.core.errors import CacheError, UnsupportedError
from kvkeep.engine.cache_state import CacheState


class CacheRows(CacheState):
    """Rows of a :class:`~kvkeep.RetentionCache`: what is done to one is done to all that belongs to it."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns seen, padding included; stored entries are in :attr:`trace`."""
        return self.rows.columns

    def reset(self) -> None:
        """Empty the cache for a new batch; policy and seed stay."""
        super().reset()
        self._start()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Follow the beams: row ``i`` becomes what row ``beam_idx[i]`` was."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times."""
        rows = len(self.rows.seq_lens)
        self.batch_select_indices(torch.arange(rows).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices``, in that order, repeats allowed.

        Raises
        ------
        CacheError
            If no row is named, or one that there is not; nothing has changed then.
        """
        index, rows = [int(row) for row in indices.tolist()], len(self.rows.seq_lens)
        if rows and not (index and all(0 <= row < rows for row in index)):
            raise CacheError(
                f"rows {index} cannot be kept of a cache of {rows} sequences: name some row from 0 to "
                f"{rows - 1} (cache.reset() empties it)."
            )
        for place, layer in enumerate(self.layers):
            if place in self.spec.managed:
                layer.select_rows(index)
            elif getattr(layer, "keys", None) is not None:
                layer.batch_select_indices(indices.to(layer.keys.device))
        self.rows.select(index)
        if self._row_counter is not None:
            self._row_counter.select(index)

    def crop(self, max_length: int) -> None:
        """Forget the newest tokens: a negative number removes so many, a positive one is the new length.

        Raises
        ------
        CacheError
            If it reaches back past an eviction: what was evicted cannot be brought back.
        """
        removed = -max_length if max_length <= 0 else max(0, self.rows.columns - max_length)
        if removed == 0:
            return
        lens = self.rows.lens_without(removed)
        for index, layer in enumerate(self.layers):
            if index not in self.spec.managed:
                layer.crop(-removed)  # may refuse, so it comes before anything of ours changes
        for layer in self.managed_layers:
            layer.forget_newest(removed, lens)
        self.rows.crop(removed)

    def activate_past_recording(self) -> None:
        """Called by transformers before assisted decoding, which is refused.

        Raises
        ------
        UnsupportedError
            Always.
        """
        raise UnsupportedError(
            "assisted decoding with a kvkeep cache",
            ["draft tokens are taken back at every step, and an eviction cannot be: generate without drafts"],
        )
