"""The page of one host in a Redis: one hash, written by a script that compares the revision first.

A Redis can lose what it acknowledged: it is flushed, restored from an older copy, restarted a second back. So every
owner keeps its roster in a local file, as beside SQLite, and two things are fences:

- The *generation*, a name that no page had before: a page made anew has another one, and grants in the old are void.
- The *script*. A Redis forgets its scripts when it ends, and until somebody of this host has compared the page with
  the rosters of the living and loaded it again, nobody of this host can write.

What is known of BookFile holds here: the roster is written before the page, one connection, one lock.
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

import msgspec
from redis.exceptions import NoScriptError, ResponseError

from ...errors import LedgerNewer, LedgerRefused
from ...facts import SCHEMA, Book, decode_book, encode
from ...units import show_bytes
from ..liveness import Life, OwnerFile, life, read_roster
from ..sqlite import files
from ..sqlite.page import BookFile, Lost, Page
from ..sqlite.recovery import Damaged, part_of, with_living
from .connection import Ask, Wire
from .scripts import (
    LOOK_OR_WRITE,
    MAKE,
    MARKER,
    MOST_BYTES,
    PAGE,
    REGISTER_SECONDS,
    SEEN_SECONDS,
    HostPage,
    Seen,
    all_pages,
    look_at,
)

log = logging.getLogger("gpu_runtime")


class Closed(Exception):
    """The page was made anew a moment ago; for so many seconds more nothing new is granted in it."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds


