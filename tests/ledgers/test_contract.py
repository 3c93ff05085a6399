"""The contract of every ledger. Each test runs for each kind of store."""

import os
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from msgspec.structs import replace

from gpu_runtime.errors import BadSetting, LedgerRefused, LedgerUnavailable
from gpu_runtime.facts import (
    MOST_ENTRIES,
    MOST_EVENTS,
    SCHEMA,
    AllocatorBlock,
    AllocatorMap,
    BlockState,
    Book,
    Declared,
    Device,
    Event,
    Holder,
    Holdings,
    Owner,
    Sample,
    SegmentMap,
    Share,
)
from gpu_runtime.ledgers import base, open_ledger
from gpu_runtime.ledgers.keeper.core import Ring, Sign
from gpu_runtime.ledgers.keeper.ledger import _KeeperBell, _Lost, _Wire
from gpu_runtime.ledgers.liveness import (
    Life,
    Sight,
    began,
    describe_self,
    end_of,
    life_of_process,
    sight_of_process,
)
from gpu_runtime.ledgers.notify import Bell, Doorbell, _Waiter
from tests.clock import PATIENCE, Clock, finished

from .conftest import GIB, count, lease, names, put, section, ticket, without


def test_every_owner_reads_what_was_written(new_owner):
    """Two owners open the same book, and each reads what the other wrote."""
    a, b = new_owner(), new_owner()
    put(a, "qwen")
    assert a.read() == b.read()
    assert b.read().lease(a.owner.id, "qwen") == lease(a, "qwen")


def test_transact_returns_the_answer_of_the_decision(new_owner):
    a = new_owner()
    assert count(a) == 1
    assert count(a) == 2


def test_an_owner_that_is_proven_alive_is_not_dead_because_a_person_said_so(new_owner):
    a, b = new_owner(), new_owner()
    put(b, "qwen")
    a.declare_dead([b.owner.id])
    assert a.dead(a.read()) == frozenset() and names(a) == ["qwen"]


def test_each_open_ledger_is_another_owner(new_owner):
    """Several runtimes in one process are several owners."""
    assert new_owner().owner.id != new_owner().owner.id


def test_a_lost_race_is_decided_again(new_owner):
    """The second decision sees what the winner of the race wrote. Neither write is lost."""
    a, b = new_owner(), new_owner()
    seen = []

    def decide(book: Book) -> tuple[Book, None]:
        if not seen:
            put(b, "first")
        seen.append(sorted(one.name for one in book.leases()))
        return book.with_section(section(a, "second")), None

    a.transact(decide)
    assert seen == [[], ["first"]]
    assert names(a) == ["first", "second"]


@pytest.fixture
def behind(new_owner):
    """A ledger that knows the page of its own write. Another owner has written since."""
    ledger, other = new_owner(), new_owner()
    put(ledger, "ours")
    put(other, "theirs")
    return ledger


def test_an_answer_that_is_not_written_is_about_the_newest_page(behind):
    """A decision starts from the page in memory. Only a successful write proves that this page is
    the newest one.
    """
    found = behind.transact(lambda book: (book, sorted(lease.name for lease in book.leases())))
    assert found == ["ours", "theirs"]


def test_a_write_on_an_older_page_is_decided_again(behind):
    decided = []

    def decide(book):
        decided.append(sorted(lease.name for lease in book.leases()))
        return book.with_section(section(behind, "new")), None

    behind.transact(decide)
    assert decided[-1] == ["ours", "theirs"]
    assert names(behind) == ["new", "theirs"]


@pytest.mark.parametrize("write", [
    lambda ledger: ledger.transact(lambda same: (same, None)),
    lambda ledger: ledger.publish_maps((allocator_map(ledger),)),
], ids=["the same book", "a map"])  # fmt: skip
def test_what_changes_no_book_makes_no_other_transaction_lose_a_race(new_owner, write):
    """A decision that returns the book unchanged, and a map, which no decision uses."""
    a, b = new_owner(), new_owner()
    put(a, "qwen")
    runs = []

    def decide(book: Book) -> tuple[Book, None]:
        runs.append(1)
        write(b)
        return book.with_section(section(a)), None

    a.transact(decide)
    assert len(runs) == 1


