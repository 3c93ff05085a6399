"""Measures how long many kernels on one machine wait for each other.

All kernels are real processes with runtimes of their own, on one kept book and simulated devices.
"""

import ctypes
import multiprocessing
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from msgspec.structs import replace

from gpu_runtime import Runtime
from gpu_runtime.facts import Ticket
from gpu_runtime.ledgers import open_ledger
from gpu_runtime.ledgers.base import Ledger
from gpu_runtime.units import GIB

from .bench_ledger import LEASES, fill
from .results import Row
from .timing import Waits, medians

FORK = multiprocessing.get_context("fork")
Told, Say = Iterator[None], Callable[[Any], None]


# -- processes that run commands --------------------------------------------------------------------------------------


class Child:
    """A forked process that runs `act`. `told` has an item for each command; `say` sends an answer."""

    def __init__(self, act: Callable[[Told, Say], None]) -> None:
        self._pipe, theirs = FORK.Pipe()
        self.process = FORK.Process(
            target=lambda: act(iter(theirs.recv, "end"), theirs.send), daemon=True
        )
        self.process.start()
        theirs.close()

    def tell(self) -> None:
        self._pipe.send(None)

    def answer(self) -> Any:
        return self._pipe.recv()

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self._pipe.close()


@contextmanager
def book() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as root:
        yield f"keeper://{root}/ledger"


@contextmanager
def filled() -> Iterator[tuple[str, list[Ledger]]]:
    """A book with LEASES leases, and its doors."""
    with book() as url:
        doors = fill(url)
        yield url, doors
        for door in doors:
            door.close()


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


def grant_after_kill(holders: int = 64, kills: int = 100) -> Row:
    """The time from the kill of a kernel with a model in use to the grant of its memory to a waiting request."""

    def hold(told: Told, say: Say) -> None:
        rt = runtime(url)
        rt.register("mine", backend="fake", size="1GiB")
        with rt.use("mine"):
            say("held")
            signal.pause()

    def wait(told: Told, say: Say) -> None:
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
            os.kill(victim.process.pid, signal.SIGKILL)
            taken.append(waiter.answer() - began)
            victim.end()
            assert waiter.answer() == "gone"
            crowd.insert(0, Child(hold))
            crowd[0].answer()
    waits = Waits.of(taken)
    what = (
        f"from a kernel's kill to the grant of its memory to a waiting request; {holders} holders"
    )
    return Row(what, str(waits), "p99 ≤ 100 ms", waits.p99 <= 0.1)


# -- all kernels lease and release ------------------------------------------------------------------------------------


def cycles(processes: int = 64, a_second: int = 10, seconds: float = 8.0) -> Row:
    """The times of a lease and its release. Each of `processes` kernels does both `a_second` times a second."""

    def cycle(told: Told, say: Say) -> None:
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
        every = Waits.of([wait for waits in _all_at_once(crowd) for wait in waits])
    return Row(
        f"{processes} processes, {a_second} times a second each: lease and release", str(every),
        "p50 ≤ 5 ms, worst ≤ 50 ms", every.median <= 0.005 and every.worst <= 0.05
    )  # fmt: skip


def writer(door: Ledger, key: str = "") -> Callable[[], None]:
    """A function that writes a ticket of the ledger's owner into the book again, with a new time."""
    ticket = Ticket(key or door.owner.id, door.owner.id, "use", "qwen", arrived=0, refreshed=0)

    def write() -> None:
        new = replace(ticket, refreshed=time.monotonic())
        door.transact(lambda book: (book.with_ticket(new), None))

    return write


def _written(write: Callable[[], None], seconds: float, pause: float = 0.0) -> list[float]:
    """The seconds of each call of `write`, which is called for some `seconds`."""
    waits, end = [], time.monotonic() + seconds
    while (began := time.monotonic()) < end:
        write()
        waits.append(time.monotonic() - began)
        if pause:
            time.sleep(pause)
    return waits


def closed_loop(processes: int = 64, seconds: float = 5.0) -> Row:
    """The waits if every process writes the book without pause."""

    def hammer(told: Told, say: Say) -> None:
        write = writer(open_ledger(url))
        write()
        say("ready")
        next(told)
        say(_written(write, seconds))

    with filled() as (url, _), ended([Child(hammer) for _ in range(processes)]) as crowd:
        served = _all_at_once(crowd)
    counts = [len(waits) for waits in served]
    every = Waits.of([wait for waits in served for wait in waits])
    a_second, fairness = sum(counts) / seconds, min(counts) / max(counts)
    return Row(
        f"{processes} processes that write without pause, {LEASES} leases in the page",
        f"{a_second:,.0f} a second; worst {every.worst * 1e3:.0f} ms (p99 {every.p99 * 1e3:.0f}); the "
        f"least served {fairness:.2f} of the most served", "≥ 4,000; ≤ 150 ms; ≥ 0.8",
        a_second >= 4000 and every.worst <= 0.15 and fairness >= 0.8
    )  # fmt: skip


