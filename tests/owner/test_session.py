"""What an owner counts as its own, which events it finds, and how long it waits for others."""

import sys
import threading
from contextlib import suppress
from threading import get_ident
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpu_runtime.errors import Busy, LedgerUnavailable
from gpu_runtime.facts import Asker, Book, Event, Section, Wait
from gpu_runtime.ledgers.host_config import Machine
from gpu_runtime.owner import maintenance, requests
from gpu_runtime.owner.acquire import room_for_process
from gpu_runtime.owner.history import recorded_events
from gpu_runtime.owner.session import NEAR_SECONDS, POLL_SECONDS, Keys
from gpu_runtime.owner.sizing import residue
from gpu_runtime.telemetry.journal import Journal
from gpu_runtime.units import GIB
from tests.clock import Clock
from tests.worlds import block, lease, owner, ticket

from .conftest import claims, fakes, loaded

TORCH, ENGINE = {"backend": "torch"}, {"backend": "llama_cpp"}
WEIGHTS = lease("m", cuda0=4, **TORCH)


@pytest.mark.parametrize(
    "leases, used, contexts, expected",
    [
        ([], {"cuda:0": 6}, {}, {"cuda:0": 6}),
        ([WEIGHTS], {"cuda:0": 6}, {}, {"cuda:0": 2}),
        ([WEIGHTS, lease("n", cuda0=1, cuda1=1, **TORCH)], {"cuda:0": 6}, {}, {"cuda:0": 1}),
        ([WEIGHTS], {"cuda:0": 6, "cuda:1": 3}, {}, {"cuda:0": 2, "cuda:1": 3}),
        ([WEIGHTS], {"cuda:0": 4, "cuda:1": 0}, {}, {}),
        ([WEIGHTS], {"cuda:0": 3}, {}, {}),
        ([WEIGHTS], {"cuda:0": 3}, {"cuda:0": 1}, {"cuda:0": 1}),
        ([WEIGHTS], {"cuda:0": 4.5}, {"cuda:0": 1}, {"cuda:0": 1}),
        ([lease("m", cuda0=4, **ENGINE)], {"cuda:0": 4}, {"cuda:0": 5}, {"cuda:0": 1}),
        ([lease("m", cuda0=4, **ENGINE)], {"cuda:0": 4}, {"cuda:0": 4}, {}),
        ([lease("m", cuda0=4, **ENGINE)], {"cuda:0": 6}, {"cuda:1": 1}, {"cuda:0": 2}),
        ([block(cuda0=4)], {"cuda:0": 4}, {"cuda:0": 1}, {"cuda:0": 1}),
        ([block(cuda0=4)], {"cuda:0": 3}, {}, {}),
        ([], {"host": 6}, {"host": 6}, {}),
    ],
)
def test_what_a_process_uses_beyond_its_leases(leases, used, contexts, expected):
    """A context is never part of a lease of torch, also while the driver still counts too few bytes.
    What an engine allocates outside torch is part of its lease.
    """
    found = residue(
        leases, *({card: int(size * GIB) for card, size in one.items()} for one in (used, contexts))
    )
    assert found == {card: size * GIB for card, size in expected.items()}


def owner_with(journal=(), page=(), tickets=(), **more):
    """As much of a session as the functions below read."""
    kept = Journal()
    kept.append(journal)
    book = Book(events=tuple(page), tickets=tuple(tickets))
    ledger = SimpleNamespace(read=lambda: book)
    return SimpleNamespace(journal=kept, ledger=ledger, wall=lambda: 100.0, **more)


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.sampled_from("xy"), st.integers(0, 1)), max_size=9
    ),
    st.integers(0, 9),
    st.integers(0, 9),
    st.sampled_from((None, 0, 1, 3)),
    st.sampled_from((None, "a")),
    st.sampled_from(((), ("x",), ("x", "y"))),
    st.integers(0, 3),
)
def test_events_are_those_of_the_journal_and_of_the_book_each_once(
    rows, journaled, on_page, limit, model, actions, since
):
    """The journal lacks the last second, and the book all but the last events.

    The keeper numbers the events. In the journal they have the numbers that their owner expected.
    """
    told, wall = [], 0.0
    for seq, (name, action, later) in enumerate(rows):
        wall += later
        told.append(Event(seq, wall, name, action, "", f"cause {seq}"))
    numbered = [replace(one, seq=one.seq + 5 * (n < journaled)) for n, one in enumerate(told)]
    page = numbered[max(0, min(journaled, len(told) - on_page)) :]
    session = owner_with(told[:journaled], page)
    wanted = [
        one
        for one in told
        if model in (None, one.model) and one.wall >= since
        if not actions or one.action in actions
    ]
    first = 0 if limit is None else max(0, len(wanted) - limit)
    assert recorded_events(session, limit, model, actions, since) == tuple(wanted[first:])


