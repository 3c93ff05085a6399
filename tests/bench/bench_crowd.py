"""Measures how long many kernels on one machine wait for each other.

All kernels are real processes with runtimes of their own, on one kept book and simulated devices.
"""

import ctypes
import itertools
import multiprocessing
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
from msgspec.structs import replace

from gpu_runtime import Runtime
from gpu_runtime.facts import Section, Ticket
from gpu_runtime.ledgers import open_ledger
from gpu_runtime.ledgers.base import Ledger

from .bench_ledger import LEASES, fill, touch
from .results import Row
from .timing import Waits

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
        time.sleep(4)  # so long the start of so many kernels takes both processors
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
    return Row(what, str(waits), "p99 ≤ 20 ms", waits.p99 <= 0.02)


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
        "p50 ≤ 5 ms, p99 ≤ 50 ms, worst ≤ 100 ms",
        every.median <= 0.005 and every.p99 <= 0.05 and every.worst <= 0.1
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


def closed_loop(processes: int = 64, seconds: float = 20.0) -> Row:
    """The waits if every process writes the book without pause.

    The system divides two processors evenly over some 10 s: in 5 s the least served has a third of the most served.
    """

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
        f"{processes} processes that write without pause for {seconds:.0f} s, {LEASES} leases in the page",
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


# -- the keeper is killed; its memory ---------------------------------------------------------------------------------


def killed_keeper(processes: int = 20, kills: int = 20) -> Row:
    """The longest wait of processes that write without pause while each keeper is killed after half a second."""

    def count(told: Told, say: Say) -> None:
        door = open_ledger(url)
        say("ready")
        next(told)
        over = threading.Event()
        threading.Thread(target=lambda: (next(told), over.set()), daemon=True).start()
        waits = []
        while not over.is_set():
            began = time.monotonic()
            new = Section(door.owner, counts={"n": len(waits) + 1})
            door.transact(lambda book, new=new: (book.with_section(new), None))
            waits.append(time.monotonic() - began)
        kept = door.read().sections[door.owner.id].counts["n"]
        say((max(waits), len(waits), kept))

    with book() as url, ended([Child(count) for _ in range(processes)]) as crowd:
        for child in crowd:
            child.answer()
        for child in crowd:
            child.tell()
        looker = open_ledger(url)
        for _ in range(kills):
            time.sleep(0.5)
            looker.read()
            os.kill(looker._wire.keeper_pid, signal.SIGKILL)
        for child in crowd:
            child.tell()
        found = [child.answer() for child in crowd]
        looker.close()
    worst, lost = max(wait for wait, *_ in found), sum(made != kept for _, made, kept in found)
    return Row(
        f"the keeper is killed {kills} times while {processes} processes write without pause: the longest write",
        f"{worst * 1e3:.0f} ms; {sum(made for _, made, _ in found):,} writes, {lost} processes lost one",
        "≤ 1 s; 0", worst <= 1 and not lost
    )  # fmt: skip


def keeper_memory(owners: int = 64, writes: int = 100_000) -> Row:
    """The memory of the keeper's process after a tenth of the writes, and after all."""
    with book() as url:
        doors = fill(url, leases=owners, owners=owners)
        acts = itertools.cycle([touch(door) for door in doors])
        taken = []
        for part in (writes // 10, writes - writes // 10):
            for act in itertools.islice(acts, part):
                act()
            taken.append(psutil.Process(doors[0]._wire.keeper_pid).memory_info().rss / 2**20)
        for door in doors:
            door.close()
    return Row(
        f"memory of the keeper with {owners} owners, after {writes:,} writes",
        f"{taken[1]:.0f} MiB ({taken[1] - taken[0]:+.1f} since the first tenth)",
        "≤ 60 MiB, ≤ +1", taken[1] <= 60 and taken[1] - taken[0] <= 1
    )  # fmt: skip


def rows() -> Iterator[Row]:
    yield grant_after_kill()
    yield cycles()
    yield closed_loop()
    yield bystander()
    yield killed_keeper()
    yield keeper_memory()
