"""The SQLite file of the book: one row, read and written by single statements.

The roster (an owner's copy of its part of the book) is written before the commit. CURRENT (the link
to the book in force) is read after the commit. If it then names another book, this process has
written into an old book, and its grant is void. So a book that is rebuilt from the rosters has every
valid grant. Nothing here decides.

The journal mode is PERSIST with synchronous=OFF, for every version of SQLite. The book survived
9,068 kills of writers in this mode. A power failure does not matter, because the book does not
outlive the boot. The mode WAL has a known bug in most versions in use.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

from ... import forks
from ...errors import LedgerNewer
from ...facts import SCHEMA, Book
from .. import notify
from ..access import owners_in
from ..book_store import BookStore, DamagedBook, Draft, GrantsClosed, LostRace, Page, boottime
from ..decoding import UNREADABLE
from ..liveness import OwnerFile
from ..pages import EMPTY, is_whole
from ..revision_hint import RevisionHint
from . import files
from .recovery import Before, newest_roster_rev, rebuild

# A SELECT returns its row while it still holds its read lock. Python needs the GIL to end the
# SELECT and release the lock. If another thread keeps the GIL for a second, no process can write
# for a second. So one statement that runs to its end within SQLite copies the row to a private
# temporary table, unless this process already has the row's revision. The row is fetched from this
# table. (When a thread kept the GIL for 200 ms at a time, other writers waited 200 to 400 ms; now
# they wait 2 ms. An INSERT OR REPLACE would allocate all pages of the temporary table anew: 286 µs
# for 400 KB, where the UPDATE takes 139 µs.)
COPY = """UPDATE temp.seen SET (rev, schema, body) =
    (SELECT rev, schema, body FROM main.book WHERE host=?)
    WHERE (SELECT rev, schema FROM main.book WHERE host=?) IS NOT (?, ?)"""
FETCH = "SELECT rev, schema, body FROM temp.seen"
SETTLED_NANOSECONDS = 50_000_000
UPDATE = "UPDATE main.book SET rev=rev+1, schema=?, body=? WHERE host=? AND rev=?"


# If the schema is damaged, SQLite's message quotes the schema, and Python may be unable to decode
# the message.
FAULTS = (sqlite3.Error, UnicodeDecodeError)
MOST_BYTES = 32 << 20  # of a page; 1,024 leases take about 400 KiB
_BUSY = (
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_PROTOCOL,
)
_DAMAGED = (
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_TOOBIG,
)
_PRAGMAS = (
    "journal_mode=PERSIST",
    "synchronous=OFF",
    "temp_store=MEMORY",
    "trusted_schema=OFF",
)


class SqliteBook(BookStore):
    """One owner's connection to the book in an SQLite file, and the owner's own file beside it."""

    def __init__(
        self,
        directory: Path,
        boot: str,
        owner_file: OwnerFile,
        moved: Callable[[Path], None],
    ) -> None:
        """The parameters are as in BookStore."""
        super().__init__(directory, boot, owner_file, moved)
        forks.awaited(self._lock)

    @property
    def path(self) -> Path:
        return self.directory / (self._page.name if self._page else files.current(self.directory))

    def written(self) -> tuple[str, int, int] | None:
        """The book in force, its inode and the time of its last write.

        The result is None if there is no book, or if the time of the write is too recent to be
        reliable. File systems measure time in steps of up to 10 ms. If a file was written a moment
        ago, it may be written again within the same step.
        """
        name = files.current(self.directory)
        try:
            found = os.stat(f"{self.directory}/{name}") if name else None
        except OSError:  # no book yet
            return None
        if found is None:
            return None
        if time.time_ns() - found.st_mtime_ns < SETTLED_NANOSECONDS:
            return None
        return name, found.st_ino, found.st_mtime_ns

    def mend(self, damage: DamagedBook, patience_seconds: float) -> None:
        """Sets the book of `damage` aside and rebuilds it, unless another process has done so.

        Waits at most `patience_seconds` for another process that rebuilds the book. Raises
        LedgerUnavailable.
        """
        with self._lock:
            self._disconnect()
            try:
                self._ensure_own_files()
                before = self._before(damage)
                rebuild(self.directory, self.boot, damage, patience_seconds, before)
                self._files_lost = False
            except (OSError, sqlite3.Error) as error:
                self._ballast_dropped |= files.drop_ballast(self.directory)
                why = error if isinstance(error, OSError) else OSError(errno.EIO, str(error))
                raise files.cannot_write(self.directory, why) from error

    def leave_to_parent(self) -> None:
        """Makes sure that the connection is never used again; called in a forked child.

        Even the connection's finaliser could disturb a statement of the parent. So the finaliser
        never runs.
        """
        if self._connection:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._connection))

    # The methods below are called with the lock held.

    def _before(self, damage: DamagedBook) -> Before:
        """The known facts about the book before the `damage`."""
        if self._page:
            return Before(self._page.book, self._page.name, self._files_lost)
        return Before(files_lost=not damage.name and self._others_lost_files())

    def _others_lost_files(self) -> bool:
        """Whether a living owner has lost its files: the directory was deleted and made again."""
        owners = owners_in(self.directory)
        return any(not os.path.lexists(owners / id) for id in notify.owners_in(owners))

    def _in_force(self, page: Page) -> bool:
        # Inodes are enough to compare the files: this connection keeps the file of `page` open, so
        # no other file gets its inode.
        try:
            return os.stat(f"{self.directory}/CURRENT").st_ino == page.inode
        except OSError:  # the file is gone, so no page is in force
            return False

    def _require_plain_journal(self, page: Page) -> None:
        """Raises DamagedBook if the book's journal exists and is not a plain file."""
        if not files.has_plain_journal(f"{self.directory}/{page.name}"):
            raise DamagedBook(page.name, page.inode, "its journal is not a file")

    def _read(self, page: Page) -> Page:
        self._require_plain_journal(page)
        try:
            wanted = (self.boot, self.boot, page.rev, SCHEMA)
            copied = self._connection.execute(COPY, wanted).rowcount
        except FAULTS as error:
            raise self._failure(page, error) from error
        known = (page.rev, SCHEMA, b"")
        rev, schema, body = self._rows(page, self._connection, FETCH)[0] if copied else known
        if body is None:
            raise DamagedBook(page.name, page.inode, "it has no page")
        if not isinstance(schema, int) or not isinstance(rev, int):
            raise DamagedBook(page.name, page.inode, "its page has no revision")
        if schema > SCHEMA:
            if rev == page.rev or is_whole(body, rev):
                raise DamagedBook(page.name, page.inode, "its schema is wrong")
            raise LedgerNewer(str(self.path), schema, SCHEMA)
        if rev < self._least_rev:
            why = f"it is at revision {rev}, and {self._least_rev} has been seen"
            raise DamagedBook(page.name, page.inode, why)
        if rev == page.rev:
            return page
        self._least_rev = rev
        try:
            return self._unpacked(page, body, rev, schema)
        except UNREADABLE as error:
            why = f"its page cannot be read ({error})"
            raise DamagedBook(page.name, page.inode, why) from error

    def _commit(self, page: Page, draft: Draft) -> None:
        closed = page.book.opens - boottime() if page.book.opens else 0.0
        if closed > 0 and self._grants(page, draft):
            raise GrantsClosed(closed)
        part_changed = self._part_changed(page, draft)
        if part_changed:
            # Until the commit is known to have succeeded, the roster may differ from the book. The
            # next `look` repairs the roster.
            self._roster_doubtful = True
            self._unfinished = page
            self._write_roster(draft.book, draft.packed, page.rev + 1)
        if self._rev_seen_by_others(page) > page.rev:
            # Another process has written since `page` was read. The UPDATE below usually notices
            # this. But if an old copy has replaced the book since then, the copy may have the
            # revision of `page`.
            raise LostRace
        self._require_plain_journal(page)
        try:
            values = (SCHEMA, draft.body, self.boot, page.rev)
            written = self._connection.execute(UPDATE, values).rowcount
        except FAULTS as error:
            raise self._failure(page, error) from error
        # If a new book was made from the rosters while this process wrote into the old book, the
        # write has no effect.
        if not written or not self._in_force(page):
            raise LostRace
        self._page = page._replace(rev=page.rev + 1, book=draft.book, packed=draft.packed)
        self._least_rev = page.rev + 1
        self._files_lost = False
        self._hint.record(page.name, page.rev + 1)
        if part_changed:
            self._roster_doubtful = False
            self._unfinished = None

    def _open(self) -> None:
        """Opens the book that CURRENT names.

        Raises DamagedBook if there is no book, or if CURRENT names an older book.
        """
        before = self._page
        self._disconnect()
        # The rosters are read first. Revisions only grow, so a book that is behind the rosters is
        # an old copy. But a roster is written before the book. So the newest roster may be one
        # revision ahead, if the write of the book did not succeed.
        least_rev = newest_roster_rev(self.directory) - 1
        name = files.current(self.directory)
        inode = files.inode_of(self.directory, name)
        if not inode:
            raise DamagedBook(name, 0, "it is gone")
        if before and not self.owner_file.in_place():
            # The directory was deleted, and another process has made it again.
            self._restore_own_files()
        if before and before.name == name:
            if before.inode != inode:
                raise DamagedBook(name, inode, "another file took its place")
            least_rev = max(least_rev, self._least_rev)
        page = Page(name, inode, -1, Book(), before.packed if before else EMPTY)
        self._hint = RevisionHint(self.directory)  # a new object, as the directory may be a new one
        connection = self._connect(page)
        self._least_rev = least_rev
        self._page = page
        self._connection = connection

    def _connect(self, page: Page) -> sqlite3.Connection:
        self._require_plain_journal(page)
        url = f"file:{quote(str(self.directory / page.name))}?mode=rw"
        try:
            # SQLite's own waiting is switched off (time-out 0), because it can starve a writer.
            # backoff.py computes the waits instead.
            db = sqlite3.connect(
                url, uri=True, timeout=0, isolation_level=None, check_same_thread=False
            )
        except FAULTS as error:
            raise self._failure(page, error) from error
        # In a shared ledger, another member may have put anything into the file. The limit bounds
        # the size of what is read. trusted_schema=OFF restricts what the file's schema can execute.
        db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_BYTES)
        for pragma in _PRAGMAS:
            self._rows(page, db, f"PRAGMA {pragma}")
        self._rows(page, db, "CREATE TABLE temp.seen (rev, schema, body)")
        self._rows(page, db, "INSERT INTO temp.seen VALUES (NULL, NULL, NULL)")
        return db

    def _rows(self, page: Page, db: sqlite3.Connection, sql: str) -> list[tuple]:
        try:
            # Both calls are in one expression. So a KeyboardInterrupt between the calls drops the
            # cursor and ends its statement. If the cursor were in a variable, the traceback would
            # keep the cursor alive, together with a read lock that blocks every writer.
            return db.execute(sql).fetchall()
        except FAULTS as error:
            raise self._failure(page, error) from error

    def _failure(self, page: Page, error: Exception) -> Exception:
        """This module's exception for an SQLite `error` on `page`."""
        if isinstance(error, UnicodeDecodeError):
            return DamagedBook(page.name, page.inode, "its schema is no text")
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
        kind = code & 0xFF
        if kind in _BUSY or not self._in_force(page):
            return LostRace()
        if kind == sqlite3.SQLITE_FULL:
            return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        cut_short = code == sqlite3.SQLITE_IOERR_SHORT_READ
        if kind in _DAMAGED or cut_short or "no such" in str(error):
            return DamagedBook(page.name, page.inode, str(error))
        return files.cannot_write(self.directory / page.name, OSError(errno.EIO, str(error)))
