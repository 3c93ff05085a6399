"""Engines that sleep: stand-ins that speak the recorded protocol of vLLM and SGLang, on a simulated card."""

import importlib
import os
import signal
import stat
import sys
import urllib.error
import urllib.request

import pytest

from gpu_runtime.backends.base import is_out_of_memory
from gpu_runtime.backends.engines import recipes
from gpu_runtime.backends.processes import engine
from gpu_runtime.backends.registry import open_backend
from gpu_runtime.devices.probe import open_probe
from gpu_runtime.errors import CannotGovern, EngineDied, NotResident
from gpu_runtime.facts import HOST, Evidence, ModelSpec, Share
from gpu_runtime.units import GIB
from tests.backends.test_engine_server import STAND_IN, alive
from tests.clock import PATIENCE, until

ON_CARD = (Share("sim:0", 4 * GIB),)
WEIGHTS = 3 * GIB // 2
PACKAGE = """
import sys
sys.path.insert(0, {folder!r})
import engine_stand_in
if __name__ == "__main__":
    engine_stand_in.main("sglang", sys.argv[1:])
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Puts stand-ins for vLLM and SGLang where they are looked for. Returns the folder of their files."""
    vllm = tmp_path / "bin" / "vllm"
    vllm.parent.mkdir()
    vllm.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{STAND_IN}" vllm "$@"\n')
    vllm.chmod(vllm.stat().st_mode | stat.S_IXUSR)
    sglang = tmp_path / "site" / "sglang"
    sglang.mkdir(parents=True)
    (sglang / "__init__.py").touch()
    (sglang / "launch_server.py").write_text(PACKAGE.format(folder=str(STAND_IN.parent)))
    (tmp_path / "held").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.setenv("PATH", f"{vllm.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("STAND_IN_RECORD", str(tmp_path / "record"))
    monkeypatch.setenv("STAND_IN_HELD", str(tmp_path / "held"))
    monkeypatch.setenv("STAND_IN_FAULT", str(tmp_path / "fault"))
    return tmp_path


def charged_in(place):
    """`Probe.charged` of a card whose driver reports what each stand-in says that it holds."""

    def charged(pids, devices):
        files = [place / "held" / str(pid) for pid in pids]
        held = sum(int(file.read_text()) for file in files if file.exists())
        return {"sim:0": held} if devices else {}

    return charged


@pytest.fixture(params=["vllm", "sglang"])
def backend(request, place, monkeypatch):
    """The backend of an engine that sleeps, on a card whose driver reports what each process holds."""
    found = open_backend(request.param, open_probe("sim:8GiB,host:8GiB"))
    monkeypatch.setattr(found.probe, "charged", charged_in(place))
    monkeypatch.setattr(type(found), "can_move", True)
    monkeypatch.setattr(type(found.recipe), "sleeps", lambda self, device: True)
    monkeypatch.setattr(found, "evidence", lambda spec: Evidence(weight_bytes=WEIGHTS))
    return found


@pytest.fixture
def loaded(backend):
    """A model in a server that has loaded it."""
    model = backend.load(ModelSpec("qwen", backend.name, source="org/name", size=4 * GIB), ON_CARD)
    yield model
    backend.drop(model)


def asleep(backend, model):
    backend.move(model, (Share(HOST, WEIGHTS),))
    return model


def test_a_server_sleeps_with_its_weights_in_host_memory_and_wakes_in_the_same_process(
    backend, loaded
):
    """Its cache is lost, and its context stays on the card. The bytes that return are those without the context."""
    served, pids, kept = backend.value(loaded), loaded.pids, GIB // 2
    assert backend.measure(loaded) == (Share("sim:0", WEIGHTS),)
    assert backend.working_bytes(loaded) == 4 * GIB - WEIGHTS
    for _ in range(2):
        asleep(backend, loaded)
        assert backend.measure(loaded) == (Share(HOST, WEIGHTS),)
        assert backend.probe.used() == {"sim:0": 0, HOST: WEIGHTS}
        assert loaded.kept == {"sim:0": kept} and loaded.pids == pids
        assert backend.must_return_to(loaded) == {"sim:0": 4 * GIB - kept}
        with pytest.raises(NotResident):
            served.base_url  # noqa: B018 - a request to a server that sleeps could end it
        backend.move(loaded, (Share("sim:0", 4 * GIB - kept),))
        assert backend.measure(loaded) == (Share("sim:0", WEIGHTS),)
        assert backend.working_bytes(loaded) == 4 * GIB - WEIGHTS - kept
        assert backend.probe.used() == {"sim:0": 4 * GIB - kept, HOST: 0}
        assert served.health() and served.base_url and loaded.pids == pids


def test_a_small_engine_may_keep_more_than_half_of_its_bytes(backend, loaded, place, monkeypatch):
    """A context takes some 500 MiB, however small the model is. Such an engine was ended when it slept."""
    monkeypatch.setattr(engine, "KEPT_SECONDS", 0.0)
    loaded.total = (Share("sim:0", 3 * GIB // 4),)
    asleep(backend, loaded)
    assert loaded.kept == {"sim:0": GIB // 2} and loaded.pids


def test_no_other_card_is_a_place_for_it(backend, loaded):
    with pytest.raises(CannotGovern, match="places a model when it loads it"):
        backend.move(loaded, (Share("sim:1", 4 * GIB),))
    assert backend.value(loaded).health()


def test_a_model_that_must_not_sleep_is_never_asked_to(backend):
    spec = ModelSpec("qwen", backend.name, source="org/name", size=4 * GIB)
    model = backend.load(ModelSpec(**{**_fields(spec), "options": {"sleep": False}}), ON_CARD)
    assert backend.measure(model) == ON_CARD and backend.working_bytes(model) is None
    with pytest.raises(CannotGovern):
        asleep(backend, model)
    backend.drop(model)


def _fields(spec):
    return {name: getattr(spec, name) for name in spec.__struct_fields__}


FAULTS = [("500", "answered 500"), ("late", "did not answer POST"), ("dies", "did not answer POST")]


@pytest.mark.parametrize(("fault", "said"), FAULTS)
@pytest.mark.parametrize("wakes", [False, True])
def test_a_server_that_does_not_sleep_or_wake_is_ended(
    backend, loaded, place, monkeypatch, fault, said, wakes
):
    """What it holds then is not known. Nothing of it is left: no process, no bytes, no claim."""
    pids = loaded.pids
    if wakes:
        asleep(backend, loaded)
    if fault == "late":
        monkeypatch.setattr(engine, "LEAST_CHANGE_SECONDS", 0.2)
        loaded.engine._started_in = 0.0
    (place / "fault").write_text(fault)
    with pytest.raises(EngineDied, match=f"it did not {'wake' if wakes else 'sleep'}: it {said}"):
        backend.move(loaded, ON_CARD if wakes else (Share(HOST, WEIGHTS),))
    assert loaded.ended and backend.measure(loaded) == ()
    assert backend.probe.used() == {"sim:0": 0, HOST: 0} and not any(map(alive, pids))


def test_a_server_that_says_that_it_sleeps_and_keeps_its_memory_is_ended(
    backend, loaded, place, monkeypatch
):
    """The request that waits for the card would otherwise find it full."""
    monkeypatch.setattr(engine, "KEPT_SECONDS", 0.2)
    (place / "fault").write_text("holds")
    with pytest.raises(EngineDied, match="says that it sleeps, and keeps 4.0 GiB on its card"):
        asleep(backend, loaded)
    assert loaded.ended and backend.probe.used() == {"sim:0": 0, HOST: 0}


def test_a_server_that_dies_asleep_is_lost_and_not_restarted(backend, loaded):
    """A restart would take the card's memory, which others may have now."""
    lost = []
    loaded.watch(lambda kind, because: lost.append(because))
    asleep(backend, loaded)
    os.kill(loaded.pids[1], signal.SIGKILL)
    until(lambda: lost)
    assert "killed by SIGKILL" in lost[0] and loaded.engine.restarts == 0
    backend.drop(loaded)
    assert backend.probe.used() == {"sim:0": 0, HOST: 0}


def test_a_server_that_was_awake_again_is_restarted(backend, loaded):
    asleep(backend, loaded)
    backend.move(loaded, ON_CARD)
    os.kill(loaded.pids[1], signal.SIGKILL)
    until(lambda: loaded.engine.restarts == 1 and backend.value(loaded).health())


def test_a_full_card_ends_nothing(backend, loaded):
    """The server sleeps on, and wakes once there is room."""
    asleep(backend, loaded)
    block = backend.probe.place("sim:0").allocate(6 * GIB)
    with pytest.raises(Exception) as error:
        backend.move(loaded, ON_CARD)
    assert is_out_of_memory(error.value) and not loaded.ended
    block.free()
    backend.move(loaded, ON_CARD)
    assert backend.value(loaded).health()


def test_no_path_but_the_health_check_is_open_without_the_key(backend, loaded):
    """Every user of the machine reaches the port. With these routes, another one could end a notebook's engine."""
    served = backend.value(loaded)
    root, headers = served.base_url.removesuffix("/v1"), served.headers

    def status(path, data=None, **given):
        try:
            request = urllib.request.Request(root + path, data, given)
            return urllib.request.urlopen(request, timeout=PATIENCE).status
        except urllib.error.HTTPError as error:
            return error.code

    for path in ("/sleep?level=1", "/release_memory_occupation", "/collective_rpc", "/invocations"):
        assert status(path, b"{}") == 401
        assert status(path, b"{}", Authorization="Bearer wrong") == 401
    assert status("/v1/models") == 401 and status("/v1/models", **headers) == 200
    assert status("/health") == 200


def test_the_middleware_protects_a_real_application(monkeypatch):
    """As vLLM adds it: `app.add_middleware(imported)`."""
    fastapi = pytest.importorskip("fastapi")
    testclient = pytest.importorskip("starlette.testclient")
    monkeypatch.syspath_prepend(str(recipes.IN_VLLM))
    monkeypatch.setenv("VLLM_API_KEY", "k3y")
    app = fastapi.FastAPI()
    app.add_middleware(importlib.import_module("gpu_console_key").Keyed)

    @app.get("/{path:path}")
    def answer(path: str) -> str:
        return path

    @app.websocket("/v1/realtime")
    async def talk(socket: fastapi.WebSocket) -> None:
        await socket.accept()

    keyed, wrong = {"Authorization": "Bearer k3y"}, {"Authorization": "Bearer k3y2"}
    client = testclient.TestClient(app)
    for path in ("/v1/models", "/sleep", "/health/", "//health", "/health%2f..%2fsleep", "/Health"):
        assert [client.get(path, headers=one).status_code for one in ({}, wrong)] == [401, 401]
        assert client.get(path, headers=keyed).status_code == 200
    assert client.get("/health").status_code == client.get("/health?a=/sleep").status_code == 200
    with pytest.raises(testclient.WebSocketDisconnect), client.websocket_connect("/v1/realtime"):
        pass
    with client.websocket_connect("/v1/realtime", headers=keyed):
        pass


def test_sglang_is_never_asked_for_its_health_while_it_sleeps(backend, loaded):
    """Its check computes a token, without its weights: it would crash."""
    served = backend.value(loaded)
    asleep(backend, loaded)
    assert not served.health() and all(map(alive, loaded.pids))
