"""Engines that are real server processes. A stand-in speaks for vLLM and Ollama, with their recorded flags only."""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from gpu_runtime.backends.base import is_out_of_memory
from gpu_runtime.backends.engines.backend import MOST_RESTARTS, Server, ServerState, claim
from gpu_runtime.backends.engines.recipe import LaunchOrder, recipe
from gpu_runtime.backends.registry import open_backend
from gpu_runtime.devices.probe import open_probe
from gpu_runtime.errors import EngineDied, LoadFailed, NotResident
from gpu_runtime.facts import ModelSpec, Share
from gpu_runtime.units import GIB
from tests.clock import PATIENCE, until

STAND_IN = Path(__file__).parents[1] / "engine_stand_in.py"
SHARES = (Share("sim:0", 4 * GIB),)
BASE = 18700 + os.getpid() % 100 * 80  # test runs beside this one use other ports
PORTS = range(BASE, BASE + 20)


def alive(pid: int) -> bool:
    """Whether process `pid` still runs. A zombie does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def record(tmp_path, monkeypatch):
    """Puts stand-ins for the engines on the PATH. A call of the fixture returns the arguments of each start."""
    for engine in ("vllm", "ollama", "llama-server"):
        file = tmp_path / "bin" / engine
        file.parent.mkdir(exist_ok=True)
        file.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{STAND_IN}" {engine} "$@"\n')
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("STAND_IN_RECORD", str(tmp_path / "record"))
    return lambda: [json.loads(line) for line in (tmp_path / "record").read_text().splitlines()]


@pytest.fixture
def server(record):
    """Makes servers and ends them after the test."""
    made: list[Server] = []

    def make(
        engine: str = "vllm",
        source: str = "org/name",
        among: range = PORTS,
        simulated: bool = True,
        seconds: float = 30.0,
        **options,
    ) -> Server:
        spec = ModelSpec("qwen", engine, source=source, options=options)

        def order(port, key):
            return LaunchOrder(spec, SHARES, {"sim:0": 8 * GIB}, source, port, simulated, key)

        limits = dict(port_range=among, start_seconds=seconds)
        made.append(Server(spec, recipe(engine), order, dict(os.environ), **limits))
        return made[-1]

    yield make
    for one in made:
        one.end()


def get(server: Server, path: str, headers: dict[str, str] | None = None) -> int:
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.order.port}{path}", headers=headers or {}
    )
    try:
        return urllib.request.urlopen(request, timeout=PATIENCE).status
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize("engine", ["vllm", "ollama", "llama-server"])
def test_a_server_goes_from_idle_to_ready_and_back_and_has_no_other_state(
    server, record, engine, tiny_gguf
):
    one = server(engine, source=str(tiny_gguf))
    one.start()
    assert one.healthy() and one.state is ServerState.READY
    pids = one.pids
    assert len(pids) == 2 and all(map(alive, pids))
    one.end()
    assert " ".join(state.name for state in one.past) == "IDLE LOADING READY STOPPING IDLE"
    assert not any(map(alive, pids)) and len(record()) == 1


@pytest.mark.parametrize("engine", ["vllm", "llama-server"])
def test_a_server_that_answers_while_it_loads_is_not_ready(server, engine, tmp_path, monkeypatch):
    """Some versions of llama-server list their models while they load. Only the health check counts."""
    monkeypatch.setenv("STAND_IN_LOADING", str(tmp_path / "loaded"))
    one = server(engine)
    starting = threading.Thread(target=one.start)
    starting.start()
    until(lambda: one.order and one.listens() and get(one, "/v1/models", one.headers) == 200)
    assert get(one, "/health") == 503 and one.state is ServerState.LOADING
    assert starting.is_alive() and not one.healthy()
    (tmp_path / "loaded").touch()
    starting.join(PATIENCE)
    assert one.state is ServerState.READY and one.healthy()


def test_the_bytes_of_a_server_are_measured_when_its_model_is_loaded(backend, monkeypatch):
    """Before the model is loaded, a server has allocated only a part of its memory."""
    probe = backend.probe
    states, servers = [], []
    make = backend._server
    monkeypatch.setattr(backend, "_server", lambda *a: servers.append(make(*a)) or servers[-1])
    charged = probe.charged
    monkeypatch.setattr(
        probe, "charged", lambda *a: states.append(servers[-1].state) or charged(*a)
    )
    backend.drop(backend.load(QWEN, SHARES))
    assert states and set(states) == {ServerState.READY}


@pytest.mark.parametrize("native", [True, False])
def test_the_health_check_of_each_llama_server(native, monkeypatch):
    """llama-server has a path for it. llama-cpp-python's server listens only once the model is loaded."""
    monkeypatch.setattr("shutil.which", lambda name: f"/opt/{name}" if native else None)
    path = recipe("llama-server").health_path(None)
    assert path == ("/health" if native else "/openapi.json")
    if not native:
        pytest.importorskip("sse_starlette", reason="llama-cpp-python[server] is not installed")
        from llama_cpp.server import app

        assert "openapi_url=None" not in Path(app.__file__).read_text()


