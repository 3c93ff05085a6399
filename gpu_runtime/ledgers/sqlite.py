"""The book of one host, as one row of an SQLite file: no daemon, no server.

A write is read → decide → one autocommit `UPDATE … WHERE host=? AND rev=?`; whoever loses the race decides again. The
roster is written before the commit and CURRENT is read after it: a book that is damaged, deleted or replaced is
set aside, and its heir is the union of what its living owners last wrote of themselves (mending.py).

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
import weakref
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import quote

import msgspec
from msgspec.structs import replace

from ..errors import LedgerNewer, LedgerUnavailable
from ..facts import SCHEMA, Book, Owner, decode_book, encode
from ..owner import Life, OwnerFile, boot_id, describe_self, life
from . import files, refuse_unlawful
from .doorbell import Doorbell
from .mending import Damaged, mend, newest_roster_rev, part_of
from .pace import Pace, processor_seconds

T = TypeVar("T")

SELECT = "SELECT rev, schema, CASE WHEN rev=? THEN NULL ELSE body END FROM book WHERE host=?"
UPDATE = "UPDATE book SET rev=rev+1, schema=?, body=? WHERE host=? AND rev=?"


class _Lost(Exception):
    """Somebody else was first, is writing, or has made a new book: look again."""


class _Page(NamedTuple):
    """What this door last saw: which file, and what stood in it."""

    name: str
    inode: int
    rev: int
    book: Book


class SqliteLedger:
    """A door to the book in a directory.

    One connection with one lock, held for one statement and never while deciding: a connection per thread was no
    faster, since SQLite lets one write at a time anyway. The lock also keeps roster, commit and the look at CURRENT
    of one thread together, so that the roster of one never hides the grant of another.
    """

    def __init__(self, directory: Path, *, notebook: str = "", user: str = "", patience_seconds: float = 10.0) -> None:
        self.url = f"sqlite://{directory}"
        self.boot = boot_id()
        self.directory = Path(directory) / self.boot
        self.patience_seconds = patience_seconds
        self._lock = threading.Lock()
        self._pace = Pace()
        self._db: sqlite3.Connection | None = None
        self._page: _Page | None = None
        self._roster_doubtful = False
        self._ballast_dropped = False
        files.prepare(self.directory)
        try:
            self._file = OwnerFile(self.directory / "owners", describe_self(notebook=notebook, user=user))
        except OSError as error:
            raise files.cannot_write(self.directory, error) from error
        try:
            self._bell = Doorbell(self.directory / "owners", self.owner.id)
        except OSError as error:
            self._file.release(remove=True)
            raise files.cannot_write(self.directory, error) from error
        _doors.add(self)
        self._closed = False
        try:
            book = self.read()
        except BaseException:
            self._shut(remove=True)
            raise
        files.sweep_owners(self.directory, _owner_ids(book))
        files.sweep_boots(self.directory)
        files.fill_ballast(self.directory)

    @property
    def owner(self) -> Owner:
        return self._file.owner

    @property
    def path(self) -> str:
        """The file that the book lies in now."""
        return str(self.directory / (self._page.name if self._page else files.current(self.directory)))

    def read(self) -> Book:
        return self._agree(lambda book: (book, book))

    def transact(self, decide: Callable[[Book], tuple[Book, T]]) -> T:
        wait = self._pace.before(time.monotonic())
        if wait:
            time.sleep(wait)
        return self._agree(decide, paced=True)

    def _agree(self, decide: Callable[[Book], tuple[Book, T]], paced: bool = False) -> T:
        deadline = time.monotonic() + self.patience_seconds
        lost = 0
        while True:
            self._require_open()
            began = processor_seconds()
            try:
                page = self._look()
                new, answer = decide(page.book)
                if new is not page.book:
                    refuse_unlawful(page.book, new, self.owner.id, self.dead, self.path)
                    self._put(page, new)
                if paced:
                    self._pace.ended(processor_seconds() - began, time.monotonic())
                return answer
            except _Lost:
                pass
            except Damaged as damage:
                self._mend(damage)
            lost, now = lost + 1, time.monotonic()
            if now > deadline:
                raise self._too_long()
            time.sleep(self._pace.lost(lost, now))

    def dead(self, book: Book) -> frozenset[str]:
        def is_dead(id: str) -> bool:
            owner = book.owner(id)
            # Who has a ticket only left no inode in the book; the name of the file, never used again, must do.
            return life(self.directory / "owners" / id, owner.inode if owner else 0) is Life.DEAD

        return frozenset(filter(is_dead, _owner_ids(book) - {self.owner.id}))

    def ring(self, owners: Iterable[str]) -> None:
        if not self._closed and os.getpid() == self.owner.pid:
            self._bell.ring_others(owners)

    def wait(self, timeout: float) -> bool:
        self._require_open()
        return self._bell.wait(timeout)

    def close(self) -> None:
        if self._closed or os.getpid() != self.owner.pid:
            return
        try:
            gone = self.owner.id not in _owner_ids(self.read())
        except LedgerUnavailable:
            gone = False
        self._shut(remove=gone)

    def _shut(self, *, remove: bool) -> None:
        self._closed = True
        with self._lock:
            self._bell.close()
            self._file.release(remove=remove)
            if self._db:
                self._db.close()

    # What follows touches the files, each for itself under the lock.

    def _look(self) -> _Page:
        """The page as it stands. Raises _Lost, Damaged, LedgerUnavailable."""
        with self._lock:
            page = self._page
            if page is None or self._db is None or not self._in_force(page):
                page = self._open()
            rows = self._run(page, self._db, SELECT, (page.rev, self.boot))
            if not rows:
                raise Damaged(page.name, page.inode, "it has no page")
            rev, schema, body = rows[0]
            if not isinstance(schema, int) or not isinstance(rev, int):
                raise Damaged(page.name, page.inode, "its page has no revision")
            if schema > SCHEMA:
                raise LedgerNewer(self.path, schema, SCHEMA)
            if rev < page.rev:
                raise Damaged(page.name, page.inode, f"it went back from revision {page.rev} to {rev}")
            if body is not None:
                try:
                    page = page._replace(rev=rev, book=decode_book(body))
                except (msgspec.MsgspecError, TypeError, UnicodeDecodeError) as error:
                    raise Damaged(page.name, page.inode, f"its page cannot be read ({error})") from error
                self._page = page
            if self._roster_doubtful:
                self._mend_roster(page)
            return page

    def _put(self, page: _Page, new: Book) -> None:
        """Writes a book over the page it was decided on. Raises _Lost, Damaged, LedgerUnavailable."""
        new = self._with_own_inode(new)
        body = encode(new)
        with self._lock:
            if self._page is not page or self._db is None:
                raise _Lost  # to another thread of ours
            try:
                self._commit(page, new, body)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT) or _takes_more(page.book, new):
                    raise files.cannot_write(Path(self.path), error) from error
                # A release may use the room that was put by for it.
                self._ballast_dropped |= files.drop_ballast(self.directory)
                try:
                    self._commit(page, new, body)
                except OSError as again:
                    raise files.cannot_write(Path(self.path), again) from again
        if self._ballast_dropped:
            files.fill_ballast(self.directory)
            self._ballast_dropped = not (self.directory / "ballast").exists()

    def _commit(self, page: _Page, new: Book, body: bytes) -> None:
        roster = part_of(new, self.owner.id)
        fresh = roster != part_of(page.book, self.owner.id)
        if fresh:
            # Until the commit is known to stand, the roster may say more or less than the book: the next look mends it.
            self._roster_doubtful = True
            self._write_roster(new, page.rev + 1)
        try:
            written = self._db.execute(UPDATE, (SCHEMA, body, self.boot, page.rev)).rowcount
        except sqlite3.Error as error:
            raise self._failure(page, error) from error
        if not written:
            raise _Lost
        # A new book may have been made from the rosters while we wrote into the old: then nobody saw this.
        if not self._in_force(page):
            raise _Lost
        self._page = page._replace(rev=page.rev + 1, book=new)
        if fresh:
            self._roster_doubtful = False

    def _mend_roster(self, page: _Page) -> None:
        try:
            self._write_roster(page.book, page.rev)
            self._roster_doubtful = False
        except OSError:
            pass  # a full disk is no reason not to read; the next look tries again

    def _write_roster(self, book: Book, rev: int) -> None:
        if not self._file.in_place():
            self._come_back()
        self._file.write_roster(encode(part_of(book, self.owner.id)), rev=rev, schema=SCHEMA)

    def _with_own_inode(self, book: Book) -> Book:
        """The lock file is this door's matter: where it was made anew, the section learns its new inode."""
        section = book.sections.get(self.owner.id)
        if section is None or section.owner.inode == self.owner.inode:
            return book
        return book.with_section(replace(section, owner=replace(section.owner, inode=self.owner.inode)))

    def _open(self) -> _Page:
        """Opens the book that CURRENT names. Raises Damaged where there is none, or not the one that was there."""
        before = self._page
        if self._db:
            self._db.close()
            self._db = None
        # The rosters first: the book only grows, so one that is behind them has gone back.
        least_rev = newest_roster_rev(self.directory) - 1
        name = files.current(self.directory)
        inode = files.inode_of(self.directory, name)
        if not inode:
            raise Damaged(name, 0, "it is gone" if name else "")
        if before and before.name == name:
            if before.inode != inode:
                raise Damaged(name, inode, "another file took its place")
            least_rev = max(least_rev, before.rev)
        page = _Page(name, inode, -1, Book())
        db = self._connect(page)
        rows = self._run(page, db, "SELECT rev FROM book WHERE host=?", (self.boot,))
        if rows and isinstance(rows[0][0], int) and rows[0][0] < least_rev:
            db.close()
            raise Damaged(name, inode, f"it is at revision {rows[0][0]}, and its owners have seen {least_rev}")
        self._page, self._db = page, db
        return page

    def _connect(self, page: _Page) -> sqlite3.Connection:
        path = quote(str(self.directory / page.name))
        try:
            db = sqlite3.connect(f"file:{path}?mode=rw", uri=True, timeout=0, isolation_level=None, check_same_thread=False)
        except sqlite3.Error as error:
            raise self._failure(page, error) from error
        self._run(page, db, "PRAGMA journal_mode=PERSIST", ())
        self._run(page, db, "PRAGMA synchronous=OFF", ())
        return db

    def _in_force(self, page: _Page) -> bool:
        return files.current(self.directory) == page.name and files.inode_of(self.directory, page.name) == page.inode

    def _run(self, page: _Page, db: sqlite3.Connection, sql: str, values: tuple[object, ...]) -> list[tuple]:
        """All rows, fetched within one C call.

        Between a Python `execute` and `fetch` a KeyboardInterrupt could leave a read lock held for as long as its
        traceback lives, and nobody could write.
        """
        try:
            return list(chain.from_iterable(map(db.execute, (sql,), (values,))))
        except sqlite3.Error as error:
            raise self._failure(page, error) from error

    def _failure(self, page: _Page, error: sqlite3.Error) -> Exception:
        """What an SQLite error means to us."""
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
        kind = code & 0xFF
        if kind in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL) or not self._in_force(page):
            return _Lost()
        if kind == sqlite3.SQLITE_FULL:
            return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        damaged = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
        if kind in damaged or code == sqlite3.SQLITE_IOERR_SHORT_READ or "no such" in str(error):
            return Damaged(page.name, page.inode, str(error))
        return files.cannot_write(self.directory / page.name, OSError(errno.EIO, str(error)))

    def _mend(self, damage: Damaged) -> None:
        with self._lock:
            if self._db:
                self._db.close()
                self._db = None
            known = self._page
            files.prepare(self.directory)
            if not self._file.in_place():
                self._come_back()
                if known:
                    self._file.write_roster(encode(part_of(known.book, self.owner.id)), rev=known.rev, schema=SCHEMA)
            try:
                mend(self.directory, self.boot, damage, self.patience_seconds)
            except (OSError, sqlite3.Error) as error:
                files.drop_ballast(self.directory)
                self._ballast_dropped = True
                why = error if isinstance(error, OSError) else OSError(errno.EIO, str(error))
                raise files.cannot_write(self.directory, why) from error

    def _come_back(self) -> None:
        """Makes our lock and doorbell anew, after somebody deleted them: without them nobody could prove us alive."""
        here, old = self.directory / "owners", self._file
        if life(old.path) is not Life.ALIVE:
            old.path.unlink(missing_ok=True)
        self._file = OwnerFile(here, replace(old.owner, inode=0))
        old.close_here()
        if self._file.owner.id != old.owner.id:
            raise LedgerUnavailable(f"another process took this one's name in {here}.\n  Restart this kernel.", path=str(here))
        self._bell.move_to(here)

    def _require_open(self) -> None:
        if os.getpid() != self.owner.pid:
            raise LedgerUnavailable(f"the ledger {self.url} stayed in the parent (pid {self.owner.pid}) of this forked "
                                    f"process. Open another:  gpu_runtime.Runtime()", path=self.url)
        if self._closed:
            raise LedgerUnavailable(f"the ledger {self.url} was closed. Open another:  gpu_runtime.Runtime()", path=self.url)

    def _too_long(self) -> LedgerUnavailable:
        holders = [pid for pid in files.writers(Path(self.path)) if pid != os.getpid()]
        who = f"pid {holders[0]} holds its lock; perhaps it is stopped" if holders else "too many write at once"
        hint = f"Let it go on:  kill -CONT {holders[0]}" if holders else "Try again, or see:  gpu leases"
        return LedgerUnavailable(f"the ledger {self.path} could not be had for {self.patience_seconds:.0f} s: {who}.\n"
                                 f"  {hint}", path=self.path, holders=tuple(holders))

    def _leave_to_parent(self) -> None:
        """In a forked child: the files are closed, the lock stands, the connection is never touched again."""
        self._bell.close_here()
        if self._db:
            # Even its finaliser would act on what the parent was doing when it forked: so it never runs.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._db))


_doors: weakref.WeakSet[SqliteLedger] = weakref.WeakSet()


def _leave_all_to_parent() -> None:
    for door in list(_doors):
        door._leave_to_parent()


os.register_at_fork(after_in_child=_leave_all_to_parent)


def _owner_ids(book: Book) -> set[str]:
    return book.sections.keys() | {ticket.owner for ticket in book.tickets}


def _takes_more(old: Book, new: Book) -> bool:
    before = old.claims()
    return any(claimed > before.get(device, 0) for device, claimed in new.claims().items())
