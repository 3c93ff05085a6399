"""Computes how soon one ledger may write again to a book that other processes want to write too.

A process that has just written is awake. Without a wait, it would write again before the next
process has woken up. Up to six transactions in a row are useful: the first transaction costs four
times as much as a later one, because the process's memory is not yet in the processor's cache.
After six transactions, the process waits if other processes want to write. (With 64 processes that
write without pause, two in a row make 800 transactions a second, and six make 2,300. With eight in
a row there are 2,700, but the longest wait is 240 ms instead of 210.)

A process that lost a race waits a random time, which grows with each loss. All waits are multiples
of the cost of one attempt, so they suit slow and fast machines alike.
"""

from __future__ import annotations

import random
import threading

FREE_TURNS = 6  # transactions in a row without a wait
IN_A_ROW_SECONDS = 0.002  # a transaction that starts so soon after the last one is "in a row"
CROWDED_SECONDS = 1.0  # how long contention is remembered
MOST_DOUBLINGS = 4  # more doublings change nothing, because 4 · 2⁴ exceeds the cap of 50
LONGEST_ATTEMPT_SECONDS = 0.01
_NEVER = float("-inf")
# The user's generator is not drawn from. This one has no state that a forked child would share.
_chance = random.SystemRandom()


class Pace:
    """Computes the waits of one ledger.

    The methods return seconds, and the caller sleeps. `now` is always a monotonic time.
    """

    def __init__(self) -> None:
        self.attempt_seconds = 0.0001  # duration of an attempt that nothing slowed down
        self._here = threading.local()
        self._crowded_at = _NEVER

    def note_contention(self, now: float) -> None:
        """Records that other processes write too, after a wait for the turn or a lost race."""
        self._crowded_at = now

    def is_crowded(self, now: float) -> bool:
        """Whether other processes have written too in the last second."""
        return now - self._crowded_at <= CROWDED_SECONDS

    def before(self, now: float) -> float:
        """Seconds to wait before a transaction that starts at the time `now`.

        The result is above 0 only if this thread has made six transactions in a row and other
        processes write too. This method counts the transactions, so call it once for each.
        """
        here = self._here
        if now - getattr(here, "ended_at", _NEVER) < IN_A_ROW_SECONDS:
            here.turns += 1
            here.row += 1
        else:
            here.last_row = getattr(here, "row", 0)
            here.turns = here.row = 1
        if here.turns <= FREE_TURNS or not self.is_crowded(now):
            return 0.0
        here.turns = 1
        return _chance.uniform(2, 6) * self.attempt_seconds

    @property
    def continues(self) -> bool:
        """Whether this transaction follows another one of this thread, without a wait between them.

        `before` must be called first.
        """
        return self._here.turns > 1

    @property
    def will_continue(self) -> bool:
        """Whether this thread will probably make its next transaction at once and without a wait.

        A thread that has made three transactions in a row will probably go on. A shorter row will
        probably be as long as the thread's last row. (A lease and its release are two.)
        """
        here = self._here
        return here.turns < FREE_TURNS and (here.row > 2 or here.row < here.last_row)

    def after_loss(self, times: int, now: float) -> float:
        """Seconds to wait after the race was lost `times` times in this transaction."""
        self.note_contention(now)
        doublings = min(times, MOST_DOUBLINGS)
        most = min(50, 4 * 2**doublings)
        return self.attempt_seconds * (1 + _chance.uniform(0, most))

    def note_end(self, attempt_seconds: float, now: float) -> None:
        """Records that a transaction ended at `now`. Its last attempt took `attempt_seconds`."""
        self._here.ended_at = now
        # The estimate stays close to the minimum. The mean would be dominated by a few attempts
        # that met a cold cache or a garbage collection, or that waited for a processor. (A thread's
        # processor time does not include the wait for a processor. But reading the processor time
        # took 4 ms on a busy machine, because the kernel often gives the processor to another
        # process during this system call.)
        most = min(self.attempt_seconds * 1.02, LONGEST_ATTEMPT_SECONDS)
        self.attempt_seconds = min(attempt_seconds, most)
