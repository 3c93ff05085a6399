"""No process can pose as an engine: nothing is sent to a port unless a process of the engine listens on it."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import aclosing
from types import SimpleNamespace

import pytest

from gpu_runtime.backends.engines.backend import claim
from gpu_runtime.backends.registry import open_backend
from gpu_runtime.devices.probe import open_probe
from gpu_runtime.errors import EngineDied, LoadFailed
from gpu_runtime.facts import ModelSpec
from gpu_runtime.serving.engines.base import EngineFailed
from gpu_runtime.serving.engines.openai_http import HttpAdapter, HttpClient
from gpu_runtime.tcp_sockets import listeners, of_another_user, socket_inodes
from gpu_runtime.units import GIB
from tests.backends.test_engine_server import BASE, PORTS, SHARES, alive, record, server
from tests.clock import until
from tests.impostor import NOBODY, impostor

__all__ = ["record", "server"]  # fixtures

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture
def unseen(monkeypatch):
    """Makes every port look free when this process chooses one, so that another process can listen already."""
    monkeypatch.setattr("gpu_runtime.backends.engines.backend._listened_on", lambda number: False)


@pytest.fixture
def loads(tmp_path, monkeypatch):
    """The path of a file. The stand-in engine listens only once this file exists."""
    monkeypatch.setenv("STAND_IN_LOADS", str(tmp_path / "loaded"))
    return tmp_path / "loaded"


@pytest.mark.processes
@pytest.mark.parametrize(
    "users", [pytest.param([NOBODY], marks=needs_root, id="another"), pytest.param([], id="this")]
)
def test_a_process_of_any_user_on_the_port_is_sent_nothing(server, unseen, loads, users):
    """Its program listens before ours does and answers 200. Our engine gets the next port at once."""
    one = server()

    def sleep(seconds: float) -> None:
        if one.order.port == PORTS[1] or not users:  # on the other's port the load never ends
            loads.touch()

    one._sleep = sleep
    with impostor(PORTS[0], *users) as false:
        one.start()
        assert (one.order.port, one.restarts) == (PORTS[1], 0) and one.healthy()
        assert false.heard() == []


@pytest.mark.processes
@needs_root
def test_ports_taken_by_another_user_end_in_one_clear_error(server, unseen, loads):
    with impostor(PORTS[0], NOBODY), pytest.raises(LoadFailed, match="all ports .* are taken"):
        server(among=range(PORTS[0], PORTS[0] + 1)).start()


@pytest.mark.processes
@pytest.mark.parametrize("engine", ["vllm", "ollama", "llama-server"])
def test_no_health_check_carries_the_key(server, engine, tmp_path, monkeypatch, tiny_gguf):
    monkeypatch.setenv("STAND_IN_HEARD", str(tmp_path / "heard"))
    one = server(engine, source=str(tiny_gguf))
    one.start()
    assert one.healthy()
    heard = [json.loads(line) for line in (tmp_path / "heard").read_text().splitlines()]
    checks = [key for path, key in heard if path in ("/health", "/api/version")]
    assert len(checks) >= 2 and set(checks) == {None}


@pytest.fixture
def robbed(record, monkeypatch):
    """A loaded engine that was killed. The process that watches it is stopped, so nothing has noticed its end."""
    monkeypatch.setattr("gpu_runtime.backends.engines.backend.PORTS", f"{BASE + 60}-{BASE + 79}")
    backend = open_backend("vllm", open_probe("sim:8GiB,host:8GiB"))
    loaded = backend.load(ModelSpec("qwen", "vllm", source="org/name", size=4 * GIB), SHARES)
    guard, engine = loaded.pids
    served = backend.value(loaded)
    before = SimpleNamespace(
        base_url=served.base_url, model=served.model, headers=served.headers, listens=served.listens
    )
    os.kill(guard, signal.SIGSTOP)
    os.kill(engine, signal.SIGKILL)
    until(lambda: not alive(engine) and not listeners(loaded.engine.order.port))
    yield served, before, loaded.engine.order.port
    os.kill(guard, signal.SIGCONT)
    backend.drop(loaded)


@pytest.mark.processes
def test_the_address_of_an_engine_whose_port_was_taken_is_not_given(robbed):
    served, _, port = robbed
    with impostor(port) as false:
        assert not served.health()
        for field in ("base_url", "headers", "api_key"):
            with pytest.raises(EngineDied, match="no process of the server listens on its port"):
                getattr(served, field)
        assert false.heard() == []


@pytest.mark.processes
def test_a_call_to_an_engine_whose_port_was_taken_is_not_sent(robbed):
    """The listening process is checked on the open connection, so an address that was read earlier is safe."""
    _, before, port = robbed

    async def call() -> None:
        async with aclosing(HttpClient(proxies=False)) as http:
            await HttpAdapter("qwen", before, http).answer("completions", {"prompt": "hi"}, None)

    with impostor(port) as false:
        with pytest.raises(EngineFailed, match="no process of the engine listens on its port"):
            asyncio.run(call())
        assert false.heard() == []


# -- the kernel's tables -----------------------------------------------------------------------------
@pytest.fixture(params=["asked", "listed"])
def source(request, monkeypatch):
    """Both ways to find a listener: a question to the kernel, and /proc where the question is forbidden."""
    if request.param == "listed":

        def forbidden(port, family):
            raise PermissionError

        monkeypatch.setattr("gpu_runtime.tcp_sockets._asked", forbidden)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::"])
def test_a_listening_socket_is_found_with_its_process(host, source):
    """The socket may listen on any address that a connection to 127.0.0.1 reaches."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    if family is socket.AF_INET6 and not os.path.exists("/proc/net/tcp6"):
        pytest.skip("this machine has no IPv6")
    with socket.create_server((host, 0), family=family, dualstack_ipv6=":" in host) as listening:
        port = listening.getsockname()[1]
        (found,) = listeners(port)
        assert found == (os.fstat(listening.fileno()).st_ino, os.geteuid())
        assert found.inode in socket_inodes([os.getpid()]) and of_another_user(port) is None
    assert listeners(port) == frozenset()


