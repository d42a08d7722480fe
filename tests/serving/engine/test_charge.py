"""An engine in this process: figures against its own count, and every way to lose it without noticing."""

import copy
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm has an environment for it")

from kvkeep.core.errors import UnsupportedError
from kvkeep.serving import check, plugin
from kvkeep.serving.deployment import Deployment
from kvkeep.serving.ledger import LEDGER
from tests.serving.engine.conftest import prompts
from tests.serving.engine.running import MODEL, engine

SETTING = {"policy": "snapkv", "budget": 96, "buffer": 32}
RIVAL = "rival.Backend"


@pytest.fixture(scope="module")
def running(environment):
    """An engine with a bounded cache."""
    with engine(SETTING) as running:
        yield running


@pytest.fixture
def config(running):
    """The engine's configuration, to be spoilt."""
    config = copy.copy(running.engine.vllm_config)
    config.cache_config = copy.copy(config.cache_config)
    config.additional_config = {"kvkeep": dict(SETTING)}
    return config


def series(name):
    """A series of this process."""
    import prometheus_client

    labels = {"model_name": MODEL, "engine": "0"}
    return prometheus_client.REGISTRY.get_sample_value(name, labels)


def test_metrics_agree_with_what_the_worker_counted(running):
    from kvkeep.serving.metrics import BoundedCacheMetrics

    lengths = [3, 40, 90, 127, 128, 200, 300, 100]
    LEDGER.reset()
    answers = running.answer(prompts(*lengths), [70, 1] * 4)
    counted = LEDGER.read()

    metrics = BoundedCacheMetrics(running.engine.vllm_config, [0])
    finished = [
        SimpleNamespace(
            request_id="1", num_prompt_tokens=len(answer.prompt), num_generation_tokens=len(answer.tokens)
        )
        for answer in answers
    ]
    metrics.record(None, SimpleNamespace(finished_requests=finished))
    assert series("kvkeep:request_mean_entries_count") == len(lengths)
    assert series("kvkeep:evictions_total") == counted["evictions"] > 0
    assert series("kvkeep:evicted_entries_total") == counted["evicted"]
    means = series("kvkeep:request_mean_entries_sum")
    # Every second request has no decode step: what its prompt left is its mean, and no step of the worker's.
    schedule = metrics._schedule
    without = sum(schedule.held(n, kept=schedule.kept(n), first=schedule.first(n)) for n in lengths[1::2])
    assert (means - without) / 4 == pytest.approx(counted["mean_entries"])
    assert series("kvkeep:request_peak_entries_sum") <= counted["peak_entries"] * len(lengths)


def test_it_is_in_charge(running):
    assert check(running.engine)


def test_without_the_setting_nothing_is_asked(config):
    from kvkeep.serving.metrics import BoundedCacheMetrics

    config.additional_config = {}
    assert check(SimpleNamespace(vllm_config=config)) is False
    BoundedCacheMetrics(config, [0]).record(None, SimpleNamespace(finished_requests=[None]))


def test_a_rival_is_named(config, monkeypatch):
    from vllm.v1.attention.backends import registry

    monkeypatch.setitem(registry._ATTN_OVERRIDES, registry.AttentionBackendEnum.CPU_ATTN, RIVAL)
    with pytest.raises(UnsupportedError, match=r"(?s)rival\.Backend.*VLLM_PLUGINS=kvkeep"):
        check(SimpleNamespace(vllm_config=config))


def test_an_engine_with_unbounded_requests_is_found(config):
    """Whatever the registry says: here the engine itself says that a request owns its full length."""
    config.cache_config.kv_cache_max_concurrency = config.cache_config.num_gpu_blocks / 32
    with pytest.raises(UnsupportedError, match=r"owns 32 blocks, and under snapkv it should own"):
        check(SimpleNamespace(vllm_config=config))


def test_a_plugin_that_could_not_register_is_an_error(config, monkeypatch):
    monkeypatch.setattr(plugin, "STATE", plugin.Registration(failure="ImportError: no such thing"))
    with pytest.raises(UnsupportedError, match="no such thing"):
        check(SimpleNamespace(vllm_config=config))


def test_a_plugin_that_was_not_loaded_is_an_error(config, monkeypatch):
    monkeypatch.setattr(plugin, "STATE", plugin.Registration())
    with pytest.raises(UnsupportedError, match="was not loaded in this process"):
        check(SimpleNamespace(vllm_config=config))


def test_a_failing_registration_leaves_vllm_alone(monkeypatch, caplog):
    state = plugin.Registration()
    monkeypatch.setattr(plugin, "STATE", state)
    monkeypatch.setattr(plugin, "_register", lambda: 1 / 0)
    plugin.register()
    assert state == plugin.Registration(failure="ZeroDivisionError: division by zero")


def test_all_reasons_at_once(config):
    """A typo does not hide what else is wrong."""
    config.kv_transfer_config = config.speculative_config = SimpleNamespace()
    config.cache_config.cache_dtype = "fp8"
    config.additional_config = {"kvkeep": {**SETTING, "bugdet": 1}}
    with pytest.raises(UnsupportedError) as refusal:
        Deployment.of(config)
    text = str(refusal.value)
    assert all(word in text for word in ("'bugdet' is unknown", "speculative", "KV transfer", "'fp8'"))


def test_buckets_resolve_what_lies_between_budget_and_buffer():
    from kvkeep.serving.metrics import entry_buckets
    from kvkeep.serving.schedule import Schedule

    bounded = Schedule(budget=96, buffer=32, block_size=32)
    assert entry_buckets(bounded, 1024) == [24, 48, 72, 96, 104, 112, 120, 128]
    kept = Schedule(budget=96, buffer=32, block_size=32, prompt="kept")
    assert entry_buckets(kept, 1024)[8:] == [256, 512, 1024]