class RedisBook(BookFile):
    """One owner's connection to the page of its host, and its own file in a local directory."""

    def __init__(
        self,
        wire: Wire,
        directory: Path,
        boot: str,
        owner_file: OwnerFile,
        moved: Callable[[Path], None],
    ) -> None:
        super().__init__(directory, boot, owner_file, moved)
        self._wire = wire
        self._key = PAGE + boot
        # Whoever shares our directory has compared the rosters for us; others have rosters that we cannot see.
        self._script = f"-- {boot} {os.stat(directory).st_ino}\n{LOOK_OR_WRITE}"
        self._sha = hashlib.sha1(self._script.encode(), usedforsecurity=False).hexdigest()
        self._vetted = False  # since the Redis started, as far as we know
        self._told_at = float("-inf")

    @property
    def path(self) -> Path:
        """What of this book lies on a disk here."""
        return self.directory

    def written(self) -> None:
        """Nothing that could be relied on: no file here changes with the page, so it is asked for each time."""
        return None

    def put(self, page: Page, new: Book) -> None:
        try:
            super().put(page, new)
        except Closed as closed:
            time.sleep(
                min(closed.seconds, 0.1)
            )  # not under the lock: others of ours have to register
            raise Lost from None

    def mend(self, damage: Damaged, patience_seconds: float) -> None:
        """Sees to it that there is a page again. Raises LedgerUnavailable."""
        with self._lock:
            self._vetted = False
            try:
                files.prepare(self.directory)
                if not self.owner_file.in_place():
                    self._come_back()
                    if self._page:  # the last that is known of us
                        self._write_roster(self._with_own_inode(self._page.book), self._page.rev)
            except OSError as error:
                raise files.cannot_write(self.directory, error) from error
            self._wire.converse(self._make)

    def read_all(self) -> tuple[HostPage, ...]:
        """The pages of all hosts that share this database."""
        with self._lock:
            return self._wire.converse(all_pages)

    def close(self, *, remove: bool) -> None:
        super().close(remove=remove)
        self._wire.close()

    def leave_to_parent(self) -> None:
        """In a forked child: the connection is the parent's, and no word is said on it."""

    # What follows is called under the lock.

    def _in_force(self, page: Page) -> bool:
        return self._vetted

    def _open(self) -> None:
        """Looks whether this Redis keeps what it is told, and whether it has kept it. Raises Damaged."""
        self._db = None
        seen = self._wire.converse(self._vet)
        self._vetted = True
        self._page = Page(seen.generation, 0, seen.rev, seen.book or Book())
        self._least_rev, self._db = seen.rev, self._wire

    def _vet(self, ask: Ask) -> Seen:
        self._wire.require_safe(ask)
        seen = self._look_at(ask)
        why = self._fault(seen, self._living())
        if why or seen is None:
            raise Damaged(self._page.name if self._page else "", 0, why)
        # On the connection that the page was read over: between the two this Redis has not started again.
        ask("SCRIPT", "LOAD", self._script)
        return seen

    def _look_at(self, ask: Ask) -> Seen | None:
        try:
            return look_at(ask, self._key)
        except ResponseError as error:
            if "WRONGTYPE" not in str(error):
                raise
            raise self._foreign(f"its key {self._key} is no page of ours") from error

    def _fault(self, seen: Seen | None, living: dict[str, tuple[int, Book]]) -> str:
        """What is wrong with the page; nothing where it holds what we and the living here have seen written."""
        known = self._page
        if seen is None:
            return "it is gone" if known else "there is none yet"
        if seen.schema > SCHEMA:
            raise LedgerNewer(self._wire.url, seen.schema, SCHEMA)
        if seen.book is None:
            return "its page cannot be read"
        # The last roster may be one ahead, for a write that has not come through.
        least = max((rev - 1 for rev, _ in living.values()), default=0)
        if known and known.name == seen.generation:
            least = max(least, self._least_rev)
        if seen.rev < least:
            return f"it is at revision {seen.rev}, and {least} has been seen"
        if known and known.name != seen.generation:
            # Made by somebody who may not have seen the rosters here.
            missing = {
                id for id, (_, part) in living.items() if part.sections
            } - seen.book.sections.keys()
            if missing:
                return f"{len(missing)} living owners are missing in it"
        return ""

    def _living(self) -> dict[str, tuple[int, Book]]:
        """What each living owner here last wrote of itself, and for which revision."""
        found: dict[str, tuple[int, Book]] = {}
        if not (
            self.directory / "owners"
        ).is_dir():  # somebody deleted it; the next write makes it anew
            return found
        for path in files.owner_files(self.directory):
            roster = read_roster(path) if life(path) is Life.ALIVE else None
            if roster is None:
                continue
            if roster.schema > SCHEMA:
                raise LedgerNewer(str(path), roster.schema, SCHEMA)
            try:
                found[path.name] = roster.rev, part_of(decode_book(roster.payload), path.name)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                log.warning("the roster %s cannot be read; its owner will register again", path)
        return found

    def _make(self, ask: Ask) -> None:
        """Makes the page anew from what it still says and what the living here say, unless somebody has done so."""
        seen, living = self._look_at(ask), self._living()
        why = self._fault(seen, living)
        if not why:
            return
        # In this order: who makes the first page makes the marker with it.
        keys, ours = ask("DBSIZE"), ask("EXISTS", MARKER)
        if seen is None and keys and not ours:
            raise self._foreign(f"it holds {keys} keys of something else, and no book")
        book = with_living(
            seen and seen.book or Book(), {id: part for id, (_, part) in living.items()}
        )
        rev = max([seen.rev if seen else 0, *(rev for rev, _ in living.values())]) + 1
        known = (
            seen is not None
            or self._page is not None
            or any(part.sections for _, part in living.values())
        )
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
            encode(book),
            str(REGISTER_SECONDS if known or not ours else 0),
            socket.gethostname(),
        )
        if made and known:
            log.warning(
                "this host's page in the Redis %s was damaged (%s). Made anew from %d living owners, "
                "%d leases; grants go on in %.0f s.",
                self._wire.url,
                why,
                len(book.sections),
                sum(1 for _ in book.leases()),
                REGISTER_SECONDS,
            )

    def _foreign(self, why: str) -> Exception:
        return self._wire.unavailable(
            f"has a database that is not ours: {why}",
            "Name one of its own:  GPU_LEDGER=redis://HOST:PORT/DB",
        )

    def _read(self, page: Page, db: object) -> Page:
        now = time.monotonic()
        tell = now - self._told_at > SEEN_SECONDS
        what, *found = self._run("look", page.name, page.rev, "seen" if tell else "")
        if tell:
            self._told_at = now
        if what == b"same":
            return page
        if what == b"gone":
            raise Damaged(page.name, 0, "it is gone")
        if what == b"large":
            raise Damaged(page.name, 0, "it is too large")
        generation, rev, schema, body = found
        if generation.decode(errors="replace") != page.name:  # made anew: is what we know in it?
            self._vetted = False
            raise Lost
        try:
            if int(schema) > SCHEMA:
                raise LedgerNewer(self._wire.url, int(schema), SCHEMA)
            if int(rev) < self._least_rev:
                raise Damaged(
                    page.name,
                    0,
                    f"it is at revision {int(rev)}, and {self._least_rev} has been seen",
                )
            self._least_rev = int(rev)
            return page._replace(rev=int(rev), book=decode_book(body))
        except (msgspec.MsgspecError, TypeError, ValueError) as error:
            raise Damaged(page.name, 0, f"its page cannot be read ({error})") from error

    def _commit(self, page: Page, new: Book, body: bytes) -> None:
        me = self.owner_file.owner.id
        if len(body) > MOST_BYTES:
            raise LedgerRefused(
                f"the ledger {self._wire.url} takes pages of up to {show_bytes(MOST_BYTES)}, and this "
                f"one would have {show_bytes(len(body))}.\n  The book is as it was.",
                path=self._wire.url,
                why="too large",
                writer=me,
            )
        before, after = part_of(page.book, me), part_of(new, me)
        if after != before:
            self._roster_doubtful, self._unfinished = (
                True,
                page,
            )  # until the write is known to stand
            self._write_roster(new, page.rev + 1)
        what, *left = self._run(
            "write",
            page.name,
            page.rev,
            page.rev + 1,
            secrets.token_hex(8),
            "yes" if _promises(after) - _promises(before) else "",
            SCHEMA,
            body,
        )
        if what == b"closed":
            raise Closed(float(left[0]))
        if what == b"gone":
            raise Damaged(page.name, 0, "it is gone")
        if what != b"written":
            raise Lost
        self._page = page._replace(rev=page.rev + 1, book=new)
        self._least_rev = page.rev + 1
        if after != before:
            self._roster_doubtful, self._unfinished = False, None

    def _run(self, *words: str | bytes | int) -> list[Any]:
        """What the script answers. Raises Lost where the Redis does not know it: then it has started again."""

        def talk(ask: Ask) -> list[Any]:
            try:
                return ask("EVALSHA", self._sha, 1, self._key, *words)
            except NoScriptError:
                self._vetted = False
                raise Lost from None

        return self._wire.converse(talk)


def _promises(part: Book) -> set[tuple[str, Any]]:
    """Bytes that an owner has been promised and not yet taken."""
    return {(lease.name, lease.target) for lease in part.leases() if lease.target}
