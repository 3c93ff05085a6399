"""The book as pieces: one part for each owner, the facts of all owners, and the order of the tickets.

A keeper publishes the pieces in shared memory, and a Redis holds them as one value. A process decodes
only the pieces that changed since it last read the book, and encodes only its own part.

Processes of several versions share a book. A fact is a map, in which a reader ignores the fields of a
later version, and takes the defaults of the fields that an earlier version has not written. A later
version only adds fields: it changes no meaning, adds no member to an enumeration, and its defaults mean
what was before. Nobody but its owner writes a part. Whoever writes the facts of all owners keeps the bytes
of each fact that is not changed, with fields of a later version.

Pure.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from mmap import mmap
from operator import attrgetter, is_
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from ..errors import LedgerRefused
from ..facts import MOST_EVENTS, Book, Device, Drain, Event, Ghost, Sample, Section, Ticket, Value
from ..facts import encode as encode_as_json

# The limit of one owner's part, which must also fit into the owner's roster.
MOST_PART_BYTES = 960 << 10
# Larger facts of all owners are written without what this version does not know: somebody has filled them.
MOST_KEPT_FACTS = 256 << 10
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
SHARED, STATE = "shared", "state"  # keys of pieces; every other key is an owner's id
_UNENCODABLE = (TypeError, ValueError, OverflowError)


class Shared(Value):
    """The facts of a book that belong to no single owner."""

    devices: tuple[Device, ...] = ()
    limits: dict[str, int] = {}
    samples: dict[str, Sample] = {}
    events: tuple[Event, ...] = ()
    seq: int = 0
    counts: dict[str, int] = {}
    ghosts: tuple[Ghost, ...] = ()
    drained: dict[str, Drain] = {}
    opens: float = 0.0


class Part(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One owner's part of the book."""

    section: Section | None = None
    tickets: tuple[Ticket, ...] = ()
    put: int = 0  # the number of the write