def test_requests_without_the_key_are_rejected(server):
    """Every user of the machine can reach the port, so each request needs the key."""
    one = server()
    one.start()
    assert get(one, "/v1/models") == 401 and get(one, "/v1/models", one.headers) == 200


def test_the_processes_that_a_server_started_end_with_it(server, tmp_path, monkeypatch):
    """A signal to the process group does not reach child processes in sessions of their own. These end, too."""
    monkeypatch.setenv("STAND_IN_CHILD", str(tmp_path / "child"))
    one = server()
    one.start()
    child = int((tmp_path / "child").read_text())
    assert alive(child) and child in one.pids
    one.end()
    assert not alive(child)


def test_a_killed_server_is_restarted_on_the_same_cards_at_most_three_times(server, record):
    one = server()
    lost = []
    one.watch(lambda kind, because: lost.append((kind, because)))
    one.start()
    for restart in range(1, MOST_RESTARTS + 1):
        os.kill(one.pids[1], signal.SIGKILL)
        until(lambda restart=restart: one.restarts == restart and one.state is ServerState.READY)
        assert one.healthy()
    same = {json.dumps(start["words"]) for start in record()}
    assert len(record()) == 1 + MOST_RESTARTS and len(same) == 1
    assert lost == []
    os.kill(one.pids[1], signal.SIGKILL)
    until(lambda: lost)
    assert lost[0][0] == "crash"
    assert "killed by SIGKILL" in lost[0][1]
    assert one.state is ServerState.IDLE
    assert len(record()) == 1 + MOST_RESTARTS
    port = claim(PORTS, "next")
    assert port.number == PORTS[0], "after four kills no port is still claimed"
    port.close()


def test_ollama_is_restarted_until_its_model_is_on_the_card(server, record, monkeypatch):
    """Up to three times, as Helix does: with a part in RAM it is slow, and its lease larger than its memory."""
    monkeypatch.setenv("STAND_IN_SPREAD", "2")
    one = server("ollama", source="qwen3:8b", simulated=False)
    one.start()
    assert one.state is ServerState.READY and one.restarts == 2 and len(record()) == 3


def test_ollama_with_a_model_that_stays_in_ram_fails_with_the_figures(server, record, monkeypatch):
    monkeypatch.setenv("STAND_IN_SPREAD", "9")
    one = server("ollama", source="qwen3:8b", simulated=False)
    with pytest.raises(
        LoadFailed,
        match=r"started 4 times, and each time only 2.0 GiB of its 4.0 GiB are on the GPU",
    ):
        one.start()
    assert len(record()) == 1 + MOST_RESTARTS and one.state is ServerState.IDLE and not one.pids


def test_ollama_without_the_model_names_the_command_to_type(server):
    with pytest.raises(LoadFailed, match="ollama pull absent"):
        server("ollama", source="absent").start()


