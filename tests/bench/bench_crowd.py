"""Measures how long many kernels on one machine wait for each other.

All kernels are real processes with runtimes of their own, on one kept book and simulated devices.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import statistics
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from msgspec.structs import replace

from gpu_runtime import Runtime
from gpu_runtime.facts import Ticket
from gpu_runtime.ledgers import open_ledger
from gpu_runtime.ledgers.base import Ledger
from gpu_runtime.units import GIB

from .bench_ledger import fill

ANSWER_SECONDS = 120.0


class Waits(NamedTuple):
    """Statistics of several waits, in seconds."""

    count: int
    median: float
    p99: float
    worst: float

    @classmethod
    def of(cls, seconds: list[float]) -> Waits:
        ordered, count = sorted(seconds), len(seconds)
        p99 = ordered[min(count - 1, count * 99 // 100)]
        return cls(count, statistics.median(ordered), p99, ordered[-1])

    def __str__(self) -> str:
        median, p99, worst = (f"{s * 1e3:.1f} ms" for s in (self.median, self.p99, self.worst))
        return f"p50 {median}, p99 {p99}, worst {worst} ({self.count})"


# -- processes that run commands --------------------------------------------------------------------------------------


class Child:
    """A forked process. It passes each command (a line of JSON) to `act`, and prints the result as a line of JSON."""

    def __init__(self, act: Callable[[Iterator[Any], Callable[[Any], None]], None]) -> None:
        told, tell = os.pipe()
        hear, said = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(tell)
            os.close(hear)
            _be(act, told, said)
        os.close(told)
        os.close(said)
        self._tell, self._hear = os.fdopen(tell, "w"), os.fdopen(hear)

    def tell(self, what: Any = None) -> None:
        self._tell.write(json.dumps(what) + "\n")
        self._tell.flush()

    def answer(self) -> Any:
        line = self._hear.readline()
        if not line:
            raise RuntimeError(f"process {self.pid} ended without an answer")
        return json.loads(line)

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        for pipe in (self._tell, self._hear):
            with suppress(OSError):
                pipe.close()


def _be(act: Callable[[Iterator[Any], Callable[[Any], None]], None], told: int, said: int) -> None:
    status = 1
    try:
        with os.fdopen(told) as lines, os.fdopen(said, "w") as out:
            act(map(json.loads, lines), lambda what: print(json.dumps(what), file=out, flush=True))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


@contextmanager
def book() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as root:
        yield f"keeper://{root}/ledger"


@contextmanager
def ended(children: list[Child]) -> Iterator[list[Child]]:
    try:
        yield children
    finally:
        for child in children:
            child.end()


def runtime(url: str, cards: str = "sim:64GiB,host:1GiB") -> Runtime:
    return Runtime(
        devices=cards,
        ledger=url,
        gpu_memory_max_percent=1.0,
        cpu_memory_max_percent=1.0,
        eviction_grace_seconds=0,
    )


# -- a kernel is killed, and a request waits for its memory -----------------------------------------------------------


def grant_after_kill(holders: int = 64, kills: int = 100) -> Waits:
    """The time from the kill of a kernel with a model in use to the grant of its memory to a waiting request."""

    def hold(told: Iterator[Any], say: Callable[[Any], None]) -> None:
        rt = runtime(url)
        rt.register("mine", backend="fake", size="1GiB")
        with rt.use("mine"):
            say("held")
            signal.pause()

    def wait(told: Iterator[Any], say: Callable[[Any], None]) -> None:
        rt = runtime(url)
        for _ in told:
            rt.register("wanted", backend="fake", size="1GiB")
            said: list[None] = []
            rt.tell_waits(lambda name, verdict, said=said: said or said.append(say("waiting")))
            with rt.use("wanted", timeout=30):
                say(time.monotonic())
            rt.forget("wanted")
            say("gone")

    with book() as url, ended([Child(hold) for _ in range(holders)]) as crowd:
        for child in crowd:
            child.answer()
        waiter = Child(wait)
        crowd.append(waiter)
        taken = []
        for turn in range(kills):
            waiter.tell()
            assert waiter.answer() == "waiting"
            time.sleep(random.uniform(0.02, 0.3))
            victim = crowd.pop(turn % holders)
            began = time.monotonic()
            os.kill(victim.pid, signal.SIGKILL)
            taken.append(waiter.answer() - began)
            victim.end()
            assert waiter.answer() == "gone"
            crowd.insert(0, Child(hold))
            crowd[0].answer()
    return Waits.of(taken)


# -- all kernels lease and release ------------------------------------------------------------------------------------


def cycles(processes: int = 64, a_second: float = 10.0, seconds: float = 8.0) -> Waits:
    """The times of a lease and its release. Each of `processes` kernels does both `a_second` times a second."""

    def cycle(told: Iterator[Any], say: Callable[[Any], None]) -> None:
        rt = runtime(url)
        with rt.lease("1 MiB", purpose="warm"):
            pass
        say("ready")
        next(told)
        waits, due = [], time.monotonic() + random.uniform(0, 1 / a_second)
        end = due + seconds
        while due < end:
            time.sleep(max(0.0, due - time.monotonic()))
            began = time.perf_counter()
            with rt.lease("1 MiB", purpose="work"):
                pass
            waits.append(time.perf_counter() - began)
            due += 1 / a_second
        say(waits)

    with book() as url, ended([Child(cycle) for _ in range(processes)]) as crowd:
        return Waits.of([wait for waits in _all_at_once(crowd) for wait in waits])


class Loop(NamedTuple):
    """Processes that write without pause."""

    waits: Waits
    a_second: float
    fairness: float  # writes of the least served process, divided by those of the most served


def writer(door: Ledger, key: str = "") -> Callable[[], None]:
    """A function that writes a ticket of the ledger's owner into the book again, with a new time."""
    key = key or door.owner.id
    ticket = Ticket(key, door.owner.id, "use", "qwen", arrived=0, refreshed=0)

    def write() -> None:
        new = replace(ticket, refreshed=time.monotonic())
        door.transact(lambda book: (book.with_ticket(new), None))

    return write


