"""Engines without a process: the program of a model runs in a thread, so that each of its steps can fail."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

from gpu_runtime import EngineDied
from gpu_runtime.backends.engines.backend import claim, ports
from gpu_runtime.backends.fake import FakeBackend
from gpu_runtime.backends.processes import model_processes, model_program
from gpu_runtime.backends.processes.engine import MOST_RESTARTS, Engine
from gpu_runtime.backends.processes.model_processes import ModelProcess, ProcessBackend
from gpu_runtime.backends.processes.remote_calls import MessageSocket, pack, uncopied, unpack
from gpu_runtime.devices.probe import open_probe
from gpu_runtime.errors import BadSetting, GpuError, LoadFailed, OutOfMemory
from gpu_runtime.facts import HOST, ModelSpec, Share
from tests.clock import PATIENCE, until

GIB = 1 << 30
ON_CARD, IN_RAM = (Share("sim:0", 4 * GIB),), (Share(HOST, 4 * GIB),)


class Thread:
    """A program in a thread, in place of a guard and its process."""

    started: list[Thread]

    def __init__(self, words: Any, log: Any, env: Any, fds: list[int]) -> None:
        self.pid = os.getpid()
        self._socket = socket.socket(fileno=os.dup(fds[0]))
        self._messages = MessageSocket(self._socket.dup())
        self._over = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()
        self.started.append(self)

    def _run(self) -> None:
        def send(*message: Any) -> None:
            with contextlib.suppress(OSError):  # it was killed
                self._messages.send(message)

        model, cancelled = model_program.Model(lambda *done: send(0, "progress", done)), set()
        try:
            while True:
                number, kind, args = self._messages.receive()
                if kind == "cancel":
                    cancelled.add(*args)
                    continue
                given = (model, number, kind, args, cancelled, send)
                threading.Thread(target=model_program._answer, args=given, daemon=True).start()
        except (EOFError, OSError):  # it was killed
            self._over.set()

    def kill(self) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self._socket.shutdown(socket.SHUT_RDWR)

    @property
    def ended(self) -> bool:
        return self._over.is_set()

    def wait(self, seconds: float = PATIENCE) -> bool:
        return self._over.wait(seconds)

    def end(self) -> int:
        self.kill()
        return -9

    def tail(self) -> str:
        return ""


@pytest.fixture
def backend(monkeypatch) -> ProcessBackend:
    """A backend whose models are fake ones. Its programs are in `Thread.started`."""
    Thread.started = []

    def guarded(*given: Any) -> tuple[Thread, Any]:
        program = Thread(*given)
        return program, SimpleNamespace(close=program.kill)

    monkeypatch.setattr(model_processes, "guarded", guarded)
    devices = "sim:1x8GiB,host:8GiB"
    return ProcessBackend("fake", devices, open_probe(devices))


def spec(**options: Any) -> ModelSpec:
    return ModelSpec("m", backend="fake", size=4 * GIB, options=options)


def held(backend: ProcessBackend) -> dict[str, int]:
    return {id: backend.probe.place(id).held_bytes() // GIB for id in ("sim:0", HOST)}


def fail(*_: Any) -> None:
    raise OutOfMemory("no room", device="sim:0")


@pytest.mark.parametrize("failing", ["the card", "the program", ""])
def test_a_move_takes_its_bytes_once_or_not_at_all(backend, monkeypatch, failing):
    handle = backend.load(spec(), ON_CARD)
    assert held(backend) == {"sim:0": 4, HOST: 0}
    if failing == "the card":
        shares = (*IN_RAM, Share("sim:0", 6 * GIB))
    else:
        shares = IN_RAM
    with monkeypatch.context() as patch:
        if failing == "the program":
            patch.setattr(FakeBackend, "move", fail)
        if failing:
            with pytest.raises(OutOfMemory):
                backend.move(handle, shares)
        else:
            backend.move(handle, shares)
    assert held(backend) == ({"sim:0": 4, HOST: 0} if failing else {"sim:0": 0, HOST: 4})
    assert backend.measure(handle) == (ON_CARD if failing else IN_RAM)
    backend.drop(handle)
    assert held(backend) == {"sim:0": 0, HOST: 0} and Thread.started[0].wait()


def test_a_context_counts_on_each_card_where_the_process_was(monkeypatch, backend):
    """That on the first card was forgotten after a move to another one. The driver shows late that it left."""
    devices = "sim:2x8GiB,host:8GiB"
    backend = ProcessBackend("fake", devices, open_probe(devices))
    contexts, where, late = {"sim:0"}, ["sim:0"], []

    def charged(pid: int, cards: tuple[str, ...]) -> dict[str, int]:
        place = late.pop() if late else where[-1]
        held = {card: (card in contexts) * GIB // 2 + (card == place) * 4 * GIB for card in cards}
        return {card: size for card, size in held.items() if card != HOST}

    monkeypatch.setattr(backend.probe, "charged", charged)
    monkeypatch.setattr(ModelProcess, "pids", (1,))
    handle = backend.load(spec(), ON_CARD)
    assert backend.measure(handle) == (Share("sim:0", 9 * GIB // 2),) and handle.kept == {}

    def move(device: str) -> dict[str, int]:
        late.extend(place for place in where[-1:] if place != HOST)
        where.append(device)
        contexts.update({device} - {HOST})
        backend.move(handle, (Share(device, 4 * GIB),))
        return {card: size for card, size in handle.kept.items() if size}

    assert move(HOST) == {"sim:0": GIB // 2}
    assert move("sim:1") == {"sim:0": GIB // 2, "sim:1": GIB // 2}
    assert move(HOST) == move("sim:0") == {"sim:0": GIB // 2, "sim:1": GIB // 2}
    backend.drop(handle)


def test_the_end_of_an_earlier_load_ends_nothing_of_a_later_one(backend):
    """The user's object is the same, and belongs to the later load."""
    first = backend.load(spec(), (Share("sim:0", GIB),))
    second = backend.load(spec(), ON_CARD, into=first)
    backend.drop(first)
    assert backend.value(second) is first.value and held(backend)["sim:0"] == 4
    assert unpack(second.value.run_there((), pack((("words",), {})))) == "words"


