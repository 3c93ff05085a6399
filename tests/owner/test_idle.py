"""An idle kernel costs almost nothing and still notices every change."""

import sys
from bisect import insort
from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import replace

from gpu_runtime.facts import Ticket
from gpu_runtime.ledgers import open_ledger
from gpu_runtime.ledgers.base import TICKS_A_SECOND
from gpu_runtime.ledgers.memory import MemoryLedger
from gpu_runtime.notebook import Activity
from gpu_runtime.owner import maintenance, operations
from gpu_runtime.threads import promptly, undisturbed
from tests.clock import until
from tests.owner.conftest import claims, fakes, loaded, where

LONG = 64 / TICKS_A_SECOND  # seconds between two reads of the book with 64 kernels


@pytest.fixture
def crowd(runtime, shared_book, clock):
    """Sixty-four kernels with an idle model each. The test calls the ticks of their monitors itself."""
    kernels = [
        runtime(ledger=shared_book, clock=clock, monitor=False, devices="sim:2x100GiB,host:400GiB")
        for _ in range(64)
    ]
    for rt in kernels:
        loaded(rt, m="1GiB")
    for rt in kernels:
        rt.tick()
    return kernels


def counted(monkeypatch, rt):
    """A list that grows with each transaction that this runtime makes from now on."""
    ledger, made = rt._session.ledger, []
    real = ledger.transact
    monkeypatch.setattr(ledger, "transact", lambda decide: made.append(decide) or real(decide))
    return made


def test_an_idle_kernel_writes_nothing_and_looks_the_less_the_more_there_are(crowd, monkeypatch):
    made = counted(monkeypatch, crowd[5])
    assert [crowd[5].tick() for _ in range(5)] == [LONG] * 5
    assert made == []


def test_a_kernel_among_few_looks_every_second(runtime):
    rt = loaded(runtime(monitor=False), m="1GiB")
    assert [rt.tick(), rt.tick()] == [1.0, 1.0]


def test_a_use_wakes_a_monitor_that_sleeps_long(crowd):
    """A use wakes the monitor, since the pin of the use must be in the book within a second."""
    rt = crowd[5]
    ledger = rt._session.ledger
    assert rt.tick() == LONG
    while ledger.wait(0):
        pass
    with rt.use("m"):
        assert ledger.wait(0), "it rang its own bell"
        assert rt.tick() == 1.0
        assert ledger.read().lease(rt._session.me, "m").pins == 1
        with rt.use("m"):
            assert not ledger.wait(0), "once is enough"
    assert [rt.tick(), rt.tick()] == [1.0, LONG]
    assert ledger.read().lease(rt._session.me, "m").pins == 0


def test_a_use_that_begins_and_ends_before_the_sleep_is_in_the_book_as_ended(crowd, monkeypatch):
    """Nobody published the end: for up to a minute the model was in use for all others."""
    rt = crowd[5]
    rt.evict("m", drop=True)
    assert rt.tick() == LONG
    before = maintenance._doze

    def used(session, book, now):
        monkeypatch.undo()
        with rt.use("m"):
            assert session.ledger.read().lease(session.me, "m").pins == 1
        return before(session, book, now)

    monkeypatch.setattr(maintenance, "_doze", used)
    assert [rt.tick(), rt.tick(), rt.tick()] == [1.0, 1.0, LONG]
    assert rt._session.ledger.read().lease(rt._session.me, "m").pins == 0


def test_a_cell_is_told_at_its_start_and_wakes_the_monitor(crowd, monkeypatch, clock):
    """A cell that blocks the interpreter could not be published later. A long cell is published once."""
    rt = crowd[5]
    kernel = rt._session.activity = Activity(clock)
    kernel.watchers.add(rt._session.cell_began)
    ledger, made = rt._session.ledger, counted(monkeypatch, rt)
    assert rt.tick() == LONG
    while ledger.wait(0):
        pass
    kernel.began("cell")
    assert ledger.wait(0), "it rang its own bell"
    until(lambda: _told(ledger, rt) == (clock.now, 0.0))
    assert rt.tick() == 1.0, "it will soon have more to tell"
    told = len(made)
    clock.advance(2)
    assert rt.tick() == 1.0 and len(made) == told, "a long cell is told once"
    kernel.ended("cell")
    assert len(made) == told
    assert [rt.tick(), rt.tick()] == [1.0, LONG]
    assert _told(ledger, rt) == (0.0, clock.now)


