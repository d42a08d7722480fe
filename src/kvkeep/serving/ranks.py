"""Which heads of a layer this process has: vLLM spreads them over tensor-parallel ranks, in order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvkeep.calibration.statistics import LayerStatistics


@dataclass(frozen=True)
class Rank:
    """One rank of a tensor-parallel group.

    Parameters
    ----------
    index, size
        Which one, of how many.

    Examples
    --------
    >>> [[Rank(index, 4).first_head(heads) for index in range(4)] for heads in (8, 2)]
    [[0, 2, 4, 6], [0, 0, 1, 1]]
    """

    index: int = 0
    size: int = 1

    @classmethod
    def here(cls) -> Rank:
        """This process's; the only one outside of a worker."""
        from vllm.distributed import (
            get_tensor_model_parallel_rank,
            get_tensor_model_parallel_world_size,
            model_parallel_is_initialized,
        )

        if not model_parallel_is_initialized():
            return cls()
        return cls(get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size())

    def first_head(self, heads: int) -> int:
        """The first of a layer's ``heads`` that stands here; where ranks are more than heads they share."""
        return self.index * heads // self.size

    def own(self, statistics: Mapping[int, Any]) -> dict[int, Any]:
        """Statistics by layer, those of this rank's query heads."""
        return {layer: self._own(each) for layer, each in statistics.items()}

    def _own(self, statistics: LayerStatistics) -> LayerStatistics:
        heads = statistics.mean.shape[0]
        part = slice(self.first_head(heads), self.first_head(heads) + heads // self.size)
        return LayerStatistics(mean=statistics.mean[part], magnitude=statistics.magnitude[part])
