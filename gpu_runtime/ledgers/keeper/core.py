"""What the keeper decides: whose turn it is, which writes are lawful, and who has died.

Pure: without sockets, clock and files. `Keeper.receive` takes a message of one connection, and returns
messages to connections. The laws of a write are in `invariants.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import NamedTuple, get_args

import msgspec
from msgspec.structs import replace

from ...compat import dataclass_transform
from ...errors import LedgerRefused
from ...facts import DISK, MOST_EVENTS, Book, Owner, Section, Ticket
from ...files import DEEPEST, is_deep
from ...version import VERSION
from ..invariants import refuse_unlawful
from ..pieces import (
    MOST_PART_BYTES,
    SHARED,
    STATE,
    UNREADABLE,
    Page,
    Part,
    Piece,
    Pieces,
    Shared,
    State,
    book_of,
    decode,
    decode_part,
    decode_shared,
    encode,
    with_events,
)
from .wire import MOST_BYTES, MOST_FRAME_BYTES

PROTOCOL = 1
TURN_SECONDS = 0.02  # how long the connection with the turn may take for its write
ALONE_SECONDS = 0.2  # nobody writes before a connection that has waited for so long
# Of all pieces; the rest of a page is for its index, and for owners that come and end.
MOST_BOOK_BYTES = MOST_BYTES - (1 << 20)
MOST_OWNERS = 4096  # their ids, users and entries in the index fit into that rest
MOST_OWNERS_OF_A_USER = 1024
MOST_SERIAL = 1 << 32
MOST_PID = 1 << 31
# Of one owner's maps, names and answers, and of all contents in one reply.
MOST_KEPT_BYTES = MOST_FRAME_BYTES - (1 << 19)
MOST_KEPT_BYTES_OF_A_USER = 64 << 20
KEPT_BYTES = 4096  # that each of them counts beside its content and names
NOTHING = msgspec.Raw(b"\xc0")
# What a keeper finds out about an owner, whatever the owner says.
PROVEN = ("boot", "pid", "started", "serial", "user", "inode", "namespaces")

# -- messages --------------------------------------------------------------------------------------


# The kinds and fields of messages are those of version 0.3. A later version may add a field with a default
# at the end of a message, and a kind of request, which an earlier keeper refuses. A keeper sends nothing
# that the version of its client does not know.


@dataclass_transform(frozen_default=True)
class Message(msgspec.Struct, array_like=True, frozen=True, tag=True, gc=False):
    """The base of all messages. `number` counts a connection's requests; its reply has the same number."""

    number: int


class Hello(Message):
    """The first message of a connection: who connects.

    `bell`: this connection only gets rings. `watch`: it only reads the book, and is no owner.
    `again`: a keeper has registered this owner already. All connections of an owner have one `secret`.
    """

    protocol: int
    version: str
    owner: Owner
    secret: bytes = b""
    again: bool = False
    bell: bool = False
    watch: bool = False


class Welcome(Message):
    """The reply to Hello. The descriptor of the book's memory comes with it."""

    protocol: int
    version: str
    owner: Owner  # as the keeper has registered it
    put: int  # the number of this owner's last write that is in the book


class Put(Message):
    """Writes this owner's part over the page `revision`."""

    revision: int
    part: msgspec.Raw  # a Part; its bytes are published as they are
    queue: tuple[str, ...] | None = None  # the keys of all tickets in their order; None: unchanged
    shared: msgspec.Raw = NOTHING  # a Shared, if a fact of all owners changes
    removed: tuple[str, ...] = ()  # dead owners whose sections and tickets leave
    declared: tuple[str, ...] = ()  # owners that a person declared dead
    events: tuple[msgspec.Raw, ...] = ()  # added to those of all owners, with the next numbers
    holds_below: dict[str, int] = {}  # see `Book`


class Pass(Message):
    """The owner writes nothing in the turn that its request `number` got. There is no reply."""


class Written(Message):
    """The write is in the book, as the page `revision`."""

    revision: int


class Turn(Message):
    """Another owner wrote first. The connection has the turn to decide again, on the page of now."""


class Soon(Message):
    """The connection has the next turn. A client that reads the book now decides sooner in its turn."""


class Refused(Message):
    """The write breaks a law, or the request is wrong."""

    why: str


