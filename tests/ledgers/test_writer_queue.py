"""The queue of writers, which avoids failed attempts to write the book. The process at the front of
the queue has the turn. If it stops, the others still write.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from gpu_runtime.errors import LedgerUnavailable
from gpu_runtime.facts import Ticket
from gpu_runtime.ledgers import open_ledger
from gpu_runtime.ledgers.book_store import LostRace
from gpu_runtime.ledgers.common import MOST_LOST_INSIDE
from gpu_runtime.ledgers.sqlite.writer_queue import (
    _HOLDER,
    _PAUSES,
    STALLED_SECONDS,
    WriterQueue,
    writer_queue_in,
)
from tests.clock import PATIENCE, scaled

from .conftest import REPO

OTHER_PROCESS = """
import sys, time; from pathlib import Path; from gpu_runtime.ledgers.sqlite.writer_queue import writer_queue_in
queue = writer_queue_in(Path(sys.argv[1]))
def compute():
    print("begun", flush=True)
    end = time.monotonic() + 0.1
    while time.monotonic() < end: pass
    queue.leave()
actions = {"enter": queue.try_enter, "leave": queue.leave, "require": queue.require_queue}
actions |= {"go on": lambda: queue.leave(continues=True), "wait": queue.enter}
def pause():
    print("begun", flush=True)
    queue.pause(0.1)
    queue.leave()
actions |= {"compute": compute, "pause": pause}
for line in sys.stdin:
    print(actions[line.strip()](), flush=True)
