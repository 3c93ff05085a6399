"""Reads and writes the page of a book (the book as it is stored), and one owner's own files.

The SQLite file and the Redis page extend `BookStore`. Both write in the same order: first the
roster (the owner's copy of its part of the book), then the page. A damaged book is rebuilt from the
rosters. If another process has rebuilt the book meanwhile, the write is void and is repeated. So a
rebuilt book has every valid grant. Nothing here decides.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from pathlib import Path
from time import sleep
from typing import Any, NamedTuple, NoReturn

from msgspec.structs import replace

from ..errors import LedgerRefused, LedgerUnavailable
from ..facts import SCHEMA, Book, Section, Shares
from . import pages
from .access import access_to, owners_in
from .book_parts import part_of, with_living
from .decoding import UNREADABLE, decode_older
from .liveness import Life, OwnerFile, life, rosters
from .page_parts import Unwritable
from .revision_hint import RevisionHint
from .sqlite import files

CLOSED_LOOK_SECONDS = 0.1  # between two checks whether grants are possible again
# Time for owners to register in a book that was made again. An owner's monitor thread reads the book
# once a second (less often with many owners), and registers the owner if it is missing.
REGISTER_SECONDS = 2.0
# The number of times a second that the monitors of all idle owners together read the book. (With
# 12, 64 idle owners used 1.3 % of a core.)
TICKS_A_SECOND = 6


class LostRace(Exception):
    """Another process has written, is writing, or has made a new book. Read the book again."""


class GrantsClosed(Exception):
    """The page was made again a moment ago. Nothing is granted for `seconds` from now."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds


class DamagedBook(Exception):
    """A book that cannot be used, and why. `name` is empty if there is no book yet."""

    def __init__(self, name: str, inode: int, why: str) -> None:
        super().__init__(name, inode, why)
        self.name, self.inode, self.why = name, inode, why


class Page(NamedTuple):
    """The book at a revision, and the file from which it was read.

    For a Redis, the name is the generation of the page, and the inode is 0.
    """

    name: str
    inode: int
    rev: int
    book: Book
    packed: pages.Packed = pages.EMPTY  # its bytes; unchanged parts are not encoded again


class Draft(NamedTuple):
    """A book that is about to be written over a page."""

    book: Book
    packed: pages.Packed
    body: bytes


