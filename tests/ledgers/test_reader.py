"""A reader reads the book without being an owner, and changes no file."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpu_runtime.ledgers import open_ledger
from gpu_runtime.ledgers.reader import peek
from tests.redis_server import redis_server


@pytest.fixture(scope="module")
def redis():
    with redis_server() as server:
        yield server


@pytest.fixture(params=["sqlite", "redis"])
def ledger(request, tmp_path):
    url = (
        f"sqlite://{tmp_path}/ledger"
        if request.param == "sqlite"
        else f"{request.getfixturevalue('redis').fresh()}&owners={tmp_path}/owners"
    )
    ledger = open_ledger(url)
    ledger.url_given = url
    yield ledger
    ledger.close()


def write(ledger, count):
    ledger.transact(lambda book: (replace(book, counts={"loaded": count}), None))


def test_every_write_is_seen_and_no_trace_is_left(ledger):
    looker = peek(ledger.url_given, ledger.directory)
    write(ledger, 0)
    here = sorted(os.listdir(ledger.directory)), sorted(os.listdir(ledger.directory / "owners"))
    for count in range(1, 30):
        write(ledger, count)
        assert looker.look() == looker.look() == ledger.read()
    assert looker.look().counts == {"loaded": 29}
    assert (
        sorted(os.listdir(ledger.directory)),
        sorted(os.listdir(ledger.directory / "owners")),
    ) == here


def test_an_unchanged_book_is_not_read_again(tmp_path, monkeypatch):
    ledger = open_ledger(f"sqlite://{tmp_path}/ledger")
    write(ledger, 1)
    stat = os.stat(ledger.path)
    os.utime(ledger.path, ns=(stat.st_atime_ns, stat.st_mtime_ns - 10**9))
    looker = peek(ledger.url, ledger.directory)
    first = looker.look()
    monkeypatch.setattr(looker, "_read", None)
    assert looker.look() is first
    ledger.close()


def test_a_second_write_with_the_same_time_is_seen_after_a_slow_read(tmp_path, monkeypatch):
    """The reader stops after it has read, until the first write is no longer recent. Meanwhile a
    second write gets the same time, as two writes within a few milliseconds do.
    """
    ledger = open_ledger(f"sqlite://{tmp_path}/ledger")
    write(ledger, 1)
    looker = peek(ledger.url, ledger.directory)
    now, read = os.stat(ledger.path).st_mtime_ns, looker._read

    def slow(name):
        nonlocal now
        book, stat = read(name), os.stat(ledger.path)
        write(ledger, 2)
        os.utime(ledger.path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        now += 10**9
        return book

    monkeypatch.setattr(time, "time_ns", lambda: now)
    monkeypatch.setattr(looker, "_read", slow)
    assert looker.look().counts == {"loaded": 1}
    monkeypatch.setattr(looker, "_read", read)
    assert looker.look().counts == {"loaded": 2}
    ledger.close()


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: path.unlink(),
        lambda path: path.write_bytes(b"\0" * 8192),
        lambda path: path.write_text("no book"),
        lambda path: os.truncate(path, 5000),
    ],
)
def test_a_damaged_book_is_not_read_and_not_changed(tmp_path, harm):
    """A reader neither reads nor changes a damaged book. Only the book's owners repair it."""
    ledger = open_ledger(f"sqlite://{tmp_path}/ledger")
    write(ledger, 1)
    path, looker = Path(ledger.path), peek(ledger.url, ledger.directory)
    harm(path)
    there = path.read_bytes() if path.exists() else None
    assert looker.look() is None
    assert (path.read_bytes() if path.exists() else None) == there
    write(ledger, 2)
    assert looker.look().counts == {"loaded": 2}
    ledger.close()


def test_a_redis_that_does_not_run_is_not_read(tmp_path):
    with redis_server() as server:
        url = f"{server.fresh()}&owners={tmp_path}/owners"
        ledger = open_ledger(url)
        write(ledger, 1)
        looker = peek(url, ledger.directory)
        assert looker.look().counts == {"loaded": 1}
        server.kill()
        assert looker.look() is None
        server.start()
        assert looker.look().counts == {"loaded": 1}
        ledger.close()
