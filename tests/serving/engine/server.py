"""One `vllm serve` process for the tests, and the few requests that they make of it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvkeep.testbed.shipped import shipped_model

#: The console command ``vllm`` looks for a package of that name, which the CPU build is not.
COMMAND = [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry"]
ARGUMENTS = ["--served-model-name", "trace-1", "--dtype", "float32", "--enforce-eager"]
ARGUMENTS += ["--max-model-len", "1024", "--block-size", "32", "--max-num-seqs", "16"]
ARGUMENTS += ["--distributed-executor-backend", "uni"]  # one process less to start
QUIET = {
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass
class Server:
    """A running server: its process, its port, its log."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @classmethod
    def start(
        cls, folder: Path, setting: dict[str, Any] | None, *arguments: str, **environment: str
    ) -> Server:
        """Start one; see :meth:`wait`."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        log = folder / "server.log"
        command = [*COMMAND, "--model", str(shipped_model("trace-1")), "--host", "127.0.0.1", *ARGUMENTS]
        command += ["--port", str(port), *arguments]
        if setting is not None:
            command += ["--additional-config", json.dumps({"kvkeep": setting})]
        with log.open("wb") as file:
            process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **QUIET, **environment},
                start_new_session=True,  # so that all of its processes can be ended
            )
        return cls(process, port, log)

    def wait(self, seconds: float) -> bool:
        """Wait until it answers; ``False`` if it ends first."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                return False
            try:
                if self.get("/health")[0] == 200:
                    return True
            except OSError:
                pass
            time.sleep(0.25)
        raise TimeoutError(f"no answer after {seconds} s:\n{self.tail(40)}")

    def kill(self) -> None:
        """End what is left of it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def gone_within(self, seconds: float) -> bool:
        """Wait until none of its processes is left."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                os.killpg(self.process.pid, 0)
            except ProcessLookupError:
                return True
            time.sleep(0.1)
        return False

    def tail(self, lines: int) -> str:
        """The end of its output."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def get(self, path: str) -> tuple[int, str]:
        """Status and body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def post(self, **body: Any) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Ask for a completion; the caller reads and closes."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        body = {"model": "trace-1", "temperature": 0, "ignore_eos": True, "return_token_ids": True, **body}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        return connection, connection.getresponse()

    def complete(self, prompt: list[int], tokens: int) -> list[int]:
        """Token ids of a completion, streamed."""
        connection, answer = self.post(prompt=prompt, max_tokens=tokens, stream=True)
        try:
            assert answer.status == 200, answer.read()
            return [token for chunk in chunks(answer) for token in chunk]
        finally:
            connection.close()

    def metric(self, name: str) -> float:
        """Sum of a series over its labels."""
        found = re.findall(
            rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", self.get("/metrics")[1], re.MULTILINE
        )
        assert found, f"/metrics has no {name}"
        return sum(float(value) for value in found)

    def until(self, name: str, value: float, seconds: float = 60) -> None:
        """Wait until a series has a value."""
        deadline = time.monotonic() + seconds
        while (now := self.metric(name)) != value:
            assert time.monotonic() < deadline, f"{name} stayed at {now}, not {value}"
            time.sleep(0.1)


def chunks(answer: http.client.HTTPResponse) -> Iterator[list[int]]:
    """Token ids of each piece of a stream."""
    for line in answer:
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])["choices"][0].get("token_ids") or []
