"""The state of a process, from the system and from its section of the book, and the message about it."""

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from gpu_runtime import Busy, StillInUse
from gpu_runtime.error_help import WHAT_TO_DO
from gpu_runtime.facts import (
    Book,
    Lease,
    LeaseId,
    Owner,
    Phase,
    Presence,
    ProcessState,
    Section,
    Share,
    Wait,
)
from gpu_runtime.ledgers.liveness import Sight
from gpu_runtime.owner import requests
from gpu_runtime.owner.requests import HUNG_SECONDS, explained, presence, presences
from gpu_runtime.rendering import answers, render
from tests.clock import until

from .conftest import alongside, fakes

OWNER = Owner("box", "boot", 4121, 7)
BUSY, IDLE = Section(OWNER, busy_since=90.0), Section(OWNER, idle_since=80.0)
LEAVING = Lease(OWNER.id, "qwen", shares=(Share("sim:0", 20 * 10**9),), phase=Phase.LEAVING)
LEAVES = Section(OWNER, idle_since=80.0, leases=(LEAVING,))
USED = Section(OWNER, leases=(Lease(OWNER.id, "qwen", last_used=70.0, settled_at=60.0),))


@pytest.mark.parametrize(
    "section, sight, silent_since, expected",
    [
        (BUSY, Sight.ALIVE, None, Presence(ProcessState.RUNNING, 90.0)),
        (IDLE, Sight.ALIVE, None, Presence(ProcessState.IDLE, 80.0)),
        (Section(OWNER), Sight.ALIVE, None, Presence(ProcessState.RUNNING)),
        (BUSY, Sight.ALIVE, 85.0, Presence(ProcessState.SILENT, 85.0)),
        (BUSY, Sight.STOPPED, 85.0, Presence(ProcessState.STOPPED)),
        (BUSY, Sight.DUMPING, 85.0, Presence(ProcessState.DUMPING)),
        (BUSY, Sight.DEAD, 85.0, Presence(ProcessState.ENDED)),
        (USED, Sight.UNKNOWN, None, Presence(ProcessState.SILENT, 70.0)),
        (Section(OWNER), Sight.UNKNOWN, None, Presence(ProcessState.SILENT)),
    ],
)
def test_the_state_of_a_process(section, sight, silent_since, expected):
    """The state follows from what is seen of the process now. That counts more than what the process wrote before."""
    assert presence(section, sight, silent_since) == expected


@pytest.mark.parametrize(
    "section, quiet, asked_ago, silent",
    [
        (BUSY, 60.0, None, 60.0),
        (BUSY, 60.0, 20.0, 60.0),
        (BUSY, 60.0, 90.0, 90.0),
        (BUSY, HUNG_SECONDS + 0.1, None, HUNG_SECONDS + 0.1),
        (BUSY, HUNG_SECONDS, None, None),
        (BUSY, HUNG_SECONDS, 5.0, 5.0),
        (IDLE, 60.0, None, None),
        (LEAVES, HUNG_SECONDS + 100.0, None, None),
        (LEAVES, HUNG_SECONDS + 100.1, None, HUNG_SECONDS + 100.1),
    ],
)
def test_a_process_whose_cell_blocks_it_is_silent_since_its_last_sign(
    runtime, clock, monkeypatch, section, quiet, asked_ago, silent
):
    """Or since the oldest request that it has not answered, if that is longer ago. An idle process may sleep long.

    A process that has begun to make room may copy for 50 times the estimate, here 2 s for 20 GB. In an earlier version
    it was never named if it blocked meanwhile: its beginning counted as an answer.
    """
    rt = runtime(clock=clock)
    ledger, book = rt._session.ledger, Book(sections={OWNER.id: section})
    monkeypatch.setattr(ledger, "sights", lambda book: {OWNER.id: Sight.ALIVE})
    monkeypatch.setattr(ledger, "silences", lambda book: {OWNER.id: quiet})
    ago = () if asked_ago is None else (asked_ago, asked_ago - 1)  # the oldest request comes first
    asked = [SimpleNamespace(owner=OWNER, since=clock() - seconds) for seconds in ago]
    since = None if silent is None else clock() - silent
    assert presences(rt._session, book, asked) == {OWNER.id: presence(section, Sight.ALIVE, since)}


def test_a_wait_names_each_stopped_process_in_its_way_once():
    """Whether it holds the memory, or was asked to free it."""
    holder, asked, fine = (Owner("box", "boot", pid, 7) for pid in (5001, 5002, 5003))
    book = Book(sections={one.id: Section(one) for one in (holder, asked, fine)})
    sights = {holder.id: Sight.STOPPED, asked.id: Sight.STOPPED, fine.id: Sight.ALIVE}
    ledger = SimpleNamespace(
        read=lambda: book, sights=lambda book, ids: {id: sights[id] for id in ids}
    )
    session = SimpleNamespace(me=OWNER.id, ledger=ledger)
    wait = Wait(
        "m is in use.", blockers=(f"{holder.id}/a", f"{fine.id}/b"), recalls={f"{asked.id}/c": 0}
    )
    found = explained(session, wait)
    assert [f"kill -CONT {pid}" in found.because for pid in (5001, 5002, 5003)] == [
        True,
        True,
        False,
    ]
    assert explained(session, found) == found and found.blockers == wait.blockers


