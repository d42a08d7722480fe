"""vLLM's CPU attention over a bounded cache: stock kernels, our slots.

The class is registered under the stock back end's own name, so it also serves engines without kvkeep, layers
with a sliding window, and encoders: for all of these it is the stock class and nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm import envs
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec

from kvkeep.serving.announce import INACTIVE
from kvkeep.serving.compaction import Compaction
from kvkeep.serving.deployment import Deployment, queries_per_block
from kvkeep.serving.heads import EqualHeads, UnequalHeads
from kvkeep.serving.layout import Layout
from kvkeep.serving.ledger import LEDGER
from kvkeep.serving.pages import LayerPages
from kvkeep.serving.rounds import Round, RoundPlanner, Rows
from kvkeep.serving.spec import BoundedSpec

logger = init_logger("vllm.kvkeep")


@dataclass
class Engine:
    """The engine of this process: its layers, its cache and its builder are made one after the other."""

    config: VllmConfig | None = None
    deployment: Deployment | None = None

    def of(self, config: VllmConfig) -> Deployment | None:
        """The deployment of a configuration, read once."""
        if config is not self.config:
            self.config, self.deployment = config, Deployment.of(config)
            if self.deployment is None:
                logger.info_once(INACTIVE, scope="global")
        return self.deployment


ENGINE = Engine()


class BoundedCPUBackend(CPUAttentionBackend):  # type: ignore[misc]
    """The CPU back end that bounds full-attention layers where kvkeep is set."""

    @staticmethod
    def get_impl_cls() -> type[BoundedCPUImpl]:
        """The attention of a layer."""
        return BoundedCPUImpl

    @staticmethod
    def get_builder_cls() -> type[BoundedCPUBuilder]:
        """What is prepared once a step."""
        return BoundedCPUBuilder

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Bound the cache of full-attention layers."""
        # vLLM asks without saying for which engine; the layers were built just before, in this process.
        config, deployment = ENGINE.config, ENGINE.deployment
        if config is None or deployment is None or not _full_attention(spec):
            return spec
        heads = config.model_config.get_num_attention_heads(config.parallel_config)
        schedule = deployment.schedule(
            block_size=spec.block_size,
            heads=heads,
            kv_heads=spec.num_kv_heads,
            max_len=config.model_config.max_model_len,
        )
        return BoundedSpec.over(
            spec,
            schedule=schedule,
            label=f"{deployment.policy.name}, budget {schedule.budget} and buffer {schedule.buffer} per head",
            layers=len(deployment.model.managed),
            reserve=deployment.settings.reserve,
        )


def _full_attention(spec: AttentionSpec) -> bool:
    return (
        type(spec) is FullAttentionSpec
        and spec.sliding_window is None
        and spec.attention_chunk_size is None
        and not spec.non_causal
    )


@dataclass
class Rounds:
    """The prepared rounds of a step, each with the kernel's own plan."""

    rounds: list[Round]
    plans: list[Tensor | None]
    num_actual_tokens: int
    builder: BoundedCPUBuilder


class BoundedCPUBuilder(CPUAttentionMetadataBuilder):  # type: ignore[misc]
    """Cuts a step into rounds, once for all layers."""

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._planner: RoundPlanner | None = None
        if isinstance(kv_cache_spec, BoundedSpec):
            deployment = ENGINE.of(vllm_config)
            assert deployment is not None
            window = deployment.policy.traits.queries
            per_block = queries_per_block(self.block_size, self.num_heads, self.num_kv_heads)
            self._planner = RoundPlanner(
                kv_cache_spec.schedule,
                window,
                per_block if window else 0,
                ragged=deployment.policy.traits.ragged,
            )
            LEDGER.open(kv_cache_spec.schedule, len(layer_names))

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Any:
        """Rounds of managed layers; the stock metadata of all others."""
        if self._planner is None:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        common = common_attn_metadata
        rows = common.num_reqs
        bounds = common.query_start_loc_cpu[: rows + 1].numpy().astype("int64")
        counts = bounds[1:] - bounds[:-1]
        starts = common.seq_lens[:rows].cpu().numpy().astype("int64") - counts
        rounds = self._planner.plan(starts, counts, common.block_table_tensor[:rows])
        reading = common.is_prefilling
        LEDGER.note(starts, counts, rounds, None if reading is None else reading[:rows].cpu().numpy())
        plans = [
            None
            if each.rows is not None  # every layer has lengths of its own
            else plan(self, each.seq_lens, each.query_start_loc, self.num_heads, self.num_kv_heads)
            for each in rounds
        ]
        return Rounds(rounds, plans, common.num_actual_tokens, self)


