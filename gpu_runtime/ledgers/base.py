"""The protocol that every ledger follows. No ledger is implemented here.

A book is all leases and requests of a host. An owner's section is the owner's part of the book. A
ticket is the entry of a waiting request.

To add a ledger, write a class with these methods below `gpu_runtime/ledgers/`. Open it for its URL
in `open_ledger` in `gpu_runtime/ledgers/__init__.py`, and test it with
`tests/ledgers/test_contract.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol, TypeVar

from ..errors import LedgerUnavailable
from ..facts import UNDECLARED, AllocatorMap, Book, Declared, Holdings, Owner, Ticket
from .liveness import Sight

T = TypeVar("T")


class Ledger(Protocol):
    """One owner's access to the book of its host. Every method may be called from any thread.

    After a fork, the child's copy is unusable: each method raises LedgerUnavailable there. The
    child has to open another ledger.
    """

    url: str

    @property
    def owner(self) -> Owner:
        """The owner whose section and tickets this ledger may write.

        The owner's id never changes. But the inode of its lock file changes if the ledger's
        directory was deleted and this ledger made it again. So read this property each time instead
        of keeping its value.
        """

    def read(self) -> Book:
        """The current book. Raises LedgerUnavailable."""

    def transact(self, decide: Callable[[Book], tuple[Book, T]]) -> T:
        """Writes the book that `decide` returns, and returns the second value of `decide`.

        `decide` may run more than once, so it must be pure. It must also look for the key of its
        decision first: a book that was rebuilt may already contain that decision. If `decide`
        returns the book object that it was given, nothing is written.

        After an exception that did not come from `decide` (such as a KeyboardInterrupt during the
        write), the write may or may not have happened. The caller then has to read the book and
        look for the key of its decision.

        Raises LedgerUnavailable, LedgerRefused.
        """

    def dead(self, book: Book) -> frozenset[str]:
        """Ids of the owners of sections and tickets in `book` that are proven dead.

        An owner whose state is unknown is not included.
        """

    def unknown(self, book: Book) -> frozenset[str]:
        """Ids of the owners of sections and tickets in `book` whose life or death is not proven."""

    def sights(self, book: Book, owners: Iterable[str] | None = None) -> dict[str, Sight]:
        """Whether each process in `book` now runs, is stopped or has ended, by owner id.

        The result has the owners in `owners`; with None, it has all owners with a section. One file
        is read for each process.
        """

    def declare_dead(self, owners: Iterable[str]) -> None:
        """Makes `dead` return these `owners` (ids), unless they are proven alive.

        Call it when a person knows that the processes of these owners have ended.
        """

    def user_of(self, book: Book, owner_id: str, ticket: Ticket | None = None) -> str:
        """The user who runs the owner `owner_id` of `book`, and who made the request `ticket`.

        The result is empty if this ledger cannot prove who the user is. Then no request in that
        user's name is carried out.
        """

    def ring(self, owners: Iterable[str]) -> None:
        """Wakes the owners with these ids (`owners`), so that they read the book.

        The id of this ledger's owner wakes the waiting threads of this process. Never blocks or
        fails.
        """

    def wait(self, timeout: float, ends: Iterable[Owner] = ()) -> bool:
        """Waits for a notification, or for the end of the process of an owner in `ends`.

        Returns True then, and False after `timeout` seconds.

        The end of a process in another container cannot be seen, so the caller should also check
        `dead` every second. Several threads may wait; a notification wakes them all. A notification
        between a thread's last wait and this wait counts too. A notification only means "read the
        book", and may be unnecessary.
        """

    def publish_maps(self, maps: tuple[AllocatorMap, ...]) -> None:
        """Stores this owner's allocator `maps` in the ledger's directory, replacing its last maps.

        The maps are removed together with the owner. Raises OSError.
        """

    def maps(self) -> dict[str, tuple[AllocatorMap, ...]]:
        """The allocator maps of the living owners that can be read from here, by owner id."""

    def add_name(self, name: str, declared: Declared = UNDECLARED) -> None:
        """Adds one model to the list of models that this owner can load. Raises OSError.

        `declared` has the model's size and importance. The list is in a separate file, not in the
        book.
        """

    def publish_names(self, names: Mapping[str, Declared]) -> None:
        """Makes `names` the list of models that this owner can load. Raises OSError.

        The list is removed together with the owner.
        """

    def names(self) -> dict[str, dict[str, Declared]]:
        """The models that each living owner can load, by owner id, as far as seen from here.

        The caller must not change the result.
        """

    def publish_answer(self, asker: str, answer: Holdings, *, private: bool) -> None:
        """Stores this owner's `answer` to the owner `asker`, beside the book. Raises OSError.

        Only this owner's user can read a `private` answer. The answer replaces the last answer to
        that asker, and is removed together with this owner.
        """

    def answer(self, owner_id: str) -> Holdings | None:
        """The last answer of the owner `owner_id` to this owner, if it can be read from here."""

    def close(self) -> None:
        """Releases this owner's lock, and the socket that wakes it.

        The owner's section should already be gone from the book. If it is not, other owners can
        prove that this owner is dead, and remove the section.
        """


def require_usable(url: str, owner: Owner, is_open: bool) -> None:
    """Raises LedgerUnavailable in a forked child of `owner`, and unless the ledger `is_open`."""
    if os.getpid() != owner.pid:
        why = f"belongs to the parent (pid {owner.pid}) of this forked process"
    elif not is_open:
        why = "was closed"
    else:
        return
    text = f"the ledger {url} {why}. Open another:  gpu_runtime.Runtime()"
    raise LedgerUnavailable(text, path=url)
