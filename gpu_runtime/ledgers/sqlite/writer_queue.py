"""Where those who want to write the book at the same time line up, so that few of them decide in vain.

A courtesy, not a lock: the book is safe without it, since a write counts only where the revision still stands. So
nobody depends on whoever is inside: who ends there lets go (the operating system drops the lock); who is stopped there,
or kept from Python by a thread that holds the GIL, is walked past after 5 ms.

Whoever comes with a decision made need not line up, as long as that does not keep the one inside from writing: else the
line would stand still while all others pass it (48 processes, 10 writes a second each: p99 of 409 ms, and so 14).

Two files: a lock with a count of those who came out and whether others are held up, and a pipe through which one of
those who wait is woken, the first to have come. In a shared ledger a member may write to both, and so make others wait
those 5 ms.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import time
import weakref
from pathlib import Path

from ..access import Access, access_to

STALLED_SECONDS = 0.005
MOST_SECONDS = 1.0
LOCK, PIPE = "turn", "turn.pipe"
ALL_MAY, LINE_UP = (
    b"-",
    b"!",
)  # after the count in the lock's file: whether others may try without lining up


def turnstile_in(directory: Path) -> Turnstile | None:
    """The turnstile before the book in that directory; None where it can neither be found nor made: then all push."""
    try:
        return Turnstile(directory, access_to(directory))
    except OSError:
        return None


class Turnstile:
    """One process's way through. Threads of one process do not keep each other out."""

    def __init__(self, directory: Path, access: Access) -> None:
        access.make_file(directory / LOCK)
        access.make_file(directory / PIPE, os.mkfifo)
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        self._lock = os.open(directory / LOCK, flags)
        self._pipe = os.open(directory / PIPE, flags)
        # No `close`: a thread may be inside while another shuts the door, and the numbers may be other files' by then.
        weakref.finalize(self, _close, self._lock, self._pipe).atexit = False
        self._stalled = b"-"  # the count at which somebody was inside and did not come out

    def try_enter(self) -> bool:
        """Our turn, at once: True, and `leave` must follow."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            return False

    def enter(self) -> bool:
        """Our turn, when it comes: True, and `leave` must follow; False where it is better not to wait for it."""
        came_out = self._count()
        began = now = time.monotonic()
        patience = STALLED_SECONDS
        # Registered once: of those who wait the first to have come is woken, and no other.
        with select.epoll() as ear:
            ear.register(self._pipe, select.EPOLLIN | select.EPOLLEXCLUSIVE)
            while came_out != self._stalled and now - began < MOST_SECONDS:
                ear.poll(patience)
                with contextlib.suppress(BlockingIOError):
                    os.read(self._pipe, 65536)
                if self.try_enter():
                    return True
                before, came_out, was, now = came_out, self._count(), now, time.monotonic()
                if came_out == before and now - was >= STALLED_SECONDS:
                    self._stalled = came_out
                patience = (
                    8 * STALLED_SECONDS
                )  # they do come out: whoever came first is woken first
        return False

    def hold_up(self) -> None:
        """From inside: somebody who did not line up was faster. Nobody else should be until we have left."""
        os.pwrite(self._lock, LINE_UP, 8)

    @property
    def held_up(self) -> bool:
        """Whether who is inside has asked so. (Whoever ends there may leave it said: until the next one leaves.)"""
        return os.pread(self._lock, 1, 8) == LINE_UP

    def leave(self, wake: bool = True) -> None:
        """Lets the next one in; not `wake`: we are likely to be back before they are awake."""
        os.pwrite(self._lock, time.monotonic_ns().to_bytes(8, "little") + ALL_MAY, 0)
        fcntl.flock(self._lock, fcntl.LOCK_UN)
        if not wake:
            return
        with contextlib.suppress(BlockingIOError):  # full: nobody has waited for a long time
            os.write(self._pipe, b"!")

    def _count(self) -> bytes:
        return os.pread(self._lock, 8, 0)


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