def test_events_of_a_clock_that_was_ahead_are_older_than_those_after_it():
    """`gpu why` has the last few. For hours it showed none of what happened since the clock was put right."""
    events = [Event(n, wall, "a", "loaded", "", "") for n, wall in enumerate((90.0, 7200.0, 95.0))]
    session = owner_with(events[:2], events)
    assert [one.wall for one in recorded_events(session, limit=2)] == [90.0, 95.0]


def test_without_the_book_the_journal_is_read():
    session = owner_with([Event(1, 1.0, "a", "loaded", "", "")])

    session.ledger.read = Mock(side_effect=LedgerUnavailable("the ledger is gone", path="here"))
    assert [one.seq for one in recorded_events(session)] == [1]


@pytest.mark.parametrize(
    "act",
    [
        lambda rt: rt.preload("llama", timeout=0),
        lambda rt: rt.evict("qwen", wait=False),
        lambda rt: rt.preload("phi", wait=False),
    ],
    ids=["recall", "evict", "preload"],
)
def test_a_request_wakes_the_owner_that_it_concerns_and_nobody_else(runtime, shared_book, act):
    """Without the notification, the owner reads the request a second later, or twelve."""
    settings = {"ledger": shared_book, "monitor": False, "eviction_grace_seconds": 0}
    owner, asker, other = (runtime(**settings) for _ in range(3))
    loaded(fakes(owner, phi="1GiB"), qwen="14GiB")
    fakes(asker, llama="14GiB")
    fakes(other, small="1GiB")
    bells = [rt._session.ledger for rt in (owner, other)]
    for bell in bells:
        while bell.wait(0):
            pass
    with suppress(Busy):
        act(asker)
    assert [bell.wait(0) for bell in bells] == [True, False]


def test_requests_and_the_ends_of_moves_are_decided_on_fresh_figures(runtime, monkeypatch):
    rt, fresh = fakes(runtime(), m="1GiB"), []
    samples = rt.probe.samples
    monkeypatch.setattr(
        rt.probe, "samples", lambda now, asked=False: fresh.append(asked) or samples(now, asked)
    )
    for act in (rt.preload, rt.evict, rt.restore):
        fresh.clear()
        act("m")
        assert True in fresh, act
    fresh.clear()
    rt.status()
    assert True not in fresh, "a status does not wait for the driver"


def test_a_load_and_a_restore_are_shown_with_the_seconds_of_the_last_one(runtime):
    rt, seen = fakes(runtime(), m="1GiB"), []
    rt.tell_waits(None, lambda one: one.ended or seen.append((one.verb, one.expected_seconds)))
    resident = rt._session.residents["m"]
    for drop in (True, False):
        resident.lease = replace(resident.lease, reload_seconds=5.0, restore_seconds=2.0)
        rt.preload("m")
        rt.evict("m", drop=drop)
    resident.lease = replace(resident.lease, reload_seconds=5.0, restore_seconds=2.0)
    rt.preload("m")
    assert seen == [("loading", 5.0), ("loading", 5.0), ("restoring", 2.0)]


def test_peaks_begin_with_a_load_and_after_each_move_and_each_way_is_timed(runtime, monkeypatch):
    """A peak must not count bytes that have left. The seconds decide which model leaves next."""
    rt, seen = runtime(), []
    monkeypatch.setattr(rt.probe, "watch_peaks", lambda: seen.append("watched"))
    rt.register("m", seen.append, backend="fake", size="1GiB")
    rt.preload("m")
    rt.evict("m")
    rt.preload("m")
    assert seen == ["watched", "load", "move", "watched", "move", "watched"]
    [lease] = rt.status().leases()
    assert lease.reload_seconds > 0 and lease.restore_seconds > 0


