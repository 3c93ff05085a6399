"""The keeper's core as a state machine, and the shared memory. Its process is in test_keeper_process.py."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gpu_runtime.facts import Device, Lease, Owner, Section, Share
from gpu_runtime.ledgers.keeper import core, shared_book
from gpu_runtime.ledgers.keeper.core import Hello, Keep, Keeper, Leave, Part, Put, Written
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
        self.waiting: dict[int, tuple[int, int]] = {}  # connection -> number of its put, and GiB
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
                self.acknowledged[connection] = waiting[1]
            if isinstance(reply, core.Rung | core.Soon):
                continue
            if isinstance(reply, core.Turn):
                self.turns[connection] = reply.number
            if waiting and reply.number == waiting[0]:
                del self.waiting[connection]

    def write(self, connection, gib, limit=0, behind=0, goes_on=False):
        me = owner(connection)
        self.numbers += 1
        leases = (Lease(me.id, "m", target=(Share("sim:0", gib * GIB),)),) if gib else ()
        part = core.encode(Part(Section(me, leases=leases), (), self.numbers))
        fields = {}
        if limit:
            shared = core.Shared(devices=(Device("sim:0", LIMIT),), limits={"sim:0": LIMIT})
            fields["shared"] = msgspec.Raw(core.encode(shared))
        revision = self.keeper.known.revision - behind
        self.waiting[connection] = (self.numbers, gib)
        message = Put(self.numbers, revision, msgspec.Raw(part), goes_on=goes_on, **fields)
        self.take(self.keeper.receive(connection, message, self.now))

    @rule(
        connection=st.integers(0, 3),
        gib=st.integers(0, 4),
        behind=st.integers(0, 1),
        goes_on=st.booleans(),
    )
    def put(self, connection, gib, behind, goes_on):
        if connection not in self.waiting:
            self.write(connection, gib, behind=behind, goes_on=goes_on)

    @rule(connection=st.integers(0, 3))
    def want(self, connection):
        if connection not in self.waiting:
            self.numbers += 1
            self.waiting[connection] = (self.numbers, 0)
            self.take(self.keeper.receive(connection, core.Want(self.numbers), self.now))

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

    @rule(connection=st.integers(0, 3))
    def die(self, connection):
        """The process ends; a new one with the same owner stands for the next notebook."""
        self.take(self.keeper.gone(connection, self.now))
        self.take(self.keeper.died([owner(connection).id]))
        self.waiting.pop(connection, None)
        assert owner(connection).id not in self.keeper.known.state.living
        self.keeper.hello(connection, Hello(0, 1, "", owner(connection)), 0, self.now)

    @rule()
    def a_page_has_the_whole_book(self):
        """The next keeper goes on with this page."""
        entries = tuple(
            shared_book.Entry(key, piece.revision, len(piece.content))
            for key, piece in self.keeper.pieces.items()
        )
        whole = b"".join(piece.content for piece in self.keeper.pieces.values())
        page = shared_book.Page(self.keeper.known.revision, entries, memoryview(whole))
        read = core.Pieces()
        read.follow(page)
        assert read.book == self.keeper.known.book
        assert len(whole) == self.keeper._bytes

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


def test_a_head_that_does_not_write_is_passed_over():
    """The first one is stopped. The second one gets its turn, and the first one's late write is refused as old."""
    keeper = Keeper()
    for number in range(3):
        keeper.hello(number, Hello(0, 1, "", owner(number)), 0, 0.0)
    empty = msgspec.Raw(core.encode(Part(Section(owner(0)), (), 1)))
    assert keeper.receive(0, Put(1, 0, empty), 0.0) == [(0, core.Turn(1))]
    mine = msgspec.Raw(core.encode(Part(Section(owner(1)), (), 1)))
    revision = keeper.known.revision
    assert keeper.receive(1, Put(1, revision, mine), 0.0) == [(1, core.Soon(1))]
    assert keeper.receive(2, core.Want(1), 0.0) == []
    assert keeper.tick(core.TURN_SECONDS / 2) == []
    assert keeper.tick(core.TURN_SECONDS) == [(1, core.Turn(1)), (2, core.Soon(1))]
    written, turn = keeper.receive(1, Put(2, revision, mine), 0.03)
    assert written == (1, Written(2, revision + 1, True)) and turn == (2, core.Turn(1))
    assert keeper.receive(0, Put(2, revision, empty), 0.03) == [(0, core.Soon(2))]
    assert keeper.receive(2, core.Pass(1), 0.03) == [(0, core.Turn(2))]


