"""The line before the book: it helps those who wait in it, and nobody depends on whoever is inside."""

from __future__ import annotations

import os
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
from gpu_runtime.ledgers.common import MOST_LOST_INSIDE
from gpu_runtime.ledgers.book_store import LostRace
from gpu_runtime.ledgers.sqlite.writer_queue import STALLED_SECONDS, WriterQueue, writer_queue_in

from .conftest import REPO

INSIDE = """
import sys; from pathlib import Path; from gpu_runtime.ledgers.sqlite.writer_queue import writer_queue_in
queue = writer_queue_in(Path(sys.argv[1]))
say = {"enter": queue.try_enter, "leave": queue.leave, "require": queue.require_queue}
for line in sys.stdin:
    print(say[line.strip()](), flush=True)
"""


class Other:
    """Another process at the same turnstile."""

    def __init__(self, directory: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", INSIDE, directory],
            cwd=REPO,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(REPO)},
        )

    def say(self, word: str) -> str:
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.kill()
        self.process.wait(10)
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def other(tmp_path):
    one = Other(tmp_path)
    yield one
    one.end()


@pytest.fixture
def ours(tmp_path) -> WriterQueue:
    return writer_queue_in(tmp_path)


def test_one_process_is_inside_at_a_time(ours, other):
    assert other.say("enter") == "True"
    assert not ours.try_enter()
    other.say("leave")
    assert ours.try_enter()
    assert other.say("enter") == "False"


def test_whoever_waits_is_woken_when_the_one_inside_leaves(ours, other, monkeypatch):
    monkeypatch.setattr("gpu_runtime.ledgers.sqlite.writer_queue.STALLED_SECONDS", 30.0)
    other.say("enter")
    leaving = threading.Timer(0.05, other.say, ["leave"])
    leaving.start()
    began = time.monotonic()
    assert ours.enter()
    assert time.monotonic() - began < 15
    leaving.join()


@pytest.mark.parametrize("how", ["stopped", "thinking"])
def test_whoever_does_not_come_out_is_walked_past(ours, other, how):
    """It may be stopped, or wait for a GIL that another of its threads keeps: the book does not need its leave."""
    other.say("enter")
    if how == "stopped":
        other.process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    assert not ours.enter()
    assert time.monotonic() - began >= STALLED_SECONDS
    began = time.monotonic()
    assert not any(ours.enter() for _ in range(100))
    assert time.monotonic() - began < 100 * STALLED_SECONDS, (
        "and nobody waits for the same one twice"
    )
    if how == "thinking":
        other.say("leave")
        assert ours.try_enter(), "the line is in order again"


def test_who_is_inside_and_not_served_holds_the_others_up_until_it_leaves(ours, other):
    assert not ours.must_queue
    other.say("enter")
    assert not ours.must_queue
    other.say("require")
    assert ours.must_queue
    other.say("leave")
    assert not ours.must_queue


@pytest.fixture
def ledger(tmp_path, monkeypatch):
    monkeypatch.setattr("gpu_runtime.ledgers.sqlite.writer_queue.STALLED_SECONDS", 30.0)
    door = open_ledger(f"sqlite://{tmp_path}/ledger")
    yield door
    door.close()


@pytest.fixture
def inside(ledger):
    """Another process, inside the turnstile of that ledger."""
    one = Other(ledger.directory)
    one.say("enter")
    yield one
    one.end()


def writing(door, decided: threading.Semaphore) -> threading.Thread:
    """A thread that writes once; each time it decides is counted."""

    def decide(book):
        decided.release()
        return book.with_ticket(
            Ticket("ours", door.owner.id, "use", "qwen", arrived=0, refreshed=0)
        ), None

    thread = threading.Thread(target=door.transact, args=[decide])
    thread.start()
    return thread


def test_who_comes_while_nobody_is_held_up_does_not_wait_for_the_one_inside(ledger, inside):
    writing(ledger, threading.Semaphore(0)).join(20)
    assert ledger.read().ticket("ours")


def test_who_comes_while_one_is_held_up_lines_up_and_decides_on_what_that_one_wrote(
    ledger, inside, tmp_path
):
    inside.say("require")
    decided, held_up = threading.Semaphore(0), open_ledger(f"sqlite://{tmp_path}/ledger")
    thread = writing(ledger, decided)
    assert decided.acquire(timeout=20)
    thread.join(0.05)
    assert not held_up.read().tickets
    held_up._queue = None  # it is inside, so to speak
    held_up.transact(
        lambda book: (
            book.with_ticket(Ticket("theirs", held_up.owner.id, "use", "qwen", 0, 0)),
            None,
        )
    )
    inside.say("leave")
    thread.join(20)
    assert {ticket.key for ticket in ledger.read().tickets} == {"ours", "theirs"}
    assert decided.acquire(blocking=False), "it decided again before it wrote"
    assert not decided.acquire(blocking=False), "once: it lost no race"
    held_up.close()


def test_who_is_inside_and_cannot_write_at_all_does_not_spin(ledger, monkeypatch):
    """A writer that is stopped holds SQLite's lock for as long as it is: then it waits as everybody does."""
    ledger.patience_seconds, decided, slept = 0.2, [], []
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


def test_death_lets_go(ours, other):
    other.say("enter")
    other.process.kill()
    other.process.wait(10)
    assert ours.try_enter()


def test_where_there_can_be_none_all_push(tmp_path):
    """A full or read-only disk keeps nobody from the book."""
    (tmp_path / "turn.pipe").mkdir()
    assert writer_queue_in(tmp_path) is None
    assert writer_queue_in(tmp_path / "missing") is None


def test_what_a_member_puts_in_its_place_is_not_followed(tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "turn").symlink_to(tmp_path / "precious")
    assert writer_queue_in(tmp_path) is None
    assert (tmp_path / "precious").read_text() == "mine"