def test_a_failing_decision_leaves_the_book_unchanged(new_owner):
    a = new_owner()
    put(a, "qwen")
    with pytest.raises(ZeroDivisionError):
        a.transact(lambda book: (book.with_section(section(a)), 1 / 0))
    assert names(a) == ["qwen"]


def test_no_increment_is_lost(new_owner):
    """Six threads of two owners count at the same time, and no increment is lost."""
    a, b = new_owner(), new_owner()

    def many(ledger) -> None:
        for _ in range(50):
            count(ledger)

    threads = [threading.Thread(target=many, args=(ledger,)) for ledger in (a, b) * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [one.counts for one in a.read().sections.values()] == [{"n": 150}, {"n": 150}]


def event(seq: int) -> Event:
    return Event(
        seq=seq, wall=0.0, model="qwen", action="loaded", reason="request", because="asked"
    )


def shared_book(a, b) -> None:
    """A book with sections and tickets of both owners, a device, a limit, a sample and events."""

    def decide(book: Book) -> tuple[Book, None]:
        return replace(
            book.with_section(section(a, "qwen")).with_ticket(ticket(a, "a1")),
            devices=(Device("sim:0", 8 * GIB),),
            limits={"sim:0": 8 * GIB},
            samples={"sim:0": Sample("sim:0", 10.0, GIB)},
            events=(event(1), event(2)),
            seq=2,
        ), None

    a.transact(decide)
    b.transact(
        lambda book: (book.with_section(section(b, "llama")).with_ticket(ticket(b, "b1")), None)
    )


def arriving(book: Book, a, gib: int) -> Book:
    return book.with_lease(replace(lease(a, "new"), shares=(), target=(Share("sim:0", gib * GIB),)))


UNLAWFUL = {
    "another's section": (
        lambda book, a, b: book.with_section(section(b)),
        "only be written by its owner",
    ),
    "another's lease": (
        lambda book, a, b: book.with_section(replace(section(a), leases=(lease(b, "x"),))),
        "its owner's",
    ),
    "a section removed": (
        lambda book, a, b: replace(book, sections={a.owner.id: section(a)}, tickets=()),
        "proof of death",
    ),
    "a section under another's id": (
        lambda book, a, b: replace(book, sections={**book.sections, a.owner.id: section(b)}),
        "as its owner",
    ),
    "two leases of one name": (
        lambda book, a, b: book.with_section(section(a, "x", "x")),
        "one name",
    ),
    "another's ticket": (
        lambda book, a, b: book.with_ticket(replace(ticket(b, "b1"), because="x")),
        "only be written by",
    ),
    "a ticket for another": (
        lambda book, a, b: book.with_ticket(ticket(b, "b2")),
        "only be written by",
    ),
    "another's ticket removed": (
        lambda book, a, b: book.without_ticket("b1"),
        "withdrawn by itself",
    ),
    "a device changed": (
        lambda book, a, b: replace(book, devices=(Device("sim:0", 9 * GIB),)),
        "first owner",
    ),
    "a limit changed": (lambda book, a, b: replace(book, limits={"sim:0": 9 * GIB}), "first owner"),
    "a limit removed": (lambda book, a, b: replace(book, limits={}), "first owner"),
    "an older sample": (
        lambda book, a, b: replace(book, samples={"sim:0": Sample("sim:0", 9.0, GIB)}),
        "no newer",
    ),
    "an event changed": (
        lambda book, a, b: replace(book, events=(event(1), replace(event(2), because="x"))),
        "never changed",
    ),
    "an event inserted": (
        lambda book, a, b: replace(book, events=(event(0), *book.events)),
        "never changed",
    ),
    "an event with an old number": (
        lambda book, a, b: replace(book, events=(*book.events, event(2)), seq=3),
        "never changed",
    ),
    "an event beyond seq": (
        lambda book, a, b: replace(book, events=(*book.events, event(3))),
        "must rise",
    ),
    "seq falls": (lambda book, a, b: replace(book, seq=1), "would fall"),
    "too many entries": (
        lambda book, a, b: book.with_section(section(a, *map(str, range(MOST_ENTRIES)), gib=0)),
        "that a page holds",
    ),
    "too many events": (
        lambda book, a, b: replace(
            book, events=tuple(map(event, range(3, 4 + MOST_EVENTS))), seq=99
        ),
        "a page holds",
    ),
    "another schema": (lambda book, a, b: replace(book, schema=SCHEMA + 1), "schema"),
    "an overdraft": (lambda book, a, b: arriving(book, a, gib=7), "law 1"),
}


@pytest.mark.parametrize("wrong", UNLAWFUL)
def test_an_unlawful_write_is_refused(new_owner, wrong):
    """The ledger checks every decision. After the refusal the book is unchanged and the ledger can
    be used.
    """
    a, b = new_owner(), new_owner()
    shared_book(a, b)
    before = a.read()
    change, because = UNLAWFUL[wrong]
    with pytest.raises(LedgerRefused, match=because) as refused:
        a.transact(lambda book: (change(book, a, b), None))
    assert refused.value.writer == a.owner.id and because in refused.value.why
    assert b.read() == before
    put(a, "still here")


LAWFUL = {
    "one's own section": lambda book, a: book.with_section(section(a)),
    "one's own tickets": lambda book, a: book.without_ticket("a1").with_ticket(ticket(a, "a2")),
    "a further device and limit": lambda book, a: replace(
        book, devices=(*book.devices, Device("sim:1", GIB)), limits={**book.limits, "sim:1": GIB}
    ),
    "a newer sample": lambda book, a: replace(
        book, samples={"sim:0": Sample("sim:0", 11.0, GIB), "x": Sample("x", 0.0, None)}
    ),
    "events appended and trimmed": lambda book, a: replace(
        book, events=(event(2), event(4)), seq=5
    ),
    "a grant within the budget": lambda book, a: arriving(book, a, gib=6),
    "a fact beyond the budget": lambda book, a: book.with_section(
        section(a, "qwen", gib=20, residue={"sim:0": GIB})
    ),
}


@pytest.mark.parametrize("right", LAWFUL)
def test_a_lawful_write_is_accepted(new_owner, right):
    a, b = new_owner(), new_owner()
    shared_book(a, b)
    expected = LAWFUL[right](a.read(), a)
    a.transact(lambda book: (LAWFUL[right](book, a), None))
    assert b.read() == expected


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"quantization": None}, "leases[0].quantization"),
        ({"name": "\ud800"}, "leases[0].name"),
        ({"name": "n" * (2 << 20)}, "the lease"),
    ],
)
def test_what_others_could_not_read_is_refused(new_owner, wrong, named):
    """The error names the field. After the refusal the book is unchanged and the ledger can be
    used.
    """
    a, b = new_owner(), new_owner()
    put(a, "qwen")
    before = b.read()
    unreadable = replace(lease(a, "broken"), **wrong)
    with pytest.raises(LedgerRefused) as refused:
        a.transact(lambda book: (book.with_section(replace(section(a), leases=(unreadable,))), 0))
    assert named in str(refused.value) and len(str(refused.value)) < 1000
    assert b.read() == a.read() == before
    put(a, "still here")
    assert names(b) == ["still here"]


