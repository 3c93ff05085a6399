"""A book in this process's memory: for a single notebook, and for tests.

`memory:` is a new book each time. `memory:NAME` is one book for all callers that open this name.
The book exists as long as one caller has it open. The same laws hold as on disk.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import TypeVar

from msgspec.structs import replace

from .. import threads
from ..facts import Book, Owner, Ticket
from .base import Ledger, unusable
from .invariants import refuse_unlawful
from .liveness import Sight, describe_self
from .notify import Bell
from .pieces import Unwritable, decode, encode, encoded_change, refused, require_readable

T = TypeVar("T")


class _MemoryBook:
    """A book, and the bells of the owners that have it open, which wake their waiting threads."""

    def __init__(self) -> None:
        self._page = _Page(Book())
        self.bells: dict[str, Bell] = {}
        self.kept: dict[tuple[str, str, str], bytes] = {}  # by kind, owner, for whom

    def newest(self) -> _Page:
        page = self._page
        while page.over:
            [page] = page.over.values()
        self._page = page
        return page


class _Page:
    """A book, and the page that was written over it."""

    def __init__(self, book: Book) -> None:
        self.book = book
        self.over: dict[None, _Page] = {}

    def put(self, new: Book) -> bool:
        """Writes `new` over this page, unless another writer was faster.

        There is no lock, since a signal handler of the user may write in the middle of a write.
        """
        page = _Page(replace(new, holds_below={}) if new.holds_below else new)
        return self.over.setdefault(None, page) is page


_named: weakref.WeakValueDictionary[str, _MemoryBook] = weakref.WeakValueDictionary()
_naming = threads.freed(threading.RLock())


class MemoryLedger(Ledger):
    """One owner's access to a book in memory. An owner counts as dead when its ledger is closed.

    The methods are described in base.py.
    """

    def __init__(self, name: str = "", *, notebook: str = "", user: str = "") -> None:
        """Opens the book `name`, or a new book if `name` is empty.

        `notebook` and `user` describe the owner.
        """
        super().__init__()
        self.url = f"memory:{name}"
        self.owner: Owner = describe_self(notebook=notebook, user=user)
        with _naming:
            self._book: _MemoryBook | None = _named.get(name) or _MemoryBook()
            if name:
                _named[name] = self._book
        self._bell = self._book.bells[self.owner.id] = Bell()

    def read(self) -> Book:
        return self._open_book().newest().book

    def transact(self, decide: Callable[[Book], tuple[Book, T]]) -> T:
        memory = self._open_book()
        while True:
            page = memory.newest()
            old = page.book
            new, answer = decide(old)
            if new is old:
                return answer
            refuse_unlawful(old, new, self.owner.id, self.dead, self.url)
            try:  # as a ledger on disk, which could not keep values such as invalid text
                require_readable(*encoded_change(old, new, self.owner.id))
            except Unwritable as error:
                raise refused(self.url, self.owner.id, str(error)) from error
            if page.put(new):
                return answer

    def dead(self, book: Book) -> frozenset[str]:
        """Ids of the owners in `book` whose ledger is closed."""
        living = self._open_book().bells.keys()
        return frozenset(book.owner_ids() - living)

    def unknown(self, book: Book) -> frozenset[str]:
        """An empty set. All owners are in this process, so each is known to be dead or alive."""
        return frozenset()

    def _sight(self, owner: Owner) -> Sight:
        return Sight.ALIVE if owner.id in self._open_book().bells else Sight.DEAD

    def give_sign(self) -> None:
        """Does nothing: all owners are in this process."""

    def silences(self, book: Book) -> dict[str, float]:
        """An empty result, since all owners are in this process."""
        return {}

    def declare_dead(self, owners: Iterable[str]) -> None:
        """Does nothing, because every owner is known to be dead or alive."""

    def user_of(self, book: Book, owner_id: str, ticket: Ticket | None = None) -> str:
        """The user of the owner `owner_id` in `book`. `ticket` is not used within one process."""
        owner = book.owner(owner_id)
        return owner.user if owner else self.owner.user

    def ring(self, owners: Iterable[str]) -> None:
        """Wakes the threads of the owners with these ids (`owners`)."""
        memory = self._book
        if memory is None:
            return
        for owner_id in owners:
            bell = memory.bells.get(owner_id)
            if bell:
                bell.ring()

    def wait(self, timeout: float, ends: Iterable[Owner] = ()) -> bool:
        """Returns True on a notification, and False after `timeout` seconds.

        `ends` is not used, because all owners are in this process.
        """
        self._open_book()
        return self._bell.wait(timeout)

    def _keep(self, kind: str, value: object, for_whom: str = "", private: bool = False) -> None:
        self._open_book().kept[kind, self.owner.id, for_whom] = encode(value)

    def _fetched(self, kind: str, type: type[T], owner: str = "") -> dict[str, T]:
        mine = self.owner.id if owner else ""
        kept = list(self._open_book().kept.items())
        return {
            id: decode(content, type=type)
            for (of_kind, id, whom), content in kept
            if (of_kind, whom) == (kind, mine) and owner in ("", id)
        }

    def close(self) -> None:
        """Removes this owner's bell, without which it counts as dead, and what is kept by it and for it."""
        memory, self._book = self._book, None
        if memory:
            for key in [key for key in memory.kept if self.owner.id in key]:
                del memory.kept[key]
            memory.bells.pop(self.owner.id, None)
            self._bell.close()

    def _open_book(self) -> _MemoryBook:
        memory = self._book
        if memory is None or os.getpid() != self.owner.pid:
            raise unusable(self.url, self.owner.pid)
        return memory