def test_a_turn_has_a_row_of_writes_and_an_end_that_nobody_can_move():
    """A lease and its release take one turn. A head that asked for its turn again and again kept it for ever."""
    keeper = Keeper()
    for number in range(2):
        keeper.hello(number, Hello(0, 1, "", owner(number)), 0, 0.0)
    part = msgspec.Raw(core.encode(Part(Section(owner(0)), (), 1)))

    def write(now):
        message = Put(1, keeper.known.revision, part, goes_on=True)
        return keeper.receive(0, message, now)

    keeper.receive(0, core.Want(1), 0.0)
    keeper.receive(1, core.Want(1), 0.0)
    for _ in range(core.MOST_WRITES - 1):
        [(_, reply)] = write(0.0)
        assert not reply.others_wait, "the next write needs no turn of its own"
    [(_, reply), turn] = write(0.0)
    assert reply.others_wait and turn == (1, core.Turn(1))

    keeper.receive(0, core.Want(2), 0.0)
    keeper.receive(1, core.Pass(1), 0.0)
    keeper.receive(1, core.Want(2), 0.0)
    [(_, reply)] = write(0.0)
    assert keeper.tick(core.GO_ON_SECONDS / 2) == []
    assert keeper.receive(0, core.Want(3), core.GO_ON_SECONDS / 2) == [(0, core.Turn(3))]
    assert keeper.tick(core.GO_ON_SECONDS)[0] == (1, core.Turn(2))


def test_a_book_that_does_not_fit_its_page_is_refused_and_may_shrink():
    """The keeper ended, and its successor too, because each writer tried again."""
    keeper, size = Keeper(), core.MOST_PART_BYTES - 1000
    for number in range(5):
        keeper.hello(number, Hello(0, 1, "", owner(number)), 0, 0.0)

    def write(number: int, bytes_: int) -> object:
        section = Section(owner(number), counts={"n" * bytes_: 1})
        part = msgspec.Raw(core.encode(Part(section, (), 1)))
        [(_, reply), *_] = keeper.receive(number, Put(1, keeper.known.revision, part), 0.0)
        return reply

    replies = [write(number, size) for number in range(5)]
    assert [type(reply) for reply in replies] == [Written] * 3 + [core.Refused] * 2
    assert "are the most" in replies[-1].why
    assert isinstance(write(0, 10), Written) and isinstance(write(4, size), Written)


def test_only_the_owner_fetches_an_answer_and_only_its_user_a_private_one():
    keeper = Keeper()
    for number in range(3):
        keeper.hello(number, Hello(0, 1, "", owner(number)), number // 2, 0.0)
    for whom in (1, 2):
        keeper.receive(0, Keep(1, "answer", b"x", owner(whom).id, private=True), 0.0)
    ask = core.Fetch(2, "answer", owner(0).id)
    assert keeper.receive(1, ask, 0.0) == [(1, core.Content(2, {owner(0).id: b"x"}))]
    assert keeper.receive(2, ask, 0.0) == [(2, core.Content(2, {}))]


# -- the shared memory -----------------------------------------------------------------------------


def test_a_page_is_read_whole_while_the_keeper_writes():
    """A reader never sees pieces of two pages, and a client cannot write."""
    writer = shared_book.Writer("test")
    reader = shared_book.Reader(writer.descriptor)
    with pytest.raises(shared_book.Torn):
        reader.page()
    ends = threading.Event()

    def write() -> None:
        revision = 0
        while not ends.is_set():
            revision += 1
            content = revision.to_bytes(8, "big") * 5000
            pieces = {key: shared_book.Piece(revision, content) for key in "ab"}
            writer.write(revision, pieces)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        until(reader.revision)
        for _ in range(300):
            with contextlib.suppress(shared_book.Torn):
                page = reader.page()
                for _, content in page.changed_since(0):
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
        writer.write(last + 1, {"a": shared_book.Piece(1, bytes(shared_book.MOST_BYTES))})
    assert reader.page().revision == last
    reader.close()
    writer.close()