def test_a_server_that_never_becomes_ready_fails_after_its_time_out(server, monkeypatch):
    """The clock is injected and advances by itself, so the test takes no real time."""
    monkeypatch.setenv("STAND_IN_MUTE", "1")
    one, now = server(seconds=600.0), [0.0]
    one._clock = lambda: now[0]

    def sleep(seconds: float) -> None:
        now[0] += 100.0 if one.pids else 0.0

    one._sleep = sleep
    with pytest.raises(LoadFailed, match=r"did not answer within 600 s"):
        one.start()
    assert now[0] == 600.0 and one.state is ServerState.IDLE


def test_an_end_during_the_load_is_reported_with_the_server_s_last_line(server, monkeypatch):
    monkeypatch.setenv("STAND_IN_SAYS", "ValueError: too long")
    with pytest.raises(LoadFailed, match="ended with code 1: ValueError: too long") as error:
        server().start()
    assert Path(error.value.log).read_text().startswith("ValueError")


def test_out_of_memory_during_the_load_is_recognised(server, monkeypatch):
    said = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    monkeypatch.setenv("STAND_IN_SAYS", said)
    with pytest.raises(Exception) as error:
        server().start()
    assert is_out_of_memory(error.value) and "2.00 GiB" in str(error.value)


def test_an_interrupted_start_leaves_no_process_and_no_port(server, monkeypatch):
    monkeypatch.setenv("STAND_IN_MUTE", "1")
    one = server()

    def stop(_: float) -> None:
        raise KeyboardInterrupt

    one._sleep = stop
    with pytest.raises(KeyboardInterrupt):
        one.start()
    assert one.state is ServerState.IDLE and one.pids == ()
    claim(PORTS, "next").close()


# -- ports -----------------------------------------------------------------------------------------
def test_two_servers_have_different_ports_and_an_end_frees_the_port(server):
    first, second = server(), server()
    first.start()
    second.start()
    assert {first.order.port, second.order.port} == {PORTS[0], PORTS[1]}
    first.end()
    third = server()
    third.start()
    assert third.order.port == PORTS[0]