def test_a_single_owner_may_change_the_limits(new_owner):
    """The first owner sets the limits. They may be changed only while a single owner uses the book."""
    a = new_owner()
    a.transact(lambda book: (replace(book.with_section(section(a)), limits={"sim:0": GIB}), None))
    a.transact(lambda book: (replace(book, limits={"sim:0": 2 * GIB}), None))
    assert a.read().limits == {"sim:0": 2 * GIB}


def test_a_full_page_can_still_shrink(new_owner):
    """Nothing can be added beyond the limit, but existing entries can be changed or removed."""
    a = new_owner()
    put(a, *map(str, range(MOST_ENTRIES)), gib=0)
    put(a, *map(str, range(MOST_ENTRIES)), gib=1)
    put(a, "one")
    assert names(a) == ["one"]


def test_living_owners_are_not_reaped(new_owner):
    a, b = new_owner(), new_owner()
    put(b, "llama")
    assert a.dead(a.read()) == frozenset()
    with pytest.raises(LedgerRefused, match="proof of death"):
        without(a, b.owner.id)


def test_a_dead_owner_is_reaped_whole(new_owner):
    """A ledger was closed, but its section is still in the book. It is as dead as a killed process."""
    a, b = new_owner(), new_owner()
    shared_book(a, b)
    b.close()
    assert a.dead(a.read()) == {b.owner.id}
    with pytest.raises(LedgerRefused, match="is removed whole"):
        a.transact(lambda book: (replace(book, sections={a.owner.id: section(a)}), None))
    with pytest.raises(LedgerRefused, match="withdrawn by itself"):
        a.transact(lambda book: (book.without_ticket("b1"), None))
    without(a, b.owner.id)
    assert list(a.read().sections) == [a.owner.id] and [one.key for one in a.read().tickets] == [
        "a1"
    ]


