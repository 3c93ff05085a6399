"""The cells that this process's kernel runs now and will run next, with the models they use.

The IPython extension knows the cells, and runtimes load models ahead for them. They meet here, since
neither may import the other. In a script there are no cells.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Collection
from typing import Any, Protocol

from .facts import CellModels

Governed = Callable[[Any], str]  # a value -> the name of the model that it is, or ""
Reader = Callable[[Collection[str], Governed], tuple[CellModels, ...]]


class Follower(Protocol):
    """An object that acts on upcoming cells, such as a runtime's look-ahead."""

    def wake(self) -> None:
        """Called when the cells have changed, in any thread. It returns at once."""


class Upcoming:
    """The upcoming cells of one kernel."""

    def __init__(self) -> None:
        self.followers: weakref.WeakSet[Follower] = weakref.WeakSet()
        self._reader: Reader | None = None

    def read_by(self, reader: Reader | None) -> None:
        """Sets the function that reads the cells; None if this process has no cells any more."""
        self._reader = reader
        self.changed()

    def cells(self, known: Collection[str], governed: Governed) -> tuple[CellModels, ...]:
        """The running cell, if any, and the waiting ones in their order.

        `known` are the names of models; `governed` returns the name of the model that a value is.
        """
        return self._reader(known, governed) if self._reader else ()

    def changed(self) -> None:
        """Wakes the followers: a cell began or ended, or another one waits."""
        for follower in list(self.followers):
            follower.wake()


def _forget() -> None:
    """In a forked child: its parent's cells are not its own."""
    upcoming.__init__()  # type: ignore[misc]


upcoming = Upcoming()
os.register_at_fork(after_in_child=_forget)
