"""The book of one host, in an SQLite file that all its processes share: no daemon, no server.

A write is read → decide → one autocommit `UPDATE … WHERE host=? AND rev=?` (bookfile.py); whoever loses the race
decides again. A book that is damaged, deleted or replaced is set aside, and rebuilt from its living owners
(mending.py).
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import msgspec

from ...errors import LedgerRefused, LedgerUnavailable
from ...facts import AllocatorMap, Book, Owner, Ticket, decode_book
from ..access import access_to
from ..allocator_files import MapFiles
from ..invariants import refuse_unlawful
from ..liveness import Life, OwnerFile, boot_id, describe_self, life, testimony
from ..notify import Doorbell
from . import files
from .backoff import Pace, processor_seconds
from .page import BookFile, Lost, Page
from .recovery import Damaged
from .writer_queue import Turnstile, turnstile_in

T = TypeVar("T")

MOST_LOST_INSIDE = 3  # races in a row, before who is inside the turnstile waits as others do


class SqliteLedger:
    """A door to the book in a directory. Each door is another owner."""

    _seen: tuple[tuple[str, int, int], Book] | None = (
        None  # when the book had been written, and what it said
    )

    def __init__(
        self, directory: Path, *, notebook: str = "", user: str = "", patience_seconds: float = 10.0
    ) -> None:
        self.url = f"sqlite://{directory}"
        self.patience_seconds = patience_seconds
        boot = boot_id()
        self.directory = Path(directory) / boot
        self._pace = Pace()
        files.prepare(self.directory)
        group = access_to(self.directory).group
        self._shared = group is not None
        try:
            file = OwnerFile(
                self.directory / "owners", describe_self(notebook=notebook, user=user), group
            )
        except OSError as error:
            raise files.cannot_write(self.directory, error) from error
        try:
            self._bell = Doorbell(self.directory / "owners", file.owner.id, group)
        except OSError as error:
            file.release(remove=True)
            raise files.cannot_write(self.directory, error) from error
        self._file = BookFile(self.directory, boot, file, moved=self._bell.move_to)
        self._turnstile = turnstile_in(self.directory)
        self._maps = MapFiles(self.directory / "owners", group)
        self._closed = False
        _doors.add(self)
        try:
            self.read()
        except BaseException:
            self._shut(remove=True)
            raise
        files.sweep_owners(self.directory, lambda: _owner_ids(self.read()))
        files.sweep_drafts(self.directory)
        files.sweep_boots(self.directory)
        files.fill_ballast(self.directory)

    @property
    def owner(self) -> Owner:
        return self._file.owner_file.owner

    @property
    def path(self) -> str:
        """The file that the book lies in now."""
        return str(self._file.path)

    def read(self) -> Book:
        """As last read, where nobody has written since: that takes two system calls, and idle kernels look often."""
        self._require_open()
        written, seen = self._file.written(), self._seen
        if written is not None and seen is not None and seen[0] == written:
            return seen[1]
        book = self._agree(lambda book: (book, book))
        self._seen = (written, book) if written is not None else None
        return book

    def transact(self, decide: Callable[[Book], tuple[Book, T]]) -> T:
        wait = self._pace.before(time.monotonic())
        if wait:
            time.sleep(wait)
        return self._agree(decide, paced=True)

    def _agree(self, decide: Callable[[Book], tuple[Book, T]], paced: bool = False) -> T:
        deadline = time.monotonic() + self.patience_seconds
        lost = 0
        turnstile: Turnstile | None = None
        try:
            while True:
                self._require_open()
                # At first without lining up: mostly nobody is there, and who lost has now in his caches what deciding
                # takes. Once inside we stay until it is written: the next attempt costs a third of the first.
                if paced and turnstile is None and (lost or self._pace.lines_up):
                    turnstile = self._at_our_turn()
                try:
                    began = processor_seconds()
                    page = self._file.look()
                    new, answer = decide(page.book)
                    if new is not page.book:
                        self._require_lawful(page, new)
                        if (
                            paced
                            and turnstile is None
                            and self._turnstile
                            and self._turnstile.held_up
                        ):
                            turnstile = self._at_our_turn()
                            if turnstile and self._file.is_behind(page):
                                continue
                        self._file.put(page, new)
                    if paced:
                        self._pace.ended(processor_seconds() - began, time.monotonic())
                    return answer
                except Lost:
                    pass
                except Damaged as damage:
                    self._file.mend(damage, self.patience_seconds)
                lost, now = lost + 1, time.monotonic()
                if now > deadline:
                    raise self._too_long()
                if turnstile:
                    turnstile.hold_up()
                # Who is inside and loses all the same is kept out by something else, such as a writer that is stopped.
                if lost > (MOST_LOST_INSIDE if turnstile else 1):
                    time.sleep(self._pace.lost(lost, now))
        finally:
            if turnstile:
                turnstile.leave(wake=not self._pace.goes_on)

    def _at_our_turn(self) -> Turnstile | None:
        """The turnstile, where others now wait for us to leave it; None where it was better not to wait for our
        turn."""
        turnstile = self._turnstile
        if turnstile is None or turnstile.try_enter():
            return turnstile
        self._pace.crowded(time.monotonic())
        return turnstile if turnstile.enter() else None

    def _require_lawful(self, page: Page, new: Book) -> None:
        """Raises LedgerRefused; but Lost where the page is no longer in force: somebody else may have reaped the same
        dead meanwhile, and the next to open a door has swept away the file that proved it."""
        try:
            refuse_unlawful(page.book, new, self.owner.id, self.dead, self.url)
        except LedgerRefused:
            if self._file.look() is not page:
                raise Lost from None
            raise

    def dead(self, book: Book) -> frozenset[str]:
        def is_dead(id: str) -> bool:
            owner = book.owner(id)
            # Who has a ticket only left no inode in the book; the name of the file, never used again, must do.
            return life(f"{self.directory}/owners/{id}", owner.inode if owner else 0) is Life.DEAD

        return frozenset(filter(is_dead, _owner_ids(book) - {self.owner.id}))

    def user_of(self, book: Book, owner_id: str, ticket: Ticket | None = None) -> str:
        """In a shared ledger anybody may write anything in the page, also in another's name. But an owner's own file
        only that user can write, and hold: what it does not bear out, its owner has not said."""
        owner = book.owner(owner_id)
        if not self._shared:
            return owner.user if owner else self.owner.user  # nobody else can have written
        told = testimony(self.directory / "owners" / owner_id, owner.inode if owner else 0)
        if told is None or (owner and owner.user != told.user):
            return ""
        try:
            part = decode_book(told.payload) if told.payload else Book()
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return ""
        if part.sections and owner_id not in part.sections:
            return ""  # an honest file under another's name
        if ticket and not _same_wish(part.ticket(ticket.key), ticket):
            return ""
        return told.user

    def ring(self, owners: Iterable[str]) -> None:
        if not self._closed and os.getpid() == self.owner.pid:
            self._bell.ring_others(owners)

    def wait(self, timeout: float, ends: Iterable[Owner] = ()) -> bool:
        self._require_open()
        return self._bell.wait(timeout, ends)

    def publish_maps(self, maps: tuple[AllocatorMap, ...]) -> None:
        self._require_open()
        self._maps.publish(self.owner.id, maps)

    def maps(self) -> dict[str, tuple[AllocatorMap, ...]]:
        self._require_open()
        return self._maps.read()

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
        self._maps.withdraw(self.owner.id)
        self._bell.close()
        self._turnstile = None
        self._file.close(remove=remove)

    def _require_open(self) -> None:
        if os.getpid() != self.owner.pid:
            raise LedgerUnavailable(
                f"the ledger {self.url} stayed in the parent (pid {self.owner.pid}) of this forked "
                f"process. Open another:  gpu_runtime.Runtime()",
                path=self.url,
            )
        if self._closed:
            raise LedgerUnavailable(
                f"the ledger {self.url} was closed. Open another:  gpu_runtime.Runtime()",
                path=self.url,
            )

    def _too_long(self) -> LedgerUnavailable:
        holders = [pid for pid in files.writers(Path(self.path)) if pid != os.getpid()]
        who = (
            f"pid {holders[0]} holds its lock; perhaps it is stopped"
            if holders
            else "too many write at once"
        )
        hint = (
            f"Let it go on:  kill -CONT {holders[0]}"
            if holders
            else "Try again, or see:  gpu leases"
        )
        return LedgerUnavailable(
            f"the ledger {self.path} could not be had for {self.patience_seconds:.0f} s: {who}.\n"
            f"  {hint}",
            path=self.path,
            holders=tuple(holders),
        )

    def _leave_to_parent(self) -> None:
        """In a forked child: the files are closed, the lock stands, the connection is never touched again."""
        self._bell.close_here()
        self._turnstile = None
        self._file.leave_to_parent()


_doors: weakref.WeakSet[SqliteLedger] = weakref.WeakSet()


def _leave_all_to_parent() -> None:
    for door in list(_doors):
        door._leave_to_parent()


os.register_at_fork(after_in_child=_leave_all_to_parent)


def _same_wish(said: Ticket | None, row: Ticket) -> bool:
    """Whether the row asks what its owner said; when it was last refreshed, and what stood in its way, is no wish."""
    return said is not None and (
        said.owner,
        said.verb,
        said.name,
        said.importance,
        said.recalls,
        said.places,
        said.said_by,
    ) == (row.owner, row.verb, row.name, row.importance, row.recalls, row.places, row.said_by)


def _owner_ids(book: Book) -> set[str]:
    return book.sections.keys() | {ticket.owner for ticket in book.tickets}
