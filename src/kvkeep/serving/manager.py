"""Blocks of requests whose length is bounded: the scheduler's half of the plug-in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

from kvkeep.serving import lastwords
from kvkeep.serving.announce import start_line
from kvkeep.serving.spec import BoundedSpec

logger = init_logger("vllm.kvkeep")


class BoundedManager(FullAttentionManager):  # type: ignore[misc]
    """Gives a request the blocks of its schedule, and never more."""

    kv_cache_spec: BoundedSpec

    def __init__(self, kv_cache_spec: BoundedSpec, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self.schedule, self.reserve = kv_cache_spec.schedule, kv_cache_spec.reserve
        self._prompts: dict[str, int] = {}
        lastwords.forget()
        usable = self.block_pool.num_gpu_blocks - 1  # block 0 is vLLM's null block
        logger.info("%s", start_line(kv_cache_spec, usable, bool(kwargs.get("enable_caching"))))

    # -- what the scheduler asks ------------------------------------------------------------------

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Note the prompt's length; after a deferred eviction give the prompt's blocks back."""
        if num_prompt_tokens is None:
            return
        self._prompts[request_id] = num_prompt_tokens
        if self.schedule.prompt != "defer":
            return
        # The eviction runs in the step that stores this token: what it frees is free one token later.
        if processed_computed_tokens > self.schedule.first(num_prompt_tokens):
            owned = len(self.req_to_blocks.get(request_id, ()))
            self._remove_blocks_in_range(request_id, self.schedule.blocks_after(num_prompt_tokens), owned)

    def _owned(self, request_id: str, num_tokens: int) -> int:
        """Blocks that a request should own to have ``num_tokens`` read."""
        schedule = self.schedule
        if schedule.prompt == "chunk" and not self.reserve:
            return schedule.blocks_for(num_tokens)
        return schedule.blocks(self._prompts.get(request_id, num_tokens))

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, *args: Any, apply_admission_cap: bool = False, **kwargs: Any
    ) -> int:
        """Blocks that are missing; on admission, all that the request will ever want."""
        if not apply_admission_cap:
            want = self._owned(request_id, num_tokens)
        elif self.schedule.prompt == "chunk":
            want = self.schedule.blocks(num_tokens)
        else:
            # vLLM asks before it says where the prompt ends, and a request that goes on after a preemption
            # brings its answer along: counted as prompt, it would wait for more blocks than it needs. The
            # next question comes before any block is given, and there all blocks are asked for.
            return 0
        return max(0, want - len(self.req_to_blocks.get(request_id, ())))

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[Any]:
        """The missing blocks."""
        owned = self.req_to_blocks[request_id]
        missing = self._owned(request_id, num_tokens) - len(owned)
        if missing <= 0:
            return []
        blocks = self.block_pool.get_new_blocks(missing)
        owned.extend(blocks)
        if self._record_new_block_ids:
            self.new_block_ids.extend(block.block_id for block in blocks)
        return list(blocks)

    def allocate_external_computed_blocks(self, *args: Any, **kwargs: Any) -> None:
        """Nothing comes from outside.

        Raises
        ------
        NotImplementedError
            Always: KV transfer is refused at start.
        """
        raise NotImplementedError("kvkeep: blocks from another engine cannot be used by a bounded cache")

    def pop_blocks_for_free(self, request_id: str) -> list[Any]:
        """The blocks of a request that ends, or is preempted."""
        self._prompts.pop(request_id, None)
        return list(super().pop_blocks_for_free(request_id))

    # -- prefix caching: none -----------------------------------------------------------------------

    def cache_blocks(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is shared: blocks do not hold consecutive tokens."""

    @classmethod
    def find_longest_cache_hit(
        cls, block_hashes: Any, max_length: int, kv_cache_group_ids: Sequence[int], *args: Any, **kwargs: Any
    ) -> tuple[tuple[list[Any], ...], int]:
        """No hit, ever."""
        return tuple([] for _ in kv_cache_group_ids), 0

    def get_num_common_prefix_blocks(self, running_request_id: str) -> int:
        """Requests share no blocks."""
        return 0
