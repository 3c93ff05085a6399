"""Measures `gpu serve` over real HTTP on loopback.

One figure is the number of calls a second of an echo engine, measured by `wrk`. The other is the extra time of a chat
completion over HTTP, compared with calling the same llama.cpp engine directly.

The server, its client and its engines share the cores. `wrk` comes with most systems (`apt install wrk`).
"""

import http.client
import json
import os
import re
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import psutil

from gpu_runtime import Runtime, samples
from tests.faces.served import free_port

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

    def call(
        self, connection: http.client.HTTPConnection, **body: object
    ) -> http.client.HTTPResponse:
        connection.request(
            "POST",
            "/v1/chat/completions",
            json.dumps({"messages": MESSAGES, **body}),
            {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"},
        )
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        return answer


class Echo(NamedTuple):
    a_second: float
    a_processor_second: float  # calls for each second of the server's processor time; the client's time is not counted
    half_load: float  # requests a second while the latencies were measured
    median: float  # latency in seconds at half the target
    p99: float


@contextmanager
def serving(
    directory: str, models: Mapping[str, object] | None = None, card: str = "24GiB"
) -> Iterator[Server]:
    """Runs `gpu serve` inside the `with` block, with an echo model, a llama.cpp model and further
    `models`, on one simulated `card`.

    The block begins when the server has printed its URL.
    """
    token = secrets.token_urlsafe(32)  # the server prints its own token to a terminal only
    place = Path(directory)
    samples.gguf_lm(place / "writer.gguf", size="24 MiB")
    (place / "models.json").write_text(
        json.dumps(
            {
                "models": {
                    "echo": {"backend": "fake", "type": "llm", "memory": "1GiB"},
                    "writer": {"path": "writer.gguf", "type": "llm", "context_length": 512},
                    **(models or {}),
                }
            }
        )
    )
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("GPU_")
    } | {
        "GPU_DEVICES": f"sim:{card},host:64GiB",
        "GPU_LEDGER": f"keeper://{place}/ledger",
        "XDG_STATE_HOME": f"{place}/state",
        "GPU_CATALOG": f"{place}/models.json",
        "GPU_CONSOLE_TOKEN": token,
    }
    with subprocess.Popen(
        [sys.executable, "-m", "gpu_runtime.cli", "serve", "--port", str(free_port())],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            process.stdout.readline()
            url = urlsplit(process.stdout.readline().strip())
            yield Server(url.netloc, token, psutil.Process(process.pid))
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def echo(server: Server, seconds: int = 10, target: float = 1000.0) -> Echo:
    """The largest number of calls a second, and the latencies at half the target."""
    connection = http.client.HTTPConnection(server.address)
    server.call(connection, model="echo").read()
    wrk(server, 2)
    before, began = sum(server.process.cpu_times()[:2]), time.perf_counter()
    full = wrk(server, seconds)
    spent = sum(server.process.cpu_times()[:2]) - before
    calls = full["a second"] * (time.perf_counter() - began)
    half = wrk(server, seconds, a_second=target / 2)
    return Echo(full["a second"], calls / spent, half["a second"], half["50%"], half["99%"])


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


def overhead(server: Server, file: Path, rounds: int = 8, most: int = 200) -> dict[str, float]:
    """The extra seconds of a short answer over HTTP, compared with the engine, and the ratio of tokens a second."""
    connection = http.client.HTTPConnection(server.address)
    ways = "direct", "through", "direct, one", "through, one"
    taken: dict[str, list[float]] = {way: [] for way in ways}
    with Runtime(devices="sim:24GiB,host:64GiB", ledger="memory:") as rt:
        rt.register("writer", str(file), context_length=512)
        with rt.use("writer") as model:

            def direct(count: int, stream: bool) -> None:
                said = model.create_chat_completion(
                    MESSAGES, stream=stream, max_tokens=count, temperature=0
                )
                if stream:
                    for _ in said:
                        pass

            def through(count: int, stream: bool) -> None:
                answer = server.call(
                    connection, model="writer", stream=stream, max_tokens=count, temperature=0
                )
                while stream and answer.readline():  # reads event by event, as a program would
                    pass
                answer.read()

            for way in (direct, through):
                way(4, True)
            for _ in range(rounds):  # alternately, since the load of the machine changes
                for name, way in (("direct", direct), ("through", through)):
                    taken[name].append(_seconds(lambda way=way: way(most, True)))
                for _ in range(8):
                    for name, way in (("direct, one", direct), ("through, one", through)):
                        taken[name].append(_seconds(lambda way=way: way(1, False)))
    middle = {name: statistics.median(seconds) for name, seconds in taken.items()}
    return {
        "tokens ratio": middle["direct"] / middle["through"],
        "tokens a second": most / middle["through"],
        "added, median": middle["through, one"] - middle["direct, one"],
        "direct, median": middle["direct, one"],
    }


def _seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def figures() -> tuple[Echo | None, dict[str, float]]:
    """The results of `echo` and `overhead`, or None for `echo` if `wrk` is not installed."""
    with tempfile.TemporaryDirectory() as directory, serving(directory) as server:
        return echo(server) if shutil.which("wrk") else None, overhead(
            server, Path(directory, "writer.gguf")
        )
