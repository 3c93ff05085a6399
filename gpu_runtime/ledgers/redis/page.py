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

The roster is written before the page. Only a write that releases bytes goes on if the disk is too
full for the roster, because a roster that claims too much is safe. There is one connection with one
lock. The lock is held for single commands and never during a decision. A thread also holds it while
it writes the roster and the page, so that no thread's roster overwrites the grant of another thread.

An old copy of the page may replace the page, for example from a backup. The copy is a valid page, and
bytes that it shows as free are granted already. So the script keeps the newest revision under a key of
its own, and refuses a page that is older.
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
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from time import sleep
from typing import Any, NamedTuple, NoReturn

from msgspec.structs import replace
from redis.exceptions import NoScriptError, ResponseError

from ...errors import LedgerNewer, LedgerRefused, LedgerUnavailable
from ...facts import SCHEMA, Book, Section, Shares, Ticket
from ...units import show_bytes
from .. import access
from ..access import access_to, owners_in
from ..base import TICKS_A_SECOND
from ..liveness import Life, OwnerFile, Roster, life, read_roster
from ..pieces import (
    SHARED,
    STATE,
    Part,
    Piece,
    Pieces,
    Shared,
    State,
    Unwritable,
    decode_shared,
    encode,
    encoded_change,
    refused,
    require_readable,
    sealed,
    with_events,
)
from .connection import (
    LOOK_OR_WRITE,
    MAKE,
    MARKER,
    MOST_BYTES,
    NEWEST,
    NOT_A_PAGE,
    PAGE,
    SEEN_SECONDS,
    Ask,
    HostPage,
    Page,
    RedisConnection,
    Seen,
    all_pages,
    has_foreign_key,
    look_at,
    page_in,
)

log = logging.getLogger("gpu_runtime")


class Living(NamedTuple):
    """What the roster of a living owner has: its revision, the owner's part, the facts of all owners."""

    rev: int
    part: Part
    shared: Shared


CLOSED_LOOK_SECONDS = 0.1  # between two checks whether grants are possible again
# Time for owners to register in a book that was made again. An owner's monitor thread reads the book
# once a second (less often with many owners), and registers the owner if it is missing.
REGISTER_SECONDS = 2.0
OLDER_SECONDS = 120.0  # an owner of version 0.2 marks the page as seen once a minute


class LostRace(Exception):
    """Another process has written, is writing, or has made a new book. Read the book again."""


