"""The code that the SQLite ledger and the Redis ledger share.

The shared code is the loop that reads, decides and writes, and the handling of an owner's files.
The `BookStore` (book_store.py) reads and writes the page (the stored book). In both ledgers, an
owner's own files are local: its lock file, its doorbell (the socket that wakes the owner), and its
maps, names and answers.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from ..errors import LedgerRefused, LedgerUnavailable
from ..facts import UNDECLARED, AllocatorMap, Book, Declared, Holdings, Owner, Ticket
from .access import access_to, owners_in
from .allocator_files import MapFiles
from .answer_files import AnswerFiles
from .base import require_usable
from .book_store import BookStore, DamagedBook, LostRace, Page
from .decoding import UNREADABLE, decode_roster
from .invariants import refuse_unlawful
from .liveness import Life, OwnerFile, Sight, life, life_of, sight_of, testimony
from .name_files import NameFiles
from .notify import Doorbell
from .sqlite import files
from .sqlite.backoff import Pace
from .sqlite.writer_queue import WriterQueue, writer_queue_in

T = TypeVar("T")

# A process with the turn (the right to write first) may lose this many races in a row. After more
# losses, the process waits as the other processes do.
MOST_LOST_INSIDE = 3


class SharedLedger:
    """One owner's access to a book that several processes share.

    Each ledger object is a separate owner. The methods follow the protocol in base.py. A subclass
    defines where the page is kept.
    """

    # The stamp of the book when it was last read, and that book.
    _seen: tuple[tuple[str, int, int], Book] | None = None
    _declared_dead: frozenset[str] = frozenset()

    def __init__(self, url: str, directory: Path, me: Owner, patience_seconds: float) -> None:
        """Opens the book in `directory` (the ledger's files of this boot) for the new owner `me`.

        `url` is shown to users, so it must not contain a password. A read or write fails after
        `patience_seconds`. Raises LedgerUnavailable.
        """
        self.url = url
        self.patience_seconds = patience_seconds
        self.directory = directory
        self._pace = Pace()
        files.prepare(directory)
        group = access_to(directory).group
        self._is_group_shared = group is not None
        owners = owners_in(directory)
        try:
            owner_file = OwnerFile(owners, me, group)
        except OSError as error:
            raise files.cannot_write(directory, error) from error
        try:
            self._bell = Doorbell(owners, owner_file.owner.id, group)
        except OSError as error:
            owner_file.release(remove=True)
            raise files.cannot_write(directory, error) from error
        self._store = self._make_store(owner_file)
        self._queue = writer_queue_in(directory)
        self._maps = MapFiles(owners, group)
        self._names = NameFiles(owners, group)
        self._answers = AnswerFiles(owners, group)
        self._closed = False
        _open_ledgers.add(self)
        try:
            self.read()
        except BaseException:
            self._shut(remove=True)
            raise
        files.sweep_owners(directory, lambda: self.read().owner_ids())
        files.sweep_drafts(directory)
        files.sweep_boots(directory)
        files.fill_ballast(directory)

    def _make_store(self, owner_file: OwnerFile) -> BookStore:
        """The connection to the page, for the owner that holds `owner_file`."""
        raise NotImplementedError

    def _timed_out(self) -> LedgerUnavailable:
        """The error after `patience_seconds` without success."""
        raise NotImplementedError

    @property
    def owner(self) -> Owner:
        """The owner whose section and tickets this ledger writes."""
        return self._store.owner_file.owner

    # Reading and writing

    def read(self) -> Book:
        """The current book. Raises LedgerUnavailable.

        Idle kernels call `read` often, so it has to be fast. With SQLite, two system calls find out
        that the book is unchanged, and nothing is read.
        """
        self._require_open()
        written, seen = self._store.written(), self._seen
        if written is not None and seen is not None and seen[0] == written:
            return seen[1]
        book = self._decide_until_written(lambda book: (book, book))
        self._seen = (written, book) if written is not None else None
        return book

    def transact(self, decide: Callable[[Book], tuple[Book, T]]) -> T:
        """Writes the book that `decide` returns, and returns the second value of `decide`.

        See base.py. Raises LedgerUnavailable, LedgerRefused.
        """
        wait = self._pace.before(time.monotonic())
        if wait:
            time.sleep(wait)
        return self._decide_until_written(decide, paced=True)

    def _decide_until_written(
        self,
        decide: Callable[[Book], tuple[Book, T]],
        paced: bool = False,
    ) -> T:
        """Repeats `decide` until the returned book is written. Returns the second returned value.

        `paced` is True for a write, which may have to queue, and False for a read.
        """
        deadline = time.monotonic() + self.patience_seconds
        races_lost = 0
        may_glance = paced
        turn: WriterQueue | None = None  # the queue, while this process has the turn
        try:
            while True:
                self._require_open()
                # If few processes write, the first attempt does not queue, so this process can read
                # and decide while another one writes. If many write, most such attempts are lost. A
                # process that has the turn keeps it until its book is written.
                if (
                    paced
                    and turn is None
                    and (races_lost or self._pace.is_crowded(time.monotonic()))
                ):
                    turn = self._wait_for_turn()
                began = time.monotonic()
                try:
                    known = self._store.glance() if may_glance else None
                    may_glance = False
                    page = known or self._store.look()
                    # The book also changes while a process reads all of it.
                    if not (known or turn) and self._store.is_behind(page):
                        page = self._store.look()
                    new, answer = decide(page.book)
                    if new is page.book and known and self._store.look() is not known:
                        continue  # the decision was made on an older page
                    if new is not page.book:
                        self._require_lawful(page, new)
                        if paced and turn is None and self._others_must_queue():
                            turn = self._wait_for_turn()
                            if turn and self._store.is_behind(page):
                                continue
                        self._store.put(page, new)
                    if paced:
                        now = time.monotonic()
                        self._pace.note_end(now - began, now)
                    return answer
                except LostRace:
                    pass  # decide again
                except DamagedBook as damage:
                    self._store.mend(damage, self.patience_seconds)
                races_lost += 1
                self._pause_after_loss(races_lost, turn, deadline)
        finally:
            if turn:
                turn.leave(continues=self._pace.will_continue)

    def _others_must_queue(self) -> bool:
        return bool(self._queue and self._queue.must_queue)

    def _wait_for_turn(self) -> WriterQueue | None:
        """The queue if this process now has the turn; None if it must write without the turn."""
        queue = self._queue
        if queue is None or (self._pace.continues and queue.try_enter()):
            return queue
        self._pace.note_contention(time.monotonic())
        return queue if queue.enter() else None

    def _pause_after_loss(self, races_lost: int, turn: WriterQueue | None, deadline: float) -> None:
        """Sleeps before the next attempt, if more than a few races were lost. Raises the time-out error.

        `turn` is the queue if this process has the turn. If this process loses a race in its turn,
        all other processes must queue until the turn ends.
        """
        now = time.monotonic()
        if now > deadline:
            raise self._timed_out()
        if turn:
            turn.require_queue()
        # If a process with the turn loses a race, something else prevents its write, such as a
        # stopped writer.
        free_losses = MOST_LOST_INSIDE if turn else 1
        if races_lost > free_losses:
            pause = turn.pause if turn else time.sleep
            pause(self._pace.after_loss(races_lost, now))

    def _require_lawful(self, page: Page, new: Book) -> None:
        """Raises LedgerRefused if `new` breaks a law; LostRace instead if `page` is out of date.

        With an old page, a lawful removal of a dead owner can look unlawful: perhaps another
        process has already removed the owner, and the file that proved the death.
        """
        try:
            refuse_unlawful(page.book, new, self.owner.id, self.dead, self.url)
        except LedgerRefused:
            if self._store.look() is not page:
                raise LostRace from None
            raise

    # Other owners

    def dead(self, book: Book) -> frozenset[str]:
        """Ids of the owners in `book` that are proven dead or were declared dead."""
        others = book.owner_ids() - {self.owner.id}
        return frozenset(id for id in others if self._life(book, id) is Life.DEAD)

    def unknown(self, book: Book) -> frozenset[str]:
        """Ids of the owners in `book` that are proven neither dead nor alive."""
        others = book.owner_ids() - {self.owner.id}
        return frozenset(id for id in others if self._life(book, id) is Life.UNKNOWN)

    def _life(self, book: Book, id: str) -> Life:
        path = self._lock_file(id)
        owner = book.owner(id)
        # The book does not describe an owner that has only a ticket. Its lock file is identified by
        # its name alone, without the inode. That is enough, because a name is never used again.
        found = life_of(owner, path) if owner else life(path)
        return Life.DEAD if found is Life.UNKNOWN and id in self._declared_dead else found

    def sights(self, book: Book, owners: Iterable[str] | None = None) -> dict[str, Sight]:
        """The present state of the owners' processes, by owner id. See base.py."""
        wanted = book.sections.keys() if owners is None else book.sections.keys() & set(owners)
        found = {}
        for id in wanted:
            owner = book.sections[id].owner
            is_mine = id == self.owner.id
            found[id] = Sight.ALIVE if is_mine else sight_of(owner, self._lock_file(id))
        return found

    def give_sign(self) -> None:
        """Notes that this owner lives and runs. See base.py."""
        self._store.owner_file.sign()

    def silences(self, book: Book) -> dict[str, float]:
        """The seconds since the last sign of each owner, by owner id. See base.py."""
        found, now = {}, time.time()
        for id in book.sections:
            with contextlib.suppress(OSError):  # the owner has just ended
                found[id] = now - os.stat(self._lock_file(id)).st_mtime
        return found

    def declare_dead(self, owners: Iterable[str]) -> None:
        """Makes `dead` return these `owners` (ids), unless they are proven alive."""
        self._declared_dead = self._declared_dead.union(owners)

    @property
    def _owners(self) -> Path:
        """The directory of all owners' files."""
        return self._store.owner_file.path.parent

    def _lock_file(self, id: str) -> str:
        return f"{self._owners}/{id}"

    def user_of(self, book: Book, owner_id: str, ticket: Ticket | None = None) -> str:
        """The user of the owner `owner_id` in `book`; empty if the user or `ticket` is not proven.

        In a shared ledger, any member may write anything into the page, even in another user's
        name. But only an owner's user can write and lock the owner's file. So a request counts only
        if the owner's file contains the request.
        """
        owner = book.owner(owner_id)
        if not self._is_group_shared:
            return owner.user if owner else self.owner.user  # a private ledger has only one user
        inode = owner.inode if owner else 0
        proof = testimony(self._owners / owner_id, inode)
        if proof is None:
            return ""
        if owner and owner.user != proof.user:
            return ""
        try:
            part = decode_roster(proof.roster) if proof.roster else Book()
        except UNREADABLE:  # a damaged roster proves nothing
            return ""
        if part.sections and owner_id not in part.sections:
            return ""  # another owner's file under this name
        if ticket and not _same_request(part.ticket(ticket.key), ticket):
            return ""
        return proof.user

    def ring(self, owners: Iterable[str]) -> None:
        """Wakes the owners with these ids (`owners`). Never fails."""
        if not self._closed and os.getpid() == self.owner.pid:
            self._bell.ring_others(owners)

    def wait(self, timeout: float, ends: Iterable[Owner] = ()) -> bool:
        """Returns True on a notification, or when the process of an owner in `ends` ends.

        Returns False after `timeout` seconds.
        """
        self._require_open()
        return self._bell.wait(timeout, ends)

    def publish_maps(self, maps: tuple[AllocatorMap, ...]) -> None:
        """Replaces this owner's allocator `maps`. Raises OSError."""
        self._require_open()
        self._maps.publish(self.owner.id, maps)

    def maps(self) -> dict[str, tuple[AllocatorMap, ...]]:
        """The allocator maps of the living owners, by owner id."""
        self._require_open()
        return self._maps.read()

    def add_name(self, name: str, declared: Declared = UNDECLARED) -> None:
        """Adds one model to the list of models that this owner can load. Raises OSError."""
        self._require_open()
        self._names.add(self.owner.id, name, declared)

    def publish_names(self, names: Mapping[str, Declared]) -> None:
        """Makes `names` the list of models that this owner can load. Raises OSError."""
        self._require_open()
        self._names.publish(self.owner.id, names)

    def names(self) -> dict[str, dict[str, Declared]]:
        """The models that each living owner can load, by owner id."""
        self._require_open()
        return self._names.read()

    def publish_answer(self, asker: str, answer: Holdings, *, private: bool) -> None:
        """Stores this owner's `answer` to the owner `asker`. Raises OSError."""
        self._require_open()
        self._answers.publish(self.owner.id, asker, answer, private=private)

    def answer(self, owner_id: str) -> Holdings | None:
        """The last answer of the owner `owner_id` to this owner; None if there is none to read."""
        self._require_open()
        return self._answers.read(owner_id, self.owner.id)

    # Closing

    def close(self) -> None:
        """Releases the owner's lock and doorbell, and removes its maps, names and answers.

        The lock file remains if the book still has a section or ticket of the owner: an unlocked
        file proves the owner's death.
        """
        if self._closed or os.getpid() != self.owner.pid:
            return
        try:
            gone = self.owner.id not in self.read().owner_ids()
        except LedgerUnavailable:  # the next owner that opens the ledger removes the file
            gone = False
        self._shut(remove=gone)

    def _shut(self, *, remove: bool) -> None:
        self._closed = True
        self._maps.withdraw(self.owner.id)
        self._names.withdraw(self.owner.id)
        self._answers.withdraw(self.owner.id)
        self._bell.close()
        self._queue = None
        self._store.close(remove=remove)

    def _require_open(self) -> None:
        require_usable(self.url, self.owner, not self._closed)

    def _leave_to_parent(self) -> None:
        """Closes the descriptors in a forked child. The parent keeps its lock.

        The child never uses the connection to the book again.
        """
        self._bell.close_here()
        if self._queue:
            self._queue.close_here()
        self._queue = None
        self._store.leave_to_parent()


_open_ledgers: weakref.WeakSet[SharedLedger] = weakref.WeakSet()


def _leave_all_to_parent() -> None:
    for ledger in list(_open_ledgers):
        ledger._leave_to_parent()


os.register_at_fork(after_in_child=_leave_all_to_parent)


def _same_request(confirmed: Ticket | None, ticket: Ticket) -> bool:
    """Whether `ticket` requests the same as `confirmed`.

    `confirmed` is the ticket with the same key in the owner's own file; None without such a ticket.
    Only fields that decide what is done are compared. For example, the time of the last refresh is
    not compared.
    """
    if confirmed is None:
        return False
    fields = ("owner", "verb", "name", "importance", "recalls", "shadows", "places", "said_by")
    return all(getattr(confirmed, field) == getattr(ticket, field) for field in fields)