def test_room_for_another_process_counts_as_unseen_until_it_has_taken_it(runtime, clock):
    """The driver shows the bytes as free until then."""
    rt = runtime(devices="sim:2x24GiB,host:64GiB", clock=clock)
    with room_for_process(rt._session, 7, "sim:1", GIB, 60.0) as lease:
        assert (lease.where, lease.bytes, lease.settled_at) == ("sim:1", GIB, clock() + 60)
        assert claims(rt) == {"sim:1": GIB}
    assert claims(rt) == {}


def waiter(pins=None, rung_after=None, tickets=()):
    """A session whose ledger lets the time pass, and the seconds of each of its waits. An own model, which
    is in the way, is in use for `pins` waits; a notification comes after `rung_after` waits.
    """
    clock, waits = Clock(), []
    model = SimpleNamespace(lease=lease("m", sim0=1), pins=set() if pins is None else {1})
    session = owner_with((), (), tickets, clock=clock, me=owner().id, residents={"m": model})

    def wait(seconds, owners=()):
        waits.append(seconds)
        clock.advance(seconds)
        if pins is not None and len(waits) >= pins:
            model.pins.clear()
        return rung_after is not None and len(waits) >= rung_after

    session.ledger.wait, session.ledger.names_the_dead = wait, True
    return session, waits, model.lease.id


@pytest.mark.parametrize("retry_in", [None, 0.25, 7.0])
@pytest.mark.parametrize("deadline_in", [None, 0.5, 0.0, -1.0, 7.0])
def test_a_pause_ends_with_the_first_of_its_ends(retry_in, deadline_in):
    session, waits, _ = waiter()
    now = session.clock()
    at = [None if seconds is None else now + seconds for seconds in (retry_in, deadline_in)]
    requests.pause(session, Wait("x", retry_at=at[0]), at[1])
    ends = [seconds for seconds in (POLL_SECONDS, retry_in, deadline_in) if seconds is not None]
    assert session.clock() - now == sum(waits) == max(0.0, min(ends))


@pytest.mark.parametrize(
    "pins, rung_after, blocks, seconds",
    [
        (None, 1, True, POLL_SECONDS),
        (3, None, True, 3 * NEAR_SECONDS),
        (9, 2, True, 2 * NEAR_SECONDS),
        (3, None, False, POLL_SECONDS),
        (10**6, None, True, POLL_SECONDS),
    ],
)
def test_a_pause_ends_with_a_notification_or_with_the_use_of_an_own_model_in_the_way(
    pins, rung_after, blocks, seconds
):
    session, waits, id = waiter(pins, rung_after)
    requests.pause(session, Wait("x", blockers=(id,) if blocks else ()), None)
    assert sum(waits) == pytest.approx(seconds)


@pytest.mark.parametrize("names_the_dead", [True, False])
def test_a_pause_watches_processes_only_where_no_keeper_notes_their_death(names_the_dead):
    """It woke with the keeper, and decided on a book in which the dead process still lived."""
    session, _, _ = waiter()
    book, watched = Book(sections={owner(2).id: Section(owner(2))}), []
    session.ledger.read = lambda: book
    session.ledger.names_the_dead = names_the_dead
    session.ledger.wait = lambda seconds, owners: watched.extend(owners) or True
    requests.pause(session, Wait("x"), None)
    assert watched == ([] if names_the_dead else [owner(2)])


