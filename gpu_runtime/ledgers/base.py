"""The protocol that every ledger follows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from ..facts import AllocatorMap, Book, Owner, Ticket

T = TypeVar("T")
Decide = Callable[[Book], tuple[Book, T]]


class Ledger(Protocol):
    """One owner's door to the book of its host. Every method may be called from any thread.

    After a fork the child's copy of a door is shut: each method raises LedgerUnavailable there. Open another.
    """

    url: str

    @property
    def owner(self) -> Owner:
        """Whose section and tickets this door may write. Its id never changes; its lock file's inode may, where
        somebody deleted the ledger's directory and this door made it anew: so ask, don't keep."""
        ...

    def read(self) -> Book:
        """The book as it stands. Raises LedgerUnavailable."""
        ...

    def transact(self, decide: Callable[[Book], tuple[Book, T]]) -> T:
        """What `decide` answered for the book that its own answer was then written over.

        `decide` may run more than once; it must be pure, and first look for its own key: in a book that was rebuilt
        meanwhile its effect may be there already. Where it returns the book it was given (the same object), nothing
        is written. After an exception that came from elsewhere than `decide` (KeyboardInterrupt at the
        worst moment) the write may have happened or not: read, and look for your key.
        Raises LedgerUnavailable, LedgerRefused.
        """
        ...

    def dead(self, book: Book) -> frozenset[str]:
        """Ids of the owners of sections and tickets in this book that are proven dead. Unknown is not dead."""
        ...

    def user_of(self, book: Book, owner_id: str, ticket: Ticket | None = None) -> str:
        """The user whose process this owner is, and whose wish the ticket, as far as this ledger can vouch for it;
        empty where it cannot, and then what is asked in that name is not done. See its own docstring for how it
        knows."""
        ...

    def ring(self, owners: Iterable[str]) -> None:
        """Tell these owners to read the book. Never blocks, never fails. One's own id wakes one's own threads."""
        ...

    def wait(self, timeout: float, ends: Iterable[Owner] = ()) -> bool:
        """True as soon as somebody rang or the process of one of the owners in `ends` has ended, False after `timeout`
        seconds. (Of one in another container the end cannot be seen: look for `dead` every second all the same.)

        Several threads may wait: a ring wakes them all, and one that came between a thread's last wait and this
        one counts. A ring may be false; it says "read the book", nothing else.
        """
        ...

    def publish_maps(self, maps: tuple[AllocatorMap, ...]) -> None:
        """Puts this owner's maps beside the book, in the place of its last; they go with it. Raises OSError."""
        ...

    def maps(self) -> dict[str, tuple[AllocatorMap, ...]]:
        """By owner id, the maps that the living put beside the book, as far as they can be seen from here."""
        ...

    def close(self) -> None:
        """Gives up this owner's lock and doorbell. Its section should be gone from the book by then; where it is
        not, others can prove this owner dead and reap it."""
        ...
