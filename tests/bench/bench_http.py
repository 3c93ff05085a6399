"""Measures `gpu serve` over real HTTP on loopback.

One figure is the number of calls a second of an echo engine, measured by `wrk`. The other is the extra time of a chat
completion over HTTP, compared with calling the same llama.cpp engine directly.

The server, its client and its engines share the cores. `wrk` comes with most systems (`apt install wrk`).
"""

import http.client
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from gpu_runtime import Runtime, samples
from tests.faces.served import OPERATORS, free_port
from tests.faces.served import serving as running

from .results import Row
from .timing import alternately

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


def overhead(server: Server, file: Path, rounds: int = 8, most: int = 200) -> Row:
    """The extra time of a short answer over HTTP, compared with the engine, and the ratio of tokens a second."""
    connection = http.client.HTTPConnection(server.address)
    with Runtime(devices="sim:24GiB,host:64GiB", ledger="memory:") as rt:
        rt.register("writer", str(file), context_length=512)
        with rt.use("writer") as model:

            def direct(count: int, stream: bool) -> None:
                options = {"stream": stream, "max_tokens": count, "temperature": 0}
                said = model.create_chat_completion(MESSAGES, **options)
                deque(said if stream else (), maxlen=0)

            def through(count: int, stream: bool) -> None:
                options = {"stream": stream, "max_tokens": count, "temperature": 0}
                answer = server.call(connection, model="writer", **options)
                while stream and answer.readline():  # reads event by event, as a program would
                    pass
                answer.read()

            ratio, added, alone = compared(rounds, 8, most, direct, through)
    return Row(
        "a chat completion of a llama.cpp model through `gpu serve`, against the same engine called directly",
        f"{added * 1e3:.1f} ms added to {alone * 1e3:.1f} for one token; {ratio:.2f}× the tokens a second",
        "≤ 3 ms; ≥ 0.95×", added <= 0.003 and ratio >= 0.95
    )  # fmt: skip


def compared(
    rounds: int, short: int, most: int, direct: Callable[..., Any], through: Callable[..., Any]
) -> tuple[float, float, float]:
    """The ratio of tokens a second, the seconds added to one token, and the seconds of one token called directly.

    Each round has a stream of `most` tokens each way, and `short` answers with one token.
    """
    ways = (direct, through)
    alternately(1, *(partial(way, 4, True) for way in ways))
    streams, ones = [], []
    for _ in range(rounds):  # alternately, since the load of the machine changes
        streams += alternately(1, *(partial(way, most, True) for way in ways))
        ones += alternately(short, *(partial(way, 1, False) for way in ways))
    alone, served = (statistics.median(chain(*streams[at::2])) for at in (0, 1))
    one, one_served = (statistics.median(chain(*ones[at::2])) for at in (0, 1))
    return alone / served, one_served - one, one


def rows() -> Iterator[Row]:
    """There is no row of an echo engine if `wrk` is not installed."""
    with tempfile.TemporaryDirectory() as directory, serving(directory) as server:
        if shutil.which("wrk"):
            yield echo(server)
        yield overhead(server, Path(directory, "writer.gguf"))