def test_a_claim_holds_for_all_processes():
    """The operating system ends a file lock with the last process that holds it."""
    held = claim(range(BASE + 30, BASE + 32), "a")
    trial = (
        "from gpu_runtime.backends.engines.backend import claim; "
        f"print(claim(range({BASE + 30}, {BASE + 32}), 'b').number)"
    )
    other = subprocess.run(
        [sys.executable, "-c", trial], capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    assert (held.number, other.stdout.strip()) == (BASE + 30, str(BASE + 31))
    held.close()
    again = claim(range(BASE + 30, BASE + 32), "c")
    assert again.number == BASE + 30
    again.close()


def test_a_port_that_another_program_takes_meanwhile_costs_one_more_attempt(server, monkeypatch):
    """It claims no ports. The engine then fails to bind that port, and gets the next one."""
    monkeypatch.setattr("gpu_runtime.backends.engines.backend._listened_on", lambda number: False)
    with socket.create_server(("127.0.0.1", PORTS[0])):
        one = server()
        one.start()
        assert one.order.port == PORTS[1] and one.restarts == 0


# -- the backend -----------------------------------------------------------------------------------
QWEN = ModelSpec("qwen", "vllm", source="org/name", size=4 * GIB)


@pytest.fixture
def backend(record):
    return open_backend("vllm", open_probe("sim:8GiB,host:8GiB"))


def test_the_value_gives_the_server_s_address_and_key(backend, record):
    """They are attributes of the loaded model. After the model was dropped, they raise NotResident."""
    loaded = backend.load(QWEN, SHARES)
    served = backend.value(loaded)
    assert served.health() and served.model == "qwen" and served.base_url.endswith("/v1")
    assert served.headers == {"Authorization": f"Bearer {served.api_key}"}
    assert backend.measure(loaded) == SHARES and backend.probe.used()["sim:0"] == 4 * GIB
    assert record()[0]["environment"]["CUDA_VISIBLE_DEVICES"] == ""
    backend.drop(loaded)
    assert not served.health() and backend.probe.used()["sim:0"] == 0
    with pytest.raises(NotResident, match="qwen is not loaded"):
        served.base_url  # noqa: B018 - the read raises


def test_a_read_of_the_address_waits_for_a_restart(backend):
    """Otherwise the caller would use a port on which no server listens yet."""
    loaded = backend.load(QWEN, SHARES)
    served = backend.value(loaded)
    os.kill(loaded.pids[1], signal.SIGKILL)
    until(lambda: served.starting)
    assert served.base_url and served.health() and not served.starting
    backend.drop(loaded)
    assert not served.starting


def test_a_read_of_a_lost_server_s_address_raises(backend, monkeypatch):
    monkeypatch.setattr("gpu_runtime.backends.processes.engine.MOST_RESTARTS", 0)
    loaded = backend.load(QWEN, SHARES)
    lost = threading.Event()
    loaded.watch(lambda kind, because: lost.set())
    os.kill(loaded.pids[1], signal.SIGKILL)
    assert lost.wait(PATIENCE)
    with pytest.raises(EngineDied, match="killed by SIGKILL"):
        backend.value(loaded).base_url  # noqa: B018
    backend.drop(loaded)


def test_an_error_names_what_to_install(backend, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(LoadFailed, match="no command vllm here.\n.*pip install vllm"):
        backend.load(QWEN, SHARES)


@pytest.fixture
def owner(record, request):
    """Another process that owns a server. The fixture returns it with the pids of guard and engine, and the port.

    With the parameter `fork`, the process has a child that it has forked, whose pid it prints.
    """
    program = textwrap.dedent("""
        import os, sys, time
        from gpu_runtime.backends.registry import open_backend
        from gpu_runtime.facts import ModelSpec, Share
        from gpu_runtime.devices.probe import open_probe
        backend = open_backend("vllm", open_probe("sim:8GiB,host:8GiB"))
        loaded = backend.load(ModelSpec("qwen", "vllm", source="org/name"), (Share("sim:0", 1000),))
        child = os.fork() if "fork" in sys.argv else 0
        if child or "fork" not in sys.argv:
            print(*loaded.pids, loaded.engine.order.port, child, flush=True)
        time.sleep(600)
    """)
    words = [sys.executable, "-c", program, getattr(request, "param", "")]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    guard, engine, port, child = (int(word) for word in process.stdout.readline().split())
    assert alive(guard) and alive(engine)
    yield process, guard, engine, port
    process.kill()
    process.wait(PATIENCE)
    if child:
        os.kill(child, signal.SIGKILL)
    if alive(guard):  # a failed test may have left it stopped
        os.kill(guard, signal.SIGCONT)


def test_a_server_ends_with_its_guard_while_its_owner_is_stopped(owner):
    """The guard is killed as well, so only the operating system can end the server."""
    process, guard, engine, _ = owner
    process.send_signal(signal.SIGSTOP)
    os.kill(guard, signal.SIGKILL)
    until(lambda: not alive(engine))
    process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("owner", ["fork"], indirect=True)
def test_a_server_ends_with_its_owner_although_a_child_that_the_owner_forked_lives_on(owner):
    """The child has the owner's sockets, so none of them closes."""
    process, guard, engine, _ = owner
    process.kill()
    process.wait(PATIENCE)
    until(lambda: not alive(engine) and not alive(guard))


def test_a_port_stays_claimed_until_the_server_has_ended_even_without_its_owner(owner, monkeypatch):
    """The guard holds the claim's lock, too. Otherwise the next server would get a port in use."""
    monkeypatch.setattr("gpu_runtime.backends.engines.backend._listened_on", lambda number: False)
    process, guard, engine, port = owner
    os.kill(guard, signal.SIGSTOP)
    process.kill()
    process.wait(PATIENCE)
    assert alive(engine)
    with pytest.raises(LoadFailed, match="are taken"):
        claim(range(port, port + 1), "next")
    os.kill(guard, signal.SIGCONT)
    until(lambda: not alive(guard) and not alive(engine))
    claim(range(port, port + 1), "next").close()