class Keep(Message):
    """Keeps `content` beside the book, in place of the last content of this kind `for_whom`.

    Only owners of the same user may fetch `private` content.
    """

    kind: str
    content: bytes
    for_whom: str = ""
    private: bool = False


class Fetch(Message):
    """Asks for what all owners keep of this `kind`; with `owner`, for what that owner keeps for the asker."""

    kind: str
    owner: str = ""


class Content(Message):
    """The reply to Fetch: contents by owner id."""

    contents: dict[str, bytes]


class Ring(Message):
    """Wakes these owners. There is no reply."""

    owners: tuple[str, ...]


class Rung(Message):
    """Wakes the owner of a bell's connection."""


class Sign(Message):
    """This owner lives and runs, as each of its messages says. There is no reply."""


class Leave(Message):
    """This owner ends. It counts as dead when the reply has come."""


Request = Hello | Put | Pass | Keep | Fetch | Ring | Sign | Leave
Reply = Welcome | Written | Turn | Soon | Refused | Content | Rung


class _Head(msgspec.Struct, array_like=True, frozen=True):
    kind: str
    number: int


def of_later_version(content: bytes) -> Refused | None:
    """The reply to a request of a kind that this version does not know; None if it is no such request."""
    try:
        head = _decode_head(content)
    except UNREADABLE:  # it is garbage
        return None
    if head.kind in _KINDS:
        return None
    return Refused(
        head.number, f"the keeper has version {VERSION}, which knows no {head.kind[:40]}"
    )


_decode_head = msgspec.msgpack.Decoder(_Head).decode
_KINDS = {kind.__name__ for kind in get_args(Request)}
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode


_NO_PIECE = Piece.of(0, b"")
TOO_DEEP = f"fields of a later version are nested more than {DEEPEST} levels deep"


def _has_deep_fields(content: msgspec.Raw, read: Part) -> bool:
    """Whether `content`, which was `read`, has more, and this more is nested too deep to be skipped.

    A reader deep in calls of its own can skip fewer levels than the keeper.
    """
    return len(encode(read)) != len(content) and is_deep(decode(content))


def _wishes(part: Part) -> list[Ticket]:
    """The requests of an owner's `part`, without what a renewal changes."""
    return [ticket.wish for ticket in part.tickets]


def _kept_bytes(keep: Keep) -> int:
    return KEPT_BYTES + len(keep.kind) + len(keep.for_whom) + len(keep.content)


# -- the keeper ------------------------------------------------------------------------------------


class Member(msgspec.Struct):
    """A living owner that has connected."""

    owner: Owner
    uid: int
    secret: bytes
    signed_at: float = 0.0


class Late(NamedTuple):
    """A write that came too late."""

    number: int
    since: float  # when the first one came, in the caller's seconds


def _on_disk(section: Section | None) -> int:
    """The bytes that an owner has on a disk, or has reserved there. They are no claim of a device."""
    return sum([lease.bytes_on_disk for lease in section.leases]) if section is not None else 0


class _Change(NamedTuple):
    """What a write changes of that by which others decide."""

    renews: bool = False  # only the time of requests that are in the book: they still wait
    only_leases: bool = False  # nothing but the leases of its owner
    more: Mapping[str, int] = {}  # bytes that these claim more, by device

    @property
    def releases(self) -> bool:
        """Whether it claims no more bytes, and changes nothing else.

        Such a write needs no turn: the decisions of others, which read the page before, still hold.
        """
        return self.only_leases and not self.more


Answers = list[tuple[int, Reply]]  # connections and the messages to them