def _told(ledger, rt):
    section = ledger.read().sections[rt._session.me]
    return section.busy_since, section.idle_since


def calmed(crowd, clock):
    clock.advance(maintenance.CALM_SECONDS)
    for rt in crowd:
        rt.tick()


def test_calm_kernels_look_once_a_minute_each_and_one_a_second(crowd, clock):
    """They would look together for ever after somebody had woken all of them."""
    calmed(crowd, clock)
    book = crowd[0]._session.ledger.read()
    due = sorted((clock.now + rt.tick(), place) for place, rt in enumerate(crowd))
    looks = []
    for _ in range(640):
        clock.now, place = due.pop(0)
        looks.append((clock.now, place))
        insort(due, (clock.now + crowd[place].tick(), place))
    assert {place for _, place in looks[-64:]} == {*range(64)}
    gaps = [later - earlier for (earlier, _), (later, _) in pairwise(looks[64:])]
    assert 0.9 < min(gaps) and max(gaps) < 1.0
    assert crowd[0]._session.ledger.read() is book, "nobody writes"


def test_what_wakes_a_calm_kernel_makes_it_look_often_again(crowd, clock):
    calmed(crowd, clock)
    rt = crowd[5]
    assert rt.tick() > LONG
    with rt.use("m"):
        assert rt.tick() == 1.0
    assert [rt.tick(), rt.tick()] == [1.0, LONG]


def test_a_calm_kernel_wakes_those_that_should_relieve_pressure(runtime, shared_book, clock):
    """Each of them looks once a minute, and pressure is to be noticed within 15 s."""
    cards = "sim:10GiB,host:400GiB"
    words = {"ledger": shared_book, "clock": clock, "monitor": False, "devices": cards}
    full, looker = (runtime(gpu_relief="always", **words) for _ in "ab")
    fakes(looker, small="1GiB")
    loaded(full, m="7GiB")
    for seconds in (maintenance.CALM_SECONDS, 10.0):
        clock.advance(seconds)
        looker.tick()
        assert not _rung(full), "idle for less than 120 s"
    clock.advance(30)
    looker.tick()
    assert _rung(full)
    full.tick()
    assert where(looker)["m"] == "host"
    clock.advance(60)
    looker.tick()
    assert not _rung(full)


def _rung(rt):
    """Whether a notification has come since the last call."""
    ledger, found = rt._session.ledger, False
    while ledger.wait(0):
        found = True
    return found


def test_nobody_sleeps_long_while_anybody_waits(crowd):
    """The verdict on a waiting request may change with time alone, and any owner may be asked to evict."""
    ledger = crowd[0]._session.ledger
    wish = Ticket("k", ledger.owner.id, "use", "big", 0.0, 0.0)
    ledger.transact(lambda book: (book.with_ticket(wish), None))
    assert crowd[5].tick() == 1.0
    ledger.transact(lambda book: (book.without_ticket("k"), None))
    assert crowd[5].tick() == LONG


def test_whoever_the_keeper_wakes_removes_the_dead(crowd):
    """The keeper wakes one owner of all. One that looked at two others only slept on, for up to 12 s."""
    row = sorted(crowd[0]._session.ledger.read().sections)
    by_id = {rt._session.me: rt for rt in crowd}
    for dead, looker in ((10, 30), (11, 3), (12, 13)):
        by_id[row[dead]]._session.ledger.close()
        by_id[row[looker]].tick()
        assert row[dead] not in by_id[row[looker]]._session.ledger.read().sections


