"""One engine's kvkeep: settings, policy, schedule, model, and every reason against them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from kvkeep import calibration as calibrations
from kvkeep.core.errors import KvkeepError, UnsupportedError
from kvkeep.core.policy import Policy
from kvkeep.core.spec import ModelSpec
from kvkeep.core.view import Rope
from kvkeep.engine.spec import model_spec
from kvkeep.serving.ranks import Rank
from kvkeep.serving.refusals import config_reasons, policy_reasons, version_reasons
from kvkeep.serving.rotary import rope_of_config
from kvkeep.serving.schedule import PromptHandling, Schedule
from kvkeep.serving.settings import Settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """What the plug-in does in one engine.

    Parameters
    ----------
    settings, policy, model
        As configured.
    rope, statistics
        Where the policy's traits ask for them; statistics by layer, of this rank's query heads.
    first_head
        Of the layer's KV heads, the first that this rank has.
    """

    settings: Settings
    policy: Policy
    model: ModelSpec
    rope: Rope | None = None
    statistics: Mapping[int, Any] = field(default_factory=dict, repr=False)
    first_head: int = 0

    @classmethod
    def of(cls, config: VllmConfig) -> Deployment | None:
        """Read a configuration of vLLM; ``None`` if it does not mention kvkeep.

        Raises
        ------
        ConfigError
            If the settings cannot be read and nothing else is wrong.
        UnsupportedError
            With every reason, if they cannot be served.
        """
        import vllm

        try:
            settings = Settings.read(config.additional_config)
            if settings is None:
                return None
            policy = settings.make_policy()
        except KvkeepError as error:
            reasons = version_reasons(vllm.__version__, False) + config_reasons(config)
            if not reasons:
                raise
            # Without a policy its own objections stay unknown; those to the rest are said now.
            raise UnsupportedError(
                "kvkeep cannot serve this configuration", [str(error), *reasons]
            ) from error
        reasons = version_reasons(vllm.__version__, settings.allow_untested) + config_reasons(config)
        spec, rope, statistics = None, None, None
        try:
            spec = model_spec(config.model_config.hf_config)
            statistics = None if settings.calibration is None else calibrations.load(settings.calibration)
            rope = rope_of_config(spec) if policy.traits.rope else None
        except UnsupportedError as error:
            reasons += error.reasons
        except KvkeepError as error:
            reasons.append(str(error))
        if spec is not None:
            reasons += policy_reasons(policy, spec, config, statistics)
            if policy.traits.calibration and statistics is not None and rope is not None:
                reasons += statistics.check(spec, rope)
        if reasons or spec is None:
            raise UnsupportedError(f"kvkeep cannot serve {policy.name} in this configuration", reasons)
        rank = Rank.here()
        layers = statistics.layers if policy.traits.calibration and statistics is not None else {}
        return cls(
            settings=settings,
            policy=policy,
            model=spec,
            rope=rope,
            statistics=rank.own(layers),
            first_head=rank.first_head(spec.kv_heads),
        )

    @property
    def prompt(self) -> PromptHandling:
        """What happens to prompts."""
        if self.settings.prompt == "kept":
            return "kept"
        return "chunk" if self.policy.traits.trigger.prefill == "chunk" else "defer"

    def schedule(self, *, block_size: int, heads: int, kv_heads: int, max_len: int) -> Schedule:
        """The schedule for blocks of a size.

        Parameters
        ----------
        heads, kv_heads
            Query and KV heads of one layer on one rank.
        max_len
            Longest sequence that the engine serves.

        Raises
        ------
        UnsupportedError
            If a block is too small for one recorded query.
        """
        window = self.policy.traits.queries
        side = 0
        if window:
            per_block = queries_per_block(block_size, heads, kv_heads)
            if not per_block:
                raise UnsupportedError(
                    f"kvkeep cannot record queries for {self.policy.name}",
                    [
                        f"blocks of {block_size} slots hold less than one query of {heads} heads: "
                        "raise --block-size"
                    ],
                )
            side = -(-window // per_block)
        return Schedule(
            budget=self.policy.amount.count,
            buffer=self.policy.buffer,
            block_size=block_size,
            prompt=self.prompt,
            side_blocks=side,
            spare=block_size - 1 if self.policy.traits.ragged else 0,
            max_len=max_len,
        )

    def schedule_in(self, config: VllmConfig) -> Schedule:
        """The schedule of an engine whose configuration is settled, as its scheduler and workers have it."""
        model, parallel = config.model_config, config.parallel_config
        return self.schedule(
            block_size=config.cache_config.block_size,
            heads=model.get_num_attention_heads(parallel),
            kv_heads=model.get_num_kv_heads(parallel),
            max_len=model.max_model_len,
        )

    def on(self, device: torch.device) -> Deployment:
        """The same with its tensors on a device."""
        if self.rope is None:
            return self
        return replace(self, rope=Rope(self.rope.inv_freq.to(device), self.rope.scaling))


def queries_per_block(block_size: int, heads: int, kv_heads: int) -> int:
    """Queries of all heads of one token that fit the room of one block: keys and values of its slots."""
    return 2 * block_size * kv_heads // heads
