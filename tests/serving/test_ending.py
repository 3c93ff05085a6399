"""The start and the end of `gpu serve`: mistakes in `tasks.yaml`, SIGHUP and SIGTERM."""

import asyncio
import http.client
import json
import os
import signal
import sys
import threading
from types import SimpleNamespace

import psutil
import pytest

from gpu_runtime import Runtime
from gpu_runtime.errors import BadDocument
from gpu_runtime.serving import server
from gpu_runtime.serving.requests import Refused
from tests import clock
from tests.faces.served import OPERATORS, free_port, serving
from tests.serving.harness import harness, refusal, stream_text
from tests.serving.loops import settle, until

# A server with a model that writes its last words only once the file `go` exists.
SLOW_SERVER = """
import asyncio, os, sys
import gpu_runtime
from gpu_runtime.serving import server
from gpu_runtime.serving.engines.registry import EchoAdapter

write = EchoAdapter.pieces

async def pieces(self, kind, body, think):
    async for piece in write(self, kind, body, think):
        yield piece
        while not os.path.exists("go"):
            await asyncio.sleep(0.01)

EchoAdapter.pieces = pieces
rt = gpu_runtime.runtime()
rt.register("slow", backend="fake", size="1GiB", model_type="llm")
"""
RUN = """
try:
    server.run(rt, port=int(sys.argv[1]))
finally:
    rt.close()
print("ended in order")
"""
CHAT = {"model": "slow", "messages": [{"role": "user", "content": "one two three"}]}


