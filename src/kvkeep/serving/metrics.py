"""What each request's cache came to: a log line, and Prometheus series beside vLLM's own.

The class is the entry point of the group ``vllm.stat_logger_plugins``: vLLM constructs it in each process of
its API server, after the engine has started. That makes it the one place of the plug-in that runs whoever won
the attention back end, so it also asks whether kvkeep is really in charge.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import prometheus_client as prometheus
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from kvkeep import __version__
from kvkeep.serving.account import Account
from kvkeep.serving.plugin import KEY
from kvkeep.serving.schedule import Schedule

if TYPE_CHECKING:
    from kvkeep.serving.deployment import Deployment

logger = init_logger("vllm.kvkeep")

PREFIX = "kvkeep:"


class BoundedCacheMetrics(AggregateStatLoggerBase):  # type: ignore[misc]
    """Figures of finished requests; does nothing in an engine without the setting.

    Parameters
    ----------
    vllm_config
        Of the engine, as it is once started.
    engine_indexes
        Of the data-parallel engines that this API server feeds.

    Raises
    ------
    UnsupportedError
        If the setting is there and kvkeep is not in charge of the engine.
    """

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int] | None = None) -> None:
        self._schedule: Schedule | None = None
        additional = vllm_config.additional_config
        if not isinstance(additional, dict) or KEY not in additional:
            return
        # Here, so that a server without the setting does not pay for them.
        from kvkeep.serving.charge import require_charge
        from kvkeep.serving.deployment import Deployment

        require_charge(vllm_config)
        deployment = Deployment.of(vllm_config)
        if deployment is None:
            return
        self._schedule = deployment.schedule_in(vllm_config)
        self._log = deployment.settings.log_requests
        self._series = _Series(self._schedule, deployment, vllm_config, engine_indexes or [0])

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Count the requests that this step finished."""
        if self._schedule is None or iteration_stats is None:
            return
        for request in iteration_stats.finished_requests:
            # A request that ended before its first token held its prompt, or part of it.
            prompt, generated = request.num_prompt_tokens, max(1, request.num_generation_tokens)
            account = Account.of(self._schedule, prompt=prompt, generated=generated)
            self._series.add(engine_idx, account)
            if self._log:
                logger.info(
                    "kvkeep: request %s, prompt %d, generated %d: %.1f entries per head on average, "
                    "%d at most; %d evictions dropped %d",
                    request.request_id,
                    prompt,
                    request.num_generation_tokens,
                    account.mean,
                    account.highest,
                    account.evictions,
                    account.evicted,
                )

    def log_engine_initialized(self) -> None:
        """Nothing: the scheduler's half has said it."""


class _Series:
    """The Prometheus series, labelled as vLLM labels its own."""

    def __init__(
        self, schedule: Schedule, deployment: Deployment, config: VllmConfig, engines: list[int]
    ) -> None:
        _forget_earlier_engines()
        labels = ["model_name", "engine"]
        buckets = entry_buckets(schedule, config.model_config.max_model_len)
        made: dict[str, Any] = {
            "mean": prometheus.Histogram(
                f"{PREFIX}request_mean_entries",
                "Entries per KV head and layer of a finished request, mean over its decode steps.",
                labels,
                buckets=buckets,
            ),
            "peak": prometheus.Histogram(
                f"{PREFIX}request_peak_entries",
                "Most entries per KV head and layer that a finished request held.",
                labels,
                buckets=buckets,
            ),
            "evictions": prometheus.Counter(
                f"{PREFIX}evictions",
                "Evictions of finished requests (all layers and heads count once).",
                labels,
            ),
            "evicted": prometheus.Counter(
                f"{PREFIX}evicted_entries",
                "Entries that finished requests dropped, per KV head and layer.",
                labels,
            ),
        }
        # Prometheus' own Info does not exist with several processes; vLLM writes a gauge of 1 instead, too.
        info = {
            "policy": deployment.policy.name,
            "budget": str(schedule.budget),
            "buffer": str(schedule.buffer),
            "prompt": schedule.prompt,
            "version": __version__,
        }
        about = prometheus.Gauge(
            f"{PREFIX}info", "What bounds the cache.", [*labels, *info], multiprocess_mode="mostrecent"
        )
        name = config.model_config.served_model_name
        self._engines: dict[int, dict[str, Any]] = {}
        for engine in engines:
            about.labels(name, str(engine), *info.values()).set(1)
            self._engines[engine] = {kind: series.labels(name, str(engine)) for kind, series in made.items()}

    def add(self, engine: int, account: Account) -> None:
        """Count one finished request."""
        series = self._engines[engine]
        series["mean"].observe(account.mean)
        series["peak"].observe(account.highest)
        series["evictions"].inc(account.evictions)
        series["evicted"].inc(account.evicted)


def entry_buckets(schedule: Schedule, max_len: int) -> list[float]:
    """Bounds of the histograms: quarters of the budget and of the buffer, then doubling for kept prompts."""
    budget, buffer = schedule.budget, schedule.buffer
    bounds = {budget * part / 4 for part in range(1, 5)} | {
        budget + buffer * part / 4 for part in range(1, 5)
    }
    bound = 2 * (budget + buffer)
    while schedule.prompt != "chunk" and bound < 2 * max_len:
        bounds.add(bound)
        bound *= 2
    return sorted(float(each) for each in bounds)


def _forget_earlier_engines() -> None:
    """Take back the series of an engine that this process made before, as vLLM does with its own."""
    registry = prometheus.REGISTRY
    for collector in list(registry._collector_to_names):
        if getattr(collector, "_name", "").startswith(PREFIX):
            registry.unregister(collector)