@pytest.mark.parametrize(
    "asked, rung_after, seconds",
    [
        (ticket("x", by=2, sim0=1), None, 3 * NEAR_SECONDS),
        (ticket("x", by=2, sim0=1), 2, 2 * NEAR_SECONDS),
        (ticket("x", by=2, sim0=1, verb="evict"), None, 12.0),
        (ticket("x", by=2, sim1=1), None, 12.0),
        (ticket("x", by=1, sim0=1), None, 12.0),
        (ticket("x", by=2, sim1=1), 1, 12.0),
    ],
)
def test_a_monitor_rests_until_a_use_ends_that_another_owner_waits_for(
    monkeypatch, asked, rung_after, seconds
):
    """The end of a use is published at once then, and else at the next tick."""
    session, waits, _ = waiter(3, rung_after, [asked])
    monkeypatch.setattr(maintenance, "time", SimpleNamespace(monotonic=session.clock))
    maintenance.rest(session, 12.0)
    assert sum(waits) == pytest.approx(seconds)


# -- the keys of decisions in progress -------------------------------------------------------------
@pytest.mark.parametrize("line", range(1, 4))
def test_an_interrupt_while_a_key_is_noted_leaves_no_key(line):
    """A notebook keeps its last error, and with it the frame that was interrupted. Even then no key stays."""
    keys, lines = Keys("me"), []

    def trace(frame, event, arg):
        if frame.f_code.co_name != "_note":
            return trace if event == "call" else None
        if event == "line":
            lines.append(frame.f_lineno)
            if len(lines) == line:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        with pytest.raises(KeyboardInterrupt) as kept:
            keys.new("use m")
    finally:
        sys.settrace(None)
    assert kept.value.__traceback__ and keys.texts() == ()


def test_a_key_is_known_until_it_is_released():
    keys = Keys("me")
    made = [keys.new(what) for what in ("use m", "use m", "evict m")]
    assert set(keys.texts()) == {"me:1:use m", "me:2:use m", "me:3:evict m"}
    released = made.pop(1)
    keys.done_with(released.note)
    assert set(keys.texts()) == {"me:1:use m", "me:3:evict m"}
    made.clear()
    assert keys.texts() == ()


def test_an_ended_wait_is_that_of_its_key_or_of_its_thread_and_keeps_the_first_reason():
    keys, others = Keys("me"), []
    mine, too = keys.new("use a"), keys.new("use b")
    thread = threading.Thread(target=lambda: others.append(keys.new("use c")))
    thread.start()
    thread.join()
    [other] = others
    assert keys.end(mine.text, "ann") and not keys.end("me:9:use a", "ann")
    assert [key.ended_by for key in (mine, too, other)] == ["ann", "", ""]
    keys.end_of(get_ident(), "its caller")
    assert [key.ended_by for key in (mine, too, other)] == ["ann", "its caller", ""]
    keys.done_with(too.note)
    assert not keys.end(too.text, "ann")


def test_work_keeps_its_key_known_and_is_skipped_once_the_key_is_gone():
    """An interrupt of the caller ends its key. Work that has begun keeps its reserved bytes until its end."""
    keys, seen = Keys("me"), []
    key = keys.new("load m")
    work = keys.kept(key, lambda: (keys.done_with(key.note), seen.append(keys.texts())))
    work()
    assert seen == [("me:1:load m",)] and keys.texts() == ()
    work()
    assert len(seen) == 1 and keys.texts() == ()
    with pytest.raises(ZeroDivisionError):
        keys.uninterrupted(kept := keys.new("move m"), lambda: 1 / 0)
    assert keys.texts() == (kept.text,)


@pytest.mark.parametrize("me", ["ann", "ops"])
def test_every_right_is_that_of_the_user_who_requests(runtime, monkeypatch, me):
    """Not that of the user of this process, and not that of the user who requested before."""
    session = runtime()._session
    session.ledger.owner = replace(session.owner, user=me)
    session.machine = Machine(
        operators=("ops",),
        operator_groups=("admins",),
        users={"bob": {"importance": 10}},
        groups={"students": {"importance": 20}},
    )
    groups = {"joe": ("admins", "students"), "eve": ("students",)}
    monkeypatch.setattr(requests, "groups_of", lambda user: groups.get(user, ()))
    importance = {"bob": 10, "joe": 20, "eve": 20}
    for user in ("eve", "ops", "ann", "joe", "bob", "eve", "ops"):
        is_operator = user in ("ops", "joe")
        expected = Asker(user, user == me, is_operator, importance.get(user, 0))
        assert requests.asker(session, user) == expected
