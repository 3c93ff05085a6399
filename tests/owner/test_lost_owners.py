"""A process not proven to live or to be dead: its memory has its name, and a person may end its leases."""

import os

import pytest
from msgspec.structs import replace

from gpu_runtime import GpuError, NotAllowed
from gpu_runtime.owner import requests
from gpu_runtime.units import GIB
from tests.redis_server import redis_server

from .conftest import claims, loaded

pytestmark = pytest.mark.processes

PID = str(os.getpid())


@pytest.fixture
def pair(runtime, tmp_path):
    """Two runtimes. The first one only looks. The second one has a model, and its lock file was replaced."""
    with redis_server() as server:
        url = f"{server.fresh()}&owners={tmp_path}/owners"
        here, lost = (runtime(ledger=url, monitor=False) for _ in "ab")
        loaded(lost, qwen="14GiB")
        path = lost._session.ledger.directory / "owners" / lost._session.me
        path.rename(path.with_name("away"))
        path.touch()
        yield here, lost
        for one in (here, lost):
            one.close()


def test_what_a_lost_process_holds_is_named_and_stays(pair):
    """The memory of a lost process may be in use. Without `force` the process is not removed from the book."""
    here, lost = pair
    assert here.reap() == 0
    named = here.evict(PID, lost=True)
    assert not named.done and claims(here) == {"sim:0": 14 * GIB}
    label = lost._session.owner.label
    assert f"{label} holds qwen (14.0 GiB on sim:0)" in named.because
    assert f"gpu evict {PID} --lost --force" in named.because
    assert f"gpu evict {PID} --lost" in str(here.doctor())


def test_a_person_who_knows_ends_its_leases(pair):
    here, lost = pair
    ended = here.evict(PID, lost=True, force=True)
    assert (ended.done, ended.bytes) == (True, 14 * GIB)
    assert claims(here) == {} and lost._session.me not in here.status().sections
    (event,) = here.why("qwen")[:1]
    assert (event.action, event.by) == ("reaped", here._session.owner.user)
    loaded(here, llama="20GiB")


def test_a_process_that_is_proven_alive_cannot_be_ended(pair):
    here, lost = pair
    path = lost._session.ledger.directory / "owners" / lost._session.me
    path.with_name("away").rename(path)
    with pytest.raises(GpuError, match=rf"process {PID} is not lost.*Lost processes: none"):
        here.evict(PID, lost=True, force=True)
    assert claims(here) == {"sim:0": 14 * GIB}


def test_another_users_process_may_be_ended_by_an_operator_only(pair, monkeypatch):
    here, lost = pair
    book = here._session.ledger.read()
    section = book.sections[lost._session.me]
    foreign = replace(section, owner=replace(section.owner, user="somebody-else"))
    monkeypatch.setattr(type(here._session.ledger), "read", lambda self: book.with_section(foreign))
    mine = here._session.owner.user
    asker = requests.asker(here._session, mine)
    here._session.users[mine] = replace(asker, operator=False)
    with pytest.raises(NotAllowed, match="only somebody-else or an operator may"):
        here.evict(PID, lost=True, force=True)
    here._session.users[mine] = replace(asker, operator=True)
    assert here.evict(PID, lost=True, force=True).done
