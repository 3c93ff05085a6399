"""How one owner tells another to read the book.

A `Bell` wakes the threads of its own process; a `Doorbell` is a Bell that other processes can ring too, over a Unix
datagram socket. A ring carries nothing, may be false, and is a hint only: whoever must not miss a change also polls.
"""

from __future__ import annotations

import io
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Iterable
from pathlib import Path

from ..facts import Owner
from .liveness import end_of


class Bell:
    """Rings are counted; each thread remembers the count it last woke for, so none is lost between two waits.

    Every waiting thread polls for itself, with an eventfd of its own. There is no elected listener whose death by
    KeyboardInterrupt would leave the others deaf, and no Condition, whose `wait` does not survive one.
    """

    def __init__(self) -> None:
        self._rings = 0
        self._counting = threading.Lock()
        self._here = threading.local()
        self._ears: weakref.WeakSet[_Ear] = weakref.WeakSet()
        self.closed = False

    def ring(self) -> None:
        with self._counting:
            self._rings += 1
            ears = list(self._ears)
        for ear in ears:
            ear.wake()

    def wait(self, timeout: float, ends: Iterable[Owner] = ()) -> bool:
        """True as soon as it rings (or rang since this thread's last wait), or the process of one of these owners ends;
        False after `timeout` seconds."""
        ear = self._ear()
        deadline = time.monotonic() + timeout
        ear.watch(ends)
        while ear.heard == self._rings and not self.closed and not ear.bereaved():
            left = deadline - time.monotonic()
            if not self._sleep(ear, max(0.0, left)) and left <= 0:
                return False
        ear.heard = self._rings
        return True

    def close(self) -> None:
        self.closed = True
        self.ring()

    def _ear(self) -> _Ear:
        ear = getattr(self._here, "ear", None)
        if ear is None:
            ear = self._here.ear = _Ear()
            with self._counting:
                self._ears.add(ear)
        return ear

    def _sleep(self, ear: _Ear, seconds: float) -> bool:
        """True where something woke this thread."""
        woken = ear.poll().poll(seconds * 1000)
        ear.rest(woken)
        return bool(woken)


class _Ear:
    """One waiting thread: the ring it last woke for, the descriptor that wakes it, and the processes it watches.

    Nobody rings for the dead: who waits for a process that is killed would learn of it only by looking, a second later.
    """

    def __init__(self) -> None:
        self.heard = 0
        self._ends: dict[
            str, io.FileIO | None
        ] = {}  # by owner; None: it has ended, or cannot be seen from here
        self._mourned: set[str] = set()  # those among them for whom this thread has woken
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Not __del__: while that closes the descriptor, weak references still answer, and a thread that rings just then
        # would bring the ear back to life and write to a descriptor that may be another file's by now.
        weakref.finalize(self, os.close, self.fd).atexit = False

    def wake(self) -> None:
        try:
            os.eventfd_write(self.fd, 1)
        except BlockingIOError:
            pass  # it has been woken already, and sleeps deeply

    def watch(self, owners: Iterable[Owner]) -> None:
        known = self._ends
        self._ends = {
            owner.id: known[owner.id] if owner.id in known else end_of(owner) for owner in owners
        }
        self._mourned &= self._ends.keys()
        for id in known.keys() - self._ends.keys():
            if (end := known[id]) is not None:
                end.close()

    def bereaved(self) -> bool:
        """Whether somebody watched has ended for whom this thread has not woken yet: each wakes it once."""
        gone = {id for id, end in self._ends.items() if end is None} - self._mourned
        self._mourned |= gone
        return bool(gone)

    def poll(self) -> select.poll:
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        for end in filter(None, self._ends.values()):
            poll.register(end, select.POLLIN)
        return poll

    def rest(self, woken: Iterable[tuple[int, int]]) -> None:
        """What woke it is over: the next sleep is to be a sleep."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            pass
        ended = {fd for fd, _ in woken}
        for id, end in self._ends.items():
            if end is not None and end.fileno() in ended:
                end.close()
                self._ends[id] = None


class Doorbell(Bell):
    """A bell with a button outside: a datagram socket `ID.bell` in a directory.

    Paths go through /proc/self/fd, because a socket's path is limited to 107 bytes and a home directory is not.
    """

    def __init__(self, directory: Path, owner_id: str, group: int | None = None) -> None:
        super().__init__()
        self.owner_id = owner_id
        self._group = group  # whose members may ring; None: only its own user
        self.path, self._directory, self._socket = _hang(directory, owner_id, group)

    def move_to(self, directory: Path) -> None:
        """Hangs it in a directory that was made anew, under the same descriptors, so that who waits need not know."""
        self.path, fd, fresh = _hang(directory, self.owner_id, self._group)
        os.dup2(fd, self._directory, inheritable=False)
        os.dup2(fresh.fileno(), self._socket.fileno(), inheritable=False)
        os.close(fd)
        fresh.close()
        self.ring()

    def ring_others(self, owners: Iterable[str]) -> None:
        for owner_id in owners:
            if owner_id == self.owner_id:
                self.ring()
                continue
            try:
                self._socket.sendto(b"!", _door(self._directory, owner_id))
            except OSError:
                pass  # gone, or so many rings wait at its door that one more says nothing new

    def close(self) -> None:
        super().close()
        self.path.unlink(missing_ok=True)
        self.close_here()

    def close_here(self) -> None:
        """Closes the descriptors and leaves the socket's name alone: a forked child's part."""
        self.closed = True
        self._socket.close()
        if self._directory >= 0:
            directory, self._directory = self._directory, -1
            os.close(directory)

    def _sleep(self, ear: _Ear, seconds: float) -> bool:
        poll = ear.poll()
        try:
            poll.register(self._socket, select.POLLIN)
        except ValueError:
            return True  # closed by another thread just now
        woken = poll.poll(seconds * 1000)
        ear.rest(woken)
        # Whoever comes first empties the socket, and tells the others: their poll may have missed it.
        if woken and self._emptied():
            self.ring()
        return bool(woken)

    def _emptied(self) -> bool:
        found = False
        while True:
            try:
                self._socket.recv(16)
                found = True
            except OSError:  # empty, or closed meanwhile
                return found


def _hang(directory: Path, owner_id: str, group: int | None) -> tuple[Path, int, socket.socket]:
    """A socket bound in the directory: its path, a descriptor of the directory, and itself."""
    path = directory / f"{owner_id}.bell"
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    bell = socket.socket(
        socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
    )
    path.unlink(missing_ok=True)  # of a killed process whose number came back in another container
    bell.bind(_door(fd, owner_id))
    if group is not None:
        os.chown(path, -1, group)
    path.chmod(0o600 if group is None else 0o660)
    return path, fd, bell


def _door(directory_fd: int, owner_id: str) -> str:
    return f"/proc/self/fd/{directory_fd}/{owner_id}.bell"
