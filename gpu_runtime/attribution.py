"""For whom this thread acts, where that is not whoever runs the process: a console acts for the people who look at it.

A name for display. What may be done goes by the process that asks, and by nothing that it says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

MOST_LETTERS = 80

_speaking_for: ContextVar[str] = ContextVar("speaking_for", default="")


@contextlib.contextmanager
def on_behalf_of(name: str) -> Iterator[None]:
    """What this thread does meanwhile is told as done for that person."""
    token = _speaking_for.set(printable(name))
    try:
        yield
    finally:
        _speaking_for.reset(token)


def speaking_for() -> str:
    """The person for whom this thread acts now; empty: nobody but its own user."""
    return _speaking_for.get()


def printable(name: str) -> str:
    """A name as it may be written down: one line, of a bounded length.

    >>> printable("ann\\n (operator)")
    'ann (operator)'
    """
    return " ".join("".join(letter if letter.isprintable() else " " for letter in name).split())[
        :MOST_LETTERS
    ]


def attributed(said_by: str, process: str) -> str:
    """Who did it: the person that the asking process names, and that process, which is known.

    >>> attributed("ann, console", "ops, pid 7"), attributed("", "ops, pid 7")
    ('ann, console (ops, pid 7)', 'ops, pid 7')
    """
    said = printable(said_by)
    return f"{said} ({process})" if said and process else said or process