def closed_loop(processes: int = 64, seconds: float = 5.0) -> Loop:
    """The waits if every process writes the book without pause. The book has 50 leases."""

    def hammer(told: Iterator[Any], say: Callable[[Any], None]) -> None:
        write = writer(open_ledger(url))
        write()
        say("ready")
        next(told)
        waits, end = [], time.monotonic() + seconds
        while (began := time.monotonic()) < end:
            write()
            waits.append(time.monotonic() - began)
        say(waits)

    with book() as url:
        doors = fill(url)
        with ended([Child(hammer) for _ in range(processes)]) as crowd:
            served = _all_at_once(crowd)
        for door in doors:
            door.close()
    counts = [len(waits) for waits in served]
    every = Waits.of([wait for waits in served for wait in waits])
    return Loop(every, sum(counts) / seconds, min(counts) / max(counts))


def _all_at_once(crowd: list[Child]) -> list[Any]:
    for child in crowd:
        assert child.answer() == "ready"
    for child in crowd:
        child.tell()
    return [child.answer() for child in crowd]


# -- kernels that keep the GIL ----------------------------------------------------------------------------------------


def bystander(hogs: int = 2, hog_seconds: float = 0.2, seconds: float = 8.0) -> Waits:
    """The waits of a kernel that writes the book every 5 ms while `hogs` other kernels also write the book.

    Each of these kernels holds its own GIL for `hog_seconds` at a time.
    """

    def repeat(write: Callable[[], None]) -> None:
        while True:
            write()
            time.sleep(0.005)

    def hog(told: Iterator[Any], say: Callable[[Any], None]) -> None:
        stay = ctypes.PyDLL(None).usleep  # PyDLL keeps the GIL during the call
        write = writer(open_ledger(url))
        threading.Thread(target=repeat, args=(write,), daemon=True).start()
        say("ready")
        while True:
            stay(int(hog_seconds * 1e6))
            time.sleep(0.001)

    with book() as url:
        doors = fill(url)
        with ended([Child(hog) for _ in range(hogs)]) as crowd:
            for child in crowd:
                child.answer()
            write = writer(doors[0], "b")
            waits, end = [], time.monotonic() + seconds
            while (began := time.monotonic()) < end:
                write()
                waits.append(time.monotonic() - began)
                time.sleep(0.005)
        for door in doors:
            door.close()
    return Waits.of(waits)


# -- recall: taking memory back from an idle kernel -------------------------------------------------------------------


class Recall(NamedTuple):
    """The time from a kernel's request to its grant.

    Before the grant, an idle 1 GiB model of another kernel must move to host memory.
    """

    waits: Waits
    copy: float  # median seconds of a preallocated copy of the same number of bytes, in the same process
    tensors: int


def recall(busy: bool, tensors: int = 8, rounds: int = 30) -> Recall:
    """Measures recalls. With `busy`, the other kernel's main thread runs a pure-Python loop meanwhile."""

    def idle(told: Iterator[Any], say: Callable[[Any], None]) -> None:
        import torch

        torch.set_num_threads(1)
        rt = runtime(url, "sim:1536MiB,host:4GiB")
        width = GIB // 4 // tensors
        with rt.use(rt.register("big", lambda: _module(torch, tensors, width), size="1GiB").name):
            pass
        here, there = torch.ones(GIB, dtype=torch.uint8), torch.ones(GIB, dtype=torch.uint8)
        copies = []
        for _ in range(5):
            began = time.perf_counter()
            there.copy_(here)
            copies.append(time.perf_counter() - began)
        del here, there
        say(statistics.median(copies[1:]))
        if busy:
            threading.Thread(target=_come_back, args=(rt, told, say), daemon=True).start()
            n = 0
            while True:
                n += 1
        _come_back(rt, told, say)

    with book() as url, ended([Child(idle)]) as crowd:
        other = crowd[0]
        copy = other.answer()
        rt = runtime(url, "sim:1536MiB,host:4GiB")
        rt.register("wanted", backend="fake", size="1GiB")
        taken = []
        for _ in range(
            rounds + 1
        ):  # the first round is cold, since the host's pages are touched for the first time
            time.sleep(random.uniform(0.01, 0.1))
            began = time.monotonic()
            with rt.use("wanted", timeout=30):
                taken.append(time.monotonic() - began)
            rt.evict("wanted")
            other.tell()
            assert other.answer() == "back"
        rt.close()
    return Recall(Waits.of(taken[1:]), copy, tensors)


def _module(torch: Any, tensors: int, width: int) -> Any:
    module = torch.nn.Module()
    for n in range(tensors):
        module.register_parameter(
            f"w{n}", torch.nn.Parameter(torch.ones(width), requires_grad=False)
        )
    return module


def _come_back(rt: Runtime, told: Iterator[Any], say: Callable[[Any], None]) -> None:
    for _ in told:
        with rt.use("big", timeout=30):
            pass
        say("back")
