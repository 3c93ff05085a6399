"""Makes locks safe at the moment of a fork.

A forked child has the memory of its parent and only one of the parent's threads. If another thread
holds a lock at the moment of the fork, the lock stays locked in the child for ever, and the data
that it protects may be half changed. SQLite has such locks itself, and remembers file locks that
the child does not have. (When a thread was inside SQLite, 2 in 200 children hung, or kept a lock
that stopped every process for 20 s.)

This module opens and closes nothing.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import Any, TypeVar

WAIT_SECONDS = (
    1.0  # the longest wait of a fork; a lock that the fork did not get is free in the child
)

_awaited: weakref.WeakValueDictionary[int, threading.Lock] = weakref.WeakValueDictionary()
_freed: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_clean = True
L = TypeVar("L")


class _Here(threading.local):
    """The locks that the fork of this thread got, and those that it did not get.

    Both are empty for a fork that began before this module was imported.
    """

    def __init__(self) -> None:
        self.taken: list[threading.Lock] = []
        self.missed: list[threading.Lock] = []


_here = _Here()


def awaited(lock: threading.Lock) -> threading.Lock:
    """Makes every fork wait for `lock`, so the child sees no half-changed data. Returns `lock`.

    Use this function for locks around SQLite, and around files that are locked for a moment.
    """
    _awaited[id(lock)] = lock
    return lock


def freed(lock: L) -> L:
    """Makes `lock` free in a forked child. Returns `lock`.

    Use this function only for a lock whose data is valid at every moment.
    """
    _freed[id(lock)] = lock
    return lock


def is_clean() -> bool:
    """Whether the fork that made this process got every lock that was passed to `awaited`.

    A fork waits at most WAIT_SECONDS for these locks. The forks that made the parent and its
    ancestors count too. In a process that was not forked, the result is True.
    """
    return _clean


def _before() -> None:
    """Acquires, in the parent, the locks that were passed to `awaited`."""
    deadline = time.monotonic() + WAIT_SECONDS
    _here.taken, _here.missed = [], []
    for (
        reference
    ) in _awaited.valuerefs():  # an atomic copy, since other threads add locks meanwhile
        lock = reference()
        if lock is None:
            continue
        left = max(0.0, deadline - time.monotonic())
        taken = lock.acquire(timeout=left)
        (_here.taken if taken else _here.missed).append(lock)


def _release() -> None:
    for lock in _here.taken:
        lock.release()
    _here.taken = []


def _in_child() -> None:
    global _clean
    _clean = _clean and not _here.missed
    _release()
    for reference in _freed.valuerefs():
        lock = reference()
        if lock is not None:
            _free(lock)
    for lock in _here.missed:
        _free(lock)


def _free(lock: threading.Lock) -> None:
    """Makes `lock` free, even if a thread of the parent held the lock.

    Use this function only in a child, which has one thread.
    """
    lock._at_fork_reinit()  # type: ignore[attr-defined]


os.register_at_fork(before=_before, after_in_parent=_release, after_in_child=_in_child)