@pytest.mark.parametrize("dead", [6, 40])
def test_every_death_is_noticed_by_somebody(crowd, dead, monkeypatch):
    """In a Redis the owner before the dead one in the list notices at its next tick, the others later."""
    monkeypatch.setattr(MemoryLedger, "names_the_dead", False)
    crowd[dead]._session.ledger.close()  # ends without removing its section
    gone = crowd[dead]._session.me
    book = crowd[0]._session.ledger.read()
    row = sorted(book.sections)
    before = next(rt for rt in crowd if rt._session.me == row[row.index(gone) - 1])
    before.tick()
    assert gone not in crowd[0]._session.ledger.read().sections


def test_a_death_is_noticed_though_the_one_before_it_is_dead_too_or_stopped(crowd, monkeypatch):
    monkeypatch.setattr(MemoryLedger, "names_the_dead", False)
    row = sorted(crowd[0]._session.ledger.read().sections)
    by_id = {rt._session.me: rt for rt in crowd}
    by_id[row[10]]._session.ledger.close()
    looker = by_id[row[30]]  # all but one are stopped
    for _ in range(len(row)):
        looker.tick()
    assert row[10] not in looker._session.ledger.read().sections
    assert claims(looker)["sim:0"] == sum(
        lease.bytes for lease in looker._session.ledger.read().leases() if lease.where == "sim:0"
    )


def test_a_book_that_nobody_wrote_is_not_read_again(tmp_path):
    mine, other = (open_ledger(f"keeper://{tmp_path}/ledger") for _ in range(2))
    for count in range(1, 50):
        other.transact(lambda book, count=count: (replace(book, counts={"loaded": count}), None))
        assert mine.read().counts == {"loaded": count} and mine.read() is mine.read()
    mine.close()
    other.close()


def test_the_monitor_gets_the_interpreter_promptly_and_gives_it_back():
    """A Python loop keeps the interpreter for 5 ms at a time, and an eviction makes sixty calls."""
    usual = sys.getswitchinterval()
    with promptly:
        with promptly:
            assert sys.getswitchinterval() == pytest.approx(promptly.seconds)
        # another runtime's monitor is at work still
        assert sys.getswitchinterval() == pytest.approx(promptly.seconds)
    assert sys.getswitchinterval() == usual


@pytest.mark.parametrize("first", [promptly, undisturbed])
def test_blocks_that_overlap_leave_the_switch_interval_as_it_was(first):
    """A monitor's round ended during an exchange: 0.5 ms stayed for ever, and threads switched ten times as often."""
    usual = sys.getswitchinterval()
    second = undisturbed if first is promptly else promptly
    first.__enter__()
    second.__enter__()
    assert sys.getswitchinterval() == undisturbed.seconds
    first.__exit__()
    second.__exit__()
    assert sys.getswitchinterval() == usual


def test_a_switch_interval_that_the_user_has_set_meanwhile_stays():
    usual = sys.getswitchinterval()
    try:
        with promptly:
            sys.setswitchinterval(0.123)
        assert sys.getswitchinterval() == pytest.approx(0.123)
    finally:
        sys.setswitchinterval(usual)


def test_a_round_first_does_what_others_wait_for_and_rings_before_it_journals(
    runtime, shared_book, monkeypatch
):
    """The rest of its round and the write of the journal would delay other processes by milliseconds."""
    a, b = (runtime(ledger=shared_book, monitor=False) for _ in "ab")
    loaded(a, idle="20GiB")
    b.evict("idle", wait=False)
    done: list[str] = []

    def noted(place: Any, name: str) -> None:
        real = getattr(place, name)
        monkeypatch.setattr(place, name, lambda *args: done.append(name) or real(*args))

    session = a._session
    noted(session.ledger, "ring")
    noted(session.journal, "append")
    noted(maintenance, "reap_neighbours")
    noted(maintenance, "remeasure")
    noted(operations, "vacate")
    a.tick()
    assert done == ["ring", "ring", "append", "reap_neighbours", "remeasure", "vacate"]
    assert where(b) == {"idle": "host"}
