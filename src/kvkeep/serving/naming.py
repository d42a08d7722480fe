"""Evictions that know whose they are: what stands in front of a builder where the policy draws."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor
from vllm.logger import init_logger
from vllm.v1.attention.backend import CommonAttentionMetadata

from kvkeep.serving.bounded import ENGINE, Rounds
from kvkeep.serving.names import LISTENER, Rows, rows_of
from kvkeep.serving.rounds import Round, RoundPlanner
from kvkeep.serving.upload import upload

logger = init_logger("vllm.kvkeep")


class NamedBuilder:
    """Mix-in in front of a :class:`~kvkeep.serving.bounded.BoundedBuilder`: names the rows that evict."""

    _planner: RoundPlanner | None

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)  # type: ignore[call-arg]
        deployment = ENGINE.of(vllm_config)
        self._rows: Rows | None = None
        if self._planner is None or deployment is None or not deployment.policy.traits.random:
            return
        self._rows = rows_of(vllm_config)
        if self._rows is None:
            logger.warning_once(
                "kvkeep: %s draws, and all requests draw the same numbers: start with "
                "--logits-processors %s to give each its own",
                deployment.policy.name,
                LISTENER,
            )

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Any:
        """What stands behind prepares, with names where something is evicted."""
        step = super().build(common_prefix_len, common_attn_metadata, fast_build)  # type: ignore[misc]
        if self._rows is None or self._planner is None or not isinstance(step, Rounds):
            return step
        if any(each.cuts is not None for each in step.rounds):
            rows = common_attn_metadata.num_reqs
            first = common_attn_metadata.block_table_tensor[:rows, self._planner.schedule.side_blocks]
            known = np.array([self._rows.names.get(row, 0) for row in range(rows)], dtype=np.int64)
            names = upload(known, first.device)
            step = replace(step, rounds=[_named(each, first, names) for each in step.rounds])
        return step


def _named(one: Round, first: Tensor, names: Tensor) -> Round:
    """The round with the names of the rows that evict, found by their first block: it has one owner."""
    if one.cuts is None:
        return one
    row = (one.cuts.blocks[:, :1] == first).int().argmax(-1)
    return replace(one, cuts=replace(one.cuts, names=names[row]))
