"""One owner's part of a page (a stored book) as JSON: the owner's section and tickets.

Only leases that changed are encoded and decoded, because a section may have hundreds of leases and
a write usually changes one lease. Encoded bytes are decoded once before they are used. So no
process writes bytes that other processes could not read.

Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, is_
from typing import Any

import msgspec

from ..errors import LedgerRefused
from ..facts import Lease, Section, Ticket, Value, encode

MOST_PART_BYTES = (
    960 << 10
)  # the limit of one owner's part, which must also fit into the owner's roster
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError)
_UNENCODABLE = (TypeError, ValueError, OverflowError)


class Unwritable(Exception):
    """Other processes could not read the value that should be written. `why` names the field."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


_FIELDS = [field for field in msgspec.structs.fields(Section) if field.name != "leases"]
_facts_of = attrgetter(
    *[field.name for field in _FIELDS]
)  # all fields of a section except its leases
# A section whose leases stay as bytes.
_Outline: Any = msgspec.defstruct(
    "_Outline",
    [
        (field.name, field.type)
        if field.required
        else (
            field.name,
            field.type,
            msgspec.field(default_factory=field.default_factory)
            if field.default is msgspec.NODEFAULT
            else field.default,
        )
        for field in _FIELDS
    ]
    + [("leases", tuple[msgspec.Raw, ...], ())],
    frozen=True,
    omit_defaults=True,
)


class _Mine(Value):
    section: _Outline | None = None
    tickets: tuple[Ticket, ...] = ()


class _Small(Value):
    section: Section | None = None
    tickets: tuple[Ticket, ...] = ()


_encode_json = msgspec.json.Encoder().encode
_decode_mine = msgspec.json.Decoder(_Mine).decode
_decode_small = msgspec.json.Decoder(tuple[_Small, ...]).decode
_decode_lease = msgspec.json.Decoder(Lease).decode


def encode_part(
    section: Section | None,
    tickets: tuple[Ticket, ...],
    old: Section | None = None,
    old_leases: tuple[bytes, ...] = (),
    old_tickets: tuple[Ticket, ...] = (),
) -> tuple[bytes, tuple[bytes, ...]]:
    """The part of an owner as bytes, and its leases as bytes.

    `old` is the previous section. `old_leases` are the leases of `old` as bytes; empty if the bytes
    are not known. `old_tickets` are the previous tickets. Raises Unwritable.
    """
    known: dict[int, bytes] = {}
    if old is not None and old_leases:
        known = {id(lease): content for lease, content in zip(old.leases, old_leases, strict=True)}
    outline, leases = None, []
    # Whether everything but the leases is unchanged. Then an earlier call has already checked that
    # other processes can read it.
    is_read = same_objects(tickets, old_tickets)
    if section is not None:
        for number, lease in enumerate(section.leases):
            content = known.get(id(lease))
            if content is None:
                content = readable(lease, _decode_lease, f"section.leases[{number}]")
            leases.append(content)
        facts = _facts_of(section)
        is_read = is_read and old is not None and same_objects(facts, _facts_of(old))
        outline = _Outline(*facts, tuple([msgspec.Raw(content) for content in leases]))
    mine = _Mine(outline, tickets)
    content = _encode_json(mine) if is_read else readable(mine, _decode_mine)
    if len(content) > MOST_PART_BYTES:
        raise Unwritable(f"its leases and requests take {len(content)} bytes, {_largest(section)}")
    return content, tuple(leases)


def decode_part(
    content: bytes,
    known: Mapping[bytes, Lease],
) -> tuple[Section | None, tuple[Ticket, ...], tuple[bytes, ...]]:
    """Returns the section, the tickets, and the leases as bytes.

    `known` has leases that were decoded earlier, by their bytes. Raises one of UNREADABLE.
    """
    mine = _decode_mine(content)
    if mine.section is None:
        return None, mine.tickets, ()
    raw = tuple([bytes(lease) for lease in mine.section.leases])
    leases = tuple([known.get(lease) or _decode_lease(lease) for lease in raw])
    owner, *facts = _facts_of(mine.section)
    return Section(owner, leases, *facts), mine.tickets, raw


def decode_small_parts(
    contents: Sequence[bytes],
) -> list[tuple[Section | None, tuple[Ticket, ...]]] | None:
    """The section and the tickets of each part in `contents`; None if any part cannot be read."""
    try:
        parts = _decode_small(b"[%b]" % b",".join(contents))
    except UNREADABLE:  # the caller then decodes each part alone
        return None
    return [(part.section, part.tickets) for part in parts] if len(parts) == len(contents) else None


def same_objects(one: Sequence[object], other: Sequence[object]) -> bool:
    """Whether both sequences have the same objects. Equality is not enough: `True` equals 1."""
    return len(one) == len(other) and all(map(is_, one, other))


def readable(
    value: msgspec.Struct,
    decode: Callable[[bytes], object],
    path: str = "",
) -> bytes:
    """Encodes `value` as JSON that `decode` can read. `path` is the place of `value` in the page.

    Raises Unwritable, which names the field.
    """
    try:
        content = _encode_json(value)
    except _UNENCODABLE as error:
        raise Unwritable(f"{_culprit(value, path)} cannot be written ({error})") from error
    try:
        decode(content)
    except UNREADABLE as error:
        why = str(error).replace("`$", f"`{path}" if path else "`$")
        raise Unwritable(f"others could not read it: {why}") from error
    return content


def _culprit(value: object, path: str) -> str:
    """The path of the first field in `value` that cannot be encoded."""
    for name, inner in _inside(value):
        try:
            _encode_json(inner)
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
    sizes = [(len(encode(lease)), lease.name[:80]) for lease in section.leases] if section else []
    if not sizes:
        return f"and {MOST_PART_BYTES} are the most"
    size, name = max(sizes)
    return f"{size} of them the lease {name!a}, and {MOST_PART_BYTES} are the most"


def unwritable(error: Unwritable, path: str, writer: str) -> LedgerRefused:
    """The error for a write whose result other processes could not read."""
    return LedgerRefused(
        f"the ledger {path} refused a write by {writer}: {error.why}.\n  The book is unchanged.",
        path=path,
        why=error.why,
        writer=writer,
    )
