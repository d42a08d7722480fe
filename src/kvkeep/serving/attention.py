"""The attention of one bounded layer inside vLLM: evict, store, attend, record, by the stock class."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionType

from kvkeep.core.errors import CacheIntegrityError, UnsupportedError
from kvkeep.serving.bounded import ENGINE, Rounds
from kvkeep.serving.by_head import HeadCalls, Rows
from kvkeep.serving.compaction import Compaction
from kvkeep.serving.deployment import Deployment, queries_per_block
from kvkeep.serving.heads import EqualHeads, UnequalHeads
from kvkeep.serving.layout import Layout
from kvkeep.serving.ledger import LEDGER
from kvkeep.serving.pages import LayerPages


@dataclass(frozen=True)
class LayerCache:
    """The cache of one layer: its pages, who holds which, and how it evicts."""

    pages: LayerPages
    heads: EqualHeads | UnequalHeads
    compaction: Compaction


class BoundedImpl:
    """Mix-in of a layer's attention: evict, store, attend, record."""

    #: Whether sequences may be rows of one KV head.
    serves_ragged = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        deployment = ENGINE.of(get_current_vllm_config())
        window = getattr(self, "sliding_window", -1)
        managed = getattr(self, "attn_type", None) == AttentionType.DECODER and window in (-1, (-1, -1))
        self._deployment = deployment if managed else None
        if self._deployment is not None and (reasons := self._objections(self._deployment)):
            raise UnsupportedError(
                f"kvkeep cannot serve {self._deployment.policy.name} on {type(self).__name__}", reasons
            )
        self._cache: LayerCache | None = None

    def _objections(self, deployment: Deployment) -> list[str]:
        """What only the layer itself knows to speak against it."""
        reasons = []
        if deployment.policy.traits.ragged and not self.serves_ragged:
            reasons.append(
                "heads of different length have been tried on CPU attention only: use another policy"
            )
        if getattr(self, "alibi_slopes", None) is not None:
            reasons.append("the kernel takes ALiBi's distances from slots, and slots are not positions here")
        if getattr(self, "kv_sharing_target_layer_name", None) is not None:
            reasons.append("a layer reads the cache of another, which an eviction would change under it")
        return reasons

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Nothing for managed layers: vLLM's slots are logical, ours are chosen in :meth:`forward`."""
        if self._deployment is None:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)  # type: ignore[misc]

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
        """Attention of a step, ``[tokens, heads, dim]`` in ``output``.

        Raises
        ------
        RuntimeError
            If a managed layer is given metadata of another builder: two plug-ins disagree.
        """
        stock = super()
        if self._deployment is None or attn_metadata is None:
            return stock.forward(  # type: ignore[misc,attr-defined]
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
        if not isinstance(attn_metadata, Rounds):
            raise RuntimeError(
                f"kvkeep bounds {layer.layer_name}, but its step was prepared by "
                f"{type(attn_metadata).__name__}: another plug-in replaced part of the attention back end. "
                "Set VLLM_PLUGINS=kvkeep."
            )
        cache = self._cache
        if cache is None or cache.pages.cache is not kv_cache:
            cache = self._cache = self._open(self._deployment, layer, kv_cache)
        if attn_metadata.untouched:
            slots, metadata = attn_metadata.rounds[0].slots, attn_metadata.stock[0]
            count = slots.shape[0]
            stored = (key, value) if key.shape[0] == count else (key[:count], value[:count])
            stock.do_kv_cache_update(layer, *stored, kv_cache, slots)  # type: ignore
            return stock.forward(layer, query, key, value, kv_cache, metadata, output)  # type: ignore
        for one, metadata in zip(attn_metadata.rounds, attn_metadata.stock, strict=True):
            if one.cuts is not None:
                LEDGER.peak = max(LEDGER.peak, cache.compaction.evict(one.cuts))
            queries, keys, values, result = query, key, value, output
            if one.tokens is not None or one.slots.shape[0] != query.shape[0]:
                part = slice(one.slots.shape[0]) if one.tokens is None else one.tokens
                queries, keys, values = query[part], key[part], value[part]
                result = output[part]  # in place for all tokens, a copy for some
            if one.rows is None:
                stock.do_kv_cache_update(layer, keys, values, kv_cache, one.slots)  # type: ignore
                stock.forward(layer, queries, keys, values, kv_cache, metadata, result)  # type: ignore
            else:
                self._attend_by_head(cache, layer, queries, keys, values, result, one.rows, attn_metadata)
            if one.tokens is not None:
                output[one.tokens] = result
            if one.record is not None:
                tokens, blocks, places = one.record
                cache.pages.record(blocks, places, queries if tokens is None else queries[tokens])
        return output

    def _attend_by_head(
        self,
        cache: LayerCache,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        rows: Rows,
        step: Rounds,
    ) -> None:
        """The stock attention with one row per request and KV head: pages take the part of blocks."""
        if step.by_head is None:
            raise CacheIntegrityError("a step for heads of different length has no builder for single heads.")
        calls = HeadCalls.of(rows, cache.heads.of(rows.blocks, rows.before, rows.fresh), cache.pages.slots)
        pages = cache.pages.by_page()
        metadata = step.by_head.stock(
            step.common, calls.query_start_loc, calls.seq_lens, calls.longest, calls.table, calls.slots
        )
        keys, values = calls.gather(key), calls.gather(value)
        queries, result = calls.gather(query), calls.gather(output)
        super().do_kv_cache_update(layer, keys, values, pages, calls.slots)  # type: ignore
        super().forward(layer, queries, keys, values, pages, metadata, result)  # type: ignore
        calls.scatter(result, output)

    def _open(self, deployment: Deployment, layer: Any, kv_cache: Tensor) -> LayerCache:
        """Take over the cache of this layer."""
        slots, dim = kv_cache.shape[2], kv_cache.shape[3] // 2
        heads, kv_heads = self.num_heads, kv_cache.shape[1]  # type: ignore[attr-defined]
        update = super().do_kv_cache_update  # type: ignore[misc]
        layout = Layout.learn(
            lambda key, value, cache, at: update(layer, key, value, cache, at),
            slots=slots,
            dim=dim,
            dtype=kv_cache.dtype,
            device=kv_cache.device,
        )
        policy = deployment.policy
        per_block = queries_per_block(slots, heads, kv_heads) if policy.traits.queries else 0
        pages = LayerPages(kv_cache, layout, heads, per_block)
        owners = UnequalHeads(pages, policy.buffer) if policy.traits.ragged else EqualHeads(pages)
        factor = self.scale * math.sqrt(dim)  # type: ignore[attr-defined]
        compaction = Compaction(
            deployment.on(kv_cache.device),
            extract_layer_index(layer.layer_name),
            pages,
            owners,
            1.0 if math.isclose(factor, 1.0, rel_tol=1e-6) else factor,
        )
        return LayerCache(pages, owners, compaction)