class GrantsClosed(Exception):
    """The page was made again a moment ago. Nothing is granted for `seconds` from now."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds


class DamagedBook(Exception):
    """Raised for a book that cannot be used, or is missing. The argument is the reason."""


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
        self._connection: Any = None  # an open connection, or None
        self._page: Page | None = None  # as last read or written
        self._least_rev = 0  # the newest revision seen: a book below it is an old copy
        self._roster_doubtful = False  # whether the roster may differ from the book
        self._unfinished: Page | None = None  # the page before a write that has not succeeded yet
        self._server = server
        self._key, self._newest = PAGE + boot, NEWEST + boot
        # Each owners' directory has a script of its own, which differs by its first line. If this
        # directory's script is loaded, an owner has compared the page with the rosters in this
        # directory. An owner in another directory cannot see these rosters.
        self._script = f"-- {boot} {os.stat(directory).st_ino}\n{LOOK_OR_WRITE}"
        self._sha = hashlib.sha1(self._script.encode(), usedforsecurity=False).hexdigest()
        # Whether the page was compared with the rosters since the Redis started.
        self._vetted = False
        self._told_at = float("-inf")  # the time when this owner last marked the page as seen

    def look(self) -> Page:
        """The current page. Raises LostRace, DamagedBook, LedgerUnavailable."""
        try:
            return self._look()
        except GrantsClosed as closed:  # it had to take back an unfinished write
            self._wait_for_others(closed)
        except OSError as error:  # such as a directory that was closed to this user
            raise access.cannot_write(self.directory, error) from error

    def _look(self) -> Page:
        with self._lock:
            if self._page is None or self._connection is None or not self._vetted:
                self._open()
            assert self._page is not None  # `_open` has read one
            self._page = page = self._read(self._page)
            if self._unfinished is not None and self._unfinished.name != page.name:
                page = self._take_back(page, self._unfinished)
            if self._roster_doubtful:
                self._repair_roster(page)
            if self._unfinished is not None:
                # A process that rebuilds the book from now on finds the correct roster. If the book
                # was rebuilt before the roster was correct, `page` is no longer in force.
                finished = not self._roster_doubtful and self._vetted
                self._unfinished = None if finished else page
            return page

    def put(self, page: Page, new: Book) -> None:
        """Writes the book `new` over the `page` on which it was decided.

        Raises LostRace, DamagedBook, LedgerRefused, LedgerUnavailable.
        """
        try:
            self._put(page, new)
        except GrantsClosed as closed:
            self._wait_for_others(closed)
        except OSError as error:
            raise access.cannot_write(self.directory, error) from error

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
        after = self._draft(page, self._with_own_inode(new))
        with self._lock:
            if self._page is not page or self._connection is None:
                raise LostRace  # another thread of this process has written first
            self._commit(page, after)

    def mend(self) -> None:
        """Makes the page again, unless another process has done so.

        Raises LedgerUnavailable, LedgerNewer.
        """
        with self._lock:
            self._vetted = False
            try:
                self._ensure_own_files()
            except OSError as error:
                raise access.cannot_write(self.directory, error) from error
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

    def _grants(self, page: Page, after: Page) -> bool:
        """Whether the page `after` promises bytes to this owner that `page` does not promise."""
        me = self.owner_file.owner.id
        before, now = page.book.sections.get(me), after.book.sections.get(me)
        if now is None or now is before:
            return False
        return bool(_promises(now) - (_promises(before) if before else set()))

    def _draft(self, page: Page, new: Book) -> Page:
        """The page after `page`, with the book `new`.

        Raises LedgerRefused, which names the field, if other processes could not read it.
        """
        me, rev, known = self.owner_file.owner.id, page.rev + 1, page.pieces
        owners = new.owner_ids()
        parts = {id: part for id, part in known.parts.items() if id in owners}
        kept = owners | {SHARED, STATE}
        raw = {SHARED: _NO_FACTS, STATE: _NO_STATE}
        raw |= {key: piece for key, piece in page.raw.items() if key in kept}
        shared, state = known.shared, known.state
        try:
            part, fields = encoded_change(page.book, new, me, before=raw[SHARED].content)
            same = me in raw and raw[me].content == part
            if "events" in fields:
                fields["shared"] = with_events(raw[SHARED].content, fields["events"])
            if not same or "shared" in fields:
                require_readable(part, fields)
        except Unwritable as error:
            raise refused(str(self.directory), me, str(error)) from error
        if "shared" in fields:
            raw[SHARED] = Piece.of(rev, bytes(fields["shared"]))
            shared = decode_shared(fields["shared"])
        if "queue" in fields:
            state = State({}, (), fields["queue"])
            raw[STATE] = Piece.of(rev, encode(state))
        if me in owners:
            tickets = tuple([ticket for ticket in new.tickets if ticket.owner == me])
            parts[me] = Part(new.sections.get(me), tickets)
            if not same:
                raw[me] = Piece.of(rev, part)
        drafted = Pieces()
        drafted.put(rev, parts, shared, state, new)
        return Page(page.name, rev, drafted, raw)

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection:
            connection.close()

    def _take_back(self, page: Page, before: Page) -> Page:
        """Undoes a write of this owner in a rebuilt `page`; `before` is its last certain page.

        The book was rebuilt while a write of this owner had not succeeded. The roster had the write
        already, so the rebuilt book may have a grant from this write. Another owner may have a grant
        for the same bytes. So this owner's grant is removed before any thread decides on the new
        book. After LostRace, this method must be called again.
        """
        me = self.owner_file.owner.id
        then, sections = before.book, dict(page.book.sections)
        sections.pop(me, None)
        if me in then.sections:
            sections[me] = then.sections[me]
        mine = [ticket for ticket in then.tickets if ticket.owner == me]
        if sections == page.book.sections and mine == [
            ticket for ticket in page.book.tickets if ticket.owner == me
        ]:
            return page
        others = [ticket for ticket in page.book.tickets if ticket.owner != me]
        book = replace(page.book, sections=sections, tickets=in_order([*others, *mine]))
        try:
            self._commit(page, self._draft(page, book))
        except OSError as error:
            raise access.cannot_write(self.directory, error) from error
        finally:
            self._unfinished = before
        assert self._page is not None
        return self._page

    def _part_changed(self, page: Page, after: Page) -> bool:
        """Whether the page `after` has another roster of this owner than `page`."""
        me = self.owner_file.owner.id
        return after.raw.get(me) is not page.raw.get(me) or _agreed(page.book) != _agreed(
            after.book
        )

    def _write_roster(self, page: Page) -> None:
        """Writes this owner's roster: its part of the `page`, and the facts that all owners share."""
        me, (devices, limits, drained) = self.owner_file.owner.id, _agreed(page.book)
        shared = Shared(devices=devices, limits=limits, drained=drained)
        mine = {SHARED: Piece.of(page.rev, encode(shared))}
        if me in page.raw:
            mine[me] = page.raw[me]
        self.owner_file.write_roster(sealed(page.rev, mine), rev=page.rev, schema=SCHEMA)

    def _repair_roster(self, page: Page) -> None:
        try:
            self._write_roster(page)
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
        access.prepare(self.directory)
        if self.owner_file.in_place():
            return
        self._restore_own_files()
        if self._page:  # the last known section of this owner
            page = self._page
            after = self._draft(page, self._with_own_inode(page.book))
            self._write_roster(after._replace(rev=page.rev))

    def _restore_own_files(self) -> None:
        """Makes this owner's deleted lock file and socket again. Raises LedgerUnavailable."""
        if self.owner_file.in_place():
            return  # another thread of this process has made them
        old = self.owner_file
        owners = owners_in(self.directory)
        access.prepare(self.directory)
        try:
            if life(old.path) is not Life.ALIVE:
                old.path.unlink(missing_ok=True)
            group = access_to(owners).group
            self.owner_file = OwnerFile(owners, replace(old.owner, inode=0), group)
            self._moved(owners)
        except OSError as error:
            raise access.cannot_write(owners, error) from error
        old.close_here()
        self._roster_doubtful = True
        if self.owner_file.owner.id != old.owner.id:
            raise LedgerUnavailable(
                f"another process took this process's owner name in {owners}.\n"
                f"  Restart this kernel.",
                path=str(owners),
            )

    # Comparing the page with the rosters

    def _open(self) -> None:
        """Reads the page. Raises DamagedBook if the page is damaged or missing.

        Raises LedgerUnavailable if this Redis is not set up to keep its data.
        """
        self._connection = None
        seen = self._server.converse(self._vet)
        self._vetted = True
        assert seen.page is not None  # `_fault` has checked it
        self._page = seen.page
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
            raise DamagedBook(why)
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

    def _fault(self, seen: Seen | None, living: Mapping[str, Living]) -> str:
        """Why the page `seen` is damaged; empty if it is not.

        The page is damaged if it lacks a write that this owner or one of the `living` owners has
        seen. Raises LedgerNewer if a newer version of gpu-console wrote the page.
        """
        known = self._page
        if seen is None:
            return "it is gone" if known else "there is none yet"
        if seen.schema > SCHEMA:
            raise LedgerNewer(self._server.url, seen.schema, SCHEMA)
        if seen.page is None:
            return "its page cannot be read"
        # A roster is written before the page. So the last roster of an owner may be one revision
        # ahead, if the write of the page did not succeed.
        least = max((roster.rev - 1 for roster in living.values()), default=0)
        if known and known.name == seen.generation:
            least = max(least, self._least_rev)
        if seen.rev < least:
            return f"it is at revision {seen.rev}, and {least} has been seen"
        if known and known.name != seen.generation:
            # The page was made again, perhaps by an owner with another directory, which did not see
            # the rosters in this directory.
            with_section = {id for id, roster in living.items() if roster.part.section is not None}
            missing = with_section - seen.page.book.sections.keys()
            if missing:
                return f"{len(missing)} living owners are missing in it"
        return ""

    def _living(self) -> dict[str, Living]:
        """The last roster of each living owner in this directory.

        Raises LedgerNewer, and LedgerUnavailable for an owner of an older version, or whose roster
        cannot be read: nothing is granted while bytes of a living owner are unknown.
        """
        found: dict[str, Living] = {}
        for path in access.owner_files(self.directory):
            roster = read_roster(path) if life(path) is Life.ALIVE else None
            if roster is None:
                continue
            if roster.schema > SCHEMA:
                raise LedgerNewer(str(path), roster.schema, SCHEMA)
            pid = path.name.partition(".")[0]
            if roster.schema < SCHEMA:
                raise self._older(f"pid {pid}")
            try:
                found[path.name] = in_roster(roster, path.name)
            except NOT_A_PAGE:
                raise self._server.unavailable(
                    f"cannot be used: the file of pid {pid}, {path}, cannot be read",
                    f"Restart that notebook, or end it:  kill {pid}",
                ) from None
        return found

    def _older(self, who: str) -> Exception:
        return self._server.unavailable(
            f"has a book of an older version of gpu-console, used by {who}",
            "Restart the notebooks that use it with this version. The book can be used two minutes later",
        )

    # Making the page

    def _make(self, ask: Ask) -> None:
        """Makes a missing or damaged page, from its own content and the living owners' rosters.

        Does nothing if the page is not damaged any more.
        """
        seen, living = self._look_at(ask), self._living()
        why = self._fault(seen, living)
        if not why:
            return
        # A Redis that lost its data may have a key of ours and no marker: what an owner keeps beside the book.
        is_ours = ask("EXISTS", MARKER)
        if seen is None and not is_ours and has_foreign_key(ask):
            raise self._foreign("it holds keys of something else, and no book")
        if seen is not None and seen.schema < SCHEMA and seen.seen_seconds < OLDER_SECONDS:
            raise self._older("a process in the last two minutes")
        page = seen.page if seen else None
        pieces = rebuilt(page.pieces if page else Pieces(), living)
        rev = max([seen.rev if seen else 0, *(roster.rev for roster in living.values())]) + 1
        any_roster = any(roster.part.section is not None for roster in living.values())
        known = seen is not None or self._page is not None or any_roster
        owners = pieces.book.owner_ids() | (self._page.book.owner_ids() if self._page else set())
        closed = closed_seconds(len(owners)) if known or not is_ours else 0.0
        contents = {id: encode(part) for id, part in pieces.parts.items()}
        contents |= {SHARED: encode(pieces.shared), STATE: encode(pieces.state)}
        raw = {key: Piece.of(rev, content) for key, content in contents.items()}
        made = ask(
            "EVAL",
            MAKE,
            4,
            self._key,
            self._newest,
            MARKER,
            f"gpu-console:damaged:{self.boot}:{secrets.token_hex(4)}",
            *(seen.words if seen else ("", "")),
            secrets.token_hex(8),
            rev,
            SCHEMA,
            sealed(rev, raw),
            str(closed),
            socket.gethostname(),
        )
        if made and known:
            self._log_made(why, pieces.book, closed)

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
        if what == b"large":
            raise DamagedBook("it is too large")
        generation, rev, schema, body = found
        if generation.decode(errors="replace") != page.name:
            self._vetted = False  # the page was made again, so it must be compared with the rosters
            raise LostRace
        try:
            return self._decoded(page, int(rev), int(schema), body)
        except NOT_A_PAGE as error:
            raise DamagedBook(f"its page cannot be read ({error})") from error

    def _decoded(self, page: Page, rev: int, schema: int, body: bytes) -> Page:
        """A copy of `page` with the book from `body`: the bytes of the revision `rev`, format `schema`.

        Raises LedgerNewer, DamagedBook, ValueError, or one of UNREADABLE.
        """
        if schema > SCHEMA:
            raise LedgerNewer(self._server.url, schema, SCHEMA)
        if schema < SCHEMA:
            raise DamagedBook("an older version of gpu-console wrote it")
        self._require_new_enough(page, rev)
        self._least_rev = rev
        return page_in(page.name, body, rev, page)

    def _require_new_enough(self, page: Page, rev: int) -> None:
        """Raises DamagedBook if `rev`, found in the Redis, is older than the known revision."""
        if rev < self._least_rev:
            why = f"it is at revision {rev}, and {self._least_rev} has been seen"
            raise DamagedBook(why)

    def _commit(self, page: Page, after: Page) -> None:
        body = sealed(after.rev, after.raw)
        self._require_small(body)
        part_changed, is_kept = self._part_changed(page, after), True
        if part_changed:
            # The roster may differ from the page until the page is known to be written. The next
            # `look` repairs the roster.
            self._roster_doubtful = True
            self._unfinished = page
            try:
                self._write_roster(after)
            except OSError as error:
                # A roster that claims too much is safe, so bytes are released on a full disk too.
                disk_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                if not disk_full or _claims_more(page.book, after.book):
                    raise
                is_kept = False
        grants = self._grants(page, after)
        what, *seconds = self._run(
            "write",
            page.name,
            page.rev,
            after.rev,
            secrets.token_hex(8),
            "yes" if grants else "",
            SCHEMA,
            body,
        )
        if what == b"closed":
            raise GrantsClosed(float(seconds[0]))
        if what != b"written":
            raise LostRace
        self._page, self._least_rev = after, after.rev
        if part_changed:
            self._roster_doubtful = not is_kept
            self._unfinished = None if is_kept else self._page

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

        Raises LostRace if the Redis does not have the script any more, as after a restart, and DamagedBook
        if the page is gone, or older than one that was written.
        """

        def talk(ask: Ask) -> list[Any]:
            """Runs the script with one command."""
            try:
                return ask("EVALSHA", self._sha, 2, self._key, self._newest, *words)
            except NoScriptError:
                self._vetted = False
                raise LostRace from None

        answer = self._server.converse(talk)
        if answer[0] == b"gone":
            raise DamagedBook("it is gone")
        if answer[0] == b"old":
            self._least_rev = max(self._least_rev, int(answer[1]))
            raise DamagedBook(f"it is older than revision {self._least_rev}, which was written")
        return answer


def _agreed(book: Book) -> tuple[Any, ...]:
    """The facts of the `book` that each owner keeps in its roster."""
    return book.devices, book.limits, book.drained


def in_roster(roster: Roster, id: str) -> Living:
    """What the `roster` of the owner `id` has. Raises ValueError, and one of UNREADABLE."""
    page = page_in("", roster.payload, roster.rev)
    return Living(roster.rev, page.pieces.parts.get(id, Part()), page.pieces.shared)


def rebuilt(pieces: Pieces, living: Mapping[str, Living]) -> Pieces:
    """A book of the `pieces` that were found, with the parts of the `living` owners from their rosters.

    While any owner lives, a book keeps the devices and limits of its first owner, so the rosters
    agree; a card that only a roster knows is added. The drained cards are those of the newest roster
    with a section if no card is drained in `pieces`.
    """
    shared = pieces.shared
    devices = {device.id: device for device in shared.devices}
    limits, drained = dict(shared.limits), shared.drained
    for roster in sorted(living.values(), key=lambda roster: roster.rev):
        devices = {device.id: device for device in roster.shared.devices} | devices
        limits = roster.shared.limits | limits
        if roster.part.section is not None and not shared.drained:
            drained = roster.shared.drained
    shared = replace(shared, devices=tuple(devices.values()), limits=limits, drained=drained)
    parts = {**pieces.parts, **{id: roster.part for id, roster in living.items()}}
    parts = {id: part for id, part in parts.items() if part.section is not None or part.tickets}
    tickets = in_order([ticket for part in parts.values() for ticket in part.tickets])
    found = Pieces()
    found.put(0, parts, shared, State({}, (), tuple([ticket.key for ticket in tickets])))
    return found


def in_order(tickets: Iterable[Ticket]) -> tuple[Ticket, ...]:
    """The `tickets` by the time at which they arrived."""
    return tuple(sorted(tickets, key=lambda ticket: ticket.arrived))


_NO_FACTS = Piece.of(0, encode(Shared()))
_NO_STATE = Piece.of(0, encode(State({}, (), ())))


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
