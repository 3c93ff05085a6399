"""Measures `gpu serve` over real HTTP on loopback: the calls a second of an echo engine, by `wrk`.

The server, its client and its engines share the cores. `wrk` comes with most systems (`apt install wrk`).
"""

import http.client
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil

from gpu_runtime import samples
from tests.faces.served import OPERATORS, free_port
from tests.faces.served import serving as running

from .results import Row

MESSAGES = [{"role": "user", "content": "one two three"}]
CONNECTIONS = 32
# A script for wrk with a pause before each request. The pause limits the requests a second of each connection.
SCRIPT = """
wrk.method, wrk.path = "POST", "/v1/chat/completions"
wrk.body = '{body}'
wrk.headers["Authorization"] = "Bearer {token}"
wrk.headers["Content-Type"] = "application/json"
local most = {pause}
if most > 0 then function delay() return math.random(0, most) end end
"""


class Server(NamedTuple):
    address: str
    token: str
    process: psutil.Process

    def request(
        self, connection: http.client.HTTPConnection, path: str, body: object, method: str = "POST"
    ) -> http.client.HTTPResponse:
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        connection.request(method, path, json.dumps(body), headers)
        answer = connection.getresponse()
        assert answer.status < 300, answer.read()
        return answer

    def call(
        self, connection: http.client.HTTPConnection, **body: object
    ) -> http.client.HTTPResponse:
        return self.request(connection, "/v1/chat/completions", {"messages": MESSAGES, **body})


@contextmanager
def serving(
    directory: str, models: Mapping[str, object] | None = None, card: str = "24GiB"
) -> Iterator[Server]:
    """Runs `gpu serve` inside the `with` block, with an echo model, a llama.cpp model and further
    `models`, on one simulated `card`.
    """
    place, port = Path(directory), free_port()
    samples.gguf_lm(place / "writer.gguf", size="24 MiB")
    entries = {
        "echo": {"backend": "fake", "type": "llm", "memory": "1GiB"},
        "writer": {"path": "writer.gguf", "type": "llm", "context_length": 512},
        **(models or {}),
    }
    (place / "models.json").write_text(json.dumps({"models": entries}))
    settings = {"GPU_DEVICES": f"sim:{card},host:64GiB", "GPU_CATALOG": f"{place}/models.json"}
    command = [sys.executable, "-m", "gpu_runtime.cli", "serve", "--port", str(port)]
    settings["GPU_CONSOLE_TOKEN"] = OPERATORS
    with running(command, place, settings, port=port) as server:
        yield Server(f"127.0.0.1:{port}", OPERATORS, psutil.Process(server.process.pid))


def echo(server: Server, seconds: int = 10, target: float = 1000.0) -> Row:
    """The largest number of calls a second, and the latencies at half the target."""
    connection = http.client.HTTPConnection(server.address)
    server.call(connection, model="echo").read()
    wrk(server, 2)
    before, began = sum(server.process.cpu_times()[:2]), time.perf_counter()
    most = wrk(server, seconds)["a second"]
    spent = sum(server.process.cpu_times()[:2]) - before
    calls = most * (time.perf_counter() - began)
    half = wrk(server, seconds, a_second=target / 2)
    median, p99 = half["50%"], half["99%"]
    return Row(
        f"calls of an echo engine through `gpu serve`, by `wrk` with {CONNECTIONS} connections on the same cores",
        f"{most:,.0f} a second ({calls / spent:,.0f} a second of the server's processor "
        f"time); at {half['a second']:,.0f} a second p50 {median * 1e3:.1f} ms, p99 {p99 * 1e3:.1f} ms",
        "≥ 1,000; p99 ≤ 50 ms at half that load", most >= 1000 and p99 <= 0.05 and half["a second"] >= 450,
    )  # fmt: skip


def wrk(server: Server, seconds: int, a_second: float = 0.0) -> dict[str, float]:
    """The requests a second, and the latencies in seconds by percentile.

    With `a_second` of 0, wrk sends as many requests as possible.
    """
    pause = round(2000 * CONNECTIONS / a_second) if a_second else 0
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        body = json.dumps({"model": "echo", "messages": MESSAGES})
        script.write(SCRIPT.format(body=body, token=server.token, pause=pause))
        script.flush()
        said = subprocess.run([
            "wrk", "-t1", f"-c{CONNECTIONS}", f"-d{seconds}s", "--latency", "-s", script.name,
            f"http://{server.address}",
        ], capture_output=True, text=True, check=True).stdout  # fmt: skip
    assert "Non-2xx" not in said and "Socket errors" not in said, said
    unit = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
    waits = {
        name: float(value) * unit[what]
        for name, value, what in re.findall(r"(\d+%)\s+([\d.]+)(us|ms|s)\b", said)
    }
    return {"a second": float(re.search(r"Requests/sec:\s+([\d.]+)", said)[1]), **waits}


def rows() -> Iterator[Row]:
    """There is no row if `wrk` is not installed."""
    if shutil.which("wrk"):
        with tempfile.TemporaryDirectory() as directory, serving(directory) as server:
            yield echo(server)
