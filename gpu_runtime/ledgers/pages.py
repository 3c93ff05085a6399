"""The bytes of a page (a stored book): an index of its owners' parts, the shared facts, the parts.

    prefix    magic, checksum of the head, size of the head, room of the head
    head      where the shared facts are, the order of the tickets, one index entry per owner
    shared    devices, limits, samples, events, …
    parts     one per owner: its section and its tickets

The index has a checksum for each part, and the bytes that the part's owner claims. So a part that
cannot be read affects only its owner, and the owner's bytes still count. A process decodes only the
parts that changed since it last read the page, and encodes only its own part.

Each piece of the page has room to grow, which is filled with blanks. A write that changes one part
leaves all other parts at their places. So SQLite writes only the disk pages that differ.

Pure.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from operator import attrgetter
from typing import NamedTuple

import msgspec

from ..facts import (
    Book,
    Device,
    Drain,
    Event,
    Ghost,
    Owner,
    Quarantined,
    Sample,
    Section,
    Ticket,
    Value,
)
from .page_parts import (
    UNREADABLE,
    decode_part,
    decode_small_parts,
    encode_part,
    readable,
    same_objects,
)

_MAGIC = b"GPU2"
_PREFIX = struct.Struct("<4sIII")
_STEP = 256  # the room of a piece is a multiple of this many bytes
# Parts up to this size are decoded together. Of larger ones, only the changed leases are decoded.
_SMALL_BYTES = 2048


class Shared(Value):
    """The facts of a page that belong to no single owner."""

    devices: tuple[Device, ...] = ()
    limits: dict[str, int] = {}
    samples: dict[str, Sample] = {}
    events: tuple[Event, ...] = ()
    seq: int = 0
    counts: dict[str, int] = {}
    ghosts: tuple[Ghost, ...] = ()
    drained: dict[str, Drain] = {}
    opens: float = 0.0


_shared_facts_of = attrgetter(*Shared.__struct_fields__)


class Entry(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The index entry of one owner."""

    id: str
    rev: int  # the revision for which this part was written
    checksum: int
    size: int
    room: int
    entries: int  # leases and tickets
    held: dict[str, int]  # device -> bytes claimed
    promised: dict[str, int]  # the part of the claims that is still arriving
    settled_at: float  # when the owner's newest lease settled
    inode: int
    namespaces: str
    user: str
    notebook: str


class _Head(msgspec.Struct, array_like=True, frozen=True, gc=False):
    shared: tuple[int, int, int]  # checksum, size, room
    queue: tuple[int, ...]  # the tickets in their order, each as its owner's index in `parts`
    parts: tuple[msgspec.Raw, ...]


class OwnerPart(msgspec.Struct, frozen=True, gc=False):
    """One owner's part of the page, decoded and as bytes."""

    section: Section | None
    tickets: tuple[Ticket, ...]
    quarantined: Quarantined | None
    entry: bytes  # its index entry, encoded
    room: int
    content: bytes  # encoded, filled up to its room
    # The leases of its section, encoded. Empty for a small part that another process wrote.
    leases: tuple[bytes, ...] = ()


class Packed(NamedTuple):
    """A page as last read or written, so that unchanged parts are not decoded or encoded again."""

    shared: Shared | None
    shared_place: tuple[int, int, int]
    shared_content: bytes
    head_room: int
    parts: dict[str, OwnerPart]  # by owner id, in the page's order


EMPTY = Packed(None, (0, 0, 0), b"", 0, {})
_UNREAD = OwnerPart(None, (), None, b"", 0, b"")
Mend = Callable[[str, bytes], OwnerPart | None]

_encode_json = msgspec.json.Encoder().encode
_decode_head = msgspec.json.Decoder(_Head).decode
_decode_entry = msgspec.json.Decoder(Entry).decode
_decode_entries = msgspec.json.Decoder(tuple[Entry, ...]).decode
_decode_shared = msgspec.json.Decoder(Shared).decode


# -- writing ---------------------------------------------------------------------------------------


