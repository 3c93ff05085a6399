"""The book in a Redis, for hosts and containers that share no file system: one page per host.

A host is one running Linux kernel. The host's page (its stored book) is named by the boot id. All
containers of the host share the boot id and the cards. The proof that an owner lives is the lock on
the owner's file, in a directory of this host. So a host removes only its own dead owners.

Containers of one host that share no directory share the page, but their owners cannot prove each
other's deaths. The bytes of a dead owner stay claimed until an owner of the same container checks.
Such containers should have one common directory: `?owners=/a/directory/mounted/in/all`. By default,
the directory is in the user's state directory. Below it, the owners' files are in a directory that
is named after the server. So every process should use the same name for the server.

A client that may write to the database may write anything in it. A Redis cannot tell the users of a
host apart, so only the password of the database protects the book.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import secrets
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from msgspec.structs import replace

from ...errors import LedgerRefused, LedgerUnavailable
from ...facts import Book, Owner, Ticket
from ...units import show_bytes
from .. import access
from ..access import access_to, owners_in, split_redis_url
from ..base import Ledger, unusable
from ..invariants import refuse_unlawful
from ..liveness import (
    Life,
    OwnerFile,
    Sight,
    boot_id,
    describe_self,
    life,
    life_of,
    sight_of,
    testimony,
)
from ..notify import Doorbell
from ..pieces import UNREADABLE, Part, decode, encode
from .connection import BESIDE, KEPT_SECONDS, NOT_A_PAGE, HostPage, Page, RedisConnection
from .page import DamagedBook, LostRace, RedisBook, in_roster

T = TypeVar("T")
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.0005, 0.02  # after lost races, chosen at random
# The user's generator is not drawn from. This one has no state that a forked child would share.
_chance = random.SystemRandom()
MOST_KEPT_BYTES = 1 << 20  # of one owner's maps, names or answers


class RedisLedger(Ledger):
    """One owner's access to the page of its host in a Redis.

    Lock files and doorbells (the sockets that wake owners) are local files.
    """

    _declared_dead: frozenset[str] = frozenset()
    again_seconds = 10.0  # a Redis may lose the names
    names_the_dead = False  # each process has a file, which it locks

    def __init__(
        self, url: str, *, notebook: str = "", user: str = "", patience_seconds: float = 10.0
    ) -> None:
        """Opens this host's page at `url` as a new owner, which `notebook` and `user` describe.

        A read or write fails after `patience_seconds`. Raises BadSetting, LedgerUnavailable.
        """
        address, owners = split_redis_url(url)
        self._connection = RedisConnection(address)
        server = self._connection.address.replace("localhost:", "127.0.0.1:")
        directory = owners / re.sub(r"[^\w.]+", "-", server) / boot_id()
        # Each container numbers its own processes. Without a random serial, owners in two
        # containers could have the same id, and thus the same section.
        me = describe_self(notebook=notebook, user=user)
        me = replace(me, serial=secrets.randbelow(2**31))
        super().__init__()
        self.url = self._connection.url
        self.patience_seconds = patience_seconds
        self.directory = directory
        access.prepare(directory)
        group = access_to(directory).group
        self._is_group_shared = group is not None
        owners = owners_in(directory)
        try:
            owner_file = OwnerFile(owners, me, group)
        except OSError as error:
            raise access.cannot_write(directory, error) from error
        try:
            self._bell = Doorbell(owners, owner_file.owner.id, group)
        except OSError as error:
            owner_file.release(remove=True)
            raise access.cannot_write(directory, error) from error
        self._store = RedisBook(
            self._connection, directory, directory.name, owner_file, moved=self._bell.move_to
        )
        self._closed = False
        self.open_here.add(self)
        try:
            self.read()
        except BaseException:
            self._shut(remove=True)
            raise
        access.sweep_owners(directory, lambda: self.read().owner_ids())
        access.sweep_drafts(directory)
        access.sweep_boots(directory)

    @property
    def path(self) -> str:
        """The server's URL, without its password."""
        return self.url

    def read_all(self) -> tuple[HostPage, ...]:
        """The pages of all hosts on this Redis, including this host. Raises LedgerUnavailable."""
        self._require_open()
        return self._store.read_all()

    @property
    def owner(self) -> Owner:  # type: ignore[override]
        """The owner whose section and tickets this ledger writes."""
        return self._store.owner_file.owner

    # Reading and writing

    def read(self) -> Book:
        return self.transact(lambda book: (book, book))

    def transact(self, decide: Callable[[Book], tuple[Book, T]]) -> T:
        deadline = time.monotonic() + self.patience_seconds
        races_lost = 0
        while True:
            self._require_open()
            try:
                page = self._store.look()
                new, answer = decide(page.book)
                if new is not page.book:
                    self._require_lawful(page, new)
                    self._store.put(page, new)
                    self.give_sign()
                return answer
            except LostRace:
                pass  # decide again
            except DamagedBook:
                self._store.mend()
            if time.monotonic() > deadline:
                raise self._timed_out()
            if races_lost:
                longest = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2**races_lost)
                time.sleep(_chance.uniform(0, longest))
            races_lost += 1

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
        others = book.owner_ids() - {self.owner.id}
        return frozenset(id for id in others if self._life(book, id) is Life.DEAD)

    def unknown(self, book: Book) -> frozenset[str]:
        others = book.owner_ids() - {self.owner.id}
        return frozenset(id for id in others if self._life(book, id) is Life.UNKNOWN)

    def _life(self, book: Book, id: str) -> Life:
        path = self._lock_file(id)
        owner = book.owner(id)
        # The book does not describe an owner that has only a ticket. Its lock file is identified by
        # its name alone, without the inode. That is enough, because a name is never used again.
        found = life_of(owner, path) if owner else life(path)
        return Life.DEAD if found is Life.UNKNOWN and id in self._declared_dead else found

    def _sight(self, owner: Owner) -> Sight:
        is_mine = owner.id == self.owner.id
        return Sight.ALIVE if is_mine else sight_of(owner, self._lock_file(owner.id))

    def give_sign(self) -> None:
        self._store.owner_file.sign()

    def silences(self, book: Book) -> dict[str, float]:
        found, now = {}, time.time()
        for id in book.sections:
            with contextlib.suppress(OSError):  # the owner has just ended
                found[id] = now - os.stat(self._lock_file(id)).st_mtime
        return found

    def declare_dead(self, owners: Iterable[str]) -> None:
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
            part = in_roster(proof.roster, owner_id).part if proof.roster else Part()
        except NOT_A_PAGE:  # a damaged roster proves nothing
            return ""
        known = {proven.key: proven for proven in part.tickets}
        if ticket and not _same_request(known.get(ticket.key), ticket):
            return ""
        return proof.user

    def ring(self, owners: Iterable[str]) -> None:
        if not self._closed and os.getpid() == self.owner.pid:
            self._bell.ring_others(owners)

    def wait(self, timeout: float, ends: Iterable[Owner] = ()) -> bool:
        self._require_open()
        return self._bell.wait(timeout, ends)

    # Closing

    def close(self) -> None:
        """Releases the owner's lock and doorbell.

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

    def _require_open(self) -> None:
        if self._closed or os.getpid() != self.owner.pid:
            raise unusable(self.url, self.owner.pid)

    # What is kept beside the book: a hash for each kind, with a field for each owner

    def _beside(self, kind: str) -> str:
        return f"{BESIDE}{self.directory.name}:{'answers' if kind == 'answer' else kind}"

    def _keep(self, kind: str, value: object, for_whom: str = "", private: bool = False) -> None:
        """See Ledger. A Redis cannot tell users apart: what is `private` is as safe as its password."""
        self._require_open()
        content, key = encode(value), self._beside(kind)
        if len(content) > MOST_KEPT_BYTES:
            raise OSError(f"its {kind} take {show_bytes(len(content))}")
        self._store.ask("HSET", key, f"{self.owner.id} {for_whom}".rstrip(), content)
        self._store.ask("EXPIRE", key, KEPT_SECONDS)
        if for_whom:
            self._drop_ended(kind, self._store.ask("HKEYS", key))

    def _fetched(self, kind: str, type: type[T], owner: str = "") -> dict[str, T]:
        self._require_open()
        key, mine = self._beside(kind), f"{owner} {self.owner.id}"
        if owner:
            found = self._store.ask("HGET", key, mine)
            words = [mine.encode(), found] if found else []
        else:
            words = self._store.ask("HGETALL", key)
            self._drop_ended(kind, words[::2])
        fetched = {}
        for field, content in zip(words[::2], words[1::2], strict=True):
            id = field.decode(errors="replace").split(" ")[0]
            if owner or self._may_live(id):
                # Another version may have written it, or a hostile owner.
                with contextlib.suppress(*UNREADABLE):
                    fetched[id] = decode(content, type=type)
        return fetched

    def _may_live(self, id: str) -> bool:
        """Whether the owner `id` lives, or is in the book and not proven dead.

        The lock file of a dead owner is removed once the owner has left the book.
        """
        found = life(self._lock_file(id)) if access.is_owner(id) else Life.DEAD
        return found is Life.ALIVE or (found is Life.UNKNOWN and id in self.read().owner_ids())

    def _drop_ended(self, kind: str, fields: list[bytes]) -> None:
        """Removes what ended owners left of this `kind`. A field begins with the owner's id."""
        ended = [
            one for one in fields if not self._may_live(one.split()[0].decode(errors="replace"))
        ]
        if ended:
            self._store.ask("HDEL", self._beside(kind), *ended)

    def _shut(self, *, remove: bool) -> None:
        with contextlib.suppress(LedgerUnavailable):  # others remove what is left
            for kind in ("maps", "names"):
                self._store.ask("HDEL", self._beside(kind), self.owner.id)
            answers = self._store.ask("HKEYS", self._beside("answers"))
            mine = [field for field in answers if field.startswith(b"%s " % self.owner.id.encode())]
            if mine:
                self._store.ask("HDEL", self._beside("answers"), *mine)
        self._closed = True
        self._bell.close()
        self._store.close(remove=remove)

    def close_in_child(self) -> None:
        self._bell.close_here()

    def _timed_out(self) -> LedgerUnavailable:
        return LedgerUnavailable(
            f"the ledger {self.url} could not be read or written for {self.patience_seconds:.0f} s: "
            f"too many processes write at once.\n  Try again, or see:  gpu leases",
            path=self.url,
        )


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
