"""Any program: it is started by its own command line, and sleeps as its fields say. The programs are real processes."""

import sys
import threading
from pathlib import Path

import psutil
import pytest

from gpu_runtime.backends.processes import engine
from gpu_runtime.backends.registry import open_backend
from gpu_runtime.devices.probe import open_probe
from gpu_runtime.errors import CannotGovern, EngineDied, LoadFailed
from gpu_runtime.facts import HOST, ModelSpec, Share
from gpu_runtime.units import MIB
from tests.backends.test_engine_server import alive
from tests.clock import scaled, until

PROGRAM = Path(__file__).parents[1] / "sleeping_program.py"
HELD = 64 * MIB  # of memory that it frees
ON_CARD = (Share("sim:0", 128 * MIB),)
TELL = [sys.executable, str(PROGRAM), "tell", "{port}"]
BY_PATHS = {"sleep": "/sleep", "wake": "/wake", "asleep": "/state"}
BY_COMMANDS = {"sleep": [*TELL, "/sleep"], "wake": [*TELL, "/wake"], "asleep": [*TELL, "/state"]}


def ram(pid: int) -> int:
    return psutil.Process(pid).memory_info().rss


@pytest.fixture
def backend(monkeypatch):
    """Its card's driver reports what each program really holds: the rest of a sleeping one is its context."""
    found = open_backend("program", open_probe("sim:1GiB,host:1GiB"))

    def charged(pids, devices):
        programs = [
            pid for pid in pids if "orphan_guard" not in " ".join(psutil.Process(pid).cmdline())
        ]
        return {"sim:0": sum(map(ram, programs))} if devices else {}

    monkeypatch.setattr(found.probe, "charged", charged)
    return found


@pytest.fixture
def load(backend, tmp_path):
    """Loads a program with these fields, and ends it after the test."""
    made = []

    def start(**fields):
        command = [
            sys.executable,
            str(PROGRAM),
            "{port}",
            str(HELD // MIB),
            str(tmp_path / "fault"),
        ]
        options = {"command": command, "health": "/ready", **fields}
        made.append(backend.load(ModelSpec("whisper", "program", options=options), ON_CARD))
        return made[-1]

    yield start
    for model in made:
        backend.drop(model)


def asleep(backend, model):
    size = sum(share.bytes for share in backend.measure(model))
    backend.move(model, (Share(HOST, size),))


def awake(backend, model):
    [(card, size)] = backend.must_return_to(model).items()
    backend.move(model, (Share(card, size),))


@pytest.mark.parametrize("how", [BY_PATHS, BY_COMMANDS], ids=["paths", "commands"])
def test_a_program_frees_its_memory_and_takes_it_again_in_the_same_process(backend, load, how):
    """What it keeps on the card is residue, and the RAM of its process is leased: both as measured."""
    model = load(**how)
    server, pids = backend.value(model), model.pids
    before, taken = ram(pids[1]), sum(share.bytes for share in backend.measure(model))
    for _ in range(2):
        asleep(backend, model)
        kept = ram(pids[1])
        assert before - kept > 0.9 * HELD
        [share] = backend.measure(model)
        assert share.device == HOST and abs(share.bytes - kept) < 4 * MIB
        assert abs(model.kept["sim:0"] - kept) < 4 * MIB and model.pids == pids
        assert backend.probe.used() == {"sim:0": 0, HOST: share.bytes}
        awake(backend, model)
        assert server.health() and model.pids == pids and ram(pids[1]) - kept > 0.9 * HELD
        [card] = backend.measure(model)
        claims = card.bytes + backend.working_bytes(model)
        assert claims == backend.probe.used()["sim:0"] == taken - model.kept["sim:0"]


def test_without_a_field_for_it_a_program_is_taken_at_its_word_and_woken_until_it_is_ready(
    backend, load, tmp_path
):
    """It answers 202 and wakes later. Its health check says when."""
    model = load(sleep="/sleep", wake="/wake")
    asleep(backend, model)
    (tmp_path / "fault").write_text("waits")
    waking = threading.Thread(target=awake, args=[backend, model])
    waking.start()
    until(lambda: model.engine.asleep)
    waking.join(0.2)
    assert waking.is_alive() and not backend.value(model).health()
    (tmp_path / "fault").unlink()
    waking.join()
    assert backend.value(model).health()


FAULTS = [
    ("500", "answered 500"),
    ("dies", "did not answer POST"),
    ("never", "(says that it|did not answer|answered nothing)"),  # the machine may be slow
    ("unclear", "and not true or false"),
]


@pytest.mark.parametrize(("fault", "said"), FAULTS)
@pytest.mark.parametrize("wakes", [False, True])
def test_a_program_that_does_not_sleep_or_wake_is_ended(
    backend, load, tmp_path, monkeypatch, fault, said, wakes
):
    model = load(**BY_PATHS)
    pids = model.pids
    if wakes:
        asleep(backend, model)
    if fault == "never":
        monkeypatch.setattr(engine, "LEAST_CHANGE_SECONDS", scaled(3))
        model.engine._started_in = 0.0
    (tmp_path / "fault").write_text(fault)
    verb = "wake" if wakes else "sleep"
    with pytest.raises(EngineDied, match=f"did not {verb}: it .*{said}"):
        (awake if wakes else asleep)(backend, model)
    assert model.ended and backend.measure(model) == () and not any(map(alive, pids))
    assert backend.probe.used() == {"sim:0": 0, HOST: 0}


COMMANDS = [
    (["sh", "-c", "exit 3"], "ended with code 3"),
    (["/nowhere/tool"], "ended with code 127"),
    (["sh", "-c", "echo $$ > PIDS; sleep 600 & wait"], HANGS := "did not end in time"),
]


@pytest.mark.parametrize(("command", "said"), COMMANDS)
def test_a_command_that_fails_or_hangs_ends_the_program_and_leaves_nothing(
    backend, load, tmp_path, monkeypatch, command, said
):
    if said == HANGS:
        monkeypatch.setattr(engine, "LEAST_CHANGE_SECONDS", 1.0)
    pids = tmp_path / "pids"
    command = [word.replace("PIDS", str(pids)) for word in command]
    model = load(sleep=command, wake="/wake")
    model.engine._started_in = 0.0
    with pytest.raises(EngineDied, match=f"its command {command[0]} {said}"):
        asleep(backend, model)
    assert model.ended
    if pids.exists() and (started := pids.read_text()):
        assert not alive(int(started))


def test_a_program_without_fields_for_sleep_is_never_told_to(backend, load):
    model = load()
    assert backend.working_bytes(model) is None and backend.must_return_to(model) == {}
    with pytest.raises(CannotGovern):
        asleep(backend, model)


def test_a_program_that_is_not_there_says_so(backend):
    spec = ModelSpec("whisper", "program", options={"command": ["/nowhere/server", "{port}"]})
    with pytest.raises(LoadFailed, match="/nowhere/server cannot be started: No such file"):
        backend.load(spec, ON_CARD)
