"""The cache of a managed layer as vLLM's scheduler sees it: blocks per request, bounded."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvkeep.serving.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class BoundedSpec(FullAttentionSpec):  # type: ignore[misc]
    """Full attention over a bounded number of entries.

    Parameters
    ----------
    schedule
        Slots, evictions and blocks of a request.
    label
        Policy and budget in words, for the log.
    layers
        Managed layers on this rank: what a block costs in all of them.
    reserve
        A request gets all its blocks before its first token.
    """

    schedule: Schedule
    label: str = ""
    layers: int = 1
    reserve: bool = True

    @classmethod
    def over(cls, spec: FullAttentionSpec, **own: Any) -> BoundedSpec:
        """The bounded form of a full-attention spec."""
        return cls(**{each.name: getattr(spec, each.name) for each in fields(FullAttentionSpec)}, **own)

    @classmethod
    def merge(cls, specs: list[Any]) -> Any:
        """One spec for a group of layers.

        Raises
        ------
        AssertionError
            If the layers differ: how vLLM asks whether they need groups of their own.
        """
        first = specs[0]
        names = {each.name for each in fields(FullAttentionSpec)}
        own = {each.name: getattr(first, each.name) for each in fields(cls) if each.name not in names}
        for spec in specs:
            if not isinstance(spec, BoundedSpec):
                raise AssertionError(f"a bounded cache is no {type(spec).__name__}")
            if any(getattr(spec, name) != value for name, value in own.items()):
                raise AssertionError("layers of one cache group have different kvkeep schedules")
        return cls.over(FullAttentionSpec.merge(specs), **own)

    @property
    def prefix_cacheable(self) -> bool:
        """Blocks do not hold consecutive tokens, so that no other request could use them."""
        return False

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        """Bytes of the largest request in one layer."""
        return self.schedule.longest(vllm_config.model_config.max_model_len) * self.page_size_bytes

    def max_num_blocks_per_req(self, vllm_config: Any, max_len: int) -> int:
        """Width of a row: logical blocks, which vLLM looks up, or owned ones where these are more."""
        return max(super().max_num_blocks_per_req(vllm_config, max_len), self.schedule.longest(max_len))