def plan(
    builder: BoundedCPUBuilder, seq_lens: Tensor, query_start_loc: Tensor, heads: int, kv_heads: int
) -> Tensor:
    """The kernel's own schedule of one call."""
    return ops.cpu_attn_get_scheduler_metadata(
        num_reqs=seq_lens.shape[0],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=builder.head_dim,
        seq_lens=seq_lens,
        dtype=builder.dtype,
        query_start_loc=query_start_loc,
        causal=True,
        sliding_window_size=-1,
        isa=builder.isa,
        enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
        dynamic_causal=None,
        kv_cache_dtype=builder.kv_cache_dtype,
    )


class BoundedCPUImpl(CPUAttentionBackendImpl):  # type: ignore[misc]
    """Attention of one layer: evict, store, attend, record."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        deployment = ENGINE.of(get_current_vllm_config())
        managed = self.attn_type == AttentionType.DECODER and self.sliding_window == -1
        self._deployment = deployment if managed else None
        self._pages: LayerPages | None = None
        self._compaction: Compaction | None = None
        self._heads: EqualHeads | UnequalHeads | None = None

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Nothing for managed layers: vLLM's slots are logical, ours are chosen in :meth:`forward`."""
        if self._deployment is None:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of a step, ``[tokens, heads * dim]`` in ``output``.

        Raises
        ------
        RuntimeError
            If a managed layer is given metadata of another builder: two plug-ins disagree.
        """
        if self._deployment is None or attn_metadata is None:
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
        if not isinstance(attn_metadata, Rounds):
            raise RuntimeError(
                f"kvkeep bounds {layer.layer_name}, but its step was prepared by "
                f"{type(attn_metadata).__name__}: another plug-in replaced part of the attention back end. "
                "Set VLLM_PLUGINS=kvkeep."
            )
        if self._pages is None or self._pages.cache is not kv_cache:
            self._open(layer, kv_cache)
        assert self._compaction is not None
        assert self._pages is not None
        for one, ready in zip(attn_metadata.rounds, attn_metadata.plans, strict=True):
            if one.cuts is not None:
                LEDGER.peak = max(LEDGER.peak, self._compaction.evict(one.cuts))
            whole = slice(attn_metadata.num_actual_tokens) if one.tokens is None else one.tokens
            queries, keys, values = query[whole], key[whole], value[whole]
            result = output[whole]  # in place for all tokens, a copy for some
            if one.rows is None:
                assert ready is not None
                caches = self._pages.by_block()
                self._write(layer.isa, keys, values, caches[0], caches[1], one.slots)
                self._attend(
                    layer, queries, caches, result, one.query_start_loc, one.seq_lens, one.block_table, ready
                )
            else:
                self._attend_by_head(layer, queries, keys, values, result, one.rows, attn_metadata.builder)
            if one.tokens is not None:
                output[one.tokens] = result
            if one.record is not None:
                tokens, blocks, places = one.record
                self._pages.record(blocks, places, queries if tokens is None else queries[tokens])
        return output

    def _attend(
        self,
        layer: Any,
        query: Tensor,
        caches: tuple[Tensor, Tensor],
        output: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        ready: Tensor,
    ) -> None:
        sinks: Tensor | None = self.sinks
        if sinks is not None and sinks.dtype not in (torch.bfloat16, torch.float32):
            sinks = sinks.float()
        ops.cpu_attention_with_kv_cache(
            query=query,
            key_cache=caches[0],
            value_cache=caches[1],
            output=output,
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            scale=self.scale,
            causal=True,
            alibi_slopes=self.alibi_slopes,
            sliding_window=self.sliding_window,
            block_table=block_table,
            softcap=self.logits_soft_cap,
            scheduler_metadata=ready,
            s_aux=sinks,
            dynamic_causal=None,
            k_scale=layer._k_scale_float,
            v_scale=layer._v_scale_float,
            kv_cache_dtype=self.kv_cache_dtype,
        )

    def _attend_by_head(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        rows: Rows,
        builder: BoundedCPUBuilder,
    ) -> None:
        """The stock kernel with one row per request and KV head: pages take the part of blocks."""
        assert self._pages is not None
        assert self._heads is not None
        pages, heads = self._pages, self._heads.of(rows.blocks, rows.before, rows.fresh)
        kv_heads, group = pages.kv_heads, self.num_queries_per_kv
        lens = heads.held + rows.counts[:, None]
        count = -(-int(lens.max()) // pages.slots)
        # Tokens in the order (request, head, token); one token each is how they lie already.
        slot = heads.held[rows.owner] + rows.offset[:, None]  # [tokens, kv_heads]
        page = heads.table[rows.owner].gather(2, (slot // pages.slots)[..., None]).squeeze(2)
        slots = page * pages.slots + slot % pages.slots
        total = query.shape[0]
        single = total == rows.counts.shape[0]
        index = None
        if not single:
            # Sorting by row and head keeps the order of tokens within them.
            line = rows.owner[:, None] * kv_heads + torch.arange(kv_heads, device=slot.device)
            index = line.flatten().argsort(stable=True)

        def by_head(tensor: Tensor, width: int) -> Tensor:
            lines = tensor.reshape(total * kv_heads, width, -1)
            return lines if index is None else lines[index]

        caches = pages.by_page()
        places = by_head(slots, 1).flatten()
        self._write(layer.isa, by_head(key, 1), by_head(value, 1), caches[0], caches[1], places)
        bounds = torch.zeros(lens.numel() + 1, dtype=torch.int32, device=lens.device)
        bounds[1:] = rows.counts.repeat_interleave(kv_heads).cumsum(0)
        seq_lens = lens.flatten().int()
        result = torch.empty((total * kv_heads, group, self.head_size), dtype=output.dtype)
        self._attend(
            layer,
            by_head(query, group),
            caches,
            result,
            bounds,
            seq_lens,
            heads.table[..., :count].reshape(-1, count).int(),
            plan(builder, seq_lens, bounds, group, 1),
        )
        lines = output.view(total * kv_heads, group, self.head_size)
        if index is None:
            lines.copy_(result)
        else:
            lines[index] = result

    def _write(
        self, isa: str, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
    ) -> None:
        ops.cpu_attn_reshape_and_cache(
            key, value, key_cache, value_cache, slots, isa, kv_cache_dtype=self.kv_cache_dtype
        )

    def _open(self, layer: Any, kv_cache: Tensor) -> None:
        """Take over the cache of this layer."""
        assert self._deployment is not None
        slots, dim = kv_cache.shape[2], kv_cache.shape[3] // 2
        layout = Layout.learn(
            lambda *write: self._write(layer.isa, *write),
            slots=slots,
            dim=dim,
            dtype=kv_cache.dtype,
            device=kv_cache.device,
        )
        queries = bool(self._deployment.policy.traits.queries)
        per_block = queries_per_block(slots, self.num_heads, self.num_kv_heads) if queries else 0
        self._pages = LayerPages(kv_cache, layout, self.num_heads, per_block)
        ragged = self._deployment.policy.traits.ragged
        buffer = self._deployment.policy.buffer
        self._heads = UnequalHeads(self._pages, buffer) if ragged else EqualHeads(self._pages)
        factor = self.scale * math.sqrt(self.head_size)
        self._compaction = Compaction(
            self._deployment,
            extract_layer_index(layer.layer_name),
            self._pages,
            self._heads,
            1.0 if math.isclose(factor, 1.0, rel_tol=1e-6) else factor,
        )
