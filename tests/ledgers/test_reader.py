"""A reader reads the book without being an owner, and changes no file."""

import os
import signal

import pytest
from msgspec.structs import replace

from gpu_runtime.ledgers import open_ledger
from gpu_runtime.ledgers.reader import peek
from tests.clock import until
from tests.redis_server import redis_server


@pytest.fixture(params=["keeper", "redis"])
def ledger(request, tmp_path):
    url = (
        f"keeper://{tmp_path}/ledger"
        if request.param == "keeper"
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
    here = sorted(os.listdir(ledger.directory))
    for count in range(1, 30):
        write(ledger, count)
        assert looker.look() == looker.look() == ledger.read()
    assert looker.look().counts == {"loaded": 29}
    assert sorted(os.listdir(ledger.directory)) == here


def test_a_keeper_that_does_not_run_is_not_read_and_not_started(tmp_path):
    ledger = open_ledger(f"keeper://{tmp_path}/ledger")
    write(ledger, 1)
    looker = peek(ledger.url, ledger.directory)
    assert looker.look().counts == {"loaded": 1}
    os.kill(ledger._wire.keeper_pid, signal.SIGKILL)
    until(lambda: looker.look() is None)
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
