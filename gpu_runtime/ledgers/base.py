"""What every ledger does. A kind of ledger is a class with the abstract methods of `Ledger`.

A book is all leases and requests of a host. An owner's section is the owner's part of the book. A
ticket is the entry of a waiting request.

To add a ledger, write a class with these methods below `gpu_runtime/ledgers/`. Let `open_ledger` in
`gpu_runtime/ledgers/__init__.py` make an object of the class for the new URL. Test the class with
`tests/ledgers/test_contract.py`.
"""

from __future__ import annotations

import os
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar, TypeVar

from ..errors import LedgerUnavailable
from ..facts import UNDECLARED, AllocatorMap, Book, Declared, Holdings, Owner, Ticket
from .liveness import Sight

T = TypeVar("T")
# The number of times a second that the monitors of all idle owners together read the book. (With
# 12, 64 idle owners used 1.3 % of a core.)
TICKS_A_SECOND = 6


class Ledger(ABC):
    """One owner's access to the book of its host. Every method may be called from any thread.

    After a fork, the copy in the child is unusable: each of its methods raises LedgerUnavailable.
    The child has to open another ledger.

    A list of names that grows is kept at most four times a second once it is long. The next
    `publish_names` keeps the rest; a runtime calls it each second.
    """

    FEW, BETWEEN_SECONDS = 256, 0.25
    again_seconds = float("inf")  # after so long, the same list of names is kept again
    names_the_dead = True  # whether `dead` looks at no process
    open_here: ClassVar[weakref.WeakSet[Ledger]] = weakref.WeakSet()  # see `close_in_child`

    url: str
    # The owner whose section and tickets this ledger may write. Its id never changes. The inode of
    # its lock file changes if the ledger's directory was deleted and made again. So read it each time.
    owner: Owner

    def __init__(self) -> None:
        self._names: dict[str, Declared] = {}
        self._all_told, self._told_at = True, float("-inf")

    @abstractmethod
    def read(self) -> Book:
        """The current book. Raises LedgerUnavailable."""

    @abstractmethod
    def transact(self, decide: Callable[[Book], tuple[Book, T]]) -> T:
        """Writes the book that `decide` returns, and returns the second value of `decide`.

        `decide` may run more than once, so it must be pure. It must first check whether the book
        already has the lease or ticket to be added, because a rebuilt book may have it. If `decide`
        returns the same book object that it was given, nothing is written.

        After an exception that did not come from `decide` (such as a KeyboardInterrupt during the
        write), the write may or may not have happened. To find out, the caller has to read the book.

        Raises LedgerUnavailable, LedgerRefused.
        """

    @abstractmethod
    def dead(self, book: Book) -> frozenset[str]:
        """Ids of the owners of sections and tickets in `book` that are dead.

        An owner is dead if its death is proven. An owner that was given to `declare_dead` also
        counts as dead, unless it is proven alive. This ledger's own owner is never dead.
        """

    @abstractmethod
    def unknown(self, book: Book) -> frozenset[str]:
        """Ids of the owners of sections and tickets in `book` that are neither dead nor alive.

        Neither the life nor the death of such an owner is proven, and nobody declared it dead.
        """

    def sights(self, book: Book, owners: Iterable[str] | None = None) -> dict[str, Sight]:
        """The present state of the owners' processes, by owner id.

        The result has each owner in `owners` that has a section in `book`. If `owners` is None, the
        result has all owners with a section. A check takes about 50 µs for each process.
        """
        wanted = book.sections.keys() if owners is None else book.sections.keys() & set(owners)
        return {id: self._sight(book.sections[id].owner) for id in wanted}

    @abstractmethod
    def give_sign(self) -> None:
        """Notes that this owner lives and runs. A write of its section is such a sign too."""

    @abstractmethod
    def silences(self, book: Book) -> dict[str, float]:
        """The seconds since the last sign of each owner in `book`, by owner id.

        An owner whose signs cannot be read from here is missing.
        """

    @abstractmethod
    def declare_dead(self, owners: Iterable[str]) -> None:
        """Makes `dead` return these `owners` (ids), unless they are proven alive.

        Call `declare_dead` when a person knows that the processes of these owners have ended.
        """

    @abstractmethod
    def user_of(self, book: Book, owner_id: str, ticket: Ticket | None = None) -> str:
        """The user who runs the owner `owner_id` of `book`, and who made the request `ticket`.

        The result is empty if this ledger cannot prove who the user is. A request without a proven
        user is not carried out.
        """

    @abstractmethod
    def ring(self, owners: Iterable[str]) -> None:
        """Wakes the owners with these ids (`owners`), so that they read the book.

        If this ledger's own owner is among `owners`, the waiting threads of this process are woken.
        This method never blocks or fails.
        """

    @abstractmethod
    def wait(self, timeout: float, ends: Iterable[Owner] = ()) -> bool:
        """Waits for a notification, or for the end of the process of an owner in `ends`.

        Returns True after a notification or an end, and False after `timeout` seconds.

        The end of a process in another container cannot be seen, so the caller should also check
        `dead` every second. Several threads may wait; a notification wakes all of them. A
        notification between a thread's last wait and this wait counts too. A notification only
        means "read the book", and may be unnecessary.
        """

    def publish_maps(self, maps: tuple[AllocatorMap, ...]) -> None:
        """Stores the allocator `maps` of this owner in the ledger's directory.

        The maps replace the owner's last maps, and are removed together with the owner. Raises
        OSError.
        """
        self._keep("maps", maps)

    def maps(self) -> dict[str, tuple[AllocatorMap, ...]]:
        """The allocator maps of the living owners, by owner id, if this user can read the maps."""
        return self._fetched("maps", tuple[AllocatorMap, ...])

    def add_name(self, name: str, declared: Declared = UNDECLARED) -> None:
        """Adds one model to the list of models that this owner can load. Raises OSError.

        `declared` has the model's size and importance. The list is in a separate file, not in the
        book.
        """
        self._names[name] = declared
        self._all_told = False
        since = time.monotonic() - self._told_at
        if len(self._names) <= self.FEW or since > self.BETWEEN_SECONDS:
            self._tell_all()

    def publish_names(self, names: Mapping[str, Declared]) -> None:
        """Makes `names` the list of models that this owner can load. Raises OSError.

        The list is removed together with the owner.
        """
        since = time.monotonic() - self._told_at
        if self._all_told and names == self._names and since < self.again_seconds:
            return
        self._names = dict(names)
        self._tell_all()

    def _tell_all(self) -> None:
        self._told_at = time.monotonic()
        self._keep("names", self._names)
        self._all_told = True

    def names(self) -> dict[str, dict[str, Declared]]:
        """The models that each living owner can load, by owner id, if this user can read the list.

        The caller must not change the result.
        """
        found = self._fetched("names", dict[str, Declared])
        return {id: names for id, names in found.items() if names}

    def publish_answer(self, asker: str, answer: Holdings, *, private: bool) -> None:
        """Stores this owner's `answer` to the owner `asker`, beside the book. Raises OSError.

        Only this owner's user can read a `private` answer. The answer replaces the last answer to
        `asker`, and is removed together with this owner.
        """
        self._keep("answer", answer, asker, private)

    def answer(self, owner_id: str) -> Holdings | None:
        """The last answer of the owner `owner_id` to this owner; None if there is none to read."""
        return self._fetched("answer", Holdings, owner_id).get(owner_id)

    @abstractmethod
    def close(self) -> None:
        """Releases this owner's lock, and the socket that wakes the owner.

        The caller should remove the owner's section from the book first. If the section is still in
        the book, other owners can prove that this owner is dead, and remove the section.
        """

    def close_in_child(self) -> None:  # noqa: B027 (a book in memory has none)
        """Closes the descriptors that a forked child has inherited. The parent keeps the lock and the book."""

    @abstractmethod
    def _sight(self, owner: Owner) -> Sight: ...

    @abstractmethod
    def _keep(self, kind: str, value: object, for_whom: str = "", private: bool = False) -> None:
        """Keeps a `value` of this `kind`, in place of the last one for this owner. Raises OSError."""

    @abstractmethod
    def _fetched(self, kind: str, type: type[T], owner: str = "") -> dict[str, T]:
        """What the living owners keep of this `kind`, by owner id; with `owner`, what it keeps for this one."""


def _close_in_child() -> None:
    for ledger in list(Ledger.open_here):
        ledger.close_in_child()


os.register_at_fork(after_in_child=_close_in_child)


def unusable(url: str, pid: int) -> LedgerUnavailable:
    """The error of a call on a ledger that is closed, or that another process, `pid`, opened before a fork."""
    is_child = os.getpid() != pid
    why = f"belongs to the parent (pid {pid}) of this forked process" if is_child else "was closed"
    return LedgerUnavailable(
        f"the ledger {url} {why}. Open another:  gpu_runtime.Runtime()", path=url
    )