def test_a_pinned_model_of_another_process_stays_and_the_error_says_what_to_type(
    runtime, shared_book
):
    a, b = (runtime(ledger=shared_book) for _ in "ab")
    fakes(a, qwen="14GiB").preload("qwen")
    a.pin("qwen")
    address = f"qwen@{a._session.me}"
    with pytest.raises(StillInUse, match=f"%gpu unpin qwen@{a._session.owner.pid}"):
        b.evict(address)
    assert "%gpu unpin" in WHAT_TO_DO["StillInUse"]
    b.unpin(address)
    assert b.evict(address).done


def test_who_waits_for_a_process_that_writes_a_core_dump_learns_who_and_why(
    runtime, shared_book, monkeypatch
):
    """The caller is told at once. In an earlier version it waited 7 s without any message."""
    a, b = (runtime(ledger=shared_book, monitor=False) for _ in "ab")
    fakes(a, qwen="14GiB")
    fakes(b, llama="14GiB")
    sights = {a._session.me: Sight.DUMPING, b._session.me: Sight.ALIVE}
    monkeypatch.setattr(b._session.ledger, "sights", lambda book, owners=None: sights)
    with a.use("qwen"), pytest.raises(Busy) as raised:
        b.preload("llama", timeout=0)
    label = a._session.owner.label
    assert f"{label} has crashed, and holds its memory while it writes a core dump." in str(
        raised.value
    )
    seen = b.status()
    assert f"{label}, writing a core dump" in answers.status(seen).text
    [lease] = render.status(seen)["leases"]
    assert lease["owner_state"] == "writing a core dump"


@pytest.mark.thorough
def test_the_owner_s_reason_comes_before_the_asker_s_time_out(runtime, shared_book):
    """The owner waits for room with the same time-out. It was blamed as a process that hangs."""
    a, b, asker = (runtime(ledger=shared_book) for _ in range(3))
    fakes(a, qwen="14GiB")
    fakes(b, llama="14GiB")
    with ExitStack() as using:
        using.enter_context(b.use("llama"))
        with alongside(lambda: a.preload("qwen")):
            until(lambda: asker.status().tickets)
            with pytest.raises(Busy, match=r"waits for room: .*llama .* is in use") as raised:
                asker.preload(LeaseId(a._session.me, "qwen"), timeout=0.1)
            assert "kernel runs again" not in str(raised.value)
            using.close()


def test_an_owner_that_has_just_given_up_is_not_blamed(runtime, shared_book, clock, monkeypatch):
    """Its ticket is gone, and its answer is not in the book yet."""
    a, asker = (runtime(ledger=shared_book, monitor=False, clock=clock) for _ in range(2))
    fakes(a, qwen="14GiB")
    target = LeaseId(a._session.me, "qwen")
    said = [Wait("a waits for room: llama is in use"), Wait("a was asked", silent=(str(target),))]
    monkeypatch.setattr(requests, "_ask_once", lambda *_: said.pop(0))
    monkeypatch.setattr(requests, "pause", lambda *_: clock.advance(40))
    with pytest.raises(Busy, match="not done within 30 s: a waits for room: llama is in use"):
        asker.preload(target, timeout=30)
    assert not said


def test_a_use_that_has_just_ended_refuses_no_eviction(runtime, shared_book):
    """The book shows the pin until it is published, 4.1 s on a busy machine. So the owner is asked."""
    a, asker = (runtime(ledger=shared_book, monitor=False) for _ in range(2))
    fakes(a, m="1GiB")
    with a.use("m"):
        a.tick()
    done: list[Any] = []
    with alongside(lambda: done.append(asker.evict(f"m@{a._session.me}"))):
        until(lambda: asker._session.ledger.read().tickets)
        a.tick()
    assert done and done[0].done and done[0].bytes == 1 << 30


def test_a_lease_in_use_is_refused_by_its_owner_at_once(runtime, shared_book):
    a, asker = (runtime(ledger=shared_book, monitor=name == "a") for name in "ab")
    fakes(a, m="1GiB")
    with a.use("m"), pytest.raises(StillInUse, match="m .* is in use by"):
        asker.evict(f"m@{a._session.me}", timeout=None)
    [declined] = [event for event in asker.why("m") if event.action == "declined"]
    assert declined.answers
