"""The file that the book lies in: one row, read and written by single statements.

The roster is written before the commit and CURRENT is read after it, so whoever rebuilds the book finds each
grant either in the rosters or void. Nothing here decides.

One journal mode for all SQLite versions, PERSIST with synchronous=OFF: it outlived 9,068 kills, WAL has a known bug in
most versions in use, and nothing here outlives the boot.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import msgspec
from msgspec.structs import replace

from ...errors import LedgerNewer, LedgerUnavailable
from ...facts import SCHEMA, Book, decode_book, encode
from ..access import access_to
from ..liveness import Life, OwnerFile, life
from . import files
from .recovery import Damaged, mend, newest_roster_rev, part_of, sealed, unsealed, with_living
from .revision_hint import Newest

# A SELECT gives its row while it still holds its read lock, and Python must have the GIL before it can fetch on and let
# go. Where another thread keeps the GIL for a second, nobody could write for a second (kept for 200 ms at a time:
# bystanders waited 200 to 400 ms; now 2). So one statement that runs to its end within SQLite copies the row to a table
# that is ours alone, and the row is fetched from there.
COPY = """INSERT OR REPLACE INTO temp.seen
    SELECT 1, rev, schema, CASE WHEN rev=? THEN NULL ELSE body END FROM main.book WHERE host=?"""
FETCH = "SELECT rev, schema, body FROM temp.seen"
SETTLED_NANOSECONDS = 50_000_000
UPDATE = "UPDATE main.book SET rev=rev+1, schema=?, body=? WHERE host=? AND rev=?"


# Where the schema is damaged, SQLite's message quotes it, and Python cannot read that.
FAULTS = (sqlite3.Error, UnicodeDecodeError)
MOST_BYTES = 32 << 20  # of a page; 256 leases take about 200 KiB


class Lost(Exception):
    """Somebody else was first, is writing, or has made a new book: look again."""


class Page(NamedTuple):
    """What stood in the book at a revision, and which file it was."""

    name: str
    inode: int
    rev: int
    book: Book


class BookFile:
    """One owner's connection to the book, and its own file beside it.

    One connection with one lock, held for single statements and never while deciding: SQLite lets one write at a time
    anyway. The lock also keeps roster, commit and the look at CURRENT of one thread together, so that the roster
    of one thread never hides the grant of another.
    """

    def __init__(
        self, directory: Path, boot: str, owner_file: OwnerFile, moved: Callable[[Path], None]
    ) -> None:
        self.directory = directory
        self.boot = boot
        self.owner_file = owner_file
        self._moved = moved  # told where our own file had to be made anew
        self._lock = threading.Lock()
        self._db: sqlite3.Connection | None = None
        self._page: Page | None = None
        self._least_rev = 0  # the book has been seen at this revision: it cannot be behind
        self._newest = Newest(directory)  # and at this one by others
        self._roster_doubtful = False
        self._unfinished: Page | None = None  # on which a write was tried that has not come through
        self._ballast_dropped = False

    @property
    def path(self) -> Path:
        return self.directory / (self._page.name if self._page else files.current(self.directory))

    def written(self) -> tuple[str, int, int] | None:
        """The book in force, its inode and when it was written last; None where that cannot be relied on.

        File systems tell time in steps of up to 10 ms: of a file written a moment ago it is not known whether it was
        written once more.
        """
        name = files.current(self.directory)
        try:
            stat = os.stat(f"{self.directory}/{name}") if name else None
        except OSError:
            return None
        if stat is None or time.time_ns() - stat.st_mtime_ns < SETTLED_NANOSECONDS:
            return None
        return name, stat.st_ino, stat.st_mtime_ns

    def look(self) -> Page:
        """The page as it stands. Raises Lost, Damaged, LedgerUnavailable."""
        with self._lock:
            if self._page is None or self._db is None or not self._in_force(self._page):
                self._open()
            self._least_rev = max(self._least_rev, self._newest.of(self._page.name))
            page = self._page = self._read(self._page, self._db)
            if self._unfinished is not None and self._unfinished.name != page.name:
                page = self._take_back(page, self._unfinished)
            if self._roster_doubtful:
                try:
                    self._write_roster(page.book, page.rev)
                    self._roster_doubtful = False
                except OSError:
                    pass  # a full disk is no reason not to read; the next look tries again
            if self._unfinished is not None:
                # Whoever makes a new book after this reads what we have just written; before it, perhaps not.
                self._unfinished = (
                    None if not self._roster_doubtful and self._in_force(page) else page
                )
            return page

    def is_behind(self, page: Page) -> bool:
        """Whether the book is known to have been written since that page was read."""
        return self._page is not page or self._newest.of(page.name) > page.rev

    def put(self, page: Page, new: Book) -> None:
        """Writes a book over the page it was decided on. Raises Lost, Damaged, LedgerUnavailable."""
        if not self.owner_file.in_place():
            with self._lock:
                self._come_back()
        new = self._with_own_inode(new)
        body = encode(new)
        with self._lock:
            if self._page is not page or self._db is None:
                raise Lost  # to another thread of ours
            try:
                self._commit(page, new, body)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT) or _takes_more(page.book, new):
                    raise files.cannot_write(self.path, error) from error
                # A release may use the room that was put by for it.
                self._ballast_dropped |= files.drop_ballast(self.directory)
                try:
                    self._commit(page, new, body)
                except OSError as again:
                    raise files.cannot_write(self.path, again) from again
        if self._ballast_dropped:
            self._ballast_dropped = not files.fill_ballast(self.directory)

    def mend(self, damage: Damaged, patience_seconds: float) -> None:
        """Sees to it that there is a book again. Raises LedgerUnavailable."""
        with self._lock:
            self._let_go()
            files.prepare(self.directory)
            if not self.owner_file.in_place():
                self._come_back()
                if self._page:  # the last that is known of us
                    self._write_roster(self._with_own_inode(self._page.book), self._page.rev)
            try:
                mend(self.directory, self.boot, damage, patience_seconds)
            except (OSError, sqlite3.Error) as error:
                self._ballast_dropped |= files.drop_ballast(self.directory)
                why = error if isinstance(error, OSError) else OSError(errno.EIO, str(error))
                raise files.cannot_write(self.directory, why) from error

    def close(self, *, remove: bool) -> None:
        with self._lock:
            self._let_go()
            self.owner_file.release(remove=remove)

    def leave_to_parent(self) -> None:
        """In a forked child: the connection is never touched again.

        Even its finaliser would act on what the parent was doing when it forked: so it never runs.
        """
        if self._db:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._db))

    # What follows is called under the lock.

    def _read(self, page: Page, db: sqlite3.Connection) -> Page:
        try:
            copied = db.execute(COPY, (page.rev, self.boot)).rowcount
        except FAULTS as error:
            raise self._failure(page, error) from error
        if not copied:
            raise Damaged(page.name, page.inode, "it has no page")
        rev, schema, body = self._rows(page, db, FETCH)[0]
        if not isinstance(schema, int) or not isinstance(rev, int):
            raise Damaged(page.name, page.inode, "its page has no revision")
        if schema > SCHEMA:
            raise LedgerNewer(str(self.path), schema, SCHEMA)
        if rev < self._least_rev:
            raise Damaged(
                page.name,
                page.inode,
                f"it is at revision {rev}, and {self._least_rev} has been seen",
            )
        if body is None:
            return page
        self._least_rev = rev
        try:
            return page._replace(rev=rev, book=decode_book(unsealed(body, rev)))
        except (msgspec.MsgspecError, TypeError, ValueError) as error:
            raise Damaged(page.name, page.inode, f"its page cannot be read ({error})") from error

    def _take_back(self, page: Page, before: Page) -> Page:
        """The page with our own part as it last stood. The book was made anew while a write of ours had not come
        through: what that wanted stood in our roster, and is taken for granted here, perhaps beside another's grant of
        the same.

        Done before anybody decides on it, in whichever thread. Raises Lost, and is then still to do.
        """
        me = self.owner_file.owner.id
        ours = with_living(page.book, {me: part_of(before.book, me)})
        book = replace(page.book, sections=ours.sections, tickets=ours.tickets)
        if part_of(book, me) == part_of(page.book, me):
            return page
        try:
            self._commit(page, book, encode(book))
        except OSError as error:
            raise files.cannot_write(self.path, error) from error
        finally:
            self._unfinished = before
        assert self._page is not None
        return self._page

    def _commit(self, page: Page, new: Book, body: bytes) -> None:
        me = self.owner_file.owner.id
        fresh = part_of(new, me) != part_of(page.book, me)
        if fresh:
            # Until the commit is known to stand, the roster may say more or less than the book: the next look mends it.
            self._roster_doubtful, self._unfinished = True, page
            self._write_roster(new, page.rev + 1)
        if self._newest.of(page.name) > page.rev:
            raise Lost  # also to an old copy, put over the book this moment: its revision may be the one that we know
        try:
            stored = sealed(body, page.rev + 1)
            written = self._db.execute(UPDATE, (SCHEMA, stored, self.boot, page.rev)).rowcount
        except FAULTS as error:
            raise self._failure(page, error) from error
        # Where a new book was made from the rosters while we wrote into the old, nobody saw what we wrote.
        if not written or not self._in_force(page):
            raise Lost
        self._page = page._replace(rev=page.rev + 1, book=new)
        self._least_rev = page.rev + 1
        self._newest.tell(page.name, page.rev + 1)
        if fresh:
            self._roster_doubtful, self._unfinished = False, None

    def _write_roster(self, book: Book, rev: int) -> None:
        self.owner_file.write_roster(
            encode(part_of(book, self.owner_file.owner.id)), rev=rev, schema=SCHEMA
        )

    def _with_own_inode(self, book: Book) -> Book:
        """The lock file is the ledger's matter: where it was made anew, the section learns its new inode."""
        owner = self.owner_file.owner
        section = book.sections.get(owner.id)
        if section is None or section.owner.inode == owner.inode:
            return book
        return book.with_section(replace(section, owner=replace(section.owner, inode=owner.inode)))

    def _come_back(self) -> None:
        """Makes our lock and doorbell anew, after somebody deleted them: without them nobody could prove us alive."""
        if self.owner_file.in_place():
            return  # another thread of ours was here
        old = self.owner_file
        here = self.directory / "owners"
        files.prepare(self.directory)
        try:
            if life(old.path) is not Life.ALIVE:
                old.path.unlink(missing_ok=True)
            self.owner_file = OwnerFile(here, replace(old.owner, inode=0), access_to(here).group)
            self._moved(here)
        except OSError as error:
            raise files.cannot_write(here, error) from error
        old.close_here()
        self._roster_doubtful = True
        if self.owner_file.owner.id != old.owner.id:
            raise LedgerUnavailable(
                f"another process took this one's name in {here}.\n  Restart this kernel.",
                path=str(here),
            )

    def _open(self) -> None:
        """Opens the book that CURRENT names. Raises Damaged where there is none, or not the one that was there."""
        before = self._page
        self._let_go()
        # The rosters first: the book only grows, so one that is behind them has gone back. (The last of them may be
        # one ahead, for a write that has not come through.)
        least_rev = newest_roster_rev(self.directory) - 1
        name = files.current(self.directory)
        inode = files.inode_of(self.directory, name)
        if not inode:
            raise Damaged(name, 0, "it is gone")
        if before and before.name == name:
            if before.inode != inode:
                raise Damaged(name, inode, "another file took its place")
            least_rev = max(least_rev, self._least_rev)
        page = Page(name, inode, -1, Book())
        self._newest = Newest(self.directory)  # perhaps the directory was made anew
        db = self._connected(page)
        self._least_rev, self._page, self._db = least_rev, page, db

    def _connected(self, page: Page) -> sqlite3.Connection:
        url = f"file:{quote(str(self.directory / page.name))}?mode=rw"
        try:
            # Time-out 0: SQLite's own way of waiting starves; pace.py has ours.
            db = sqlite3.connect(
                url, uri=True, timeout=0, isolation_level=None, check_same_thread=False
            )
        except FAULTS as error:
            raise self._failure(page, error) from error
        # In a shared ledger another member may have put anything in the file: no code of its schema runs here.
        db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_BYTES)
        for pragma in (
            "journal_mode=PERSIST",
            "synchronous=OFF",
            "temp_store=MEMORY",
            "trusted_schema=OFF",
        ):
            self._rows(page, db, f"PRAGMA {pragma}")
        self._rows(page, db, "CREATE TABLE temp.seen (one INTEGER PRIMARY KEY, rev, schema, body)")
        return db

    def _let_go(self) -> None:
        db, self._db = self._db, None
        if db:
            db.close()

    def _in_force(self, page: Page) -> bool:
        return (
            files.current(self.directory) == page.name
            and files.inode_of(self.directory, page.name) == page.inode
        )

    def _rows(self, page: Page, db: sqlite3.Connection, sql: str) -> list[tuple]:
        try:
            # In one expression: a KeyboardInterrupt between the calls drops the cursor and ends its statement. Kept in
            # a variable, the traceback would keep it, and with it a read lock that no writer gets past.
            return db.execute(sql).fetchall()
        except FAULTS as error:
            raise self._failure(page, error) from error

    def _failure(self, page: Page, error: Exception) -> Exception:
        """What an SQLite error means to us."""
        if isinstance(error, UnicodeDecodeError):
            return Damaged(page.name, page.inode, "its schema is no text")
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
        kind = code & 0xFF
        if kind in (
            sqlite3.SQLITE_BUSY,
            sqlite3.SQLITE_LOCKED,
            sqlite3.SQLITE_PROTOCOL,
        ) or not self._in_force(page):
            return Lost()
        if kind == sqlite3.SQLITE_FULL:
            return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        damaged = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_TOOBIG)
        if kind in damaged or code == sqlite3.SQLITE_IOERR_SHORT_READ or "no such" in str(error):
            return Damaged(page.name, page.inode, str(error))
        return files.cannot_write(self.directory / page.name, OSError(errno.EIO, str(error)))


def _takes_more(old: Book, new: Book) -> bool:
    before = old.claims()
    return any(claimed > before.get(device, 0) for device, claimed in new.claims().items())
