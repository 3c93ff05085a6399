"""A book in this process's memory: for one notebook alone, and for tests.

`memory:` is a book of its own each time; `memory:NAME` is one book for all who open that name while a door to it is
open. The same rules hold as on disk.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import TypeVar

from ..errors import LedgerUnavailable
from ..facts import AllocatorMap, Book, Owner, Ticket
from .invariants import refuse_unlawful
from .liveness import describe_self
from .notify import Bell

T = TypeVar("T")


class _Page:
    """A book, and the doors that are open to it."""

    def __init__(self) -> None:
        self.book = Book()
        self.writing = threading.Lock()
        self.bells: dict[str, Bell] = {}
        self.maps: dict[str, tuple[AllocatorMap, ...]] = {}


_named: weakref.WeakValueDictionary[str, _Page] = weakref.WeakValueDictionary()
_naming = threading.Lock()


class MemoryLedger:
    """A door to a book in memory. An owner is dead here when its door is closed."""

    def __init__(self, name: str = "", *, notebook: str = "", user: str = "") -> None:
        self.url = f"memory:{name}"
        self.owner: Owner = describe_self(notebook=notebook, user=user)
        with _naming:
            self._page: _Page | None = _named.get(name) or _Page()
            if name:
                _named[name] = self._page
        self._bell = self._page.bells[self.owner.id] = Bell()

    def read(self) -> Book:
        return self._open_page().book

    def transact(self, decide: Callable[[Book], tuple[Book, T]]) -> T:
        page = self._open_page()
        while True:
            old = page.book
            new, answer = decide(old)
            if new is old:
                return answer
            refuse_unlawful(old, new, self.owner.id, self.dead, self.url)
            with page.writing:
                # Books are frozen, so the same object is the same revision.
                if page.book is old:
                    page.book = new
                    return answer

    def dead(self, book: Book) -> frozenset[str]:
        present = book.sections.keys() | {ticket.owner for ticket in book.tickets}
        return frozenset(present - self._open_page().bells.keys())

    def user_of(self, book: Book, owner_id: str, ticket: Ticket | None = None) -> str:
        owner = book.owner(owner_id)
        return owner.user if owner else self.owner.user  # all are this process

    def ring(self, owners: Iterable[str]) -> None:
        page = self._page
        for owner_id in owners if page else ():
            bell = page.bells.get(owner_id)
            if bell:
                bell.ring()

    def wait(self, timeout: float, ends: Iterable[Owner] = ()) -> bool:
        self._open_page()  # all owners are this process: none ends before it
        return self._bell.wait(timeout)

    def publish_maps(self, maps: tuple[AllocatorMap, ...]) -> None:
        self._open_page().maps[self.owner.id] = maps

    def maps(self) -> dict[str, tuple[AllocatorMap, ...]]:
        return dict(self._open_page().maps)

    def close(self) -> None:
        page, self._page = self._page, None
        if page:
            page.maps.pop(self.owner.id, None)
            page.bells.pop(self.owner.id, None)
            self._bell.close()

    def _open_page(self) -> _Page:
        page = self._page
        if page is None:
            raise LedgerUnavailable(
                f"the ledger {self.url} was closed. Open another:  gpu_runtime.Runtime()",
                path=self.url,
            )
        if os.getpid() != self.owner.pid:
            raise LedgerUnavailable(
                f"the ledger {self.url} stayed in the parent of this forked process (pid "
                f"{self.owner.pid}). Open another:  gpu_runtime.Runtime()",
                path=self.url,
            )
        return page