def post(port: int, body: dict) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=clock.PATIENCE)
    headers = {"Authorization": f"Bearer {OPERATORS}", "Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    return connection.getresponse()


@pytest.mark.processes
def test_sigterm_lets_running_answers_end_and_sighup_reads_the_tasks_again(tmp_path):
    """While running answers end, new calls get a 503, also over new connections. The server then ends in order."""
    tasks = tmp_path / "tasks.yaml"
    port = free_port()
    environment = {"GPU_CONSOLE_TOKEN": OPERATORS, "GPU_TASKS": str(tasks)}
    environment["GPU_CATALOG"] = str(tmp_path / "none")
    command = [sys.executable, "-c", SLOW_SERVER + RUN, str(port)]
    with serving(command, tmp_path, environment, port=port, path="/health") as served:
        token = {"Authorization": f"Bearer {OPERATORS}", "Accept": "application/json"}

        def models() -> set[str]:
            rows = json.loads(served.get("/v1/models", **token).body)["data"]
            return {row["id"] for row in rows}

        assert models() == {"slow"}
        tasks.write_text("tasks: {write: {candidates: [slow]}}")
        os.kill(served.process.pid, signal.SIGHUP)
        clock.until(lambda: models() == {"slow", "task:write"})
        running = post(port, {**CHAT, "stream": True})
        while not running.readline().startswith(b"data: "):
            pass  # a comment says what the call waits for
        os.kill(served.process.pid, signal.SIGTERM)
        clock.until(lambda: post(port, CHAT).status == 503)
        refused = post(port, CHAT)
        assert refused.getheader("Retry-After")
        assert json.loads(refused.read())["error"]["code"] == "ending"
        (tmp_path / "go").touch()
        assert running.read().endswith(b"data: [DONE]\n\n")
        assert served.process.wait(clock.PATIENCE) == 0
        assert "ended in order" in served.output


# A server whose model is in a load that hangs in C code: in a thread of the server, or in a process of the model's own,
# which also ignores SIGTERM.
STUCK_SERVER = """
import ctypes, os, sys
import gpu_runtime
from gpu_runtime.backends.processes.model_processes import ProcessBackend
from gpu_runtime.serving import server

def hang(verb):
    open("began", "w").close()
    while True:
        ctypes.CDLL(None).pause()

rt = gpu_runtime.runtime()
if sys.argv[2] == "process":
    rt._session.backends["fake"] = ProcessBackend("fake", "sim:24GiB,host:64GiB", rt._session.probe)
    rt.register("slow", backend="fake", size="1GiB", model_type="llm")
else:
    rt.register("slow", hang, backend="fake", size="1GiB", model_type="llm")
"""
HANGS = """
import ctypes, signal, sys

if sys.orig_argv[2:3] == ["-m"] and "model_program" in sys.orig_argv[3]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open("began", "w").close()
    while True:
        ctypes.CDLL(None).pause()
"""


@pytest.mark.processes
@pytest.mark.parametrize("where", ["thread", "process"])
def test_sigterm_ends_a_server_whose_load_hangs(tmp_path, where):
    """The server ended only at SIGKILL. No process and no lease remains."""
    (tmp_path / "sitecustomize.py").write_text(HANGS)
    port, ledger = free_port(), f"keeper://{tmp_path / 'ledger'}"
    environment = {
        "GPU_CONSOLE_TOKEN": OPERATORS,
        "GPU_CATALOG": str(tmp_path / "none"),
        "GPU_DEVICES": "sim:24GiB,host:64GiB",
        "GPU_LEDGER": ledger,
        "GPU_SERVE_GRACE_SECONDS": "1",
        "PYTHONPATH": str(tmp_path),
    }
    command = [sys.executable, "-c", STUCK_SERVER + RUN, str(port), where]
    with serving(command, tmp_path, environment, port=port, path="/health") as served:
        call = threading.Thread(target=lambda: statuses.append(post(port, CHAT).status))
        statuses: list[int] = []
        call.start()
        clock.until((tmp_path / "began").exists)
        processes = psutil.Process(served.process.pid).children(recursive=True)
        children = [one for one in processes if "keeper" not in " ".join(one.cmdline())]
        assert bool(children) == (where == "process")
        os.kill(served.process.pid, signal.SIGTERM)
        assert served.process.wait(clock.PATIENCE) == 0
        assert "ended in order" in served.output
        call.join()
        assert statuses == [503]
        clock.until(lambda: not any(child.is_running() for child in children))
        with Runtime(ledger=ledger, devices=environment["GPU_DEVICES"]) as rt:
            rt.reap()  # a load in C code keeps its lease until its process has ended
            assert not list(rt.status().leases())


def test_a_mistake_in_the_tasks_stops_the_server_at_its_start(tmp_path):
    """The first call used to report it."""
    tasks = tmp_path / "tasks.yaml"
    tasks.write_text("tasks:\n  classify:\n    candidates: []\n")
    settings = SimpleNamespace(gpu_tasks=str(tasks), gpu_serve_log=None)
    rt = SimpleNamespace(settings=settings, status=None)
    with pytest.raises(BadDocument) as bad:
        server.run(rt)
    assert (bad.value.line, bad.value.field) == (3, "tasks.classify.candidates")


async def test_accepted_calls_end_within_the_grace_time():
    """A call that takes longer than the grace time is ended by `close`."""
    gate, never = asyncio.Event(), asyncio.Event()
    async with harness(qwen=4, scripts={"qwen": [gate, never]}) as k:
        reply = await k.chat("qwen", "one two", stream=True)
        draining = asyncio.ensure_future(k.gateway.drain(30.0))
        await settle()
        with refusal(503, "ending") as refused:
            await k.chat("qwen")
        assert refused.value.headers and not draining.done()
        gate.set()
        assert await stream_text(reply) == "one two"
        await draining
    async with harness(qwen=4, scripts={"qwen": [never]}) as k:
        waiting = asyncio.ensure_future(k.chat("qwen"))
        await until(lambda: k.log)
        await k.gateway.drain(0.01)
        await k.gateway.close()
        with pytest.raises(Refused, match="the server is ending"):
            await waiting


async def test_the_grace_time_is_a_setting(monkeypatch):
    """GPU_SERVE_GRACE_SECONDS is how long the server drains after SIGTERM."""
    services, drained = [], []

    async def drain(gateway, seconds: float) -> None:
        drained.append(seconds)

    run = lambda make, service, **_: services.append(service)
    monkeypatch.setattr(server.http_server, "run", run)
    monkeypatch.setattr(server.Gateway, "drain", drain)
    async with harness(settings={"gpu_serve_grace_seconds": 7}) as k:
        server.run(k.rt)
        await services[0].drain()
    assert drained == [7.0]