def _all_at_once(crowd: list[Child]) -> list[Any]:
    for child in crowd:
        assert child.answer() == "ready"
    for child in crowd:
        child.tell()
    return [child.answer() for child in crowd]


# -- kernels that keep the GIL ----------------------------------------------------------------------------------------


def bystander(hogs: int = 2, hog_ms: int = 200, seconds: float = 8.0) -> Row:
    """The waits of a kernel that writes the book every 5 ms while `hogs` other kernels also write the book.

    Each of these kernels holds its own GIL for `hog_ms` at a time.
    """

    def hog(told: Told, say: Say) -> None:
        stay = ctypes.PyDLL(None).usleep  # PyDLL keeps the GIL during the call
        arguments = writer(open_ledger(url)), float("inf"), 0.005
        threading.Thread(target=_written, args=arguments, daemon=True).start()
        say("ready")
        while True:
            stay(hog_ms * 1000)
            time.sleep(0.001)

    with filled() as (url, doors), ended([Child(hog) for _ in range(hogs)]) as crowd:
        for child in crowd:
            child.answer()
        waits = Waits.of(_written(writer(doors[0], "b"), seconds, 0.005))
    what = f"writes of a third process, while two kernels hold their GIL for {hog_ms} ms at a time"
    return Row(what, str(waits), "p99 ≤ 10 ms", waits.p99 <= 0.01)


# -- recall: taking memory back from an idle kernel -------------------------------------------------------------------


def recall(busy: bool, tensors: int = 8, rounds: int = 30) -> tuple[Waits, float]:
    """The time from a kernel's request to its grant, and the seconds of a plain copy in the other process.

    Before the grant, an idle 1 GiB model of the other kernel must move to host memory. With `busy`, that kernel's main
    thread runs a pure-Python loop meanwhile.
    """

    def idle(told: Told, say: Say) -> None:
        import torch

        torch.set_num_threads(1)
        rt = runtime(url, "sim:1536MiB,host:4GiB")

        def module() -> Any:
            made = torch.nn.Module()
            for n in range(tensors):
                weight = torch.nn.Parameter(torch.ones(GIB // 4 // tensors), requires_grad=False)
                made.register_parameter(f"w{n}", weight)
            return made

        def come_back() -> None:
            for _ in told:
                with rt.use("big", timeout=30):
                    pass
                say("back")

        rt.register("big", module, size="1GiB")
        rt.preload("big")
        here, there = torch.ones(GIB, dtype=torch.uint8), torch.ones(GIB, dtype=torch.uint8)
        say(medians(4, partial(there.copy_, here), warm=1)[0])
        del here, there
        if busy:
            threading.Thread(target=come_back, daemon=True).start()
            n = 0
            while True:
                n += 1
        come_back()

    with book() as url, ended([Child(idle)]) as [other]:
        copy = other.answer()
        rt = runtime(url, "sim:1536MiB,host:4GiB")
        rt.register("wanted", backend="fake", size="1GiB")
        taken = []
        for _ in range(rounds + 1):
            time.sleep(random.uniform(0.01, 0.1))
            began = time.monotonic()
            with rt.use("wanted", timeout=30):
                taken.append(time.monotonic() - began)
            rt.evict("wanted")
            other.tell()
            assert other.answer() == "back"
        rt.close()
    return Waits.of(taken[1:]), copy  # in the cold round the host's pages are touched first


def rows() -> Iterator[Row]:
    yield grant_after_kill()
    yield cycles()
    yield closed_loop()
    yield bystander()
    waits, copy = recall(busy=False)
    yield Row(
        "recall of another kernel's idle 1 GiB model, request to grant",
        f"{waits}; the copy alone {copy * 1e3:.0f} ms", "p50 ≤ 50 ms + the copy", waits.median <= 0.05 + copy
    )  # fmt: skip
    for tensors in (8, 40):
        waits, copy = recall(busy=True, tensors=tensors)
        further = 5 * (tensors - 8)
        yield Row(
            f"recall of an idle 1 GiB model in {tensors} tensors, its kernel's main thread in a pure-Python loop",
            f"{waits}; the copy alone {copy * 1e3:.0f} ms", "p99 ≤ 100 ms + the copy"
            + (f" + {further} ms for the further tensors" if further else ""),
            waits.p99 <= 0.1 + copy + further / 1e3
        )  # fmt: skip
