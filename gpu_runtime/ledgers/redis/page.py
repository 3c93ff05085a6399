"""The page (stored book) of one host in a Redis: a hash that a script writes.

The script first compares the page's revision with the revision on which the writer decided.

A Redis can lose data that it acknowledged. The Redis can be flushed, restored from an older copy,
or restarted without the data of the last second. So every owner keeps its roster (a copy of its
part of the book) in a local file. Two things protect the page:

- The *generation* is a name that no page had before. A page that is made again has a new
  generation, and grants in the old page are void.
- The *script* must be loaded before any write, and a Redis forgets its scripts when it ends. An
  owner on this host first compares the page with the rosters of the living owners, and only
  afterwards loads the script. Until the script is loaded, nobody on this host can write.

The roster is written before the page. There is one connection with one lock. The lock is held for single commands and
never during a decision. A thread also holds it while it writes the roster and the page, so that no thread's roster
overwrites the grant of another thread.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from time import sleep
from typing import Any, NamedTuple, NoReturn

from msgspec.structs import replace
from redis.exceptions import NoScriptError, ResponseError

from ...errors import LedgerNewer, LedgerRefused, LedgerUnavailable
from ...facts import SCHEMA, Book, Section, Shares
from ...units import show_bytes
from .. import files, pages
from ..access import access_to, owners_in
from ..base import TICKS_A_SECOND
from ..decoding import UNREADABLE, decode_older, decode_roster
from ..liveness import Life, OwnerFile, life, read_roster, rosters
from ..page_parts import Unwritable, unwritable
from ..pages import encoded
from .book_parts import part_of, with_living
from .connection import Ask, RedisConnection
from .revision_hint import RevisionHint
from .scripts import (
    LOOK_OR_WRITE,
    MAKE,
    MARKER,
    MOST_BYTES,
    PAGE,
    SEEN_SECONDS,
    HostPage,
    Seen,
    all_pages,
    look_at,
)

log = logging.getLogger("gpu_runtime")

LivingParts = dict[
    str, tuple[int, Book]
]  # owner id -> revision of its roster, its part of the book


CLOSED_LOOK_SECONDS = 0.1  # between two checks whether grants are possible again
# Time for owners to register in a book that was made again. An owner's monitor thread reads the book
# once a second (less often with many owners), and registers the owner if it is missing.
REGISTER_SECONDS = 2.0


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


class RedisBook:
    """One owner's connection to the page of its host, and its own file in a local directory."""

    def __init__(
        self,
        server: RedisConnection,
        directory: Path,
        boot: str,
        owner_file: OwnerFile,
        moved: Callable[[Path], None],
    ) -> None:
        """Uses the connection `server`. `directory` has the owners' files of the boot with the id `boot`.

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
        self._roster_frame = pages.EMPTY  # the facts of all owners in the roster, encoded
        self._agreed: tuple[object, ...] = (None, None, None)  # the values encoded in that frame
        self._server = server
        self._key = PAGE + boot
        # Each owners' directory has a script of its own, which differs by its first line. If this
        # directory's script is loaded, an owner has compared the page with the rosters in this
        # directory. An owner in another directory cannot see these rosters.
        self._script = f"-- {boot} {os.stat(directory).st_ino}\n{LOOK_OR_WRITE}"
        self._sha = hashlib.sha1(self._script.encode(), usedforsecurity=False).hexdigest()
        self._vetted = (
            False  # whether the page was compared with the rosters since the Redis started
        )
        self._told_at = float("-inf")  # the time when this owner last marked the page as seen

    @property
    def path(self) -> Path:
        return self.directory

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
        """Makes the page again, unless another process has done so.

        `damage` and `patience_seconds` are not used: the page is read and compared with the rosters
        again. Raises LedgerUnavailable, LedgerNewer.
        """
        with self._lock:
            self._vetted = False
            try:
                self._ensure_own_files()
            except OSError as error:
                raise files.cannot_write(self.directory, error) from error
            self._server.converse(self._make)

    def ask(self, *words: str | bytes | int) -> Any:
        """The server's answer to one command. Raises LedgerUnavailable."""
        with self._lock:
            return self._server.converse(lambda ask: ask(*words))

    def read_all(self) -> tuple[HostPage, ...]:
        """The pages of all hosts that share this database."""
        with self._lock:
            return self._server.converse(all_pages)

    def close(self, *, remove: bool) -> None:
        """Closes the connection and the owner's lock; `remove` also removes the lock file."""
        with self._lock:
            self._disconnect()
            self.owner_file.release(remove=remove)
        self._server.close()

    # The methods below are called with the lock held.

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
        self._roster_doubtful = True
        if self.owner_file.owner.id != old.owner.id:
            raise LedgerUnavailable(
                f"another process took this process's owner name in {owners}.\n"
                f"  Restart this kernel.",
                path=str(owners),
            )

    def _in_force(self, page: Page) -> bool:
        return self._vetted

    # Comparing the page with the rosters

    def _open(self) -> None:
        """Reads the page. Raises DamagedBook if the page is damaged or missing.

        Raises LedgerUnavailable if this Redis is not set up to keep its data.
        """
        self._connection = None
        seen = self._server.converse(self._vet)
        self._vetted = True
        self._hint = RevisionHint(self.directory)  # a new object, as the directory may be a new one
        self._page = Page(seen.generation, 0, seen.rev, seen.book or Book())
        self._least_rev = seen.rev
        self._connection = self._server

    def _vet(self, ask: Ask) -> Seen:
        """The page, if it has every write that this owner and other living owners have seen.

        Also loads the script, so that this owner and others may write. Raises DamagedBook if the
        page lacks a write.
        """
        self._server.require_safe(ask)
        seen = self._look_at(ask)
        why = self._fault(seen, self._living())
        if why or seen is None:
            raise DamagedBook(self._page.name if self._page else "", 0, why)
        # The page was read on the same connection, so the Redis was not restarted since that read.
        ask("SCRIPT", "LOAD", self._script)
        return seen

    def _look_at(self, ask: Ask) -> Seen | None:
        try:
            return look_at(ask, self._key)
        except ResponseError as error:
            if "WRONGTYPE" not in str(error):
                raise
            raise self._foreign(f"its key {self._key} is no page of ours") from error

    def _fault(self, seen: Seen | None, living: LivingParts) -> str:
        """Why the page `seen` is damaged; empty if it is not.

        The page is damaged if it lacks a write that this owner or one of the `living` owners has
        seen. Raises LedgerNewer if a newer version of gpu-console wrote the page.
        """
        known = self._page
        if seen is None:
            return "it is gone" if known else "there is none yet"
        if seen.schema > SCHEMA:
            raise LedgerNewer(self._server.url, seen.schema, SCHEMA)
        if seen.book is None:
            return "its page cannot be read"
        # A roster is written before the page. So the last roster of an owner may be one revision
        # ahead, if the write of the page did not succeed.
        least = max((rev - 1 for rev, _ in living.values()), default=0)
        if known and known.name == seen.generation:
            least = max(least, self._least_rev)
        if seen.rev < least:
            return f"it is at revision {seen.rev}, and {least} has been seen"
        if known and known.name != seen.generation:
            # The page was made again, perhaps by an owner with another directory, which did not see
            # the rosters in this directory.
            with_section = {id for id, (_, part) in living.items() if part.sections}
            missing = with_section - seen.book.sections.keys()
            if missing:
                return f"{len(missing)} living owners are missing in it"
        return ""

    def _living(self) -> LivingParts:
        """The last roster of each living owner in this directory. Raises LedgerNewer."""
        found: LivingParts = {}
        for path in files.owner_files(self.directory):
            roster = read_roster(path) if life(path) is Life.ALIVE else None
            if roster is None:
                continue
            if roster.schema > SCHEMA:
                raise LedgerNewer(str(path), roster.schema, SCHEMA)
            try:
                found[path.name] = roster.rev, part_of(decode_roster(roster), path.name)
            except UNREADABLE:
                log.warning("the roster %s cannot be read; its owner will register again", path)
        return found

    # Making the page

    def _make(self, ask: Ask) -> None:
        """Makes a missing or damaged page, from its own content and the living owners' rosters.

        Does nothing if the page is not damaged any more.
        """
        seen, living = self._look_at(ask), self._living()
        why = self._fault(seen, living)
        if not why:
            return
        # The keys are counted before the marker is read. In the reverse order, another owner could
        # make the first page and the marker in between, and these keys would look foreign.
        keys, is_ours = ask("DBSIZE"), ask("EXISTS", MARKER)
        if seen is None and keys and not is_ours:
            raise self._foreign(f"it holds {keys} keys of something else, and no book")
        found_book = seen.book if seen else None
        parts = {id: part for id, (_, part) in living.items()}
        book = with_living(found_book or Book(), parts)
        roster_revs = (rev for rev, _ in living.values())
        rev = max([seen.rev if seen else 0, *roster_revs]) + 1
        any_roster = any(part.sections for _, part in living.values())
        known = seen is not None or self._page is not None or any_roster
        owners = book.owner_ids() | (self._page.book.owner_ids() if self._page else set())
        closed = closed_seconds(len(owners)) if known or not is_ours else 0.0
        made = ask(
            "EVAL",
            MAKE,
            3,
            self._key,
            MARKER,
            f"gpu-console:damaged:{self.boot}:{secrets.token_hex(4)}",
            *(seen.words if seen else ("", "")),
            secrets.token_hex(8),
            rev,
            SCHEMA,
            encoded(book, rev),
            str(closed),
            socket.gethostname(),
        )
        if made and known:
            self._log_made(why, book, closed)

    def _log_made(self, why: str, book: Book, closed: float) -> None:
        log.warning(
            "this host's page in the Redis %s was damaged (%s). Made again from %d living owners, "
            "%d leases; grants continue in %.0f s.",
            self._server.url,
            why,
            len(book.sections),
            sum(1 for _ in book.leases()),
            closed,
        )

    def _foreign(self, why: str) -> Exception:
        return self._server.unavailable(
            f"has a database that is not ours: {why}",
            "Name one of its own:  GPU_LEDGER=redis://HOST:PORT/DB",
        )

    # Reading and writing

    def _read(self, page: Page) -> Page:
        now = time.monotonic()
        mark_seen = now - self._told_at > SEEN_SECONDS
        mark = "seen" if mark_seen else ""
        what, *found = self._run("look", page.name, page.rev, mark)
        if mark_seen:
            self._told_at = now
        if what == b"same":
            self._require_new_enough(page, page.rev)
            return page
        if what == b"gone":
            raise DamagedBook(page.name, 0, "it is gone")
        if what == b"large":
            raise DamagedBook(page.name, 0, "it is too large")
        generation, rev, schema, body = found
        if generation.decode(errors="replace") != page.name:
            self._vetted = False  # the page was made again, so it must be compared with the rosters
            raise LostRace
        try:
            return self._decoded(page, int(rev), int(schema), body)
        except UNREADABLE as error:
            raise DamagedBook(page.name, 0, f"its page cannot be read ({error})") from error

    def _decoded(self, page: Page, rev: int, schema: int, body: bytes) -> Page:
        """A copy of `page` with the book from `body`: the bytes of the revision `rev`, format `schema`.

        Raises LedgerNewer, DamagedBook, or one of UNREADABLE.
        """
        if schema > SCHEMA:
            raise LedgerNewer(self._server.url, schema, SCHEMA)
        self._require_new_enough(page, rev)
        self._least_rev = rev
        return self._unpacked(page, body, rev, schema)

    def _require_new_enough(self, page: Page, rev: int) -> None:
        """Raises DamagedBook if `rev`, found in the Redis, is older than the known revision."""
        if rev < self._least_rev:
            why = f"it is at revision {rev}, and {self._least_rev} has been seen"
            raise DamagedBook(page.name, 0, why)

    def _commit(self, page: Page, draft: Draft) -> None:
        self._require_small(draft.body)
        part_changed = self._part_changed(page, draft)
        if part_changed:
            # The roster may differ from the page until the page is known to be written. The next
            # `look` repairs the roster.
            self._roster_doubtful = True
            self._unfinished = page
            self._write_roster(draft.book, draft.packed, page.rev + 1)
        grants = self._grants(page, draft)
        what, *seconds = self._run(
            "write",
            page.name,
            page.rev,
            page.rev + 1,
            secrets.token_hex(8),
            "yes" if grants else "",
            SCHEMA,
            draft.body,
        )
        if what == b"closed":
            raise GrantsClosed(float(seconds[0]))
        if what == b"gone":
            raise DamagedBook(page.name, 0, "it is gone")
        if what != b"written":
            raise LostRace
        self._page = page._replace(rev=page.rev + 1, book=draft.book, packed=draft.packed)
        self._least_rev = page.rev + 1
        self._hint.record(page.name, page.rev + 1)
        if part_changed:
            self._roster_doubtful = False
            self._unfinished = None

    def _require_small(self, body: bytes) -> None:
        """Raises LedgerRefused if the encoded page (`body`) is larger than MOST_BYTES."""
        if len(body) > MOST_BYTES:
            raise LedgerRefused(
                f"the ledger {self._server.url} takes pages of up to {show_bytes(MOST_BYTES)}, and this "
                f"one would have {show_bytes(len(body))}.\n  The book is unchanged.",
                path=self._server.url,
                why="too large",
                writer=self.owner_file.owner.id,
            )

    def _run(self, *words: str | bytes | int) -> list[Any]:
        """The script's answer to the arguments `words`.

        Raises LostRace if the Redis does not have the script any more, as after a restart.
        """

        def talk(ask: Ask) -> list[Any]:
            """Runs the script with one command."""
            try:
                return ask("EVALSHA", self._sha, 1, self._key, *words)
            except NoScriptError:
                self._vetted = False
                raise LostRace from None

        return self._server.converse(talk)


def _promises(section: Section) -> set[tuple[str, Shares]]:
    """Names and targets of the section's leases that have a target: bytes granted and not used yet."""
    return {(lease.name, lease.target) for lease in section.leases if lease.target}


def closed_seconds(owners: int) -> float:
    """Seconds without grants after a book with this number of `owners` was made again."""
    return REGISTER_SECONDS * max(1.0, owners / TICKS_A_SECOND)


def _claims_more(old: Book, new: Book) -> bool:
    """Whether `new` claims more bytes on any device than `old`."""
    before = old.claims()
    return any(claimed > before.get(device, 0) for device, claimed in new.claims().items())
