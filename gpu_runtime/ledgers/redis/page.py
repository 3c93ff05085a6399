"""The page (stored book) of one host in a Redis: a hash that a script writes.

The script first compares the page's revision with the revision on which the writer decided.

A Redis can lose data that it acknowledged. The Redis can be flushed, restored from an older copy,
or restarted without the data of the last second. So every owner keeps its roster (a copy of its
part of the book) in a local file, as with SQLite. Two things protect the page:

- The *generation* is a name that no page had before. A page that is made again has a new
  generation, and grants in the old page are void.
- The *script* must be loaded before any write, and a Redis forgets its scripts when it ends. An
  owner on this host first compares the page with the rosters of the living owners, and only
  afterwards loads the script. Until the script is loaded, nobody on this host can write.

As in BookStore, the roster is written before the page, and there is one connection with one lock.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from redis.exceptions import NoScriptError, ResponseError

from ...errors import LedgerNewer, LedgerRefused
from ...facts import SCHEMA, Book
from ...units import show_bytes
from ..book_parts import part_of, with_living
from ..book_store import (
    BookStore,
    DamagedBook,
    Draft,
    GrantsClosed,
    LostRace,
    Page,
    closed_seconds,
)
from ..decoding import UNREADABLE, decode_roster
from ..liveness import Life, OwnerFile, life, read_roster
from ..pages import encoded
from ..revision_hint import RevisionHint
from ..sqlite import files
from .connection import Ask, RedisConnection
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


class RedisBook(BookStore):
    """One owner's connection to the page of its host, and its own file in a local directory."""

    def __init__(
        self,
        server: RedisConnection,
        directory: Path,
        boot: str,
        owner_file: OwnerFile,
        moved: Callable[[Path], None],
    ) -> None:
        """Uses the connection `server`. All other parameters are as in BookStore."""
        super().__init__(directory, boot, owner_file, moved)
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

    def read_all(self) -> tuple[HostPage, ...]:
        """The pages of all hosts that share this database."""
        with self._lock:
            return self._server.converse(all_pages)

    def close(self, *, remove: bool) -> None:
        """Closes the connection and the owner's lock; `remove` also removes the lock file."""
        super().close(remove=remove)
        self._server.close()

    # The methods below are called with the lock held.

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