def test_the_ticket_of_a_dead_owner_without_a_section_goes_too(new_owner):
    """An owner that only has a request has no section. After its death, no other request may wait
    for it.
    """
    a, b = new_owner(), new_owner()
    b.transact(lambda book: (book.with_ticket(ticket(b, "b1")), None))
    with pytest.raises(LedgerRefused, match="proof of death"):
        without(a, b.owner.id)
    b.close()
    assert a.dead(a.read()) == {b.owner.id}
    without(a, b.owner.id)
    assert a.read().tickets == ()


def test_a_closed_ledger_raises(new_owner):
    a = new_owner()
    a.close()
    a.close()
    for use in (a.read, lambda: put(a, "x"), lambda: a.wait(0)):
        with pytest.raises(LedgerUnavailable, match="was closed"):
            use()
    a.ring([a.owner.id])


def test_a_ring_wakes_once(new_owner):
    a, b = new_owner(), new_owner()
    assert not a.wait(0)
    b.ring([a.owner.id, "1.2.3", b.owner.id])
    assert a.wait(PATIENCE)
    assert not a.wait(0)
    assert b.wait(PATIENCE)


def test_a_ring_between_two_looks_is_not_lost(new_owner):
    """The notification arrived before the wait began. Each waiting thread wakes, even if another
    thread woke first.
    """
    a, b = new_owner(), new_owner()
    a.wait(0)
    b.ring([a.owner.id])
    woken = []
    other = threading.Thread(target=lambda: woken.append(a.wait(PATIENCE)))
    other.start()
    other.join()
    assert woken == [True] and a.wait(0)


def test_one_ring_wakes_all_waiting_threads(new_owner):
    a, b = new_owner(), new_owner()
    woken = []
    threads = [threading.Thread(target=lambda: woken.append(a.wait(PATIENCE))) for _ in range(4)]
    for thread in threads:
        thread.start()
    b.ring([a.owner.id])
    for thread in threads:
        thread.join()
    assert woken == [True] * 4


def test_a_wait_without_a_ring_times_out(new_owner):
    a = new_owner()
    started = time.monotonic()
    assert not a.wait(0.05)
    assert time.monotonic() - started >= 0.05


@pytest.mark.parametrize("later", [-1, 0, 1])
def test_a_process_that_began_at_another_time_is_another_process(later):
    """The system gives the pid of an ended process to a new one, which gets no signal and proves no life."""
    me = describe_self()
    started = me.started + later
    end = end_of(replace(me, started=started))
    found = [end is not None, life_of_process(me.pid, started) is Life.ALIVE]
    found.append(sight_of_process(me.pid, started) is Sight.ALIVE)
    if end:
        end.close()
    assert found == [later == 0] * 3


NAMED = """
import ctypes
ctypes.CDLL(None).prctl(15, "entrainementéé.py".encode(), 0, 0, 0)
from gpu_runtime.ledgers.liveness import describe_self, end_of
from gpu_runtime.owner.checkpoints import look
from gpu_runtime.telemetry.sampler import _person
me = describe_self()
assert end_of(me) and look(me.pid).started == me.started
print(_person(me.pid).command)
"""


def test_the_name_of_a_process_may_be_any_bytes():
    """The system cuts it after 15, also within a letter. A script with this name could open no ledger."""
    ran = finished([sys.executable, "-c", NAMED])
    assert ran.stdout == "entrainementé\ufffd\n", ran.stderr


def test_the_end_of_a_watched_process_ends_even_a_wait_of_no_time_and_counts_once():
    """A descriptor of a process that is watched no more is closed."""
    process, bell = subprocess.Popen(["sleep", "600"]), Bell()
    watched = [Owner("box", "boot", process.pid, began(process.pid))]
    assert not bell.wait(0)
    descriptors = len(os.listdir("/proc/self/fd"))
    assert not bell.wait(0, watched)
    assert len(os.listdir("/proc/self/fd")) == descriptors + 1
    assert not bell.wait(0)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert not bell.wait(0, watched)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert bell.wait(0, watched) and not bell.wait(0, watched)
    process.wait()