class Keeper:
    """The book, the owners and the queue of writers. A connection is a number that the caller chooses."""

    def __init__(self) -> None:
        """A keeper with an empty book."""
        self.known = Pieces()
        self.pieces: dict[str, Piece] = {}
        self._bytes = 0  # of all pieces
        self.members: dict[str, Member] = {}  # the living
        self._by_connection: dict[int, str] = {}
        self._bells: dict[int, str] = {}
        self._kept: dict[tuple[str, str, str], Keep] = {}  # by owner, kind, for whom
        # Connections whose writes came too late; the first one has the turn.
        self._queue: dict[int, Late] = {}
        self._turn_ends = 0.0
        self._claimed_at: dict[int, float] = {}  # when a connection last wrote more than a release
        # The oldest page on which a decision still holds: since then, bytes were only released.
        self._holds_since = 0
        # Since this page, only leases were written and events added.
        self._only_leases_since = 0
        self._publish(self.known.book, {}, Shared(), self.known.state, {})

    def adopt(self, page: Page, living: Mapping[str, str], dead: Iterable[str]) -> None:
        """Goes on with the `page` of an earlier keeper. `living` maps owner ids to users."""
        self.known.follow(page)
        self.pieces = {
            key: piece._replace(revision=page.revision) for key, piece in page.pieces().items()
        }
        self._bytes = sum([len(piece.content) for piece in self.pieces.values()])
        self._set_state(replace(self.known.state, living=dict(living), dead=tuple(sorted(dead))))
        self._holds_since = self.known.revision

    @property
    def deadline(self) -> float | None:
        """When `tick` must be called, in the caller's seconds; None: at no time."""
        return self._turn_ends if self._queue else None

    # Connections

    def identity(self, hello: Hello, seen: Owner) -> Owner:
        """The owner of a new connection. `seen` is the owner as the system shows its process.

        An owner keeps its id if the next keeper sees it with another pid, or not at all. The system
        shows processes of other PID namespaces with the pid 0, so the serial distinguishes them.
        """
        claimed, book, living = hello.owner, self.known.book, self.known.state.living
        registered = book.owner(claimed.id)
        users = {living.get(claimed.id), registered.user if registered else None} - {None}
        member = self.members.get(claimed.id)
        is_same = member is None or member.secret == hello.secret
        is_possible = 0 <= claimed.pid < MOST_PID and claimed.serial < MOST_SERIAL
        if hello.again and users <= {seen.user} and is_same and is_possible:
            return replace(claimed, user=seen.user)
        seen = replace(seen, serial=seen.serial % MOST_SERIAL)
        while seen.id in living:
            member = self.members.get(seen.id)
            if member is not None and member.secret == hello.secret:
                break
            seen = replace(seen, serial=(seen.serial + 1) % MOST_SERIAL)
        return seen

    def hello(self, connection: int, hello: Hello, uid: int, now: float) -> Welcome | Refused:
        """Registers an owner whose process and user are proven. The id is unused, or its own."""
        owner, living = hello.owner, self.known.state.living
        if not hello.bell and owner.id not in living:
            theirs = [*living.values()].count(owner.user)
            if theirs >= MOST_OWNERS_OF_A_USER or len(living) >= MOST_OWNERS:
                why = f"{len(living)} owners are open, {theirs} of them by {owner.user}: no more can be"
                return Refused(hello.number, why)
        if hello.bell:
            self._bells[connection] = owner.id
        else:
            member = self.members.setdefault(owner.id, Member(owner, uid, hello.secret))
            member.signed_at = now
            self._by_connection[connection] = owner.id
            state = self.known.state
            if owner.id not in state.living:
                living = {**living, owner.id: owner.user}
                dead = tuple([id for id in state.dead if id != owner.id])
                self._set_state(replace(state, living=living, dead=dead))
                self._holds_since = self.known.revision  # somebody may just count it as dead
        part = self.known.parts.get(owner.id)
        return Welcome(hello.number, PROTOCOL, VERSION, owner, part.put if part else 0)

    def gone(self, connection: int, now: float) -> Answers:
        """A connection was closed. The owner's bytes stay claimed: a closed connection proves no death."""
        self._bells.pop(connection, None)
        self._claimed_at.pop(connection, None)
        self._by_connection.pop(connection, None)
        return self._out_of_queue(connection, now)

    def died(self, ids: Iterable[str]) -> Answers:
        """These owners have ended. Whoever waits for room is woken, because their bytes may be free.

        If nobody waits, one owner with a lease is woken, which removes them from the book. An owner
        without leases has perhaps no monitor.
        """
        state = self.known.state
        gone = [id for id in ids if id in state.living]
        if not gone:
            return []
        for id in gone:
            self.members.pop(id, None)
        for connections in (self._by_connection, self._bells):
            for connection in [number for number, id in connections.items() if id in gone]:
                del connections[connection]
        for key in [key for key in self._kept if key[0] in gone or key[2] in gone]:
            del self._kept[key]
        living = {id: user for id, user in state.living.items() if id not in gone}
        dead = {id for id in (*state.dead, *gone) if id in self.known.book.owner_ids()}
        self._set_state(replace(state, living=living, dead=tuple(sorted(dead))))
        waiting = {ticket.owner for ticket in self.known.book.tickets}
        bells = [bell for bell, id in self._bells.items() if id in waiting - set(gone)]
        if not bells and dead:
            sections = self.known.book.sections
            able = {id for id in living if id in sections and sections[id].leases} or living
            bells = [bell for bell, id in self._bells.items() if id in able][:1]
        return [(bell, Rung(0)) for bell in bells]

    # Messages

    def receive(self, connection: int, message: Request, now: float) -> Answers:
        """Carries out a message of a registered connection."""
        me = self._by_connection.get(connection)
        if me is None and connection in self._bells and isinstance(message, Ring | Sign):
            me = self._bells[connection]
        if me is None:
            return [
                (connection, Refused(message.number, "no owner has greeted on this connection"))
            ]
        if me in self.members:
            self.members[me].signed_at = now
        if isinstance(message, Ring):
            rung = set(message.owners)
            return [(bell, Rung(0)) for bell, id in self._bells.items() if id in rung]
        if isinstance(message, Put):
            return self._take_put(connection, me, message, now)
        if isinstance(message, Pass):
            late = self._queue.get(connection)
            is_current = late is not None and late.number == message.number
            return self._out_of_queue(connection, now) if is_current else []
        if isinstance(message, Keep):
            return [(connection, self._keep(me, message))]
        if isinstance(message, Fetch):
            return [(connection, Content(message.number, self._fetch(me, message, now)))]
        if isinstance(message, Leave):
            return [(connection, Written(message.number, self.known.revision)), *self.died([me])]
        return []

    def _keep(self, me: str, message: Keep) -> Reply:
        key, uid = (me, message.kind, message.for_whom), self.members[me].uid
        mine = theirs = _kept_bytes(message)
        for other, kept in self._kept.items():
            if other != key and self.members[other[0]].uid == uid:
                theirs += _kept_bytes(kept)
                mine += _kept_bytes(kept) if other[0] == me else 0
        if mine > MOST_KEPT_BYTES or theirs > MOST_KEPT_BYTES_OF_A_USER:
            return Refused(message.number, f"{max(mine, theirs)} bytes are too many to keep")
        if message.for_whom in ("", *self.known.state.living):  # else it has ended meanwhile
            self._kept[key] = message
        return Written(message.number, self.known.revision)

    def _fetch(self, me: str, message: Fetch, now: float) -> dict[str, bytes]:
        if message.kind == "silences":
            return {
                id: encode(now - member.signed_at)
                for id, member in self.members.items()
                if id in self.known.book.sections
            }
        for_whom = me if message.owner else ""
        found = {
            id: kept.content
            for (id, kind, whom), kept in self._kept.items()
            if (kind, whom) == (message.kind, for_whom)
            and message.owner in ("", id)
            and (not kept.private or self.members[id].uid == self.members[me].uid)
        }
        smallest_first = sorted(found, key=lambda id: len(found[id]))
        sizes = itertools.accumulate([len(found[id]) for id in smallest_first])
        # Where all do not fit into a frame, the largest are left out.
        fit = zip(smallest_first, sizes, strict=True)
        return {id: found[id] for id, total in fit if total <= MOST_KEPT_BYTES}

    # Turns

    def _take_put(self, connection: int, me: str, put: Put, now: float) -> Answers:
        rings: Answers = []
        try:
            if len(put.part) > MOST_PART_BYTES:
                raise ValueError(f"its leases and requests take {len(bytes(put.part))} bytes")
            size = len(put.shared) + sum(map(len, put.events))
            if size > MOST_PART_BYTES:
                raise ValueError(f"the facts of all owners take {size} bytes")
            if len(put.events) > MOST_EVENTS:
                raise ValueError(f"{len(put.events)} events are more than {MOST_EVENTS}")
            mine = decode_part(put.part)
            if _has_deep_fields(put.part, mine):
                raise ValueError(TOO_DEEP)
            change = self._change(me, mine, put)
            if change.renews:
                put = replace(put, queue=None)
            oldest = self._oldest_page(me, put, change)
            is_current = oldest <= put.revision <= self.known.revision
            if not is_current or (not change.releases and self._must_wait(connection, now)):
                return self._queue_up(connection, put.number, now)
            unseen = set() if change.renews else self._changed_since(put.revision)
            self._write(me, put, mine, change)
            if not change.releases:
                self._claimed_at[connection] = now
            reply: Reply = Written(put.number, self.known.revision)
            rings = self._rings_for(me, unseen - {me})
        except LedgerRefused as error:
            # perhaps others have filled the page
            if put.revision < self._holds_since and not change.releases:
                return self._queue_up(connection, put.number, now)
            reply = Refused(put.number, error.facts["why"])
        except UNREADABLE as error:
            reply = Refused(put.number, f"others could not read it: {error}")
        except ValueError as error:  # too large a page
            reply = Refused(put.number, str(error))
        return [(connection, reply), *self._out_of_queue(connection, now), *rings]

    def _changed_since(self, revision: int) -> set[str]:
        return {id for id in self.known.parts if self.pieces[id].revision > revision}

    def _rings_for(self, me: str, unseen: set[str]) -> Answers:
        """The messages that wake requests which a write of `me` on an old page has missed.

        `unseen` are the owners that wrote since that page. `me` has woken no request of theirs, and its
        own request has not seen the bytes that they released.
        """
        waiting = {ticket.owner for ticket in self.known.book.tickets}
        concerned = waiting & ({me, *unseen} if unseen else unseen)
        return [(bell, Rung(0)) for bell, id in self._bells.items() if id in concerned]

    def _change(self, me: str, mine: Part, put: Put) -> _Change:
        """What `put` changes, with `mine` as the part of `me`."""
        old = self.known.parts.get(me)
        if old is None or (old.section is None) != (mine.section is None):
            return _Change()
        same_wishes = old.tickets == mine.tickets or _wishes(old) == _wishes(mine)
        renews = same_wishes and old.tickets != mine.tickets and old.section == mine.section
        queue = None if renews else put.queue
        if not same_wishes or (queue, put.shared, put.removed) != (None, NOTHING, ()):
            return _Change(renews)
        before = old.section.claims() if old.section else {}
        after = mine.section.claims() if mine.section else {}
        more = {place: size - before.get(place, 0) for place, size in after.items()}
        more[DISK] = _on_disk(mine.section) - _on_disk(old.section)
        return _Change(renews, True, {place: size for place, size in more.items() if size > 0})

    def _oldest_page(self, me: str, put: Put, change: _Change) -> int:
        """The revision of the oldest page on which a write of `me` can be decided.

        It has this owner's last part, which another thread of the owner may have written. A claim whose
        room is still free, whatever others have claimed, can be decided before these.
        """
        oldest = self.pieces.get(me, _NO_PIECE).revision
        if change.releases:
            return oldest
        if put.shared != NOTHING:  # a release may have added an event since
            oldest = max(oldest, self.pieces[SHARED].revision)
        if put.holds_below and change.only_leases:
            claims, more, most = self.known.book.claims(), change.more, put.holds_below
            if all([claims.get(at, 0) + size <= most.get(at, -1) for at, size in more.items()]):
                return max(oldest, self._only_leases_since)
        return max(oldest, self._holds_since)

    @property
    def _head(self) -> int | None:
        return next(iter(self._queue), None)

    def _must_wait(self, connection: int, now: float) -> bool:
        """Whether the connection that has the turn writes before this one.

        It does if it has waited for long, and if this one has claimed bytes since it began to wait.
        Else others write meanwhile, so that nobody waits for a process that does not run.
        """
        head = self._head
        if head is None or head == connection:
            return False
        since = self._queue[head].since
        return now - since >= ALONE_SECONDS or self._claimed_at.get(connection, -1.0) >= since

    def _queue_up(self, connection: int, number: int, now: float) -> Answers:
        """The write `number` gets the turn after all that were late before. A head keeps its turn."""
        since = self._queue[connection].since if connection in self._queue else now
        self._queue[connection] = Late(number, since)
        if self._head != connection:
            return self._soon() if len(self._queue) == 2 else []
        if now - since < ALONE_SECONDS:  # else nobody writes meanwhile, and the turn ends as before
            self._turn_ends = now + TURN_SECONDS
        return [(connection, Turn(number))]

    def _out_of_queue(self, connection: int, now: float) -> Answers:
        had_turn = self._head == connection
        self._queue.pop(connection, None)
        if not had_turn or not self._queue:
            return []
        self._turn_ends = now + TURN_SECONDS
        head, late = next(iter(self._queue.items()))
        return [(head, Turn(late.number)), *self._soon()]

    def _soon(self) -> Answers:
        return [(next, Soon(late.number)) for next, late in [*self._queue.items()][1:2]]

    def tick(self, now: float) -> Answers:
        """Passes over a head of the queue that did not write in time."""
        if not self._queue or now < self._turn_ends:
            return []
        return self._out_of_queue(next(iter(self._queue)), now)

    # Writing

    def _write(self, me: str, put: Put, mine: Part, change: _Change) -> None:
        """Makes the page with the write. Raises LedgerRefused, ValueError, and one of UNREADABLE."""
        known = self.known
        removed = set(put.removed) - {me}
        parts = {**known.parts, me: mine}
        for id in (*removed, *([me] if mine.section is None and not mine.tickets else ())):
            parts.pop(id, None)
        facts = bytes(put.shared) if put.shared != NOTHING else b""
        sent = (put.shared, *put.events) if facts else put.events
        if put.events:
            facts = with_events(facts or self.pieces[SHARED].content, put.events)
        shared = decode_shared(facts) if facts else known.shared
        if any(map(is_deep, map(decode, sent))):
            raise ValueError(TOO_DEEP)
        state = known.state
        if put.queue is not None or removed:
            waiting = {ticket.key for part in parts.values() for ticket in part.tickets}
            order = put.queue if put.queue is not None else state.queue
            dead = tuple([id for id in state.dead if id not in removed])
            queue = tuple([key for key in dict.fromkeys(order) if key in waiting])
            state = replace(state, queue=queue, dead=dead)
        new = book_of(parts, shared, state)
        refuse_unlawful(known.book, new, me, lambda book: self._dead(put.declared))
        contents = {me: bytes(put.part)} if me in parts else {}
        if facts:
            contents[SHARED] = facts
        if state is not known.state:
            contents[STATE] = encode(state)
        before = [len(self.pieces.get(key, _NO_PIECE).content) for key in contents]
        grown = sum(map(len, contents.values())) - sum(before)
        if grown > 0 and self._bytes + grown > MOST_BOOK_BYTES:
            raise ValueError(
                f"the book would take {self._bytes + grown} bytes, and {MOST_BOOK_BYTES} are the most"
            )
        if len(parts) > MOST_OWNERS:
            raise ValueError(
                f"the book would have {len(parts)} owners, and {MOST_OWNERS} are the most"
            )
        self._publish(new, parts, shared, state, contents)
        if not change.releases:
            self._holds_since = self.known.revision
        if not change.only_leases:
            self._only_leases_since = self.known.revision

    def _dead(self, declared: Iterable[str]) -> frozenset[str]:
        state = self.known.state
        return frozenset(state.dead) | (frozenset(declared) - state.living.keys())

    def _set_state(self, state: State) -> None:
        known = self.known
        self._publish(known.book, known.parts, known.shared, state, {})
        self._only_leases_since = self.known.revision

    def _publish(
        self,
        book: Book,
        parts: dict[str, Part],
        shared: Shared,
        state: State,
        contents: Mapping[str, bytes],
    ) -> None:
        """Makes the next page. `contents` are the changed pieces that are encoded already."""
        revision, known = self.known.revision + 1, self.known
        if STATE not in contents and (state is not known.state or not self.pieces):
            contents = {**contents, STATE: encode(state)}
        if SHARED not in self.pieces:
            contents = {**contents, SHARED: encode(shared)}
        gone = [key for key in self.pieces if key not in parts and key not in (SHARED, STATE)]
        fresh = {key: Piece.of(revision, content) for key, content in contents.items()}
        for key in gone:
            self._bytes -= len(self.pieces.pop(key).content)
        for key, piece in fresh.items():
            self._bytes += len(piece.content) - len(self.pieces.get(key, _NO_PIECE).content)
            self.pieces[key] = piece
        self.known.put(revision, parts, shared, state, book)
