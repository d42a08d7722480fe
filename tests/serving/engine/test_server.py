"""Clients of a real server over HTTP, with a bounded cache behind it."""

import importlib.util
import json
import random
import re
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

if importlib.util.find_spec("vllm") is None:
    reason = "vLLM is not installed here: make test-vllm has an environment for it"
    pytest.skip(reason, allow_module_level=True)

from kvkeep.serving.account import Account
from kvkeep.serving.schedule import Schedule
from tests.serving.engine.server import Server, chunks

pytestmark = pytest.mark.slow

SETTING = {"policy": "snapkv", "budget": 96, "buffer": 32}
SCHEDULE = Schedule(budget=96, buffer=32, block_size=32)
TOKENS = 120


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """One server for the module; the last test ends it."""
    server = Server.start(tmp_path_factory.mktemp("server"), SETTING, VLLM_PLUGINS="kvkeep")
    try:
        assert server.wait(1200), server.tail(60)
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="module")
def prompts():
    draw = random.Random(0)
    return [[draw.randrange(5, 169) for _ in range(length)] for length in (3, 40, 90, 150, 200, 300, 64, 128)]


@pytest.fixture(scope="module")
def alone(server, prompts):
    """Each prompt served with nobody else there."""
    return [server.complete(prompt, TOKENS) for prompt in prompts]


def test_it_says_what_it_does(server):
    lines = [line for line in server.log.read_text().splitlines() if "kvkeep active" in line]
    assert len(lines) == 1
    assert "snapkv, budget 96 and buffer 32" in lines[0]
    assert re.search(r"A request of 1,024 tokens owns \d+ blocks \(.*\) instead of 32 \(.*\)", lines[0])
    assert "Prefix caching does not apply" in lines[0]
    assert "kvkeep inactive" not in server.log.read_text()


def test_account_of_each_request(server, prompts, alone):
    """Log lines and series say what the requests' lengths imply."""
    accounts = [Account.of(SCHEDULE, prompt=len(prompt), generated=TOKENS) for prompt in prompts]
    server.until("kvkeep:request_mean_entries_count", len(prompts))
    assert server.metric("kvkeep:request_mean_entries_sum") == pytest.approx(
        sum(each.mean for each in accounts)
    )
    assert server.metric("kvkeep:request_peak_entries_sum") == sum(each.highest for each in accounts)
    assert server.metric("kvkeep:evictions_total") == sum(each.evictions for each in accounts)
    assert server.metric("kvkeep:evicted_entries_total") == sum(each.evicted for each in accounts)
    assert server.metric("kvkeep:info") == 1
    assert server.metric("vllm:kv_cache_usage_perc") == 0
    text = server.log.read_text()
    for prompt, each in zip(prompts, accounts, strict=True):
        assert (
            f"prompt {len(prompt)}, generated {TOKENS}: {each.mean:.1f} entries per head on average" in text
        )


def test_many_clients_get_what_one_gets(server, prompts, alone):
    assert len({tuple(tokens) for tokens in alone}) > 1  # the model looks at its prompt
    with ThreadPoolExecutor(len(prompts)) as clients:
        together = list(clients.map(lambda prompt: server.complete(prompt, TOKENS), prompts))
    assert all(len(tokens) == TOKENS for tokens in together)
    assert together == alone


def test_an_impossible_request_stops_nobody(server, prompts, alone):
    with ThreadPoolExecutor(2) as clients:
        other = clients.submit(server.complete, prompts[5], TOKENS)
        connection, answer = server.post(prompt=[7] * 1500, max_tokens=8)
        message = json.loads(answer.read())
        connection.close()
        assert answer.status == 400
        assert "1024" in json.dumps(message)
        assert other.result() == alone[5]


def test_a_client_that_leaves_frees_its_blocks(server, prompts, alone):
    connection, answer = server.post(prompt=prompts[2], max_tokens=900, stream=True)
    assert next(chunks(answer))
    server.until("vllm:num_requests_running", 1)
    assert server.metric("vllm:kv_cache_usage_perc") > 0
    answer.close()
    connection.close()
    server.until("vllm:num_requests_running", 0)
    # The gauge is written when the engine steps: let it.
    assert server.complete(prompts[0], TOKENS) == alone[0]
    server.until("vllm:kv_cache_usage_perc", 0)


def test_a_signal_ends_it_cleanly(server):
    before = len(server.log.read_text())
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0, server.tail(40)
    assert server.gone_within(30), "processes of the server are left"
    # vLLM itself may say that its engine is gone; nothing of ours has anything to say.
    assert "kvkeep/serving" not in server.log.read_text()[before:]


def test_a_bad_setting_stops_it_with_all_reasons(tmp_path):
    """The refusal stands in a worker's traceback, above two more; it is also the last thing that is said."""
    bad = {**SETTING, "policy": "snapkvv"}
    server = Server.start(tmp_path, bad, "--kv-cache-dtype", "fp8", VLLM_PLUGINS="kvkeep")
    try:
        assert not server.wait(1200)
    finally:
        server.kill()
    assert server.process.returncode != 0
    last = server.log.read_text().partition("The engine did not start: ")[2]
    assert "did you mean 'snapkv'?" in last
    assert "a cache of type 'fp8' is quantized" in last
    assert len(last.splitlines()) < 20
