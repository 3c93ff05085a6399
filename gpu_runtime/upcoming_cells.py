"""The cells that this process's kernel runs now and will run next, with the models they use.

The IPython extension reads the cells, and runtimes load models ahead for the cells. This module
connects the extension and the runtimes, since neither may import the other. A script has no cells.
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
    """An object that acts on upcoming cells, such as the look-ahead of a runtime."""

    def wake(self) -> None:
        """Called in any thread when the cells have changed. This method must return at once."""


class Upcoming:
    """The upcoming cells of one kernel."""

    def __init__(self) -> None:
        self.followers: weakref.WeakSet[Follower] = weakref.WeakSet()
        self._reader: Reader | None = None

    def read_by(self, reader: Reader | None) -> None:
        """Sets the function that reads the cells; None if this process no longer has cells."""
        self._reader = reader
        self.changed()

    def cells(self, known: Collection[str], governed: Governed) -> tuple[CellModels, ...]:
        """The running cell, if there is one, and the waiting cells in their order.

        `known` are the names of all models. `governed(value)` returns the name of the model that
        the object `value` is; empty if it is no model. It is called with the values of variables.
        """
        return self._reader(known, governed) if self._reader else ()

    def changed(self) -> None:
        """Wakes the followers, because a cell began, ended or was queued."""
        for follower in list(self.followers):
            follower.wake()


def _forget() -> None:
    """Removes the reader and the followers in a forked child: the cells belong to the parent."""
    upcoming.__init__()  # type: ignore[misc]


upcoming = Upcoming()
os.register_at_fork(after_in_child=_forget)
