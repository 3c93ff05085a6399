"""A look at the book that leaves no trace."""

from __future__ import annotations

import os
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
def door(request, tmp_path):
    url = (
        f"sqlite://{tmp_path}/ledger"
        if request.param == "sqlite"
        else f"{request.getfixturevalue('redis').fresh()}&owners={tmp_path}/owners"
    )
    ledger = open_ledger(url)
    ledger.asked_for = url
    yield ledger
    ledger.close()


def write(door, count):
    door.transact(lambda book: (replace(book, counts={"loaded": count}), None))


def test_every_write_is_seen_and_no_trace_is_left(door):
    looker = peek(door.asked_for, door.directory)
    write(door, 0)
    here = sorted(os.listdir(door.directory)), sorted(os.listdir(door.directory / "owners"))
    for count in range(1, 30):
        write(door, count)
        assert looker.look() == looker.look() == door.read()
    assert looker.look().counts == {"loaded": 29}
    assert (
        sorted(os.listdir(door.directory)),
        sorted(os.listdir(door.directory / "owners")),
    ) == here


def test_a_book_that_nobody_wrote_is_not_read_again(tmp_path, monkeypatch):
    door = open_ledger(f"sqlite://{tmp_path}/ledger")
    write(door, 1)
    stat = os.stat(door.path)
    os.utime(door.path, ns=(stat.st_atime_ns, stat.st_mtime_ns - 10**9))
    looker = peek(door.url, door.directory)
    first = looker.look()
    monkeypatch.setattr(looker, "_read", None)
    assert looker.look() is first
    door.close()


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: path.unlink(),
        lambda path: path.write_bytes(b"\0" * 8192),
        lambda path: path.write_text("no book"),
        lambda path: os.truncate(path, 5000),
    ],
)
def test_a_damaged_book_is_nothing_to_look_at_and_is_left_as_it_is(tmp_path, harm):
    """To mend it is its owners' business."""
    door = open_ledger(f"sqlite://{tmp_path}/ledger")
    write(door, 1)
    path, looker = Path(door.path), peek(door.url, door.directory)
    harm(path)
    there = path.read_bytes() if path.exists() else None
    assert looker.look() is None
    assert (path.read_bytes() if path.exists() else None) == there
    write(door, 2)
    assert looker.look().counts == {"loaded": 2}
    door.close()


def test_a_redis_that_is_away_is_nothing_to_look_at(tmp_path):
    with redis_server() as server:
        url = f"{server.fresh()}&owners={tmp_path}/owners"
        door = open_ledger(url)
        write(door, 1)
        looker = peek(url, door.directory)
        assert looker.look().counts == {"loaded": 1}
        server.kill()
        assert looker.look() is None
        server.start()
        assert looker.look().counts == {"loaded": 1}
        door.close()