class State(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What a keeper knows of the owners, and the order of the tickets. A Redis knows only the order."""

    living: dict[str, str]  # owner id -> user
    dead: tuple[str, ...]
    queue: tuple[str, ...]  # keys of tickets


encode, decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.decode
decode_part = msgspec.msgpack.Decoder(Part).decode
decode_shared = msgspec.msgpack.Decoder(Shared).decode
decode_state = msgspec.msgpack.Decoder(State).decode


# -- the bytes of a page ---------------------------------------------------------------------------


class Piece(NamedTuple):
    """One part of a page: an owner's part, or the facts of all owners."""

    revision: int  # of the page in which the piece was last changed
    content: bytes
    checksum: int

    @classmethod
    def of(cls, revision: int, content: bytes) -> Piece:
        return cls(revision, content, zlib.crc32(content))


class Head(NamedTuple):
    """What is stored before the bytes of a page."""

    revision: int
    index_bytes: int
    checksum: int  # of the index and the revision: with a wrong one, a page would hide other writes


class Page(NamedTuple):
    """What a reader copied of a page."""

    revision: int
    changed_at: dict[str, int]  # all keys, and the revision in which each piece was last changed
    contents: dict[str, bytes]  # of the pieces that the reader did not have

    def pieces(self) -> dict[str, Piece]:
        """The pieces that the reader did not have."""
        changed_at = self.changed_at
        return {key: Piece.of(changed_at[key], content) for key, content in self.contents.items()}


# Columns: keys, revisions, bytes and checksums of the pieces.
_decode_index = msgspec.msgpack.Decoder(tuple[list[str], list[int], list[int], list[int]]).decode
_HEAD = struct.Struct("<4sII")  # magic, bytes of the index, its checksum
_MAGIC = b"GPU4"


def joined(revision: int, pieces: Mapping[str, Piece]) -> tuple[Head, bytes]:
    """A page of `pieces`: its head, and its index with the pieces."""
    revisions, contents, checksums = zip(*pieces.values(), strict=True) if pieces else ((),) * 3
    index = encode((tuple(pieces), revisions, tuple(map(len, contents)), checksums))
    head = Head(revision, len(index), _checksum(index, revision))
    return head, b"".join([index, *contents])


def page_at(memory: bytes | mmap, start: int, head: Head, known: int = -1) -> Page:
    """The page that begins at `start` of `memory`, with the pieces that changed after the revision `known`.

    Raises ValueError for a wrong checksum, and one of UNREADABLE.
    """
    end = start + head.index_bytes
    index = memory[start:end]
    if _checksum(index, head.revision) != head.checksum:
        raise ValueError("its checksum is wrong")
    keys, revisions, sizes, checksums = _decode_index(index)
    ends = [*accumulate(sizes, initial=end)]
    new = [place for place, revision in enumerate(revisions) if revision > known]
    contents = [memory[ends[place] : ends[place + 1]] for place in new]
    if [*map(zlib.crc32, contents)] != [checksums[place] for place in new]:
        raise ValueError("the checksum of a piece is wrong")
    changed = zip([keys[place] for place in new], contents, strict=True)
    return Page(head.revision, dict(zip(keys, revisions, strict=True)), dict(changed))


def sealed(revision: int, pieces: Mapping[str, Piece]) -> bytes:
    """A page of `pieces` as one value, with its checksums."""
    head, whole = joined(revision, pieces)
    return _HEAD.pack(_MAGIC, head.index_bytes, head.checksum) + whole


def opened(value: bytes, revision: int, known: int = -1) -> Page:
    """The page that `sealed` made for this `revision`; see `page_at`."""
    if len(value) < _HEAD.size:
        raise ValueError("it is too short")
    magic, index_bytes, checksum = _HEAD.unpack_from(value)
    if magic != _MAGIC:
        raise ValueError("it does not begin as a page does")
    return page_at(value, _HEAD.size, Head(revision, index_bytes, checksum), known)


def _checksum(index: bytes, revision: int) -> int:
    return zlib.crc32(index, revision & 0xFFFFFFFF)


# -- the book --------------------------------------------------------------------------------------


class Pieces:
    """A book as the pieces of a page, decoded. Only pieces that changed are decoded again.

    A copy (`copy.copy`) can follow a page while the object stays as it is.
    """

    def __init__(self) -> None:
        """An empty book, older than every page."""
        self.revision = 0
        self.parts: dict[str, Part] = {}
        self.shared = Shared()
        self.facts = encode(self.shared)  # as they were read
        self.state = State({}, (), ())
        self.book = Book()

    def follow(self, page: Page) -> None:
        """Takes over a newer `page`, which has the pieces that changed since. Raises one of UNREADABLE."""
        if page.revision == self.revision:
            return
        parts = dict(self.parts)
        shared, state = self.shared, self.state
        for key, content in page.contents.items():
            if key == SHARED:
                shared, self.facts = decode_shared(content), content
            elif key == STATE:
                state = decode_state(content)
            else:
                parts[key] = decode_part(content)
        if len(parts) + 2 > len(page.changed_at):  # an owner has left; `+ 2`: SHARED and STATE
            parts = {key: parts[key] for key in page.changed_at if key in parts}
        self.put(page.revision, parts, shared, state)

    def put(
        self,
        revision: int,
        parts: dict[str, Part],
        shared: Shared,
        state: State,
        book: Book | None = None,
    ) -> None:
        """Becomes the book of these pieces, which is made here if it is not given."""
        self.parts, self.shared, self.state = parts, shared, state
        self.book = book_of(parts, shared, state) if book is None else book
        self.revision = revision


def book_of(parts: Mapping[str, Part], shared: Shared, state: State) -> Book:
    """The book that these pieces make."""
    sections = {id: part.section for id, part in parts.items() if part.section is not None}
    waiting = {ticket.key: ticket for part in parts.values() for ticket in part.tickets}
    tickets = tuple([waiting[key] for key in state.queue if key in waiting])
    facts = {name: getattr(shared, name) for name in Shared.__struct_fields__}
    return Book(sections=sections, tickets=tickets, **facts)


_facts_of = attrgetter(*Shared.__struct_fields__)


def changed(old: Book, new: Book, me: str, before: bytes = b"") -> dict[str, Any]:
    """The fields of a keeper's Put for the change from `old` to `new` by the owner `me`, without its part.

    `before` has the facts of all owners in `old`, as they were read. Empty: they were not. If nothing
    but events was added to them, only these are in the result, since other owners may add some too.
    """
    fields: dict[str, Any] = {}
    if new.tickets is not old.tickets:
        fields["queue"] = tuple([ticket.key for ticket in new.tickets])
    facts = _facts_of(new), _facts_of(old)
    if _same_objects(*facts):
        pass
    elif before and (events := _appended(old, new)):
        fields["events"] = tuple([msgspec.Raw(encode(event)) for event in events])
    else:
        is_kept = 0 < len(before) < MOST_KEPT_FACTS
        shared = _facts_after(before, *facts) if is_kept else encode(Shared(*facts[0]))
        fields["shared"] = msgspec.Raw(shared)
    removed = old.owner_ids() - new.owner_ids() - {me}
    if removed:
        fields["removed"] = tuple(sorted(removed))
    return fields


def _appended(old: Book, new: Book) -> tuple[Event, ...]:
    """The events that `new` has after those of `old`, if no other fact of all owners is changed; else ()."""
    added = tuple([event for event in new.events if event.seq > old.seq])
    numbers = [event.seq for event in added]
    if numbers != [*range(old.seq + 1, new.seq + 1)]:
        return ()
    with_added = (*old.events, *added)[-MOST_EVENTS:]
    rest = replace(old, events=new.events, seq=new.seq)
    same_events = _same_objects(with_added, new.events)
    same_rest = _same_objects(_facts_of(rest), _facts_of(new))
    return added if same_events and same_rest else ()


def with_events(facts: bytes, events: Iterable[msgspec.Raw]) -> bytes:
    """The encoded `facts` of all owners with more `events`, which get the next numbers.

    Fields of a later version stay in each event. Raises one of UNREADABLE.
    """
    kept = _decode_map(facts)
    seq = decode(kept.get("seq", _ZERO), type=int)
    known = _decode_list(kept.get("events", _NOTHING))
    for event in events:
        seq += 1
        known.append(msgspec.Raw(encode({**_decode_map(event), "seq": seq})))
    return encode({**kept, "events": known[-MOST_EVENTS:], "seq": seq})


def _facts_after(before: bytes, facts: Sequence[Any], old: Sequence[Any]) -> bytes:
    """The `facts` of all owners, encoded. What is the same object in `old` has the bytes that it has in `before`."""
    kept = _decode_map(before)
    for name, value, was in zip(Shared.__struct_fields__, facts, old, strict=True):
        if value is was:
            continue
        known = kept.get(name)  # None: it had no member
        if known and isinstance(value, tuple):
            same = dict(zip(map(id, was), _decode_list(known), strict=True))
            value = [same.get(id(item), item) for item in value]
        elif known and isinstance(value, dict):
            bytes_of = _decode_map(known)
            value = {
                key: bytes_of[key] if item is was.get(key) else item for key, item in value.items()
            }
        kept[name] = value
    return encode(kept)


_decode_map = msgspec.msgpack.Decoder(dict[str, msgspec.Raw]).decode
_decode_list = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_ZERO, _NOTHING = encode(0), encode([])


def _same_objects(sequence: Sequence[object], other: Sequence[object]) -> bool:
    """Whether both sequences have the same objects. Equality is not enough: `True` equals 1."""
    return len(sequence) == len(other) and all(map(is_, sequence, other))


# -- writing one's own part ------------------------------------------------------------------------


class Unwritable(Exception):
    """Raised for a write that other processes could not read. The argument is the reason."""


def encoded_change(
    old: Book, new: Book, me: str, put: int = 0, before: bytes = b""
) -> tuple[bytes, dict[str, Any]]:
    """The part of the owner `me` in the book `new`, and the result of `changed`, which has `before`.

    `put` is the number of the write. Raises Unwritable, whose text names the field, if a value
    cannot be encoded or the part is too large.
    """
    section = new.sections.get(me)
    tickets = tuple([ticket for ticket in new.tickets if ticket.owner == me])
    try:
        part, fields = encode(Part(section, tickets, put)), changed(old, new, me, before)
    except _UNENCODABLE as error:
        culprit = _culprit(section, "") if section else "a request"
        raise Unwritable(f"{culprit} cannot be written ({error})") from error
    if len(part) > MOST_PART_BYTES:
        raise Unwritable(f"its leases and requests take {len(part)} bytes, {_largest(section)}")
    return part, fields


def require_readable(part: bytes, fields: Mapping[str, Any]) -> Part:
    """The decoded `part` of a change. Raises Unwritable if other processes could not read the change."""
    try:
        if "shared" in fields:
            decode_shared(fields["shared"])
        return decode_part(part)
    except UNREADABLE as error:
        raise Unwritable(f"others could not read it: {error}") from error


def refused(url: str, writer: str, why: str) -> LedgerRefused:
    """The error for a write of the owner `writer` to the ledger `url` that other processes could not read."""
    return LedgerRefused(
        f"the ledger {url} refused a write by {writer}: {why}.\n  The book is unchanged.",
        path=url,
        why=why,
        writer=writer,
    )


def _culprit(value: object, path: str) -> str:
    """The path of the first field in `value` that cannot be encoded."""
    for name, inner in _inside(value):
        try:
            encode(inner)
        except _UNENCODABLE:  # the culprit is in here
            return _culprit(inner, f"{path}{name}")
    return f"the field {path.lstrip('.') or '?'}"


def _inside(value: object) -> Sequence[tuple[str, object]]:
    """The members of `value`, each with its name."""
    if isinstance(value, msgspec.Struct):
        return [(f".{name}", getattr(value, name)) for name in value.__struct_fields__]
    if isinstance(value, Mapping):
        return [(f"[{name!a}]", inner) for name, inner in value.items()]
    if isinstance(value, (tuple, list)):
        return [(f"[{place}]", inner) for place, inner in enumerate(value)]
    return ()


def _largest(section: Section | None) -> str:
    """The end of a sentence about the size of an owner's part: the largest lease in it."""
    sizes = [(len(encode_as_json(one)), one.name[:80]) for one in section.leases] if section else []
    if not sizes:
        return f"and {MOST_PART_BYTES} are the most"
    size, name = max(sizes)
    return f"{size} of them the lease {name!a}, and {MOST_PART_BYTES} are the most"
