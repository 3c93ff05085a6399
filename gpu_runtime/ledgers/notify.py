"""Notifications: one owner wakes another, so that it reads the book.

A `Bell` wakes the threads of its own process. A `Doorbell` is a Bell that other processes can ring
too, through a Unix datagram socket. A ring is a notification without content. A ring may be lost or
unnecessary, so a caller that must not miss a change also reads the book regularly.
"""

from __future__ import annotations

import io
import itertools
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from ..facts import Owner
from .liveness import end_of


class Bell:
    """Wakes the waiting threads of this process, and numbers the rings.

    Each thread remembers the ring at which it last woke, so no ring between two waits is lost.

    Every waiting thread waits on an eventfd of its own. There is no single listening thread: if a
    KeyboardInterrupt ended such a thread, no other thread would ever wake. A Condition is not used
    either, because its `wait` does not survive a KeyboardInterrupt. There is no lock, since a signal
    handler of the user may ring at any moment.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._last = 0  # the number of a ring; it differs after each one
        self._here = threading.local()
        self._waiters: set[weakref.ref[_Waiter]] = set()
        self.closed = False

    def ring(self) -> None:
        """Wakes every waiting thread. If a thread does not wait now, its next wait ends at once."""
        self._wake_all_but(None)

    def _wake_all_but(self, awake: _Waiter | None) -> None:
        self._last = next(self._numbers)
        for reference in self._waiters.copy():
            waiter = reference()
            if waiter is not None and waiter is not awake:
                waiter.wake()

    def wait(self, timeout: float, ends: Iterable[Owner] = ()) -> bool:
        """Waits for a ring since this thread's last wait, or for the end of an owner in `ends`.

        Returns True after a ring or an end, and False after `timeout` seconds.
        """
        waiter = self._waiter()
        deadline = time.monotonic() + timeout
        waiter.watch(ends)
        while not self.closed and waiter.seen == self._last and not waiter.owner_ended():
            left = deadline - time.monotonic()
            woken = self._sleep(waiter, max(0.0, left))
            if not woken and left <= 0:
                return False
        waiter.seen = self._last
        return True

    def close(self) -> None:
        """Wakes every thread for the last time. After `close`, `wait` returns at once."""
        self.closed = True
        self.ring()

    def _waiter(self) -> _Waiter:
        waiter = getattr(self._here, "waiter", None)
        if waiter is None:
            waiter = self._here.waiter = _Waiter()
            self._waiters.add(weakref.ref(waiter, self._waiters.discard))
        return waiter

    def _source(self) -> Source | None:
        return None

    def _sleep(self, waiter: _Waiter, seconds: float) -> bool:
        """Sleeps for at most `seconds`. Returns whether something woke this thread."""
        poll, source = waiter.poll(), self._source()
        if source is not None:
            try:
                poll.register(source, select.POLLIN)
            except ValueError:
                return True  # another thread closed it just now
        woken = poll.poll(seconds * 1000)
        waiter.reset(woken)
        # The first thread that wakes empties the source, so the polls of the other threads may miss
        # the ring. For this reason the first thread wakes all other threads.
        if woken and source is not None and source.drain():
            self._wake_all_but(waiter)
        return bool(woken)


class Source(Protocol):
    """What other processes ring: a socket."""

    def fileno(self) -> int: ...

    def drain(self) -> bool:
        """Reads all rings. Returns whether there was one."""


class _Waiter:
    """One waiting thread: the last ring that it has seen, its eventfd, and the processes it watches.

    A killed process does not ring. If the waiting thread did not watch the process, the thread
    would notice the death only when it reads the book again, a second later.
    """

    def __init__(self) -> None:
        self.seen = 0
        # Maps owner ids to descriptors. None means that the owner's process has ended, or that this
        # process cannot see it.
        self._ends: dict[str, io.FileIO | None] = {}
        self._reported: set[str] = set()  # ended owners for which this thread has already woken
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # `__del__` is not used, because weak references to this object still work while `__del__`
        # closes the descriptor. A thread that rings at that moment could get this object from its
        # weak reference. The thread could write to a descriptor number that already belongs to
        # another file.
        weakref.finalize(self, os.close, self.fd).atexit = False

    def wake(self) -> None:
        """Wakes the thread."""
        try:
            os.eventfd_write(self.fd, 1)
        except BlockingIOError:
            pass  # the wake-up is pending already

    def watch(self, owners: Iterable[Owner]) -> None:
        """Watches the processes of these `owners`, and no other processes."""
        known = self._ends
        self._ends = {
            owner.id: known[owner.id] if owner.id in known else end_of(owner) for owner in owners
        }
        self._reported &= self._ends.keys()
        for id in known.keys() - self._ends.keys():
            end = known[id]
            if end is not None:
                end.close()

    def owner_ended(self) -> bool:
        """Whether a watched process has ended since the last call. Each end counts only once."""
        ended = {id for id, end in self._ends.items() if end is None}
        new = ended - self._reported
        self._reported |= new
        return bool(new)

    def poll(self) -> select.poll:
        """A poll object for the wake descriptor and the watched processes."""
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        for end in filter(None, self._ends.values()):
            poll.register(end, select.POLLIN)
        return poll

    def reset(self, woken: Iterable[tuple[int, int]]) -> None:
        """Clears the causes of this wake-up, so that the next sleep does not end at once.

        `woken` are the descriptors that poll returned, with their events.
        """
        ended = {fd for fd, _ in woken}
        if self.fd in ended:
            with suppress(BlockingIOError):  # another thread has cleared it
                os.eventfd_read(self.fd)
        for id, end in self._ends.items():
            if end is not None and end.fileno() in ended:
                end.close()
                self._ends[id] = None


class Doorbell(Bell):
    """A bell that other processes can ring: a datagram socket `ID.bell` in a directory.

    Paths go through /proc/self/fd, because the path of a socket is limited to 107 bytes, and a home
    directory may be longer.
    """

    def __init__(self, directory: Path, owner_id: str, group: int | None = None) -> None:
        """Binds the socket of the owner `owner_id` in `directory`. Raises OSError.

        Members of `group` may ring the bell. If `group` is None, only the owner's user may ring it.
        """
        super().__init__()
        self.owner_id = owner_id
        self._group = group
        self.path, self._directory, self._socket = _bind(directory, owner_id, group)

    def move_to(self, directory: Path) -> None:
        """Binds the socket again in `directory`, which was deleted and made again. Raises OSError.

        The descriptors keep their numbers, so waiting threads are not affected.
        """
        self.path, fd, fresh = _bind(directory, self.owner_id, self._group)
        os.dup2(fd, self._directory, inheritable=False)
        os.dup2(fresh.fileno(), self._socket.fileno(), inheritable=False)
        os.close(fd)
        fresh.close()
        self.ring()

    def ring_others(self, owners: Iterable[str]) -> None:
        """Rings the doorbells of these `owners` (ids). Never fails.

        If this object's own owner is in `owners`, the threads of this process are woken directly.
        """
        for owner_id in owners:
            if owner_id == self.owner_id:
                self.ring()
                continue
            try:
                self._socket.sendto(b"!", _socket_path(self._directory, owner_id))
            except OSError:
                pass  # the owner is gone, or has many unread rings and will wake anyway

    def close(self) -> None:
        super().close()
        with suppress(OSError):  # the directory is gone, or was closed to this user
            self.path.unlink()
        self.close_here()

    def close_here(self) -> None:
        """Closes the descriptors. The socket's name remains. A forked child may call this too."""
        self.closed = True
        self._socket.close()
        if self._directory >= 0:
            directory, self._directory = self._directory, -1
            os.close(directory)

    def _source(self) -> Source:
        return self

    def fileno(self) -> int:
        return self._socket.fileno()

    def drain(self) -> bool:
        found = False
        while True:
            try:
                self._socket.recv(16)
                found = True
            except OSError:  # empty, or closed meanwhile
                return found


def _bind(directory: Path, owner_id: str, group: int | None) -> tuple[Path, int, socket.socket]:
    """A socket bound in `directory`: its path, a descriptor of the directory, the socket."""
    path = directory / f"{owner_id}.bell"
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    bell = socket.socket(
        socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
    )
    # A file with this name is left from a killed owner. That owner ran in another container, with
    # the same pid and the same start time.
    path.unlink(missing_ok=True)
    bell.bind(_socket_path(fd, owner_id))
    if group is not None:
        os.chown(path, -1, group)
    path.chmod(0o600 if group is None else 0o660)
    return path, fd, bell


def _socket_path(directory_fd: int, owner_id: str) -> str:
    return f"/proc/self/fd/{directory_fd}/{owner_id}.bell"
