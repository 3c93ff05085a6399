"""The keeper's core as a state machine, and the shared memory. Its process is in test_keeper_process.py."""

import contextlib
import gc
import mmap
import os
import socket
import sys
import threading
import time
from unittest.mock import Mock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from msgspec.structs import replace

from gpu_runtime.facts import HOST, Device, Event, Lease, Owner, Phase, Section, Share, Ticket
from gpu_runtime.ledgers import invariants, pieces
from gpu_runtime.ledgers.keeper import core, server, wire
from gpu_runtime.ledgers.keeper.core import Hello, Keep, Keeper, Leave, Part, Put, Written
from gpu_runtime.version import VERSION
from tests import clock
from tests.clock import until

from .conftest import GIB

LIMIT = 4 * GIB


def owner(number: int) -> Owner:
    return Owner("host", "boot", 100 + number, 1, number, user=f"user{number}")


class Turns(RuleBasedStateMachine):
    """Four owners write, stop, end and come back in any order. Each remembers what the keeper acknowledged."""

    @initialize()
    def begin(self):
        self.keeper, self.now = Keeper(), 0.0
        self.acknowledged: dict[int, int] = {}  # connection -> GiB of its lease
        # connection -> number of its put, GiB, and whether the put must not be taken at once
        self.waiting: dict[int, tuple[int, int, bool]] = {}
        self.claimed_at = 0  # the page of the last write that claimed more
        self.settled_at = 0  # the page since which only leases were written
        self.wrote_at: dict[int, int] = {}  # connection -> the page of its last write
        self.turns: dict[
            int, int
        ] = {}  # connection -> the number of the last request that got the turn
        self.numbers = 0
        for number in range(4):
            self.take(self.keeper.receive(number, Leave(0), self.now))  # unknown: refused
            self.keeper.hello(number, Hello(0, 1, "", owner(number)), 0, self.now)
        self.write(0, 0, LIMIT // GIB)

    def take(self, answers):
        for connection, reply in answers:
            waiting = self.waiting.get(connection)
            if isinstance(reply, Written) and waiting and reply.number == waiting[0]:
                assert not waiting[2], "it was decided on a page that was too old"
                if waiting[1] > self.acknowledged.get(connection, -1):
                    self.claimed_at = reply.revision
                self.wrote_at[connection] = reply.revision
                self.acknowledged[connection] = waiting[1]
            if isinstance(reply, core.Rung | core.Soon):
                continue
            if isinstance(reply, core.Turn):
                self.turns[connection] = reply.number
            if waiting and reply.number == waiting[0]:
                del self.waiting[connection]

    def write(self, connection, gib, limit=0, behind=0, room=None):
        me = owner(connection)
        self.numbers += 1
        leases = (Lease(me.id, "m", target=(Share("sim:0", gib * GIB),)),) if gib else ()
        part = core.encode(Part(Section(me, leases=leases), (), self.numbers))
        fields = {}
        if limit:
            shared = core.Shared(devices=(Device("sim:0", LIMIT),), limits={"sim:0": LIMIT})
            fields["shared"] = msgspec.Raw(core.encode(shared))
        revision = self.keeper.known.revision - behind
        claims = gib > self.acknowledged.get(connection, -1)
        claimed_at = self.claimed_at * claims
        if room is not None:
            fields["holds_below"] = {"sim:0": room * GIB}
            others = sum(one for other, one in self.acknowledged.items() if other != connection)
            claimed_at = self.settled_at * claims if others + gib <= room else claimed_at
        too_old = revision < max(self.wrote_at.get(connection, 0), claimed_at)
        self.waiting[connection] = (self.numbers, gib, too_old)
        message = Put(self.numbers, revision, msgspec.Raw(part), **fields)
        self.take(self.keeper.receive(connection, message, self.now))

    @rule(
        connection=st.integers(0, 3),
        gib=st.integers(0, 4),
        behind=st.integers(0, 4),
        room=st.none() | st.integers(0, 4),
    )
    def put(self, connection, gib, behind, room):
        """With `room`, the claim is right after others claimed too, while no more GiB are claimed in all."""
        if connection not in self.waiting:
            self.write(connection, gib, behind=behind, room=room)

    @rule(connection=st.integers(0, 3))
    def give_back(self, connection):
        """Also a turn that has ended, while the connection waits for another one."""
        if connection in self.turns:
            back = core.Pass(self.turns[connection])
            self.take(self.keeper.receive(connection, back, self.now))

    @rule(seconds=st.sampled_from([0.001, core.TURN_SECONDS, 1.0]))
    def pass_time(self, seconds):
        self.now += seconds
        self.take(self.keeper.tick(self.now))

    @rule(connection=st.integers(0, 3))
    def reconnect(self, connection):
        self.take(self.keeper.gone(connection, self.now))
        self.waiting.pop(connection, None)
        self.keeper.hello(connection, Hello(0, 1, "", owner(connection)), 0, self.now)

    @rule(
        connection=st.integers(0, 3),
        message=st.sampled_from(
            [Leave(0), Keep(0, "names", b"x", private=True), core.Fetch(0, "names"), core.Sign(0)]
        ),
    )
    def die(self, connection, message):
        """The process ends; a new one with the same owner stands for the next notebook.

        A child that was forked from it may still speak on its connection. Nothing is done for it.
        """
        self.take(self.keeper.receive(connection, message, self.now))
        self.take(self.keeper.died([owner(connection).id]))
        [(to, reply)] = self.keeper.receive(connection, message, self.now)
        assert (to, type(reply)) == (connection, core.Refused)
        self.take(self.keeper.gone(connection, self.now))
        self.waiting.pop(connection, None)
        assert owner(connection).id not in self.keeper.known.state.living
        self.keeper.hello(connection, Hello(0, 1, "", owner(connection)), 0, self.now)
        self.settled_at = self.keeper.known.revision

    @rule()
    def a_page_has_the_whole_book(self):
        """The next keeper goes on with this page."""
        read = core.Pieces()
        read.follow(whole(self.keeper))
        assert read.book == self.keeper.known.book

    @invariant()
    def what_was_acknowledged_is_in_the_book(self):
        for connection, gib in self.acknowledged.items():
            section = self.keeper.known.book.sections[owner(connection).id]
            assert sum(lease.target[0].bytes for lease in section.leases) == gib * GIB

    @invariant()
    def no_card_is_promised_twice(self):
        assert self.keeper.known.book.claims().get("sim:0", 0) <= LIMIT

    @invariant()
    def whoever_waits_is_in_the_queue(self):
        """A put without a reply stands in the queue, so it gets a turn."""
        assert set(self.waiting) <= set(self.keeper._queue)
        assert (self.keeper.deadline is not None) == bool(self.keeper._queue)


TestTurns = Turns.TestCase


def put_of(keeper: Keeper, number: int, behind: int = 0) -> Put:
    """A write that changes what others decide by, decided on a page `behind` the last one."""
    events = msgspec.Raw(core.encode(core.Shared()))
    part = msgspec.Raw(core.encode(Part(Section(owner(number)), (), 1)))
    return Put(1, keeper.known.revision - behind, part, shared=events)


def three_late(now: float) -> Keeper:
    """A keeper with three owners, whose first one has the turn, and then the second one."""
    keeper = keeper_of(3)
    for number in range(3):
        keeper.receive(number, put_of(keeper, number), 0.0)
    assert keeper.receive(0, put_of(keeper, 0, 1), now) == [(0, core.Turn(1))]
    assert keeper.receive(1, put_of(keeper, 1, 2), now) == [(1, core.Soon(1))]
    assert keeper.receive(2, put_of(keeper, 2, 3), now) == []
    return keeper


def test_a_head_that_does_not_write_is_passed_over():
    """The first one is stopped. The second one gets its turn, and the first one's late write is refused as old."""
    keeper = three_late(1.0)
    late = put_of(keeper, 0)
    assert keeper.tick(1.0 + core.TURN_SECONDS / 2) == []
    assert keeper.tick(1.0 + core.TURN_SECONDS) == [(1, core.Turn(1)), (2, core.Soon(1))]
    written, turn = keeper.receive(1, put_of(keeper, 1), 1.03)
    assert written == (1, Written(1, late.revision + 1)) and turn == (2, core.Turn(1))
    assert keeper.receive(0, late, 1.03) == [(0, core.Soon(1))]
    assert keeper.receive(2, core.Pass(1), 1.03) == [(0, core.Turn(1))]


def test_nobody_waits_for_a_head_that_does_not_run_unless_it_was_late_for_long():
    """One writes between. The head is late again, keeps its turn, and after a while nobody writes before it."""
    keeper = three_late(1.0)
    keeper.hello(3, Hello(0, 1, "", owner(3)), 0, 0.0)
    page = keeper.known.revision
    assert keeper.receive(3, put_of(keeper, 3), 1.01) == [(3, Written(1, page + 1))]
    assert keeper.receive(3, put_of(keeper, 3), 1.011) == [], "it wrote since the head waits"
    assert keeper.receive(0, put_of(keeper, 0, 1), 1.012) == [(0, core.Turn(1))]
    assert keeper.tick(1.01 + core.TURN_SECONDS) == [], "its turn began again"
    alone = 1.001 + core.ALONE_SECONDS
    keeper.receive(0, put_of(keeper, 0, 1), alone - 0.002)
    keeper.hello(4, Hello(0, 1, "", owner(4)), 0, 0.0)
    assert keeper.receive(4, put_of(keeper, 4), alone) == []
    assert keeper.receive(0, put_of(keeper, 0, 2), alone) == [(0, core.Turn(1))]
    assert keeper.tick(alone - 0.002 + core.TURN_SECONDS)[0] == (1, core.Turn(1)), "nobody moves it"


def test_a_release_needs_no_turn_and_ends_no_turn():
    """A decision on the page before a release still holds. A grant, a request and an own write end it."""
    keeper, put = Keeper(), iter(range(1, 100))
    for number in range(3):
        keeper.hello(number, Hello(0, 1, "", owner(number)), 0, 0.0)

    def write(number, gib, revision, *tickets):
        leases = (Lease(owner(number).id, "m", target=(Share("sim:0", gib * GIB),)),)
        part = core.encode(Part(Section(owner(number), leases=leases), tickets, 1))
        queue = tuple(ticket.key for ticket in tickets) or None
        message = Put(next(put), revision, msgspec.Raw(part), queue)
        return keeper.receive(number, message, 0.0)[0][1]

    for number in range(3):
        write(number, 2, keeper.known.revision)
    page = keeper.known.revision
    assert isinstance(write(1, 3, 0), core.Turn)
    assert write(0, 1, page) == Written(5, page + 1), "the turn is another owner's"
    assert write(1, 3, page) == Written(6, page + 2), "its page lacks the release only"
    assert isinstance(write(2, 3, page), core.Turn), "its page lacks the grant"
    keeper.receive(2, core.Pass(7), 0.0)
    page = keeper.known.revision
    assert isinstance(write(0, 0, page), Written)
    assert isinstance(write(0, 1, page), core.Turn), "its page lacks its own write"
    keeper.receive(0, core.Pass(9), 0.0)
    page = keeper.known.revision
    ticket = Ticket("t", owner(2).id, "use", "m", arrived=0, refreshed=0)
    assert isinstance(write(2, 2, page, ticket), Written)
    assert isinstance(write(0, 1, page), core.Turn), "its page lacks the request"
    assert isinstance(write(0, 1, keeper.known.revision + 1), core.Turn), "of another keeper"


def test_a_claim_needs_no_turn_while_its_room_is_left(monkeypatch):
    """Others have claimed since the page that it was decided on. What else they decide by ends it."""
    keeper = keeper_of(3)
    numbers = iter(range(1, 100))

    def write(number, gib, revision, room=0, tickets=(), events=()):
        leases = (Lease(owner(number).id, "m", target=(Share("sim:0", gib * GIB),)),)
        part = core.encode(Part(Section(owner(number), leases=leases), tickets, 1))
        queue = tuple(ticket.key for ticket in tickets) or None
        below = {"sim:0": room * GIB} if room else {}
        noted = tuple(msgspec.Raw(core.encode(event)) for event in events)
        message = Put(
            next(numbers), revision, msgspec.Raw(part), queue, events=noted, holds_below=below
        )
        reply = keeper.receive(number, message, 0.0)[0][1]
        if isinstance(reply, core.Turn):
            keeper.receive(number, core.Pass(message.number), 0.0)
        return type(reply)

    for number in range(3):
        write(number, 1, keeper.known.revision)
    page = keeper.known.revision
    noted = [
        Event(seq=1, wall=float(wall), model="m", action="x", reason="", because="")
        for wall in (1, 2)
    ]
    assert write(0, 4, page, room=7, events=noted) is Written
    assert write(1, 2, page, room=7) is Written, "7 GiB are claimed, and it had room for so many"
    assert write(2, 2, page, room=7) is core.Turn, "8 GiB would be claimed"
    assert write(2, 2, page) is core.Turn, "it names no room"
    assert write(0, 5, page, room=9) is core.Turn, "its page lacks its own write"
    assert write(1, 1, page + 2, events=noted[:1]) is Written
    assert [(event.seq, event.wall) for event in keeper.known.book.events] == [
        (1, 1),
        (2, 2),
        (3, 1),
    ]
    assert write(1, 1, keeper.known.revision, events=noted * 9) is core.Refused
    page = keeper.known.revision
    write(0, 4, page, tickets=(Ticket("t", owner(0).id, "use", "m", arrived=0, refreshed=0),))
    assert write(2, 2, page, room=9) is core.Turn, "its page lacks the request"
    page = keeper.known.revision
    assert keeper.died([owner(1).id]) == []
    assert write(2, 2, page, room=9) is core.Turn, "its page lacks the death"
    page = keeper.known.revision
    write(0, 5, page)
    monkeypatch.setattr(invariants, "MOST_ENTRIES", 1)
    assert write(2, 1, page, room=9) is Written
    leases = tuple(Lease(owner(2).id, name, target=(Share("sim:0", GIB),)) for name in "mn")
    part = msgspec.Raw(core.encode(Part(Section(owner(2), leases=leases), (), 1)))
    for revision, reply in ((keeper.known.revision, core.Refused), (page + 2, core.Turn)):
        write(0, 6, keeper.known.revision)
        put = Put(99, revision, part, holds_below={"sim:0": 99 * GIB})
        if reply is core.Refused:
            put = replace(put, revision=keeper.known.revision)
        assert type(keeper.receive(2, put, 0.0)[0][1]) is reply, "others filled the page meanwhile"


def test_a_renewed_request_needs_no_turn_and_ends_no_decision():
    """It waits as before. Only the time and the text are new, and others may decide without them."""
    keeper = keeper_of(3)

    def write(number, revision, *tickets, gib=1, queue=None):
        leases = (Lease(owner(number).id, "m", target=(Share("sim:0", gib * GIB),)),)
        part = msgspec.Raw(core.encode(Part(Section(owner(number), leases=leases), tickets, 1)))
        queue = queue or tuple(ticket.key for ticket in tickets) or None
        answers = keeper.receive(number, Put(number, revision, part, queue), 0.0)
        if isinstance(answers[0][1], core.Turn):
            keeper.receive(number, core.Pass(number), 0.0)
        return [type(reply) for _, reply in answers]

    for number in range(3):
        keeper.hello(10 + number, Hello(0, 1, "", owner(number), bell=True), 0, 0.0)
        write(number, keeper.known.revision)
    first, second = (
        Ticket(key, owner(number).id, "use", "m", arrived=0, refreshed=0)
        for number, key in enumerate("ab")
    )
    assert write(0, keeper.known.revision, first) == [Written]
    page = keeper.known.revision
    assert write(1, page, second, queue=("a", "b")) == [Written]
    assert write(0, page, replace(first, refreshed=5.0, because="new")) == [Written], (
        "it was decided before"
    )
    assert keeper.known.book.tickets[0].because == "new"
    assert [ticket.key for ticket in keeper.known.book.tickets] == ["a", "b"]
    assert Written in write(2, page + 1, gib=2), "its page lacks the renewal only"
    page = keeper.known.revision
    assert Written in write(2, page, gib=3)
    assert write(0, page, replace(first, refreshed=6.0, users=2)) == [core.Turn], "its wish is new"


def test_room_on_the_disk_is_reserved_on_the_newest_page():
    """It claims no bytes of a device. Two processes that read one page reserved the same room."""
    keeper = keeper_of(2)
    held = {"shares": (Share(HOST, 3 * GIB),), "disk_room": 5 * GIB}
    for number in range(2):
        leases = (Lease(owner(number).id, "m", **held),)
        write(keeper, number, Part(Section(owner(number), leases=leases), (), 1))
    page = keeper.known.revision
    for number, reply in enumerate((Written(2, page + 1), core.Turn(2))):
        leases = (Lease(owner(number).id, "m", **held, stowing=True),)
        part = msgspec.Raw(core.encode(Part(Section(owner(number), leases=leases), (), 2)))
        assert keeper.receive(number, Put(2, page, part), 0.0)[0] == (number, reply)


def test_facts_of_all_owners_are_written_again_if_a_release_has_added_an_event():
    """They lacked the event. The keeper refused them, and their owner got an error."""
    keeper = keeper_of(2)
    for number in range(2):
        write(keeper, number, Part(Section(owner(number)), (), 1))
    page = keeper.known.revision
    event = Event(seq=1, wall=1.0, model="m", action="x", reason="", because="")
    noted = (msgspec.Raw(core.encode(event)),)
    release = Part(Section(owner(0), counts={"x": 1}), (), 2)
    assert isinstance(write(keeper, 0, release, events=noted), Written)
    part = msgspec.Raw(core.encode(Part(Section(owner(1)), (), 2)))
    facts = msgspec.Raw(core.encode(core.Shared(limits={"sim:0": GIB})))
    assert keeper.receive(1, Put(2, page, part, shared=facts), 0.0) == [(1, core.Turn(2))]


def test_a_removal_is_decided_again_if_its_owner_has_just_come_back():
    """It was refused with an error for the user, as a removal without proof of death."""
    keeper = keeper_of(2)
    for number in range(2):
        write(keeper, number, Part(Section(owner(number)), (), 1))
    keeper.died([owner(1).id])
    late = replace(put_of(keeper, 0), removed=(owner(1).id,))
    keeper.hello(1, Hello(0, 1, "", owner(1)), 0, 0.0)
    assert keeper.receive(0, late, 0.0) == [(0, core.Turn(1))]
    assert owner(1).id in keeper.known.book.sections


def test_a_book_that_does_not_fit_its_page_is_refused_and_may_shrink():
    """The keeper ended, and its successor too, because each writer tried again."""
    keeper, size = Keeper(), core.MOST_PART_BYTES - 1000
    for number in range(5):
        keeper.hello(number, Hello(0, 1, "", owner(number)), 0, 0.0)

    def sized(number: int, bytes_: int) -> object:
        section = Section(owner(number), counts={"n" * bytes_: 1})
        return write(keeper, number, Part(section, (), 1))

    replies = [sized(number, size) for number in range(5)]
    assert [type(reply) for reply in replies] == [Written] * 3 + [core.Refused] * 2
    assert "are the most" in replies[-1].why
    assert isinstance(sized(0, 10), Written) and isinstance(sized(4, size), Written)
    me, key = owner(1), "k" * size
    waiting = Part(Section(me), (Ticket(key, me.id, "use", "m", arrived=0, refreshed=0),), 2)
    assert isinstance(write(keeper, 1, waiting, queue=(key,)), core.Refused), "the order counts too"
    assert isinstance(write(keeper, 1, waiting, queue=("x", "x")), Written)
    short = replace(waiting, tickets=(replace(waiting.tickets[0], key="t"),))
    write(keeper, 1, short, queue=("t", "t"))
    assert [ticket.key for ticket in keeper.known.book.tickets] == ["t"], "each has one place"
    large = msgspec.Raw(core.encode({"junk": "x" * core.MOST_PART_BYTES}))
    put = put_of(keeper, 0)
    [(_, reply), *_] = keeper.receive(0, replace(put, shared=large), 0.0)
    assert "facts of all owners" in reply.why


def keeper_of(count: int) -> Keeper:
    keeper = Keeper()
    for number in range(count):
        keeper.hello(number, Hello(0, 1, "", owner(number)), number // 2, 0.0)
    return keeper


def write(keeper: Keeper, connection: int, part: Part, **fields) -> object:
    """The reply to a write over the newest page."""
    content = msgspec.Raw(core.encode(part))
    message = Put(part.put, keeper.known.revision, content, **fields)
    return keeper.receive(connection, message, 0.0)[0][1]


def whole(keeper: Keeper) -> pieces.Page:
    assert sum(len(piece.content) for piece in keeper.pieces.values()) == keeper._bytes
    known = keeper.pieces.items()
    changed_at = {key: piece.revision for key, piece in known}
    contents = {key: piece.content for key, piece in known}
    return pieces.Page(keeper.known.revision, changed_at, contents)


def test_only_the_turn_that_a_connection_has_now_can_be_given_back():
    keeper = keeper_of(2)
    keeper.receive(1, put_of(keeper, 1), 0.0)
    for owner_number, number in ((0, 1), (1, 1), (0, 2)):
        late = replace(put_of(keeper, owner_number, 1), number=number)
        keeper.receive(owner_number, late, 0.0)
    assert keeper.receive(0, core.Pass(1), 0.0) == []
    assert keeper.receive(0, core.Pass(2), 0.0) == [(1, core.Turn(1))]


def test_a_connection_is_the_owner_that_its_process_proves():
    """An owner keeps its id with its secret only, and a number distinguishes two that look alike."""
    keeper, seen = Keeper(), owner(1)
    mine = Hello(0, 1, "", seen, secret=b"mine")
    other = Hello(0, 1, "", seen, secret=b"other")
    assert keeper.identity(mine, seen) == seen
    keeper.hello(0, mine, 0, 0.0)
    assert keeper.identity(mine, seen) == seen, "another connection of the same owner"
    second = keeper.identity(other, seen)
    assert second.serial == seen.serial + 1
    keeper.hello(1, Hello(0, 1, "", second, secret=b"other"), 0, 0.0)
    assert keeper.identity(Hello(0, 1, "", seen, secret=b"third"), seen).serial == seen.serial + 2
    for impossible in ({"pid": 2**63}, {"pid": -1}, {"serial": 2**64 - 1}):
        claimed = replace(owner(9), **impossible)
        shown = keeper.identity(Hello(0, 1, "", claimed, again=True), replace(claimed, pid=109))
        assert shown.pid == 109 and 0 <= shown.serial < core.MOST_SERIAL

    moved = replace(owner(7), user="user1")  # the next keeper sees the process as another one
    again = replace(mine, again=True)
    assert keeper.identity(again, moved) == seen
    assert keeper.identity(replace(again, secret=b"guess"), moved) == moved
    assert keeper.identity(again, owner(7)) == owner(7), "another user"
    write(keeper, 0, Part(Section(seen), (), 1))
    keeper.died([seen.id])
    assert keeper.identity(again, owner(7)) == owner(7), "its section names its user"


def test_a_user_has_a_number_of_owners_and_all_together_too(monkeypatch):
    """One process registered 4,000 owners in 18 s. All descriptors end with it, and then the page."""
    monkeypatch.setattr(core, "MOST_OWNERS_OF_A_USER", 2)
    monkeypatch.setattr(core, "MOST_OWNERS", 3)
    keeper = Keeper()

    def hello(serial: int, user: str, **more) -> type:
        me = replace(owner(1), serial=serial, user=user)
        return type(keeper.hello(serial, Hello(0, 1, "", me, **more), 0, 0.0))

    assert [hello(serial, "ann") for serial in range(3)] == [core.Welcome] * 2 + [core.Refused]
    assert [hello(serial, "bob") for serial in (3, 4)] == [core.Welcome, core.Refused]
    assert hello(1, "ann") is core.Welcome, "one that has registered may connect again"
    assert hello(2, "ann", bell=True) is core.Welcome, "a bell is no owner"
    refused = write(keeper, 2, Part(Section(replace(owner(1), serial=2)), (), 1))
    assert isinstance(refused, core.Refused), "and writes nothing"
    keeper.died([replace(owner(1), serial=0).id])
    assert hello(2, "ann") is core.Welcome


def test_a_greeting_tells_which_write_came_last_and_takes_an_owner_off_the_dead():
    keeper = keeper_of(3)
    write(keeper, 0, Part(Section(owner(0)), (), 9))
    keeper.died([owner(0).id, owner(2).id, "unknown"])
    assert keeper.known.state.dead == (owner(0).id,), "the others have nothing in the book"
    keeper.died([owner(1).id])
    assert keeper.hello(5, Hello(4, 1, "", owner(0)), 0, 0.0).put == 9
    assert keeper.known.state.dead == ()
    assert keeper.hello(6, Hello(4, 1, "", owner(1)), 0, 0.0).put == 0


def test_a_death_wakes_who_waits_for_room():
    """64 idle notebooks, which woke at each death, kept the one that waited from the processor."""
    keeper = keeper_of(4)
    for number in range(4):
        keeper.hello(10 + number, Hello(0, 1, "", owner(number), bell=True), 0, 0.0)
        write(keeper, number, Part(Section(owner(number)), (), 1))
    assert keeper.died([owner(3).id]) == [(10, core.Rung(0))], "one removes it from the book"
    ticket = Ticket("t", owner(1).id, "use", "m", arrived=0, refreshed=0)
    write(keeper, 1, Part(Section(owner(1)), (ticket,), 2), queue=("t",))
    assert keeper.died([owner(2).id]) == [(11, core.Rung(0))]
    assert keeper.known.state.dead == (owner(2).id, owner(3).id), "both, until they are removed"


def test_a_death_wakes_an_owner_that_can_remove_it():
    """One without leases has perhaps no monitor: the dead one stayed in the book until others looked by chance."""
    keeper = keeper_of(3)
    for number in range(3):
        keeper.hello(10 + number, Hello(0, 1, "", owner(number), bell=True), 0, 0.0)
    for number, leases in ((0, ()), (1, (Lease(owner(1).id, "m"),)), (2, ())):
        write(keeper, number, Part(Section(owner(number), leases=leases), (), 1))
    assert keeper.died([owner(2).id]) == [(11, core.Rung(0))]


def test_a_release_that_has_not_seen_a_request_wakes_it_and_a_request_that_has_not_seen_a_release_looks_again():
    """Both are taken on an old page. Neither knew of the other, and the request waited until it looked by itself."""
    keeper = keeper_of(2)
    for number in (0, 1):
        keeper.hello(10 + number, Hello(0, 1, "", owner(number), bell=True), 0, 0.0)
    held = Part(Section(owner(0), leases=(Lease(owner(0).id, "m"),)), (), 1)
    write(keeper, 0, held)
    write(keeper, 1, Part(Section(owner(1)), (), 1))
    page = keeper.known.revision
    ticket = Ticket("t", owner(1).id, "use", "m", arrived=0, refreshed=0)
    wish = msgspec.Raw(core.encode(Part(Section(owner(1)), (ticket,), 2)))
    freed = msgspec.Raw(core.encode(Part(Section(owner(0)), (), 2)))
    requested = Put(2, page, wish, queue=("t",))
    released = Put(2, page, freed)
    assert keeper.receive(1, requested, 0.0) == [(1, Written(2, page + 1))]
    assert keeper.receive(0, released, 0.0) == [(0, Written(2, page + 2)), (11, core.Rung(0))]
    again = keeper.receive(1, replace(requested, number=3, revision=page + 1), 0.0)
    assert again == [(1, Written(3, page + 3)), (11, core.Rung(0))]


MEMBERS = st.integers(0, 3)


@given(
    st.lists(st.tuples(MEMBERS, MEMBERS | st.none(), st.sampled_from("an"), st.booleans())),
    st.sets(MEMBERS, max_size=2),
)
def test_what_is_kept_reaches_whom_it_is_for_and_ends_with_either(keeps, dead):
    """The last content of a kind for an asker, or for all; a private one only if both have one user."""
    keeper, kept = keeper_of(4), {}
    for n, (by, whom, kind, private) in enumerate(keeps):
        for_whom = "" if whom is None else owner(whom).id
        keeper.receive(by, Keep(1, kind, b"%d" % n, for_whom, private=private), 0.0)
        kept[by, whom, kind] = b"%d" % n, private
    assert keeper.died([owner(number).id for number in dead]) == [], "nobody waits"
    for number in dead:  # another process, or the owner comes back
        keeper.hello(number, Hello(0, 1, "", owner(number)), number // 2, 0.0)

    def expected(me, kind, whom, by=None):
        return {
            owner(one).id: content
            for (one, to, its_kind), (content, private) in kept.items()
            if (its_kind, to) == (kind, whom) and by in (None, one) and not {one, to} & dead
            if not private or one // 2 == me // 2
        }

    for me in range(4):
        for kind in "an":
            [(_, all_of)] = keeper.receive(me, core.Fetch(2, kind), 0.0)
            assert all_of.contents == expected(me, kind, None)
            for by in range(4):
                [(_, of_one)] = keeper.receive(me, core.Fetch(2, kind, owner(by).id), 0.0)
                assert of_one.contents == expected(me, kind, me, by)


def test_nothing_is_kept_for_an_owner_that_has_ended():
    """It stayed until the end of the owner that had answered: after 800 commands, nothing more could be kept."""
    keeper = keeper_of(2)
    keeper.died([owner(1).id])
    [(_, reply)] = keeper.receive(0, Keep(1, "answer", b"late", owner(1).id), 0.0)
    assert isinstance(reply, Written) and not keeper._kept


def test_a_ring_wakes_the_named_owners():
    keeper = keeper_of(2)
    keeper.hello(11, Hello(0, 1, "", owner(1), bell=True), 0, 0.0)
    rings = core.Ring(0, (owner(1).id, "unknown"))
    assert keeper.receive(0, rings, 0.0) == [(11, core.Rung(0))]


def test_whoever_has_no_section_is_not_asked_for_a_sign_and_a_write_is_one():
    """In an earlier version a write was none: a notebook that began a cell after a pause counted as blocked."""
    keeper = keeper_of(2)
    write(keeper, 0, Part(Section(owner(0)), (), 1))

    def silences(now):
        [(_, reply)] = keeper.receive(1, core.Fetch(1, "silences"), now)
        return {id: msgspec.msgpack.decode(said) for id, said in reply.contents.items()}

    assert silences(3.0) == {owner(0).id: 3.0}
    assert keeper.receive(0, core.Sign(0), 2.0) == []
    assert silences(3.0) == {owner(0).id: 1.0}
    keeper.receive(0, put_of(keeper, 0), 9.0)
    assert silences(10.0) == {owner(0).id: 1.0}


def test_what_an_owner_keeps_has_a_limit(monkeypatch):
    """Also in many small parts: each kind is another one. Other owners have a limit of their own."""
    keeper = keeper_of(2)

    def says(connection, kind, size):
        [(_, said)] = keeper.receive(connection, Keep(1, kind, bytes(size)), 0.0)
        return type(said)

    most = core.MOST_KEPT_BYTES - core.KEPT_BYTES - len("maps")
    assert says(0, "maps", most + 1) is core.Refused
    assert says(0, "maps", most) is says(0, "maps", 9) is Written
    small = [says(0, f"answer{number}", 0) for number in range(most // core.KEPT_BYTES)]
    assert small[800] is Written and small[-1] is core.Refused
    assert says(0, "maps", 3) is says(1, "maps", most) is Written
    monkeypatch.setattr(core, "MOST_KEPT_BYTES_OF_A_USER", core.MOST_KEPT_BYTES)
    assert says(1, "maps", most) is core.Refused, "the other owner is of the same user"


def test_the_parts_of_the_dead_leave_with_their_tickets():
    """Nobody removes itself in this way, nor one that lives, even if a person declared it dead."""
    keeper = keeper_of(4)
    for number in range(3):
        mine = Ticket(f"t{number}", owner(number).id, "use", "m", 1.0, 1.0)
        section = Section(owner(number)) if number else None  # a part may have tickets only
        queue = (*keeper.known.state.queue, mine.key)
        part = Part(section, (mine,), number + 1)
        assert isinstance(write(keeper, number, part, queue=queue), Written)
    assert [ticket.key for ticket in keeper.known.book.tickets] == ["t0", "t1", "t2"]

    me, empty, dead = keeper.known.parts[owner(2).id], Part(None, (), 5), (owner(1).id,)
    assert isinstance(write(keeper, 2, me, removed=dead), core.Refused)
    assert isinstance(write(keeper, 2, me, removed=dead, declared=dead), core.Refused)
    keeper.died(dead)
    assert keeper.known.state.dead == dead
    assert isinstance(write(keeper, 2, me, removed=(*dead, owner(2).id)), Written)
    assert keeper.known.state.dead == () and keeper.known.state.queue == ("t0", "t2")
    assert set(keeper.known.parts) == {owner(0).id, owner(2).id}
    whole(keeper)

    assert isinstance(write(keeper, 2, empty, queue=("t0",)), Written)
    assert owner(2).id not in keeper.pieces
    old = keeper.known.book
    changes = pieces.changed(old, replace(old, tickets=()), owner(3).id)
    assert changes == {"queue": (), "removed": (owner(0).id,)}, "it had no section"


def test_a_person_may_declare_dead_whom_the_keeper_does_not_know():
    keeper = keeper_of(2)
    write(keeper, 0, Part(Section(owner(0)), (), 1))
    keeper.adopt(whole(keeper), {owner(1).id: "user1"}, ())
    mine, gone = Part(Section(owner(1)), (), 1), (owner(0).id,)
    assert isinstance(write(keeper, 1, mine, removed=gone), core.Refused)
    assert isinstance(write(keeper, 1, mine, removed=gone, declared=gone), Written)


def test_the_next_keeper_goes_on_with_the_page():
    keeper = keeper_of(3)
    for number in range(3):
        write(keeper, number, Part(Section(owner(number)), (), 1))
    page, heir = whole(keeper), Keeper()
    heir.adopt(page, {owner(2).id: "user2"}, {owner(1).id, owner(0).id})
    assert heir.known.book == keeper.known.book and heir.known.revision > page.revision
    assert heir.known.state.living == {owner(2).id: "user2"}
    assert heir.known.state.dead == (owner(0).id, owner(1).id)
    changed = whole(heir).changed_at.items()
    assert [key for key, revision in changed if revision > page.revision] == [pieces.STATE]


def test_a_book_above_its_limit_may_shrink_but_not_grow(monkeypatch):
    keeper = keeper_of(1)
    write(keeper, 0, Part(Section(owner(0), counts={"n" * 100: 1}), (), 1))
    monkeypatch.setattr(core, "MOST_BOOK_BYTES", 10)
    for size, reply in ((101, core.Refused), (100, Written), (99, Written), (100, core.Refused)):
        part = Part(Section(owner(0), counts={"n" * size: 1}), (), 1)
        assert isinstance(write(keeper, 0, part), reply)


def test_a_keeper_keeps_nothing_of_the_writes_that_others_have_followed():
    """The sums of each section that was ever checked were kept, up to 4096 sections."""
    keeper, card = keeper_of(8), Device("sim:0", GIB)
    shared = msgspec.Raw(core.encode(core.Shared(devices=(card,), limits={card.id: GIB})))
    write(keeper, 0, Part(Section(owner(0)), (), 1), shared=shared)

    def blocks_after(writes: int) -> int:
        for number in range(writes):
            me = owner(number % 8)
            held = Lease(me.id, "m", shares=(Share(card.id, 1 + number),), last_used=float(number))
            part = Part(Section(me, leases=(held,)), (), number)
            assert isinstance(write(keeper, number % 8, part), Written)
        gc.collect()
        return sys.getallocatedblocks()

    early, late = blocks_after(800), blocks_after(800)
    assert abs(late - early) < 800, "less than one object a write"


# -- the shared memory -----------------------------------------------------------------------------


def test_a_page_is_read_whole_while_the_keeper_writes():
    """A reader never sees pieces of two pages, and a client cannot write."""
    writer = wire.Writer("test")
    reader = wire.Reader(writer.descriptor)
    with pytest.raises(wire.Torn):
        reader.page()
    ends = threading.Event()

    def write() -> None:
        revision = 0
        while not ends.is_set():
            revision += 1
            content = revision.to_bytes(8, "big") * 5000
            published = {key: pieces.Piece.of(revision, content) for key in "ab"}
            writer.write(revision, published)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        until(reader.revision)
        for _ in range(300):
            with contextlib.suppress(wire.Torn):
                page = reader.page()
                for content in page.contents.values():
                    assert content == page.revision.to_bytes(8, "big") * 5000
    finally:
        ends.set()
        thread.join()
    with pytest.raises(PermissionError):
        mmap.mmap(writer.descriptor, 100)
    with pytest.raises(PermissionError):
        os.ftruncate(writer.descriptor, 10)
    last = reader.revision()
    with pytest.raises(ValueError, match="are the most"):
        writer.write(last + 1, {"a": pieces.Piece.of(1, bytes(wire.MOST_BYTES))})
    assert reader.page().revision == last
    reader.close()
    writer.close()


@pytest.mark.parametrize("written", range(wire._PREFIX.size))
def test_a_page_whose_prefix_is_written_in_part_is_no_page(written):
    """The keeper may be stopped in the middle. A client raised a DecodeError for a page of no bytes."""
    writer = wire.Writer("test")
    reader = wire.Reader(writer.descriptor)
    for revision in (0x0102030405, 0x0102030406):
        writer.write(revision, {"a": pieces.Piece.of(1, b"x")})
    writer._memory[written : wire._PREFIX.size] = bytes(wire._PREFIX.size - written)
    assert reader.page().revision == 0x0102030405
    reader.close()
    writer.close()


def test_an_owner_whose_process_cannot_be_seen_ends_unless_it_connects_again(monkeypatch, tmp_path):
    """As one of another container. One comes back, one keeps a connection, and one does neither."""
    monkeypatch.setattr(server.os, "pidfd_open", Mock(side_effect=PermissionError))
    lock = server.locked(tmp_path)
    keeper = server.Server(tmp_path, lock)

    def connected(serial, bell=False):
        opened = socket.socket(socket.AF_UNIX)
        opened.connect(str(tmp_path / wire.SOCKET))
        hello = Hello(1, 1, "", replace(owner(1), serial=serial), b"secret%d" % serial)
        opened.sendall(wire.frame(core.encode(replace(hello, bell=bell))))
        handle(2)  # the connection, and then its message
        return opened

    def handle(count):
        for _ in range(count):
            for key, events in keeper._selector.select(clock.PATIENCE):
                keeper._handle(key, events)

    def living():
        return set(keeper._keeper.known.state.living)

    with contextlib.closing(lock):
        first = [connected(1), connected(2), connected(3)]
        bell = connected(3, bell=True)
        all_three = living()
        assert len(all_three) == 3
        for opened in first:
            opened.close()
            handle(1)
        again = connected(1)
        keeper.pass_time(time.monotonic() - server.UNSEEN_SECONDS)
        assert living() == all_three
        keeper.pass_time(time.monotonic() + server.UNSEEN_SECONDS)
        assert sorted(id.rsplit(".")[-1] for id in living() & all_three) == ["1", "3"]
        bell.close()
        again.close()


def test_a_fault_ends_one_connection_and_a_stranger_has_a_number_of_them(
    monkeypatch, tmp_path, capfd
):
    """A fault of the keeper's code ended it, and its successor when the same message came again."""
    lock = server.locked(tmp_path)
    keeper = server.Server(tmp_path, lock)

    def sent(content: bytes, events: int) -> socket.socket:
        opened = socket.socket(socket.AF_UNIX)
        opened.connect(str(tmp_path / wire.SOCKET))
        opened.sendall(content)
        for _ in range(events):
            for key, found in keeper._selector.select(clock.PATIENCE):
                keeper._handle(key, found)
        return opened

    hello = wire.frame(core.encode(Hello(1, 1, "", owner(1), b"secret")))
    with contextlib.closing(lock), contextlib.closing(sent(hello, 2)) as honest:
        half = b"\xff\xff\x0f\x00" + bytes(server.MOST_GREETING_BYTES)
        assert sent(half, 3).recv(1) == b"", "much was sent before a greeting"
        with monkeypatch.context() as patched:
            patched.setattr(keeper._keeper, "identity", Mock(side_effect=KeyError("a fault")))
            assert sent(hello, 2).recv(1) == b""
        assert "a fault" in capfd.readouterr().err
        monkeypatch.setattr(keeper, "_most_connections", 2)
        with monkeypatch.context() as patched:
            patched.setattr(server.os, "geteuid", lambda: 12345)
            with contextlib.closing(sent(b"", 1)) as second:
                assert sent(b"", 1).recv(1) == b""
                second.setblocking(False)
                with pytest.raises(BlockingIOError):
                    second.recv(1)
        assert len(keeper._keeper.known.state.living) == 1 and honest.recv(1)


def test_the_newest_page_of_a_book_is_found():
    name = f"test-{os.getpid()}"
    writers = [wire.Writer(name) for _ in range(3)]
    for writer, revision in zip(writers, (4, 9, 5), strict=True):
        writer.write(revision, {"a": pieces.Piece.of(revision, b"x")})
    assert wire.newest(name).revision == 9
    for writer in writers:
        writer.close()
    assert wire.newest(name) is None


# Recorded from version 1 of the protocol. A line here never changes: other environments on the machine speak it.
ANN = Owner("box", "b", 7, 9, 1, user="ann", notebook="n.ipynb", namespaces="1-2")
OWNER_1 = (
    b"\x88\xa4host\xa3box\xa4boot\xa1b\xa3pid\x07\xa7started\t\xa6serial\x01\xa4user\xa3ann"
    b"\xa8notebook\xa7n.ipynb\xaanamespaces\xa31-2"
)
SAID_1 = [
    (Hello(1, 1, "", ANN, b"s"), b"\x99\xa5Hello\x01\x01\xa0" + OWNER_1 + b"\xc4\x01s\xc2\xc2\xc2"),
    (
        Put(2, 5, msgspec.Raw(b"\x93\xc0\x90\x03"), ("k",), removed=("1.2.3",)),
        b"\x9a\xa3Put\x02\x05\x93\xc0\x90\x03\x91\xa1k\xc0\x91\xa51.2.3\x90\x90\x80",
    ),
    (core.Pass(4), b"\x92\xa4Pass\x04"),
    (
        Keep(5, "names", b"\x80", "7.9.0", True),
        b"\x96\xa4Keep\x05\xa5names\xc4\x01\x80\xa57.9.0\xc3",
    ),
    (core.Fetch(6, "names", "7.9.1"), b"\x94\xa5Fetch\x06\xa5names\xa57.9.1"),
    (core.Ring(7, ("7.9.1",)), b"\x93\xa4Ring\x07\x91\xa57.9.1"),
    (core.Sign(8), b"\x92\xa4Sign\x08"),
    (Leave(9), b"\x92\xa5Leave\t"),
]
HEARD_1 = [
    (core.Welcome(1, 1, "", ANN, 3), b"\x96\xa7Welcome\x01\x01\xa0" + OWNER_1 + b"\x03"),
    (Written(2, 6), b"\x93\xa7Written\x02\x06"),
    (core.Soon(3), b"\x92\xa4Soon\x03"),
    (core.Turn(3), b"\x92\xa4Turn\x03"),
    (core.Refused(5, "why"), b"\x93\xa7Refused\x05\xa3why"),
    (core.Content(6, {"7.9.1": b"\x80"}), b"\x93\xa7Content\x06\x81\xa57.9.1\xc4\x01\x80"),
    (core.Rung(0), b"\x92\xa4Rung\x00"),
]


PART_1 = (
    b"\x93\x84\xa5owner"
    + OWNER_1
    + b"\xa6leases\x91\xde\x00\x08\xa5owner\xa57.9.1\xa4name\xa1m\xa3key\xa1k\xa6shares"
    b"\x91\x82\xa6device\xa5sim:0\xa5bytes\x05\xa5phase\xa7leaving\xa9last_used\xcb@\x04\x00\x00\x00\x00\x00\x00\xa7movable"
    b"\xc2\xa7backend\xa5torch\xa7residue\x81\xa5sim:0\x02\xa6counts\x81\xa6loaded\x01\x91\xde\x00\x06\xa3key\xa1q\xa5owner"
    b"\xa57.9.1\xa4verb\xa3use\xa4name\xa1m\xa7arrived\xcb?\xf0\x00\x00\x00\x00\x00\x00\xa9refreshed\xcb?\xf0\x00\x00\x00\x00"
    b"\x00\x00\x03"
)


def test_the_recorded_part_of_version_1_is_understood():
    """A kernel that runs for weeks writes these bytes. A later version reads them, whatever fields it has added."""
    lease = Lease(
        ANN.id, "m", "k", (Share("sim:0", 5),), phase=Phase.LEAVING, last_used=2.5, movable=False,
        backend="torch",
    )  # fmt: skip
    ticket = Ticket("q", ANN.id, "use", "m", 1.0, 1.0)
    part = Part(Section(ANN, (lease,), {"sim:0": 2}, counts={"loaded": 1}), (ticket,), 3)
    assert pieces.decode_part(PART_1) == part
    assert set(Phase) == {"arriving", "settled", "leaving"}, (
        "0.3 could read no page with another one"
    )


def test_a_request_of_a_later_version_is_refused_with_the_version():
    later = core.of_later_version(core.encode(["Nap", 5, {"seconds": 3}]))
    assert later == core.Refused(5, f"the keeper has version {VERSION}, which knows no Nap")
    for garbage in (
        b"",
        b"\xc1",
        core.encode(["Put", 5]),
        core.encode({"Nap": 5}),
        core.encode([]),
    ):
        assert core.of_later_version(garbage) is None


def test_the_recorded_conversation_of_version_1_is_understood():
    """Also with a field that a later version adds at the end."""
    for decode, said in ((core.decode_request, SAID_1), (core.decode_reply, HEARD_1)):
        for message, recorded in said:
            later = bytes([recorded[0] + 1]) + recorded[1:] + b"\xa5later"
            assert decode(recorded) == message
            assert decode(later) == message
            assert core.encode(message)[1:].startswith(recorded[1:])
