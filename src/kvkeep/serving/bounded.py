"""A back end of vLLM over a bounded cache: its own kernels, our slots.

Mix-ins stand in front of a stock back end, its builder (both here) and its attention (`attention.py`). They
hand every round to the stock class as if it were a whole step of shorter sequences: no kernel is called here.
Engines without kvkeep, layers with a sliding window, and encoders get the stock class and nothing else.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec

from kvkeep.core.arrays import IntArray
from kvkeep.core.errors import UnsupportedError
from kvkeep.serving import lastwords
from kvkeep.serving.announce import INACTIVE
from kvkeep.serving.deployment import Deployment, queries_per_block
from kvkeep.serving.ledger import LEDGER
from kvkeep.serving.rounds import Round, RoundPlanner
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
            with lastwords.left():
                self.config, self.deployment = config, Deployment.of(config)
            if self.deployment is None:
                logger.info_once(INACTIVE, scope="global")
        return self.deployment


ENGINE = Engine()


class BoundedBackend:
    """Mix-in of a back end: full-attention layers get a bounded cache."""

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Bound the cache of full-attention layers."""
        # vLLM asks without saying for which engine; the layers were built just before, in this process.
        config, deployment = ENGINE.config, ENGINE.deployment
        spec = super().customize_spec(spec)  # type: ignore[misc]
        if config is None or deployment is None or not _full_attention(spec):
            return spec
        with lastwords.left():
            schedule = deployment.schedule(
                block_size=spec.block_size,
                heads=config.model_config.get_num_attention_heads(config.parallel_config),
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
    """The rounds of a step, each with the stock metadata for it.

    Parameters
    ----------
    rounds
        In order.
    stock
        What the stock builder made of each; ``None`` where every layer has lengths of its own.
    common
        What vLLM said of the step.
    by_head
        Builder for rows of one request and one KV head; ``None`` where all heads are equally long.
    untouched
        vLLM's own preparation is right as it is: one round, in which nothing is evicted or recorded.
    """

    rounds: list[Round]
    stock: list[Any]
    common: CommonAttentionMetadata
    by_head: BoundedBuilder | None
    untouched: bool = False


class BoundedBuilder:
    """Mix-in of a metadata builder: cuts a step into rounds, once for all layers."""

    _planner: RoundPlanner | None
    _by_head: BoundedBuilder | None
    _counts: bool
    supports_update_block_table: bool

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)  # type: ignore[call-arg]
        self._planner, self._by_head = None, None
        deployment = ENGINE.of(vllm_config)
        if deployment is None or not isinstance(kv_cache_spec, BoundedSpec):
            return
        if kv_cache_spec.block_size != kv_cache_spec.schedule.block_size:
            raise UnsupportedError(
                f"kvkeep cannot serve blocks of {kv_cache_spec.schedule.block_size} slots here",
                [
                    f"attention takes them apart into blocks of {kv_cache_spec.block_size}: "
                    f"use --block-size {kv_cache_spec.block_size}"
                ],
            )
        # vLLM would reuse the metadata of one group of layers for another with its block table put in.
        self.supports_update_block_table = False
        window = deployment.policy.traits.queries
        heads = vllm_config.model_config.get_num_attention_heads(vllm_config.parallel_config)
        per_block = queries_per_block(kv_cache_spec.block_size, heads, kv_cache_spec.num_kv_heads)
        self._planner = RoundPlanner(
            kv_cache_spec.schedule,
            window,
            per_block if window else 0,
            ragged=deployment.policy.traits.ragged,
        )
        if deployment.policy.traits.ragged:
            self._by_head = self.by_head()
        managed = _managed_layers(vllm_config)
        # Layers may stand in several groups with a builder each: a step is counted once.
        self._counts = not managed or managed[0] in layer_names
        if self._counts:
            LEDGER.open(kv_cache_spec.schedule, len(managed) or len(layer_names))

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Any:
        """Rounds of managed layers; the stock metadata of all others."""
        if self._planner is None:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)  # type: ignore[misc]
        common = common_attn_metadata
        rows = common.num_reqs
        bounds = common.query_start_loc_cpu.numpy()[: rows + 1]
        counts = bounds[1:] - bounds[:-1]
        # A bound, and exact as long as no token is drafted; the lengths themselves are on the device.
        upper = common.seq_lens_cpu_upper_bound
        lens = (common.seq_lens.cpu() if upper is None else upper).numpy()[:rows]
        untouched = self._planner.untouched(longest := int(lens.max(initial=0)))
        if untouched:
            rounds = [_as_prepared(common, lens, longest)]
        else:
            read, now = lens.astype("int64"), counts.astype("int64")
            rounds = self._planner.plan(read - now, now, common.block_table_tensor[:rows])
        if self._counts:
            reading = common.is_prefilling
            LEDGER.note(lens, counts, rounds, None if reading is None else reading.cpu().numpy()[:rows])
        if untouched:
            metadata = super().build(common_prefix_len, common, fast_build)  # type: ignore[misc]
            return Rounds(rounds, [metadata], common, self._by_head, untouched=True)
        stock = [
            None
            if each.rows is not None
            else self.stock(
                common,
                each.query_start_loc,
                each.seq_lens,
                each.longest,
                each.block_table,
                each.slots,
                host=(each.bounds_cpu, each.lens_cpu, each.most_tokens),
            )
            for each in rounds
        ]
        return Rounds(rounds, stock, common, self._by_head)

    def stock(
        self,
        common: CommonAttentionMetadata,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        longest: int,
        block_table: Tensor,
        slots: Tensor,
        host: tuple[Tensor, Tensor, int] | None = None,
    ) -> Any:
        """The stock metadata of one round, as if it were a step.

        Parameters
        ----------
        host
            ``query_start_loc``, ``seq_lens`` and the most new tokens of a row on the host, where they are
            known there.
        """
        if host is None:
            bounds, lens = query_start_loc.cpu(), seq_lens.cpu()
            most_tokens = int(bounds.diff().max())
        else:
            bounds, lens, most_tokens = host
        step = common.replace(
            num_reqs=seq_lens.shape[0],
            num_actual_tokens=slots.shape[0],
            max_query_len=most_tokens,
            max_seq_len=longest,
            query_start_loc=query_start_loc,
            query_start_loc_cpu=bounds,
            seq_lens=seq_lens,
            seq_lens_cpu_upper_bound=lens,
            block_table_tensor=block_table,
            slot_mapping=slots,
            causal=True,
            is_prefilling=None,
            req_idx=None,
            positions=None,
            _num_computed_tokens_cache=None,
            _token_to_req_indices_cache=None,
        )
        return super().build(0, step)  # type: ignore[misc]

    def by_head(self) -> BoundedBuilder:
        """This builder for rows of one request and one KV head.

        Raises
        ------
        NotImplementedError
            Where nobody has tried it.
        """
        raise NotImplementedError(f"{type(self).__name__} does not serve heads of different length")


def _as_prepared(common: CommonAttentionMetadata, lens: IntArray, longest: int) -> Round:
    """The one round of a step that vLLM prepared rightly; ``lens`` are its lengths on the host."""
    return Round(
        tokens=None,
        query_start_loc=common.query_start_loc,
        seq_lens=common.seq_lens,
        longest=longest,
        most_tokens=common.max_query_len,
        block_table=common.block_table_tensor,
        slots=common.slot_mapping[: common.num_actual_tokens],
        cuts=None,
        record=None,
        bounds_cpu=common.query_start_loc_cpu,
        lens_cpu=torch.from_numpy(lens),
    )


def _managed_layers(config: VllmConfig) -> list[str]:
    """Names of this rank's managed layers, first to last."""
    layers = get_layers_from_vllm_config(config, Attention)
    return [name for name, layer in layers.items() if getattr(layer.impl, "_deployment", None) is not None]


def narrowed(builder: Any, **sizes: int) -> Any:
    """A copy of a builder that is told other numbers of heads."""
    other = copy.copy(builder)
    for name, size in sizes.items():
        setattr(other, name, size)
    return other