def test_a_failed_load_and_an_end_during_a_load_leave_no_program_and_no_bytes(backend, monkeypatch):
    with pytest.raises(LoadFailed, match="fails=True"):
        backend.load(spec(fails=True), ON_CARD)
    load, processes = model_program.Model.load, []
    prepared = ProcessBackend._prepared
    monkeypatch.setattr(
        ProcessBackend,
        "_prepared",
        lambda *given: (made := prepared(*given), processes.append(made[0]))[0],
    )
    ended = lambda *given: (processes[0].end(), load(*given))[1]
    monkeypatch.setattr(model_program.Model, "load", ended)
    backend.drop(backend.load(spec(), ON_CARD))
    assert held(backend)["sim:0"] == 0
    assert [program.wait() for program in Thread.started] == [True, True]


def endless(model: Any) -> Iterator[str]:
    try:
        while True:
            yield model.name
    finally:
        streams_ended.set()


streams_ended = threading.Event()


def test_a_stream_ends_with_its_reader(backend):
    handle = backend.load(spec(), ON_CARD)
    stream = handle.value.stream(endless)
    assert next(stream) == "m"
    stream.close()
    assert streams_ended.wait(PATIENCE), "the program goes on"
    backend.drop(handle)


def test_a_program_is_started_again_where_its_model_is_and_lost_after_some_times(backend):
    handle, lost = backend.load(spec(), ON_CARD), []
    backend.move(handle, IN_RAM)
    handle.watch(lambda kind, because: lost.append(because))
    for count in range(1, MOST_RESTARTS + 1):
        Thread.started[-1].kill()
        until(lambda count=count: len(Thread.started) == count + 1)
        assert unpack(handle.value.run_there(("__repr__",), pack(((), {})))) == "<fake m on host>"
    assert not lost
    Thread.started[-1].kill()
    until(lambda: lost)
    with pytest.raises(EngineDied, match=f"restarted {MOST_RESTARTS} times"):
        handle.value.run_there((), pack(((), {})))
    assert backend.droppable(handle) and backend.unchanged(handle)