def pack(book: Book, old: Packed, rev: int) -> Packed:
    """The page of `book` for the revision `rev`. Parts that are unchanged since `old` are reused.

    Raises Unwritable if other processes could not read the page.
    """
    waiting = _tickets_by_owner(book)
    parts: dict[str, OwnerPart] = {}
    for id, section in book.sections.items():
        tickets, part = waiting.pop(id, ()) if waiting else (), old.parts.get(id)
        same = part is not None and part.section is section and part.tickets == tickets
        parts[id] = part if same else _part(id, section, tickets, part, rev)  # type: ignore[assignment]
    for id, unread in book.quarantined.items():
        if id not in parts:
            parts[id] = _kept(unread, old.parts.get(id))
            waiting.pop(id, None)
    for id, tickets in waiting.items():
        parts[id] = _part(id, None, tickets, old.parts.get(id), rev)
    shared, place, content = _packed_shared(book, old)
    return Packed(shared, place, content, old.head_room, parts)


def body(packed: Packed, tickets: tuple[Ticket, ...], rev: int) -> tuple[Packed, bytes]:
    """Encodes a page: returns `packed` with the size of the new head, and the page's bytes.

    `tickets` are the book's tickets, in their order. `rev` is the page's revision.
    """
    number = {id: n for n, id in enumerate(packed.parts)} if tickets else {}
    place = _encode_json(packed.shared_place)
    queue = _encode_json([number[ticket.owner] for ticket in tickets])
    entries = b",".join([part.entry for part in packed.parts.values()])
    head = b"[%b,%b,[%b]]" % (place, queue, entries)  # a _Head
    room = _room(len(head) + _PREFIX.size, packed.head_room)
    prefix = _PREFIX.pack(_MAGIC, _checksum(head, rev), len(head), room)
    whole = [(prefix + head).ljust(room), packed.shared_content]
    whole += [part.content for part in packed.parts.values()]
    return packed._replace(head_room=room), b"".join(whole)


def encoded(book: Book, rev: int) -> bytes:
    """The bytes of a new page of `book` at the revision `rev`. Raises Unwritable."""
    return body(pack(book, EMPTY, rev), book.tickets, rev)[1]


def _tickets_by_owner(book: Book) -> dict[str, tuple[Ticket, ...]]:
    found: dict[str, tuple[Ticket, ...]] = {}
    for ticket in book.tickets:
        found[ticket.owner] = (*found.get(ticket.owner, ()), ticket)
    return found


def _part(
    id: str,
    section: Section | None,
    tickets: tuple[Ticket, ...],
    old: OwnerPart | None,
    rev: int,
) -> OwnerPart:
    """The part of the owner `id`; the `old` part if nothing in it has changed."""
    if old is not None and old.quarantined is None:
        same_section = old.section is section or old.section == section
        if same_section and (old.tickets is tickets or old.tickets == tickets):
            return old
    known = (old.section, old.leases, old.tickets) if old else ()
    content, leases = encode_part(section, tickets, *known)
    owner = section.owner if section else None
    entry = Entry(
        id=id,
        rev=rev,
        checksum=zlib.crc32(content),
        size=len(content),
        room=_room(len(content), old.room if old else 0),
        entries=len(tickets) + (len(section.leases) if section else 0),
        held=section.claims() if section else {},
        promised=section.promises() if section else {},
        settled_at=section.settled_at if section else 0.0,
        inode=owner.inode if owner else 0,
        namespaces=owner.namespaces if owner else "",
        user=owner.user if owner else "",
        notebook=owner.notebook if owner else "",
    )
    return OwnerPart(
        section,
        tickets,
        None,
        readable(entry, _decode_entry),
        entry.room,
        content.ljust(entry.room),
        leases,
    )


def _kept(unread: Quarantined, old: OwnerPart | None) -> OwnerPart:
    """An owner's unreadable part. Its bytes stay as they are."""
    if old is not None and old.quarantined is unread:
        return old
    room = _decode_entry(unread.entry).room
    return OwnerPart(None, (), unread, unread.entry, room, unread.content.ljust(room))


