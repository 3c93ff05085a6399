"""Makes a new book. The first book is empty; a later book is made from the living owners' rosters.

A roster is an owner's copy of its part of the book. A damaged book is set aside under a name with
`damaged`, and never emptied. The new book has a name that no book had before.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from ...errors import LedgerNewer
from ...facts import SCHEMA, Book
from ..access import access_to, owners_in
from ..book_parts import part_of, union
from ..book_store import DamagedBook, boottime, closed_seconds
from ..decoding import UNREADABLE, decode_roster
from ..liveness import Life, Roster, life, life_of, read_roster
from ..pages import encoded
from ..revision_hint import RevisionHint
from . import files

log = logging.getLogger("gpu_runtime")


def living_rosters(directory: Path) -> dict[str, Roster]:
    """The last roster of each living owner in `directory`, by owner id."""
    rosters = {}
    for path in files.owner_files(directory):
        roster = read_roster(path) if life(path) is Life.ALIVE else None
        if roster:
            rosters[path.name] = roster
    return rosters


def newest_roster_rev(directory: Path) -> int:
    """The newest revision in the living owners' rosters in `directory`; 0 without rosters."""
    try:
        return max((roster.rev for roster in living_rosters(directory).values()), default=0)
    except FileNotFoundError:  # the whole directory is gone
        return 0


class Before(NamedTuple):
    """The old book, as the process that makes the new book last saw it."""

    book: Book = Book()  # the old book, as this process last read it
    name: str = ""
    # Whether owners' files were deleted. Rosters of living owners may then be missing.
    files_lost: bool = False


NOTHING = Before()


def rebuild(
    directory: Path,
    boot: str,
    damage: DamagedBook,
    patience_seconds: float,
    before: Before = NOTHING,
) -> None:
    """Replaces the damaged book (`damage`), unless another process has done so.

    `directory` has the ledger's files of the boot with the id `boot`. An owner that has no readable
    roster and may be alive keeps the part that it had in the book `before`. If there is such an
    owner, if a roster cannot be read, or if owners' files were deleted, nothing is granted until
    all owners had time to register. Waits at most `patience_seconds` for another process that makes
    a new book.

    Raises LedgerUnavailable, OSError or sqlite3.Error. After an error, CURRENT (the link to the
    book in force) may name a book that does not exist, which also counts as damage.
    """
    with files.rebuild_lock(directory) as lock:
        files.take(lock, patience_seconds)
        if files.current(directory) != damage.name:
            return
        if files.inode_of(directory, damage.name) != damage.inode:
            return
        name = files.next_book(directory, damage.name or before.name)
        # CURRENT is changed before the rosters are read. A writer writes its roster, commits, and
        # then reads CURRENT. If the writer still reads the old name, its roster is complete, and is
        # read below. If it reads the new name, it knows that its grant is void.
        files.point_current_at(directory, name)
        book, rev = _from_rosters(directory, name, before)
        _make(directory, name, boot, book, rev)
        RevisionHint(directory).record(name, rev)  # replaces the revision of the older book
        kept = []
        for old in files.other_books(directory, name):
            path = files.set_aside(directory, old)
            if path:
                kept.append(path)
    if damage.name or kept:
        _log_rebuilt(directory, damage, kept, name, book)


def _from_rosters(directory: Path, name: str, before: Before) -> tuple[Book, int]:
    """The book `name`, made from the rosters of the living owners, and its revision.

    Raises LedgerNewer if a newer version of gpu-console wrote a roster.
    """
    rosters = living_rosters(directory)
    newest_schema = max((roster.schema for roster in rosters.values()), default=SCHEMA)
    if newest_schema > SCHEMA:
        raise LedgerNewer(str(directory / name), newest_schema, SCHEMA)
    # Only the owner's own part of each roster is used. Otherwise an owner in a shared ledger could
    # change the part of another owner.
    by_age = sorted(rosters.items(), key=lambda item: item[1].rev)
    parts = {id: _decoded(roster) for id, roster in by_age}
    found = {id: part_of(part, id) for id, part in parts.items() if part is not None}
    missing = _missing(directory, before.book, found)
    if missing:
        log.warning("the sections of %d owners are those last seen: no file has them", len(missing))
    book = union([*missing.values(), *found.values()])
    rev = max((roster.rev for roster in rosters.values()), default=0) + 1
    if before.files_lost or len(found) < len(rosters) or missing:
        book = replace(book, opens=boottime() + closed_seconds(len(before.book.sections)))
    return book, rev


def _missing(directory: Path, before: Book, found: Mapping[str, Book]) -> dict[str, Book]:
    """The last known parts of owners that may be alive but have no readable roster, by owner id."""
    missing = {}
    for id in sorted(before.owner_ids() - found.keys()):
        owner, path = before.owner(id), owners_in(directory) / id
        known = life_of(owner, path) if owner else life(path)
        if known is not Life.DEAD:
            missing[id] = part_of(before, id)
    return missing


def _log_rebuilt(
    directory: Path,
    damage: DamagedBook,
    kept: list[Path],
    name: str,
    book: Book,
) -> None:
    log.warning(
        "the ledger %s was damaged (%s). Set aside: %s. "
        "Rebuilt as %s from %d living owners, %d leases.",
        directory / damage.name,
        damage.why,
        ", ".join(map(str, kept)) or "nothing, no file was left",
        name,
        len(book.sections),
        sum(1 for _ in book.leases()),
    )


def _decoded(roster: Roster) -> Book | None:
    try:
        return decode_roster(roster)
    except UNREADABLE:
        log.warning(
            "a living owner's roster of %d bytes cannot be read; the owner will register again",
            len(roster.payload),
        )
        return None


def _make(directory: Path, name: str, boot: str, book: Book, rev: int) -> None:
    """Makes a book under a draft's name. Once the book is complete, it is renamed to `name`."""
    draft = (
        directory / ".book-draft"
    )  # one name is enough, because this process holds the rebuild lock
    draft.unlink(missing_ok=True)
    flags = os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    fd = os.open(draft, flags, 0o600)
    os.close(fd)
    db = sqlite3.connect(draft, isolation_level=None)
    try:
        # A large book has many pages of this size, and a write changes only a few of them.
        db.execute("PRAGMA page_size=8192")
        db.execute("PRAGMA journal_mode=OFF")
        db.execute("PRAGMA synchronous=OFF")
        # One Linux kernel has one page. The row's key is the boot id, because two containers on one
        # kernel have different host names.
        db.execute(
            "CREATE TABLE book (host TEXT PRIMARY KEY, rev INTEGER NOT NULL, schema INTEGER NOT NULL, "
            "body BLOB NOT NULL)"
        )
        db.execute("INSERT INTO book VALUES (?, ?, ?, ?)", (boot, rev, SCHEMA, encoded(book, rev)))
    finally:
        db.close()
    access_to(directory).open_file(draft)
    os.rename(draft, directory / name)
