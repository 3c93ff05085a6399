"""The hands that keep the book, and the one door to them: `open_ledger(url)`.

A ledger keeps one page with a revision. It is *given* what to decide; it does not know what a planner is. Before it
writes it checks that the laws of the book hold, whatever the decision was.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from ..facts import Book, Owner

T = TypeVar("T")
Decide = Callable[[Book], tuple[Book, T]]


class Ledger(Protocol):
    """One owner's door to the book of its host."""

    url: str
    owner: Owner  # whose sections and tickets this door may write

    def read(self) -> Book:
        """The book as it stands. Raises LedgerUnavailable."""
        ...

    def transact(self, decide: Callable[[Book], tuple[Book, T]]) -> T:
        """What `decide` answered for the book that its own answer was then written over.

        `decide` may run more than once; it must be pure. Where it returns the book it was given (the same object),
        nothing is written. Raises LedgerUnavailable, LedgerRefused.
        """
        ...

    def dead(self, book: Book) -> frozenset[str]:
        """Ids of the owners in this book that are proven dead."""
        ...

    def ring(self, owners: Iterable[str]) -> None:
        """Tell these owners to read the book. Never blocks, never fails."""
        ...

    def wait(self, timeout: float) -> bool:
        """True as soon as somebody rang, False after `timeout` seconds."""
        ...

    def close(self) -> None:
        """Gives up this owner's lock and doorbell. Its section should be gone from the book by then."""
        ...