def _packed_shared(book: Book, old: Packed) -> tuple[Shared, tuple[int, int, int], bytes]:
    known, facts = old.shared, _shared_facts_of(book)
    if known is not None and same_objects(facts, _shared_facts_of(known)):
        return known, old.shared_place, old.shared_content
    shared = Shared(*facts)
    content = readable(shared, _decode_shared)
    room = _room(len(content), old.shared_place[2])
    return shared, (zlib.crc32(content), len(content), room), content.ljust(room)


def _room(size: int, before: int) -> int:
    """The room (bytes in the page) for `size` bytes of content.

    The room `before` is kept if it is large enough for the content, and not far too large. Then no
    other part of the page moves.
    """
    if size <= before <= 4 * size + 2 * _STEP:
        return before
    return (size + size // 16 + 2 * _STEP) // _STEP * _STEP  # for one more lease, or two


def _checksum(head: bytes, rev: int) -> int:
    # The checksum covers the revision too, because a wrong digit in the revision would look like
    # another version of the page.
    return zlib.crc32(head, rev & 0xFFFFFFFF)


# -- reading ---------------------------------------------------------------------------------------


def unpack(
    page: bytes, rev: int, old: Packed = EMPTY, mend: Mend | None = None
) -> tuple[Book, Packed]:
    """Decodes the bytes `page` of the revision `rev`. Returns the book and the packed page.

    Parts that are in `old` are not decoded again. If the bytes of a part are wrong, `mend(id,
    entry)` may find the part of the owner `id` with this index entry elsewhere. Raises ValueError,
    msgspec.MsgspecError if the page itself cannot be read.
    """
    head, offset = _head_of(page, rev)
    checksum, size, room = head.shared
    if old.shared is not None and old.shared_place == head.shared:
        shared, shared_content = old.shared, old.shared_content
    else:
        shared_content = page[offset : offset + room]
        if zlib.crc32(shared_content[:size]) != checksum:
            raise ValueError("the checksum of its shared facts is wrong")
        shared = _decode_shared(shared_content[:size])
    offset += room
    known = {part.entry: id for id, part in old.parts.items() if part.quarantined is None}
    raws = [bytes(raw) for raw in head.parts]
    fresh = iter(_decode_entries(b"[%b]" % b",".join(raw for raw in raws if raw not in known)))
    parts: dict[str, OwnerPart] = {}
    changed: list[_Changed] = []
    for raw in raws:
        owner = known.get(raw)
        if owner is not None:
            part = parts[owner] = old.parts[owner]
            offset += part.room
        else:
            entry = next(fresh)
            parts[entry.id] = _UNREAD  # keeps the place of this owner in the order of the page
            changed.append(_Changed(entry, raw, page[offset : offset + entry.room]))
            offset += entry.room
    parts.update(_read_parts(changed, old.parts, mend))
    book = _book(shared, head.queue, parts)
    return book, Packed(shared, head.shared, shared_content, _PREFIX.unpack_from(page)[3], parts)


def _head_of(page: bytes, rev: int) -> tuple[_Head, int]:
    """The head of a page, and the offset at which the shared facts begin."""
    if len(page) < _PREFIX.size:
        raise ValueError("it is too short")
    magic, checksum, size, room = _PREFIX.unpack_from(page)
    head = page[_PREFIX.size : _PREFIX.size + size]
    if magic != _MAGIC or len(head) != size:
        raise ValueError("it does not begin as a page does")
    if _checksum(head, rev) != checksum:
        raise ValueError("its checksum is wrong")
    return _decode_head(head), room


class _Changed(msgspec.Struct, frozen=True, gc=False):
    """A part of a page that this process has not decoded yet."""

    entry: Entry
    raw: bytes  # the entry, encoded
    content: bytes  # the part, filled up to its room

    @property
    def whole(self) -> bytes | None:
        """The part without the blanks behind it; None if its checksum is wrong."""
        whole = self.content[: self.entry.size]
        is_right = len(whole) == self.entry.size and zlib.crc32(whole) == self.entry.checksum
        return whole if is_right else None


def _read_parts(
    changed: Collection[_Changed], old: Mapping[str, OwnerPart], mend: Mend | None
) -> Iterator[tuple[str, OwnerPart]]:
    """Yields each of the `changed` parts, decoded, with the id of its owner.

    All small parts are decoded by one call, because a page of many processes has many small parts.
    (With 64 small parts, one call takes 0.2 ms and single calls take 0.4 ms.)
    """
    small: list[tuple[_Changed, bytes]] = []
    rest: list[_Changed] = []
    for part in changed:
        whole = part.whole if part.entry.size <= _SMALL_BYTES else None
        if whole is None:
            rest.append(part)
        else:
            small.append((part, whole))
    decoded = decode_small_parts([whole for _, whole in small])
    if decoded is None:  # at least one part cannot be read, and `_read_part` finds out which
        rest, decoded = list(changed), []
    for (part, _), (section, tickets) in zip(small, decoded, strict=False):
        yield part.entry.id, _checked(part, section, tickets, ())
    for part in rest:
        yield part.entry.id, _read_part(part, old.get(part.entry.id), mend)


def _read_part(part: _Changed, last: OwnerPart | None, mend: Mend | None) -> OwnerPart:
    """The decoded `part`. `last` is the part that the same owner had before.

    If the checksum of the part is wrong, the result is the part that `mend` finds elsewhere. If
    there is none, or if the part cannot be decoded, the part is quarantined. A quarantined part
    stays in the page unchanged, and the device memory in its index entry stays claimed.
    """
    whole = part.whole
    if whole is None:
        mended = mend(part.entry.id, part.raw) if mend else None
        return mended or _quarantined(part, "its checksum is wrong")
    known = {}
    if last and last.section and last.leases:
        known = dict(zip(last.leases, last.section.leases, strict=True))
    try:
        section, tickets, leases = decode_part(whole, known)
    except UNREADABLE as error:
        return _quarantined(part, str(error))
    return _checked(part, section, tickets, leases)


def _checked(
    part: _Changed,
    section: Section | None,
    tickets: tuple[Ticket, ...],
    leases: tuple[bytes, ...],
) -> OwnerPart:
    """The `part` with its decoded content; quarantined if the content belongs to another owner."""
    id = part.entry.id
    is_own = (section or tickets) and (section is None or section.owner.id == id)
    if not is_own or (tickets and any([ticket.owner != id for ticket in tickets])):
        return _quarantined(part, "it is not its owner's")
    return OwnerPart(section, tickets, None, part.raw, part.entry.room, part.content, leases)


def _quarantined(part: _Changed, why: str) -> OwnerPart:
    entry = part.entry
    pid, started, serial = (int(number) for number in entry.id.split("."))
    owner = Owner(
        host="",
        boot="",
        pid=pid,
        started=started,
        serial=serial,
        user=entry.user,
        notebook=entry.notebook,
        inode=entry.inode,
        namespaces=entry.namespaces,
    )
    unread = Quarantined(
        owner=owner,
        held=entry.held,
        promised=entry.promised,
        settled_at=entry.settled_at,
        entries=entry.entries,
        why=why,
        entry=part.raw,
        content=part.content,
    )
    return OwnerPart(None, (), unread, part.raw, entry.room, part.content)


def _book(shared: Shared, queue: tuple[int, ...], parts: dict[str, OwnerPart]) -> Book:
    facts = zip(Shared.__struct_fields__, _shared_facts_of(shared), strict=True)
    return Book(
        **dict(facts),
        sections={id: part.section for id, part in parts.items() if part.section is not None},
        tickets=_tickets_in_order(queue, tuple(parts.values())),
        quarantined={id: part.quarantined for id, part in parts.items() if part.quarantined},
    )


def _tickets_in_order(queue: tuple[int, ...], parts: tuple[OwnerPart, ...]) -> tuple[Ticket, ...]:
    """The tickets of all `parts`, in order. `queue` has, for each ticket, the index of its part."""
    if not any([part.tickets for part in parts]):
        return ()
    waiting = [iter(part.tickets) for part in parts]
    tickets: list[Ticket] = []
    for number in queue:
        ticket = next(waiting[number], None) if 0 <= number < len(waiting) else None
        if ticket is not None:  # None: the ticket is in a part that cannot be read
            tickets.append(ticket)
    for rest in waiting:
        tickets += rest
    return tuple(tickets)
