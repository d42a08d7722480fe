"""Everything about a vLLM configuration that cannot be served, found at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvkeep.core.policy import Policy
from kvkeep.core.spec import ModelSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig

#: Releases that the test suite has run with.
TESTED = ("0.32",)


NO_SELECTORS = (
    "it keeps every entry and reads some of them, and here attention reads every block that is stored: run "
    "it in transformers, or serve a policy that evicts"
)


def version_reasons(version: str, allow_untested: bool) -> list[str]:
    """Objections to a release of vLLM."""
    if allow_untested or ".".join(version.split(".")[:2]) in TESTED:
        return []
    return [
        f"vLLM {version} is untested (tested: {', '.join(f'{known}.*' for known in TESTED)}): install one of "
        'those, or set "allow_untested": true and check the outputs'
    ]


def config_reasons(config: VllmConfig) -> list[str]:
    """Objections to features of vLLM that assume that nothing leaves the cache."""
    parallel, cache = config.parallel_config, config.cache_config
    objections = {
        "speculative decoding rolls tokens back across evictions: leave --speculative-config out": (
            config.speculative_config is not None
        ),
        "KV transfer sends blocks as if they held consecutive tokens: leave --kv-transfer-config out": (
            config.kv_transfer_config is not None
        ),
        f"a cache of type {cache.cache_dtype!r} is quantized, and policies read keys and values as they are: "
        "use --kv-cache-dtype auto": cache.cache_dtype not in ("auto", "float16", "bfloat16", "float32"),
        "decode context parallelism spreads a sequence over ranks: use --decode-context-parallel-size 1": (
            getattr(parallel, "decode_context_parallel_size", 1) > 1
        ),
        "prefill context parallelism spreads a prompt over ranks: use --prefill-context-parallel-size 1": (
            getattr(parallel, "prefill_context_parallel_size", 1) > 1
        ),
        "multi-head latent attention (MLA) caches one latent for all heads, not keys and values": bool(
            getattr(config.model_config, "use_mla", False)
        ),
        "it is an encoder-decoder: cross-attention has a second cache": bool(
            getattr(config.model_config, "is_encoder_decoder", False)
        ),
        "dual batch overlap may read one request in two halves at once: leave --enable-dbo and --ubatch-size "
        "out": bool(getattr(parallel, "use_ubatching", False)),
        "images in a prompt are attended to in both directions, and evictions cut a prompt into pieces: use "
        "--language-model-only": bool(getattr(config.model_config, "is_mm_prefix_lm", False)),
        "pooling models read a text once and keep nothing": (
            getattr(config.model_config, "runner_type", "generate") != "generate"
        ),
    }
    return [reason for reason, applies in objections.items() if applies]


def policy_reasons(policy: Policy, spec: ModelSpec, config: VllmConfig, calibration: Any) -> list[str]:
    """Objections to a policy inside vLLM."""
    traits, reasons = policy.traits, list(policy.check(spec))
    buffer, budget = policy.buffer, policy.amount.count if policy.bounded else 0
    if traits.reads is not None:
        return [*reasons, f"{policy.name} is a selector: {NO_SELECTORS}"]
    if not policy.bounded:
        reasons.append(f"{policy.name} keeps everything: leave the setting out to serve the full cache")
        return reasons
    if traits.scope == "model":
        reasons.append(
            f"{policy.name} decides for all layers together, and here each layer evicts when its turn comes: "
            "use a policy or mode in which every layer decides alone"
        )
    if traits.trigger.decode == "never":
        reasons.append("a policy with trigger='never' does not bound the cache: leave trigger out")
    if traits.merges:
        reasons.append(
            f"{policy.name} changes values of what is kept, and evictions here only move entries: leave its "
            "merging out"
        )
    if traits.trigger.needs_entropy:
        reasons.append(
            f"{policy.name} evicts where the model is unsure, and slots here follow from lengths alone: use "
            "another trigger"
        )
    if traits.trigger.decode == "clock" and budget % buffer:
        reasons.append(
            f"{policy.name} evicts by the clock, and a budget of {budget} is no multiple of the buffer of "
            f"{buffer}: use {max(1, round(budget / buffer)) * buffer}"
        )
    if traits.trigger.prefill == "after":
        reasons.append("prefill='after' needs the end of the prompt, which vLLM does not tell: use 'defer'")
    if (traits.trigger.prefill == "defer" or policy.amount.prompt == "kept") and getattr(
        config, "use_v2_model_runner", False
    ):
        reasons.append(
            "a prompt that stays whole must be known by its blocks, which model runner V2 does not tell: set "
            'VLLM_USE_V2_MODEL_RUNNER=0, or use "prefill": "chunk" and "prompt": "counts"'
        )
    mixed = len(spec.managed) < len(spec.layers)
    if mixed and getattr(config.cache_config, "enable_prefix_caching", False):
        # vLLM asks only the groups that take part; a hit there would skip tokens that ours has not stored.
        reasons.append(
            "a prompt found in the prefix cache of its sliding-window layers would be skipped in the bounded "
            "layers too, which share nothing: use --no-enable-prefix-caching"
        )
    if mixed and getattr(config.scheduler_config, "disable_hybrid_kv_cache_manager", False):
        reasons.append(
            "without the hybrid cache manager its sliding-window layers want a full cache beside the bounded "
            "one: leave --disable-hybrid-kv-cache-manager out"
        )
    if traits.attends:
        reasons.append(
            f"{policy.name} adds up the attention of every step, which vLLM's kernels do not return"
        )
    if traits.query_moments:
        reasons.append(f"{policy.name} needs moments of the prompt's queries, which are not recorded here")
    if traits.log_retention:
        reasons.append(f"{policy.name} needs retention gates, whose input vLLM's attention does not see")
    if traits.ragged and traits.trigger.prefill == "defer" and policy.amount.prompt != "kept":
        reasons.append(
            f"{policy.name} gives heads different lengths, for which a prompt cannot be read whole first: "
            'use "prefill": "chunk"'
        )
    if not traits.exact_budget:
        reasons.append(f"{policy.name} does not keep exactly its budget, and slots here are fixed")
    if policy.protects_prompt and policy.amount.prompt != "kept":
        reasons.append(
            f'{policy.name} protects the prompt inside the budget: set "prompt": "kept", or '
            '"options": {"protect_prompt": false}'
        )
    if traits.calibration and calibration is None:
        reasons.append(
            f"{policy.name} needs calibration statistics of this model: run `kvkeep calibrate`, and set "
            '"calibration": "FILE"'
        )
    return reasons + _rank_reasons(policy, spec, config.parallel_config.tensor_parallel_size)


def _rank_reasons(policy: Policy, spec: ModelSpec, ranks: int) -> list[str]:
    """Objections to heads that are spread over tensor-parallel ranks, each of which sees only its own."""
    traits = policy.traits
    if ranks > 1 and not policy.heads_alone:
        return [
            f"{policy.name} looks at all heads of a layer together, and each of {ranks} tensor-parallel "
            "ranks has only some: use --tensor-parallel-size 1, or a policy whose heads decide alone"
        ]
    if ranks > spec.kv_heads and (traits.queries or traits.calibration):
        return [
            f"{policy.name} scores a KV head by all of its query heads, and {ranks} tensor-parallel ranks "
            f"share {spec.kv_heads} KV heads: use --tensor-parallel-size of at most {spec.kv_heads}"
        ]
    return []