class BookStore:
    """One owner's connection to the book, and its own file beside the book.

    There is one connection with one lock. The lock is held for single statements and never during a
    decision. A thread also holds the lock while it writes the roster, commits, and checks CURRENT
    (the link to the book in force). So no thread's roster overwrites the grant of another thread.
    """

    def __init__(
        self,
        directory: Path,
        boot: str,
        owner_file: OwnerFile,
        moved: Callable[[Path], None],
    ) -> None:
        """`directory` has the ledger's files of the boot with the id `boot`.

        `owner_file` is the owner's lock file. `moved(directory)` is called when the owner's files
        had to be made again in a new directory.
        """
        self.directory = directory
        self.boot = boot
        self.owner_file = owner_file
        self._moved = moved
        self._lock = threading.Lock()
        self._hint = RevisionHint(directory)
        self._connection: Any = None  # an open connection, or None
        self._page: Page | None = None  # as last read or written
        self._least_rev = 0  # the newest revision seen: a book below it is an old copy
        self._roster_doubtful = False  # whether the roster may differ from the book
        self._unfinished: Page | None = None  # the page before a write that has not succeeded yet
        self._ballast_dropped = False
        self._files_lost = False  # owners' files were deleted since the book was last written
        self._roster_frame = pages.EMPTY  # the facts of all owners in the roster, encoded
        self._agreed: tuple[object, ...] = (None, None, None)  # the values encoded in that frame

    @property
    def path(self) -> Path:
        """The file or directory of the book on this machine."""
        raise NotImplementedError

    def written(self) -> tuple[str, int, int] | None:
        """A value that changes with each write to the book; None while no value is reliable."""
        return None

    def glance(self) -> Page | None:
        """The page in memory; None if a newer page is known, or if an earlier write is unfinished.

        A decision on the page in memory saves a third of the cost of a write. If there is a newer
        page after all, the write fails. Without a write, only `look` notices the newer page.
        """
        with self._lock:
            page = self._page
            is_certain = not (self._roster_doubtful or self._unfinished or self._connection is None)
            if page is None or not is_certain or self._rev_seen_by_others(page) != page.rev:
                return None
            return page

    def look(self) -> Page:
        """The current page. Raises LostRace, DamagedBook, LedgerUnavailable."""
        try:
            return self._look()
        except GrantsClosed as closed:  # it had to take back an unfinished write
            self._wait_for_others(closed)
        except OSError as error:  # such as a directory that was closed to this user
            raise files.cannot_write(self.directory, error) from error

    def _look(self) -> Page:
        with self._lock:
            if self._page is None or self._connection is None or not self._in_force(self._page):
                self._open()
            assert self._page is not None  # `_open` has read one
            self._least_rev = max(self._least_rev, self._rev_seen_by_others(self._page))
            page = self._page = self._read(self._page)
            if self._unfinished is not None and self._unfinished.name != page.name:
                page = self._take_back(page, self._unfinished)
            if self._roster_doubtful:
                self._repair_roster(page)
            if self._unfinished is not None:
                # A process that rebuilds the book from now on finds the correct roster. If the book
                # was rebuilt before the roster was correct, `page` is no longer in force.
                finished = not self._roster_doubtful and self._in_force(page)
                self._unfinished = None if finished else page
            return page

    def is_behind(self, page: Page) -> bool:
        """Whether a process is known to have written the book since `page` was read."""
        return self._page is not page or self._rev_seen_by_others(page) > page.rev

    def put(self, page: Page, new: Book) -> None:
        """Writes the book `new` over the `page` on which it was decided.

        Raises LostRace, DamagedBook, LedgerRefused, LedgerUnavailable.
        """
        try:
            self._put(page, new)
        except GrantsClosed as closed:
            self._wait_for_others(closed)
        except OSError as error:
            raise files.cannot_write(self.directory, error) from error

    def _wait_for_others(self, closed: GrantsClosed) -> NoReturn:
        """Waits a moment, then raises LostRace.

        The lock is not held during the wait, so another thread can register this owner in the book.
        """
        sleep(min(closed.seconds, CLOSED_LOOK_SECONDS))
        raise LostRace from None

    def _put(self, page: Page, new: Book) -> None:
        if not self.owner_file.in_place():
            with self._lock:
                self._restore_own_files()
        if self.is_behind(page):  # a lost race costs less here than after the roster is written
            raise LostRace
        draft = self._draft(page, self._with_own_inode(new))
        with self._lock:
            if self._page is not page or self._connection is None:
                raise LostRace  # another thread of this process has written first
            try:
                self._commit(page, draft)
            except OSError as error:
                self._commit_without_ballast(page, draft, error)
        if self._ballast_dropped:
            self._ballast_dropped = not files.fill_ballast(self.directory)

    def mend(self, damage: DamagedBook, patience_seconds: float) -> None:
        """Replaces the damaged book (`damage`) by a new one, unless another process has done so.

        Waits at most `patience_seconds` for another process that is replacing the book. Raises
        LedgerUnavailable.
        """
        raise NotImplementedError

    def close(self, *, remove: bool) -> None:
        """Closes the connection and the owner's lock; `remove` also removes the lock file."""
        with self._lock:
            self._disconnect()
            self.owner_file.release(remove=remove)

    def leave_to_parent(self) -> None:
        """Makes sure that the connection is never used again; called in a forked child."""

    # The methods below are called with the lock held.

    def _in_force(self, page: Page) -> bool:
        """Whether `page` is still the page that all processes use."""
        raise NotImplementedError

    def _open(self) -> None:
        """Opens the book in force: sets `_connection`, `_page` and `_least_rev`.

        Raises DamagedBook.
        """
        raise NotImplementedError

    def _read(self, page: Page) -> Page:
        """The current page; `page` itself if it has not changed. Raises LostRace, DamagedBook."""
        raise NotImplementedError

    def _commit(self, page: Page, draft: Draft) -> None:
        """Writes the roster, then the page. Raises LostRace, DamagedBook, OSError."""
        raise NotImplementedError

    def _grants(self, page: Page, draft: Draft) -> bool:
        """Whether `draft` promises bytes to this owner that `page` does not promise."""
        me = self.owner_file.owner.id
        before, after = page.book.sections.get(me), draft.book.sections.get(me)
        if after is None or after is before:
            return False
        return bool(_promises(after) - (_promises(before) if before else set()))

    def _draft(self, page: Page, new: Book) -> Draft:
        """The draft for writing the book `new` over `page`.

        Raises LedgerRefused, which names the field, if other processes could not read the draft.
        """
        rev = page.rev + 1
        try:
            packed = pages.pack(new, page.packed, rev)
            packed, body = pages.body(packed, new.tickets, rev)
        except Unwritable as error:
            raise unwritable(error, str(self.path), self.owner_file.owner.id) from error
        return Draft(new, packed, body)

    def _unpacked(self, page: Page, body: bytes, rev: int, schema: int) -> Page:
        """A copy of `page` with the book from `body`, the bytes of the revision `rev`.

        Raises ValueError, TypeError, msgspec.MsgspecError if the content cannot be read.
        """
        if schema < SCHEMA:
            return page._replace(rev=rev, book=decode_older(body, rev), packed=pages.EMPTY)
        book, packed = pages.unpack(body, rev, page.packed, self._part_in_roster)
        return page._replace(rev=rev, book=book, packed=packed)

    def _part_in_roster(self, id: str, entry: bytes) -> pages.OwnerPart | None:
        """The part of the owner `id` that fits `entry`, from the owner's own file; or None."""
        for roster in rosters(owners_in(self.directory) / id):
            try:
                _, packed = pages.unpack(roster.payload, roster.rev)
            except UNREADABLE:  # try the other roster; without any, the part is quarantined
                continue
            part = packed.parts.get(id)
            if part and part.entry == entry and not part.quarantined:
                return part
        return None

    def _rev_seen_by_others(self, page: Page) -> int:
        """The newest revision of this book that any process has recorded; 0 if not known."""
        return self._hint.of(page.name)

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection:
            connection.close()

    def _commit_without_ballast(self, page: Page, draft: Draft, error: OSError) -> None:
        """Repeats a write that failed with `error`, after freeing the ballast (reserved disk space).

        The ballast is only for writes that release bytes, and only for a full disk. In any other
        case LedgerUnavailable is raised.
        """
        disk_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        if not disk_full or _claims_more(page.book, draft.book):
            raise files.cannot_write(self.path, error) from error
        self._ballast_dropped |= files.drop_ballast(self.directory)
        try:
            self._commit(page, draft)
        except OSError as again:
            raise files.cannot_write(self.path, again) from again

    def _take_back(self, page: Page, before: Page) -> Page:
        """Undoes a write of this owner in a rebuilt `page`; `before` is its last certain page.

        The book was rebuilt while a write of this owner had not succeeded. The roster had the write
        already, so the rebuilt book may have a grant from this write. Another owner may have a grant
        for the same bytes. So this owner's grant is removed before any thread decides on the new
        book. After LostRace, this method must be called again.
        """
        me = self.owner_file.owner.id
        restored = with_living(page.book, {me: part_of(before.book, me)})
        book = replace(
            page.book,
            sections=restored.sections,
            tickets=restored.tickets,
            quarantined=restored.quarantined,
        )
        if part_of(book, me) == part_of(page.book, me):
            return page
        try:
            self._commit(page, self._draft(page, book))
        except OSError as error:
            raise files.cannot_write(self.path, error) from error
        finally:
            self._unfinished = before
        assert self._page is not None
        return self._page

    def _part_changed(self, page: Page, draft: Draft) -> bool:
        """Whether `draft` changes something that this owner's roster contains."""
        me = self.owner_file.owner.id
        if draft.packed.parts.get(me) is not page.packed.parts.get(me):
            return True
        before, after = page.book, draft.book
        return (before.devices, before.limits, before.drained) != (
            after.devices,
            after.limits,
            after.drained,
        )

    def _write_roster(self, book: Book, packed: pages.Packed, rev: int) -> None:
        """Writes this owner's roster: its part of the book, and the facts that all owners share."""
        me = self.owner_file.owner.id
        agreed, frame = (book.devices, book.limits, book.drained), self._roster_frame
        if any(now is not last for now, last in zip(agreed, self._agreed, strict=True)):
            devices, limits, drained = self._agreed = agreed
            frame = pages.pack(Book(devices=devices, limits=limits, drained=drained), frame, rev)
        part = packed.parts.get(me)
        frame = frame._replace(parts={me: part} if part else {})
        tickets = part.tickets if part else ()
        self._roster_frame, payload = pages.body(frame, tickets, rev)
        self.owner_file.write_roster(payload, rev=rev, schema=SCHEMA)

    def _repair_roster(self, page: Page) -> None:
        try:
            self._write_roster(page.book, page.packed, page.rev)
            self._roster_doubtful = False
        except OSError:
            pass  # a full disk must not prevent reading; the next read tries again

    def _with_own_inode(self, book: Book) -> Book:
        """The `book` with the current inode of this owner's lock file, which can change."""
        owner = self.owner_file.owner
        section = book.sections.get(owner.id)
        if section is None or section.owner.inode == owner.inode:
            return book
        current = replace(section.owner, inode=owner.inode)
        return book.with_section(replace(section, owner=current))

    def _ensure_own_files(self) -> None:
        """Makes the directory, and this owner's lock, socket and roster, if they were deleted.

        Raises OSError.
        """
        files.prepare(self.directory)
        if self.owner_file.in_place():
            return
        self._restore_own_files()
        if self._page:  # the last known section of this owner
            page = self._page
            draft = self._draft(page, self._with_own_inode(page.book))
            self._write_roster(draft.book, draft.packed, page.rev)

    def _restore_own_files(self) -> None:
        """Makes this owner's deleted lock file and socket again. Raises LedgerUnavailable."""
        if self.owner_file.in_place():
            return  # another thread of this process has made them
        old = self.owner_file
        owners = owners_in(self.directory)
        files.prepare(self.directory)
        try:
            if life(old.path) is not Life.ALIVE:
                old.path.unlink(missing_ok=True)
            group = access_to(owners).group
            self.owner_file = OwnerFile(owners, replace(old.owner, inode=0), group)
            self._moved(owners)
        except OSError as error:
            raise files.cannot_write(owners, error) from error
        old.close_here()
        self._roster_doubtful = self._files_lost = True
        if self.owner_file.owner.id != old.owner.id:
            raise LedgerUnavailable(
                f"another process took this process's owner name in {owners}.\n"
                f"  Restart this kernel.",
                path=str(owners),
            )


def _promises(section: Section) -> set[tuple[str, Shares]]:
    """Names and targets of the section's leases that have a target: bytes granted and not used yet."""
    return {(lease.name, lease.target) for lease in section.leases if lease.target}


def closed_seconds(owners: int) -> float:
    """Seconds without grants after a book with this number of `owners` was made again."""
    return REGISTER_SECONDS * max(1.0, owners / TICKS_A_SECOND)


def boottime() -> float:
    """Seconds of CLOCK_BOOTTIME."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def unwritable(error: Unwritable, path: str, writer: str) -> LedgerRefused:
    """The error for a write whose result other processes could not read."""
    return LedgerRefused(
        f"the ledger {path} refused a write by {writer}: {error.why}.\n  The book is unchanged.",
        path=path,
        why=error.why,
        writer=writer,
    )


def _claims_more(old: Book, new: Book) -> bool:
    """Whether `new` claims more bytes on any device than `old`."""
    before = old.claims()
    return any(claimed > before.get(device, 0) for device, claimed in new.claims().items())