"""


class Other:
    """Another process that uses the same queue."""

    def __init__(self, directory: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OTHER_PROCESS, directory],
            cwd=REPO,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(REPO)},
        )

    def begin(self, word: str) -> None:
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def run(self, word: str) -> str:
        self.begin(word)
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)
        self.process.stdin.close()
        self.process.stdout.close()


def readable(other: Other, seconds: float) -> bool:
    """Whether `other` answers within `seconds`."""
    return bool(select.select([other.process.stdout], [], [], seconds)[0])


@pytest.fixture
def other(tmp_path):
    one = Other(tmp_path)
    yield one
    one.end()


@pytest.fixture
def ours(tmp_path) -> WriterQueue:
    return writer_queue_in(tmp_path)


def test_one_process_has_the_turn_at_a_time(ours, other):
    assert other.run("enter") == "True"
    assert not ours.try_enter()
    other.run("leave")
    assert ours.try_enter()
    assert other.run("enter") == "False"


def test_the_end_of_a_turn_wakes_a_waiting_process(ours, other, monkeypatch):
    monkeypatch.setattr("gpu_runtime.ledgers.sqlite.writer_queue.STALLED_SECONDS", PATIENCE)
    other.run("enter")
    leaving = threading.Timer(0.05, other.run, ["leave"])
    leaving.start()
    assert ours.enter()
    leaving.join()


@pytest.mark.parametrize("how", ["stopped", "thinking"])
def test_a_process_that_does_not_end_its_turn_is_passed(ours, other, how, monkeypatch):
    """The process with the turn may be stopped, or may wait for the GIL, which another of its
    threads holds. Other processes then pass it. No process waits for the same turn twice.
    """
    other.run("enter")
    if how == "stopped":
        other.process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    assert not ours.enter()
    assert time.monotonic() - began >= STALLED_SECONDS
    monkeypatch.setattr("gpu_runtime.ledgers.sqlite.writer_queue.STALLED_SECONDS", 100 * PATIENCE)
    assert not any(ours.enter() for _ in range(100))
    if how == "thinking":
        other.run("leave")
        assert ours.try_enter(), "the queue works again"


def test_a_process_that_goes_on_keeps_the_others_waiting_for_a_moment(ours, other, monkeypatch):
    """Without the moment, the woken process takes the turn between a lease and its release."""
    monkeypatch.setattr("gpu_runtime.ledgers.sqlite.writer_queue.CONTINUES_SECONDS", 0.1)
    other.run("enter")
    began = time.monotonic()
    other.run("go on")
    assert ours.enter()
    assert time.monotonic() - began >= 0.1


def test_a_process_whose_patience_ends_does_not_pass_the_one_that_was_woken(ours, monkeypatch):
    """Each process looks every 40 ms whether the others still write. Turns that end in the meantime
    show that they do, so it does not try to take the turn.
    """
    ended = iter(range(100))
    monkeypatch.setattr(ours, "_turns_ended", lambda: next(ended).to_bytes(8, "little"))
    monkeypatch.setattr("gpu_runtime.ledgers.sqlite.writer_queue.UNCALLED_SECONDS", 0.1)
    os.read(ours._pipe, 100)  # nobody wakes this process
    tried = []
    monkeypatch.setattr(ours, "try_enter", lambda: tried.append(time.monotonic()) or True)
    began = time.monotonic()
    assert ours.enter()
    assert len(tried) == 1 and tried[0] - began >= 0.1


def test_a_stopped_process_does_not_keep_the_others_waiting(ours, other, tmp_path):
    """The system wakes the stopped process again and again, as it has waited longest."""
    other.run("enter")
    other.run("leave")
    assert ours.try_enter()
    os.pwrite(ours._lock, _HOLDER.pack(_PAUSES), 9)  # so that the others wait
    other.begin("wait")
    assert not readable(other, 0.05)
    other.process.send_signal(signal.SIGSTOP)
    entered, third = [], writer_queue_in(tmp_path)
    waiting = threading.Thread(target=lambda: entered.append(third.enter()))
    waiting.start()
    ours.leave()
    while waiting.is_alive():
        if ours.try_enter():
            ours.leave()
    assert entered == [True]


@pytest.mark.parametrize("does", ["compute", "pause"])
def test_a_process_that_only_needs_time_for_its_turn_is_not_passed(ours, other, does, monkeypatch):
    """On a busy machine a turn lasts longer than `STALLED_SECONDS`. After a lost race, the process
    with the turn sleeps before its next attempt.
    """
    monkeypatch.setattr("gpu_runtime.ledgers.sqlite.writer_queue.RUNNABLE_SECONDS", PATIENCE)
    other.run("enter")
    assert other.run(does) == "begun"
    assert ours.enter()


def test_a_process_with_the_turn_that_loses_makes_the_others_queue_until_it_leaves(ours, other):
    assert not ours.must_queue
    other.run("enter")
    assert not ours.must_queue
    other.run("require")
    assert ours.must_queue
    other.run("leave")
    assert not ours.must_queue


@pytest.fixture
def ledger(tmp_path, monkeypatch):
    monkeypatch.setattr("gpu_runtime.ledgers.sqlite.writer_queue.STALLED_SECONDS", PATIENCE)
    ledger = open_ledger(f"sqlite://{tmp_path}/ledger")
    yield ledger
    ledger.close()


@pytest.fixture
def other_with_turn(ledger):
    """Another process that has the turn in the queue of `ledger`."""
    one = Other(ledger.directory)
    one.run("enter")
    yield one
    one.end()


def writing(ledger, decided: threading.Semaphore) -> threading.Thread:
    """Starts a thread that writes once. `decided` counts its decisions."""

    def decide(book):
        decided.release()
        return book.with_ticket(
            Ticket("ours", ledger.owner.id, "use", "qwen", arrived=0, refreshed=0)
        ), None

    thread = threading.Thread(target=ledger.transact, args=[decide])
    thread.start()
    return thread


def test_a_writer_does_not_wait_for_the_turn_while_nobody_must_queue(ledger, other_with_turn):
    writing(ledger, threading.Semaphore(0)).join(PATIENCE)
    assert ledger.read().ticket("ours")


def test_a_process_decides_on_what_was_written_while_it_read(ledger, tmp_path, monkeypatch):
    """In a crowd, other processes write while one reads. Without this rule its first attempt would
    always be lost, because the read takes long.
    """
    with contextlib.closing(open_ledger(f"sqlite://{tmp_path}/ledger")) as third:

        def write(key):
            theirs = Ticket(key, third.owner.id, "use", "qwen", 0, 0)
            third.transact(lambda book: (book.with_ticket(theirs), None))

        look, looks = ledger._store.look, []

        def look_slowly():
            page = look()
            looks.append(page)
            if len(looks) == 1:
                write("while it read")
            return page

        write("before")
        monkeypatch.setattr(ledger._store, "look", look_slowly)
        decided = threading.Semaphore(0)
        writing(ledger, decided).join(PATIENCE)
    assert decided.acquire(blocking=False) and not decided.acquire(blocking=False)
    assert {ticket.key for ticket in ledger.read().tickets} == {"before", "while it read", "ours"}


def test_a_writer_that_must_queue_decides_on_what_the_process_with_the_turn_wrote(
    ledger, other_with_turn, tmp_path
):
    other_with_turn.run("require")
    decided, favoured = threading.Semaphore(0), open_ledger(f"sqlite://{tmp_path}/ledger")
    thread = writing(ledger, decided)
    assert decided.acquire(timeout=PATIENCE)
    thread.join(0.05)
    assert not favoured.read().tickets
    favoured._queue = None  # as if it had the turn
    favoured.transact(
        lambda book: (
            book.with_ticket(Ticket("theirs", favoured.owner.id, "use", "qwen", 0, 0)),
            None,
        )
    )
    other_with_turn.run("leave")
    thread.join(PATIENCE)
    assert {ticket.key for ticket in ledger.read().tickets} == {"ours", "theirs"}
    assert decided.acquire(blocking=False), "it decided again before it wrote"
    assert not decided.acquire(blocking=False), "once: it lost no race"
    favoured.close()


def test_a_process_with_the_turn_that_cannot_write_does_not_spin(ledger, monkeypatch):
    """A stopped process holds SQLite's lock.

    The process with the turn then sleeps between its attempts, like the others.
    """
    ledger.patience_seconds, decided, slept = scaled(0.2), [], []
    sleep = time.sleep

    def lose(page, new):
        raise LostRace

    with monkeypatch.context() as patch, pytest.raises(LedgerUnavailable):
        patch.setattr(ledger._store, "put", lose)
        patch.setattr(
            "gpu_runtime.ledgers.common.time.sleep",
            lambda seconds: slept.append(seconds) or sleep(seconds),
        )
        ledger.transact(
            lambda book: (
                decided.append(book)
                or book.with_ticket(
                    Ticket("ours", ledger.owner.id, "use", "qwen", arrived=0, refreshed=0)
                ),
                None,
            )
        )
    assert len(slept) >= len(decided) - MOST_LOST_INSIDE - 1 > 0
    assert all(slept)


def test_death_ends_a_turn(ours, other):
    other.run("enter")
    other.process.kill()
    other.process.wait(PATIENCE)
    assert ours.try_enter()


def test_without_a_queue_all_write_directly(tmp_path):
    """If the queue's file cannot be written on this disk, writers still write."""
    (tmp_path / "turn.pipe").mkdir()
    assert writer_queue_in(tmp_path) is None
    assert writer_queue_in(tmp_path / "missing") is None


def test_a_link_in_place_of_the_queues_file_is_not_followed(tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "turn").symlink_to(tmp_path / "precious")
    assert writer_queue_in(tmp_path) is None
    assert (tmp_path / "precious").read_text() == "mine"
