"""The names of users, and the person for whom this thread acts if it is not the user of the process.

A console, for example, acts for its visitors. The name of a visitor is for display only.
Permissions depend on the requesting process, and not on the name. The name is in a context
variable, so each asyncio task can act for a person of its own.
"""

from __future__ import annotations

import contextlib
import os
import pwd
from collections.abc import Iterator
from contextvars import ContextVar

from . import safe_text

MOST_LETTERS = 80

_speaking_for: ContextVar[str] = ContextVar("speaking_for", default="")


@contextlib.contextmanager
def on_behalf_of(name: str) -> Iterator[None]:
    """Inside this `with` block, this thread's actions are attributed to the person `name`."""
    token = _speaking_for.set(printable(name))
    try:
        yield
    finally:
        _speaking_for.reset(token)


def speaking_for() -> str:
    """The person for whom this thread acts now. Empty if it acts for the user of its process."""
    return _speaking_for.get()


def printable(name: str) -> str:
    """`name` as text that is safe to store: one line, of a bounded length.

    >>> printable("ann\\n (operator)")
    'ann (operator)'
    """
    letters = [letter if letter.isprintable() else " " for letter in name]
    one_line = " ".join("".join(letters).split())
    return one_line[:MOST_LETTERS]


def attributed(said_by: str, process: str) -> str:
    """The author of a request: the claimed name `said_by`, and the known `process` of the request.

    >>> attributed("ann, console", "ops, pid 7"), attributed("", "ops, pid 7")
    ('ann, console (ops, pid 7)', 'ops, pid 7')
    """
    said = printable(said_by)
    if said and process:
        return f"{said} ({process})"
    return said or process


def name_of(uid: int) -> str:
    """The name of the user `uid`; or the number as text if the user has no name, as in containers.

    A name from a directory service may be any bytes. Owner records hold only printable text.
    """
    try:
        return safe_text.printable(pwd.getpwuid(uid).pw_name, safe_text.LONGEST_NAME)
    except KeyError:  # as in containers
        return str(uid)


def own_name() -> str:
    """The name of this process's user. It is the kernel's answer: $LOGNAME can be set to any name."""
    return name_of(os.geteuid())