def test_a_bell_whose_keeper_has_ended_opens_another_wire():
    """Else each wait would end at once, for ever, and a process that waits use a whole processor."""
    pairs = [socket.socketpair() for _ in range(2)]
    for ours, _ in pairs:
        ours.setblocking(False)
    wires = []
    for ours, _ in pairs:
        wires.append(_Wire.__new__(_Wire))
        wires[-1].socket, wires[-1].descriptors = ours, []
        wires[-1]._inode = os.fstat(ours.fileno()).st_ino
    opened = iter(wires)
    bell = _KeeperBell(lambda: next(opened))
    pairs[0][1].close()
    assert bell.wait(PATIENCE) and pairs[0][0].fileno() < 0, "its end is a ring"
    assert bell.wait(PATIENCE), "the book may have changed meanwhile"
    assert not bell.wait(0.0)
    pairs[1][1].send(b"ring")
    assert bell.wait(PATIENCE) and not bell.wait(0.0)
    bell.close_here()
    pairs[1][1].close()


def test_a_ring_that_no_keeper_has_got_reaches_the_next_one():
    """The sender writes to the new keeper already, while its bell has the old one. The others slept on."""
    sent: list[object] = []
    wires = [Mock(), Mock()]
    wires[0].send.side_effect = _Lost("it ended")
    wires[1].send.side_effect = sent.append
    opened = iter(wires)
    bell = _KeeperBell(lambda: next(opened))
    for id in ("b", "a"):
        bell.tell(Ring(0, (id,)))
    bell.tell(Sign(0))  # a lost sign comes again by itself
    assert bell._open_again() and sent == [Ring(0, ("a", "b"))]


def test_closing_wakes_waiting_threads(new_owner):
    """A monitor thread that waits on a ledger must end when the ledger is closed."""
    a = new_owner()
    waiting = threading.Event()

    def wait() -> None:
        waiting.set()
        try:
            a.wait(PATIENCE)
        except LedgerUnavailable:
            pass

    thread = threading.Thread(target=wait)
    thread.start()
    waiting.wait(PATIENCE)
    a.close()
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_plain_memory_is_a_book_of_its_own():
    a, b = open_ledger("memory:"), open_ledger("memory:")
    put(a, "qwen")
    assert names(b) == []


@pytest.mark.parametrize(
    "url", ["", "http://localhost", "redis:6379", "sqlite:relative", "/var/tmp/x"]
)
def test_the_error_for_an_unknown_url_names_the_known_ones(url):
    with pytest.raises(BadSetting, match="keeper:///"):
        open_ledger(url)


def test_a_waiter_that_is_being_closed_cannot_be_reached(monkeypatch):
    """Before a waiter's socket is closed, no thread can reach the socket any more. Otherwise a
    thread that notifies the waiter would write to a closed descriptor, or into another file.
    """
    import os
    import weakref

    alive_at_close, close = [], os.close
    monkeypatch.setattr(
        os, "close", lambda fd: (alive_at_close.append(ref() is not None), close(fd))
    )
    waiter = _Waiter()
    ref = weakref.ref(waiter)
    del waiter
    assert alive_at_close == [False]


def test_a_bell_that_moved_has_rung(tmp_path):
    """Its directory was deleted: rings that were sent meanwhile are lost, and the book may have changed."""
    for name in "ab":
        (tmp_path / name).mkdir()
    bell = Doorbell(tmp_path / "a", "1.1.0")
    assert not bell.wait(0)
    bell.move_to(tmp_path / "b")
    assert bell.wait(0) and not bell.wait(0)
    bell.ring_others(["1.1.0"])
    assert bell.path.parent == tmp_path / "b" and bell.wait(0)
    bell.close()


def allocator_map(ledger, *segments: SegmentMap, wall: float = 1.0) -> AllocatorMap:
    """An allocator map of the ledger's owner."""
    reserved = sum(segment.bytes for segment in segments)
    return AllocatorMap(
        ledger.owner.id, "sim:0", wall, reserved, reserved, 0, 0, 0, segments=segments
    )