class Losable(Engine):
    """An engine that a test loses."""

    def lose(self) -> None:
        self.error = EngineDied("gone", kind="crash")
        self._report_loss()

    def end(self) -> None:
        self._wanted = False


@pytest.mark.parametrize(
    "acts", [*itertools.permutations(["watch", "lose", "end", "watch again"])], ids=" ".join
)
def test_a_loss_is_reported_once_and_an_end_on_purpose_is_none(acts):
    engine, told = Losable("m", Path("log")), []
    watch = lambda: engine.watch(lambda kind, because: told.append((kind, because)))
    for act in acts:
        {"watch": watch, "watch again": watch, "lose": engine.lose, "end": engine.end}[act]()
    is_lost = max(acts.index("lose"), min(map(acts.index, ("watch", "watch again"))))
    assert told == ([("crash", "gone")] if is_lost < acts.index("end") else [])


def test_the_bytes_of_all_processes_of_a_model_count_where_the_driver_shows_any(
    backend, monkeypatch
):
    monkeypatch.setattr(model_processes, "descendants", lambda pid: (1, 2))
    shown = {os.getpid(): 1, 1: 2, 2: 4}
    charged = lambda pids, ids: {"sim:0": sum(map(shown.get, pids)), HOST: 0}
    monkeypatch.setattr(backend.probe, "charged", charged)
    handle = backend.load(spec(), (Share("sim:0", GIB), Share(HOST, GIB)))
    assert backend.measure(handle) == (Share("sim:0", 7), Share(HOST, GIB))
    backend.drop(handle)


# -- messages


def test_an_error_that_cannot_be_sent_becomes_its_text():
    """A call may raise an error of a class that only its process knows."""

    class Local(Exception):
        """pickle finds no such class."""

    ours, its = map(MessageSocket, socket.socketpair())
    model_program._send(its, 1, "error", Local("words"))
    number, what, error = ours.receive()
    assert (number, what, type(error)) == (1, "error", GpuError) and "words" in str(error)
    its.close()
    with pytest.raises(EOFError):
        ours.receive()
    ours.close()


def test_a_message_has_its_large_buffers_beside_its_pickle():
    """So no process copies an array into a pickle, and the array that arrives can be changed."""
    ours, its = map(MessageSocket, socket.socketpair())
    array = numpy.arange(300_000)
    packed = pack({"array": array, "words": "small"})
    assert len(packed[0]) < 1000 and packed[1].raw().nbytes == array.nbytes
    sending = threading.Thread(target=ours.send, args=((1, uncopied(packed)),))
    sending.start()  # the socket holds less than the array
    number, found = its.receive()
    sending.join()
    value = unpack(found)
    value["array"][0] = 5
    assert (number, value["words"], value["array"][0]) == (1, "small", 5)
    assert (value["array"][1:] == array[1:]).all() and array[0] == 0
    ours.close()
    its.close()


# -- ports


def test_a_port_in_use_is_skipped_and_claimed_once_it_is_free():
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        with pytest.raises(LoadFailed, match=rf"all ports from {taken} to {taken} are taken."):
            claim(range(taken, taken + 1), "a")
    mine = claim(range(taken, taken + 1), "a")
    with pytest.raises(LoadFailed, match="taken"):
        claim(range(taken, taken + 1), "b")
    mine.close()
    claim(range(taken, taken + 1), "b").close()


@pytest.mark.parametrize("text", ["", "80", "9000-8000", "8300-99999", "a-b"])
def test_an_invalid_range_is_one_clear_error(text):
    with pytest.raises(BadSetting, match="GPU_ENGINE_PORTS"):
        ports(text)