def test_a_socket_that_a_connection_to_loopback_does_not_reach_is_not_listed(source):
    with socket.create_server(("127.0.0.2", 0)) as elsewhere:
        assert listeners(elsewhere.getsockname()[1]) == frozenset()


# -- claims ------------------------------------------------------------------------------------------
@pytest.mark.processes
@needs_root
def test_no_other_user_can_hold_a_claim(tmp_path, monkeypatch):
    """A claim is a lock on a file in this user's directory; a name of an abstract socket could be taken."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    tmp_path.chmod(0o755)
    held = claim(range(BASE + 50, BASE + 51), "a")
    (lock,) = (tmp_path / "gpu-console" / "ports").iterdir()
    mine = socket_inodes([os.getpid()])
    with open("/proc/net/unix") as sockets:
        named = [line.split() for line in sockets if "@gpu-console" in line]
    assert not [words for words in named if int(words[6]) in mine]
    held.close()
    attack = f"import os; os.setgid({NOBODY}); os.setuid({NOBODY}); open({str(lock)!r}, 'r+b')"
    tried = subprocess.run([sys.executable, "-c", attack], capture_output=True, text=True)
    assert "PermissionError" in tried.stderr


@needs_root
def test_claims_in_a_directory_of_another_user_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "gpu-console").mkdir()
    os.chown(tmp_path / "gpu-console", NOBODY, NOBODY)
    with pytest.raises(LoadFailed, match="belongs to uid 65534"):
        claim(range(BASE + 50, BASE + 51), "a")


def test_no_process_can_listen_on_a_port_that_an_engine_will_inherit():
    """Between the bind and the engine's first answer, whatever options the process sets on its socket."""
    port = claim(range(BASE + 52, BASE + 60), "a")
    port.bind()
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, option, 1)
            with pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", port.number))
    port.close()