def test_all_owners_see_a_map_and_it_is_replaced_whole(new_owner):
    """A new map replaces all parts of the earlier one."""
    a, b = new_owner(), new_owner()
    assert b.maps() == {}
    cut = SegmentMap(
        0,
        20 << 20,
        "large",
        (
            AllocatorBlock(1 << 20, BlockState.ALLOCATED, 2),
            AllocatorBlock(19 << 20, BlockState.INACTIVE),
        ),
    )
    a.publish_maps((allocator_map(a, cut), allocator_map(a)))
    assert b.maps() == a.maps() == {a.owner.id: (allocator_map(a, cut), allocator_map(a))}
    a.publish_maps((allocator_map(a, wall=2.0),))
    b.publish_maps(())
    assert b.maps() == {a.owner.id: (allocator_map(a, wall=2.0),), b.owner.id: ()}


def test_maps_are_removed_with_their_owner(new_owner):
    a, b = new_owner(), new_owner()
    a.publish_maps((allocator_map(a),))
    assert a.owner.id in b.maps()
    a.close()
    assert b.maps() == {}


def listed(*names: str) -> Holdings:
    return Holdings(tuple(Holder(name, "variable", "sim:0", 1, 1) for name in names), 1)


@pytest.mark.parametrize("private", [True, False])
def test_an_answer_is_for_its_asker_and_replaced_by_the_next(new_owner, private):
    a, b, c = new_owner(), new_owner(), new_owner()
    assert b.answer(a.owner.id) is None
    a.publish_answer(b.owner.id, listed("x"), private=private)
    a.publish_answer(c.owner.id, listed("y"), private=private)
    assert b.answer(a.owner.id) == listed("x") and c.answer(a.owner.id) == listed("y")
    a.publish_answer(b.owner.id, listed("z"), private=private)
    assert b.answer(a.owner.id) == listed("z") and a.answer(a.owner.id) is None
    a.close()
    assert b.answer(a.owner.id) is None


def test_names_are_added_one_by_one_and_withdrawn(new_owner):
    """Other owners see the names of the models that an owner can load. Adding or withdrawing a name
    does not write the book.
    """
    a, b = new_owner(), new_owner()
    before = b.read()
    assert b.names() == {}
    a.add_name("qwen")
    a.add_name("llama")
    a.add_name("qwen")
    assert b.names() == a.names() == {a.owner.id: {"qwen": Declared(), "llama": Declared()}}
    a.publish_names({"llama": Declared(GIB, 5), "new\nline": Declared()})
    b.publish_names({})
    known = {"llama": Declared(GIB, 5), "new\nline": Declared()}
    assert b.names() == {a.owner.id: known}, "with the size and the importance"
    a.add_name("llama", Declared(2 * GIB))
    assert b.names()[a.owner.id]["llama"] == Declared(2 * GIB), "the last one counts"
    assert a.read() == before
    a.publish_names({})
    assert b.names() == {}


def test_a_long_list_of_names_is_told_four_times_a_second_and_then_all_of_it(monkeypatch):
    """Up to 256 names are told one by one. What was left out is told with the next `publish_names`, and once."""
    clock, told = Clock(), []
    monkeypatch.setattr(base, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(base.Ledger, "__abstractmethods__", frozenset())
    teller = base.Ledger()
    monkeypatch.setattr(teller, "_keep", lambda _, names: told.append(len(names)))
    for n in range(256 + 8):
        clock.advance(0.125 if n >= 256 else 0)
        teller.add_name(f"m{n}")
    assert told == [*range(1, 257), 259, 262], "after more than 0.25 s"
    for _ in range(2):
        teller.publish_names({f"m{n}": Declared() for n in range(256 + 8)})
    assert told[258:] == [264]


def test_names_are_removed_with_their_owner(new_owner):
    a, b = new_owner(), new_owner()
    a.add_name("qwen")
    a.close()
    assert b.names() == {}
    with pytest.raises(LedgerUnavailable):
        a.add_name("llama")


def test_a_closed_ledger_neither_publishes_nor_returns_maps(new_owner):
    a = new_owner()
    a.close()
    for act in (a.maps, lambda: a.publish_maps(())):
        with pytest.raises(LedgerUnavailable):
            act()
