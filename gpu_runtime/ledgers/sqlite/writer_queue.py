"""A queue for processes that write the book at the same time, so that fewer attempts fail.

The queue is not a lock. The book is safe without a queue, because a write counts only if the
revision is unchanged. *The turn* is the right to write first; one process at a time, the holder,
has the turn. No other process depends on the holder. If the holder ends, the operating system
releases its lock. If the holder is stopped, or another of its threads keeps the GIL, the other
processes write without the turn after 5 to 40 ms. If the holder only waits for a processor, the
other processes wait 250 ms before they write without the turn. (On a machine with 25 other
programs, 64 processes that never waited longer than 5 ms made 50 to 180 writes a second, and some
gave up after 10 s. With the present rule they made 700 to 1,400 writes a second, and none gave up.)

Other processes may write without queueing, as long as the process with the turn loses no race.
After it has lost a race, they must queue until the turn ends.

A process that has several writes to make says so at the end of a turn, and takes the next turn too if
it comes back within 1 ms. Its second write is four times as fast as its first one.

The queue has two files. The lock file contains the time at which the last turn ended, a mark, and the
id of the thread that has the turn. The mark says whether all processes must queue, or whether the
process of the last turn will come back. The second file is a pipe that wakes the process that has
waited longest. In a shared ledger, a member may write to both files, and so make other processes
wait up to MOST_SECONDS for a turn.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import threading
import time
import weakref
from pathlib import Path

from ..access import Access, access_to

STALLED_SECONDS = 0.005
# How long a turn may last while its thread could run, but gets no processor.
RUNNABLE_SECONDS = 0.25
# How soon a process takes its next turn, if it said so at the end of its last turn.
CONTINUES_SECONDS = 0.001
UNCALLED_SECONDS = 0.5  # after such a wait, a process that was never woken tries to take the turn
MOST_SECONDS = 5.0  # the longest wait for the turn, even if other turns end
LOCK, PIPE = "turn", "turn.pipe"
_COUNT_BYTES = 8
# In the lock file, the mark follows the time at which the last turn ended.
ALL_MAY, MUST_QUEUE, CONTINUES = b"-", b"!", b"+"
# The mark is followed by the native id of the thread that has the turn, or by _PAUSES.
_HOLDER = struct.Struct("<I")
_PAUSES = 0xFFFFFFFF


def writer_queue_in(directory: Path) -> WriterQueue | None:
    """The queue of the book in `directory`; None if it cannot be opened or made.

    Without a queue, all processes write directly.
    """
    try:
        return WriterQueue(directory, access_to(directory))
    except OSError:  # a full disk must not prevent writes
        return None


class WriterQueue:
    """One process's access to the queue. The threads of one process do not exclude each other."""

    def __init__(self, directory: Path, access: Access) -> None:
        """Opens the queue's files in `directory`, with the rights of `access`. Raises OSError."""
        access.make_file(directory / LOCK)
        access.make_file(directory / PIPE, os.mkfifo)
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        self._lock = os.open(directory / LOCK, flags)
        self._pipe = os.open(directory / PIPE, flags)
        # There is no `close`; the descriptors are closed when no thread uses this object any more.
        # While one thread closes the ledger, another may have the turn and still use the
        # descriptors. If they were closed, their numbers could belong to other files already.
        self._closing = weakref.finalize(self, _close, self._lock, self._pipe)
        self._closing.atexit = False
        self._next_is_awake = False  # whether `leave` has woken a process for a later turn
        self._stalled = b"-"  # the last `_turns_ended` after which a process did not end its turn
        self._wake_next()  # without a byte in the pipe, the first process would wait in vain

    def try_enter(self) -> bool:
        """Takes the turn if no process has it. After True, the caller must call `leave`."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another process has the turn
            return False
        os.pwrite(self._lock, _HOLDER.pack(threading.get_native_id()), _COUNT_BYTES + 1)
        return True

    def enter(self) -> bool:
        """Waits for the turn, and returns whether this process has it.

        After True, the caller must call `leave`. After False, the caller writes without the turn:
        the process with the turn does not end it, or MOST_SECONDS have passed.
        """
        ended = self._turns_ended()
        began = ended_at = now = time.monotonic()
        patience = STALLED_SECONDS
        is_next = False
        # The system wakes the process that registered the pipe first, and no other. This process
        # registers it once for the whole wait, so it keeps its place in the queue.
        with select.epoll() as poll:
            poll.register(self._pipe, select.EPOLLIN | select.EPOLLEXCLUSIVE)
            while ended != self._stalled and now - began < MOST_SECONDS:
                if poll.poll(patience):
                    is_next = True
                    with contextlib.suppress(BlockingIOError):  # another process was woken
                        os.read(self._pipe, 65536)
                ended_before, ended = ended, self._turns_ended()
                # Without this rule, a process whose patience ends would take the turn before the
                # process that was woken for it.
                may_try = not self._will_continue() if is_next else ended == ended_before
                if may_try and self.try_enter():
                    return True
                now = time.monotonic()
                if ended != ended_before:
                    ended_at = now
                elif now - ended_at >= STALLED_SECONDS and not (
                    now - ended_at < RUNNABLE_SECONDS and self._holder_is_runnable()
                ):
                    self._stalled = ended
                # A process that was woken but is stopped gets every call to wake the next process.
                is_next = is_next or now - began >= UNCALLED_SECONDS
                # The first check is after 5 ms. Later checks are rarer, because the process with the
                # turn was not stopped at the first check.
                patience = CONTINUES_SECONDS if is_next else 8 * STALLED_SECONDS
        return False

    def pause(self, seconds: float) -> None:
        """Sleeps for `seconds` in the turn. Other processes wait at most 250 ms for the turn."""
        os.pwrite(self._lock, _HOLDER.pack(_PAUSES), _COUNT_BYTES + 1)
        time.sleep(seconds)
        os.pwrite(self._lock, _HOLDER.pack(threading.get_native_id()), _COUNT_BYTES + 1)

    def require_queue(self) -> None:
        """Marks that all processes must queue.

        The process with the turn calls this method after it lost a race to a process that did not
        queue.
        """
        os.pwrite(self._lock, MUST_QUEUE, _COUNT_BYTES)

    @property
    def must_queue(self) -> bool:
        """Whether the process with the turn has called `require_queue`.

        If the process with the turn is killed, the mark remains until the next turn ends.
        """
        return os.pread(self._lock, 1, _COUNT_BYTES) == MUST_QUEUE

    def leave(self, continues: bool = False) -> None:
        """Ends the turn and wakes the next process.

        If `continues` is true, this process will probably take another turn within
        CONTINUES_SECONDS. The next process is woken too, and waits for the end of that turn.
        """
        mark = CONTINUES if continues else ALL_MAY
        os.pwrite(self._lock, time.monotonic_ns().to_bytes(_COUNT_BYTES, "little") + mark, 0)
        fcntl.flock(self._lock, fcntl.LOCK_UN)
        next_is_awake, self._next_is_awake = self._next_is_awake, continues
        if continues and next_is_awake:
            return
        self._wake_next()

    def _wake_next(self) -> None:
        # A full pipe wakes every process that waits.
        with contextlib.suppress(BlockingIOError):
            os.write(self._pipe, b"!")

    def close_here(self) -> None:
        """Closes the descriptors in a forked child, so that it cannot keep a killed parent's turn."""
        self._closing()

    def _holder_is_runnable(self) -> bool:
        """Whether the thread with the turn runs, waits for a processor, or is in `pause`.

        On a busy machine, a thread may wait for a processor for longer than STALLED_SECONDS. A
        thread that is stopped, or that waits for the GIL, is not runnable.
        """
        holder = os.pread(self._lock, _HOLDER.size, _COUNT_BYTES + 1)
        if len(holder) != _HOLDER.size:
            return False
        [thread] = _HOLDER.unpack(holder)
        if thread == _PAUSES:
            return True
        try:
            stat = Path(f"/proc/{thread}/task/{thread}/stat").read_text()
        except OSError:  # it has ended, or it cannot be seen from here
            return False
        return stat.rpartition(")")[2].split()[0] == "R"

    def _will_continue(self) -> bool:
        """Whether the process that had the last turn will probably take the next one too."""
        state = os.pread(self._lock, _COUNT_BYTES + 1, 0)
        if state[_COUNT_BYTES:] != CONTINUES:
            return False
        age = time.monotonic_ns() - int.from_bytes(state[:_COUNT_BYTES], "little")
        return 0 <= age < CONTINUES_SECONDS * 1e9

    def _turns_ended(self) -> bytes:
        """A value that changes whenever a turn ends."""
        return os.pread(self._lock, _COUNT_BYTES, 0)


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
