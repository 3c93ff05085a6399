"""How a new book is made: at first from nothing, later from what its living owners last wrote of themselves.

A damaged book is set aside under a name that says so, never emptied; its heir has a name that no book had before.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import zlib
from pathlib import Path

import msgspec
from msgspec.structs import replace

from ...errors import LedgerNewer
from ...facts import SCHEMA, Book, Device, Section, Ticket, decode_book, encode
from ..access import access_to
from ..liveness import Life, Roster, life, read_roster
from . import files
from .revision_hint import Newest

log = logging.getLogger("gpu_runtime")


class Damaged(Exception):
    """A book that cannot be used, and why. An empty name: there is none yet."""

    def __init__(self, name: str, inode: int, why: str) -> None:
        super().__init__(name, inode, why)
        self.name, self.inode, self.why = name, inode, why


def part_of(book: Book, owner_id: str) -> Book:
    """What an owner writes into its roster: its section and tickets, and what all must agree on."""
    section = book.sections.get(owner_id)
    return Book(
        devices=book.devices,
        limits=book.limits,
        drained=book.drained,
        sections={owner_id: section} if section else {},
        tickets=tuple(ticket for ticket in book.tickets if ticket.owner == owner_id),
    )


def union(parts: list[Book]) -> Book:
    """One book from its owners' parts, the newest last: which cards are drained is its word."""
    devices: dict[str, Device] = {}
    limits: dict[str, int] = {}
    sections: dict[str, Section] = {}
    tickets: list[Ticket] = []
    for part in parts:
        devices = {device.id: device for device in part.devices} | devices
        limits = part.limits | limits
        sections |= part.sections
        tickets += part.tickets
    drained = next((part.drained for part in reversed(parts) if part.sections), {})
    return Book(
        devices=tuple(devices.values()),
        limits=limits,
        sections=sections,
        drained=drained,
        tickets=tuple(sorted(tickets, key=lambda ticket: ticket.arrived)),
    )


def with_living(book: Book, parts: dict[str, Book]) -> Book:
    """The book with what these owners say of themselves in place of what it said of them."""
    others = replace(
        book,
        sections={id: section for id, section in book.sections.items() if id not in parts},
        tickets=tuple(ticket for ticket in book.tickets if ticket.owner not in parts),
    )
    whole = union([others, *parts.values()])
    return replace(
        others,
        devices=whole.devices,
        limits=whole.limits,
        sections=whole.sections,
        tickets=whole.tickets,
        drained=book.drained or whole.drained,
    )


def living_rosters(directory: Path) -> dict[str, Roster]:
    """What each living owner last wrote of itself, by its id."""
    rosters = (
        (path.name, read_roster(path))
        for path in files.owner_files(directory)
        if life(path) is Life.ALIVE
    )
    return {id: roster for id, roster in rosters if roster}


def newest_roster_rev(directory: Path) -> int:
    try:
        return max((roster.rev for roster in living_rosters(directory).values()), default=0)
    except FileNotFoundError:  # the whole directory is gone
        return 0


def sealed(body: bytes, rev: int) -> bytes:
    """A page as it stands in the file: one wrong digit in it would still be JSON, and grant memory that is not
    there."""
    return _sum(body, rev) + body


def unsealed(stored: bytes, rev: int) -> memoryview:
    """The page's JSON. Raises ValueError where it is not what was written at that revision."""
    body = memoryview(stored)[4:]
    if _sum(body, rev) != stored[:4]:
        raise ValueError("its check sum is wrong")
    return body


def _sum(body: bytes | memoryview, rev: int) -> bytes:
    return zlib.crc32(body, rev & 0xFFFFFFFF).to_bytes(4, "big")


def mend(directory: Path, boot: str, damage: Damaged, patience_seconds: float) -> None:
    """Puts a new book in the damaged one's place, unless another process has done so.

    Raises LedgerUnavailable, OSError, sqlite3.Error; then CURRENT names a book that is not there, which is damage too.
    """
    with files.rebuild_lock(directory) as lock:
        files.take(lock, patience_seconds)
        if (
            files.current(directory) != damage.name
            or files.inode_of(directory, damage.name) != damage.inode
        ):
            return
        name = files.next_book(directory, damage.name)
        # In this order. A writer writes its roster, commits, reads CURRENT. Whose look at CURRENT came before this
        # line has its roster written, and we read it below; whose comes after knows that its grant is void.
        files.point_current_at(directory, name)
        rosters = living_rosters(directory)
        if any(roster.schema > SCHEMA for roster in rosters.values()):
            raise LedgerNewer(
                str(directory / name), max(roster.schema for roster in rosters.values()), SCHEMA
            )
        # Of each only its own part: in a shared ledger nobody speaks for another.
        by_age = sorted(rosters.items(), key=lambda one: one[1].rev)
        book = union([part_of(_decoded(roster), id) for id, roster in by_age])
        rev = max((roster.rev for roster in rosters.values()), default=0) + 1
        _make(directory, name, boot, book, rev)
        Newest(directory).tell(
            name, rev
        )  # so that of another book of that name nothing is remembered
        kept = [
            path
            for old in files.other_books(directory, name)
            if (path := files.set_aside(directory, old))
        ]
    if damage.name or kept:
        log.warning(
            "the ledger %s was damaged (%s). Set aside: %s. Rebuilt as %s from %d living owners, %d leases.",
            directory / damage.name,
            damage.why,
            ", ".join(map(str, kept)) or "nothing was left to keep",
            name,
            len(book.sections),
            sum(1 for _ in book.leases()),
        )


def _decoded(roster: Roster) -> Book:
    try:
        return decode_book(roster.payload)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        log.warning(
            "a living owner's roster of %d bytes cannot be read; it will register again",
            len(roster.payload),
        )
        return Book()


def _make(directory: Path, name: str, boot: str, book: Book, rev: int) -> None:
    """Makes a book under a draft's name and gives it its own when it is whole."""
    draft = directory / ".book-draft"  # one at a time: we hold the rebuild lock
    draft.unlink(missing_ok=True)
    os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    db = sqlite3.connect(draft, isolation_level=None)
    try:
        db.execute("PRAGMA journal_mode=OFF")
        db.execute("PRAGMA synchronous=OFF")
        # One kernel, one page: the row is named by the boot, since two containers on it have different host names.
        db.execute(
            "CREATE TABLE book (host TEXT PRIMARY KEY, rev INTEGER NOT NULL, schema INTEGER NOT NULL, "
            "body BLOB NOT NULL)"
        )
        db.execute(
            "INSERT INTO book VALUES (?, ?, ?, ?)", (boot, rev, SCHEMA, sealed(encode(book), rev))
        )
    finally:
        db.close()
    access_to(directory).open_file(draft)
    os.rename(draft, directory / name)
