"""An engine in this process: figures against its own count, and every way to lose it without noticing."""

import copy
import random
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from kvkeep.core.errors import UnsupportedError
from kvkeep.serving import check, plugin
from kvkeep.serving.deployment import Deployment
from kvkeep.serving.ledger import LEDGER
from kvkeep.testbed.shipped import shipped_model

SETTING = {"policy": "snapkv", "budget": 96, "buffer": 32}
# vLLM and what it imports warn of much.
pytestmark = pytest.mark.filterwarnings("ignore")

RIVAL = "rival.Backend"


@pytest.fixture(scope="module")
def llm():
    """An engine with a bounded cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        from vllm import LLM

        yield LLM(
            str(shipped_model("trace-1")),
            dtype="float32",
            enforce_eager=True,
            distributed_executor_backend="uni",
            skip_tokenizer_init=True,
            max_model_len=512,
            block_size=32,
            max_num_seqs=16,
            disable_log_stats=False,
            additional_config={"kvkeep": SETTING},
        )


@pytest.fixture
def config(llm):
    """The engine's configuration, to be spoilt."""
    config = copy.copy(llm.llm_engine.vllm_config)
    config.cache_config = copy.copy(config.cache_config)
    config.additional_config = {"kvkeep": dict(SETTING)}
    return config


def series(name):
    """A series of this process."""
    import prometheus_client

    labels = {"model_name": str(shipped_model("trace-1")), "engine": "0"}
    return prometheus_client.REGISTRY.get_sample_value(name, labels)


def test_metrics_agree_with_what_the_worker_counted(llm):
    from vllm import SamplingParams

    from kvkeep.serving.metrics import BoundedCacheMetrics

    draw = random.Random(0)
    lengths = [3, 40, 90, 127, 128, 200, 300, 100]
    prompts = [{"prompt_token_ids": [draw.randrange(5, 169) for _ in range(length)]} for length in lengths]
    sampling = [
        SamplingParams(temperature=0, max_tokens=n, detokenize=False, ignore_eos=True) for n in (70, 1)
    ]
    LEDGER.reset()
    outputs = llm.generate(prompts, sampling * 4, use_tqdm=False)
    counted = LEDGER.read()

    metrics = BoundedCacheMetrics(llm.llm_engine.vllm_config, [0])
    finished = [
        SimpleNamespace(
            request_id=output.request_id,
            num_prompt_tokens=len(output.prompt_token_ids),
            num_generation_tokens=len(output.outputs[0].token_ids),
        )
        for output in outputs
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


def test_it_is_in_charge(llm):
    assert check(llm)


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
    config.cache_config.kv_cache_max_concurrency = config.cache_config.num_gpu_blocks / 16
    with pytest.raises(UnsupportedError, match=r"owns 16 blocks, and under snapkv it should own"):
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
