"""One poller for all sessions of a process: it asks the runtime, they look at what it was told.

Twenty sessions cost one question to the ledger, in a thread of its own, so that a ledger that does not answer holds up
no page. It asks only while somebody looks. Panel is not imported here.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from gpu_runtime import threads
from gpu_runtime.errors import GpuError
from gpu_runtime.facts import Snapshot

log = logging.getLogger("gpu_runtime")
T = TypeVar("T")

POLL_SECONDS = 0.5  # between two questions; what an action did is asked about at once
REFRESH_SECONDS = (
    1.0  # an unchanged snapshot is passed on that often, for what depends on the time alone
)
REAP_SECONDS = 1.0  # between two looks for the dead, whom nobody else may be left to notice
FORGET_SECONDS = 60.0  # what nobody asked for any more is forgotten after that


class Look(NamedTuple):
    """What the ledger said last, and whether it still answers."""

    snapshot: Snapshot | None = None  # None: nothing was heard yet
    error: str = ""  # why nothing newer is known; empty: all is well
    since: float = 0.0  # since when it is so, in epoch seconds
    revision: int = 0  # another number: something is new


@dataclass
class _Wanted:
    """Something asked for beside the snapshot."""

    fetch: Callable[[Any], Any]
    every: float
    asked_at: float
    fetched_at: float | None = None
    value: Any = None
    trouble: str = ""  # why it could not be fetched last

    def is_due(self, now: float) -> bool:
        """Whether it is old, and anybody still asks for it."""
        if self.fetched_at is None:
            return True
        return (
            now - self.fetched_at >= self.every
            and now - self.asked_at < 2 * self.every + REFRESH_SECONDS
        )


class Watch:
    """What one runtime tells, for all who look at it. `of` gives the one of a runtime."""

    def __init__(
        self,
        rt: Any,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        start: Callable[[Callable[[], None]], Any] = threads.start,
    ) -> None:
        self.rt = rt
        self.look = Look()
        self._clock, self._wall, self._start = clock, wall, start
        self._sessions: weakref.WeakSet[Any] = (
            weakref.WeakSet()
        )  # a session that was not closed properly goes too
        self._lock = threading.Lock()
        self._running = False
        self._due, self._heard = threading.Event(), threading.Event()
        self._wanted: dict[str, _Wanted] = {}
        self._once: dict[str, tuple[Snapshot, Any]] = {}
        self._passed_on = self._reaped_at = 0.0

    # -- who looks

    def join(self, session: Any) -> None:
        """From now on this session looks; while any does, the runtime is asked."""
        with self._lock:
            self._sessions.add(session)
            if self._running:
                return
            self._running = True
            self._heard.clear()
        self._start(self._run)

    def leave(self, session: Any) -> None:
        self._sessions.discard(session)
        self.nudge()  # the last one leaves no thread behind

    def first(self, timeout: float) -> Look:
        """The first answer since somebody looks again; after `timeout` seconds whatever is known."""
        self._heard.wait(timeout)
        return self.look

    def nudge(self) -> None:
        """Something was done: ask now."""
        self._due.set()

    # -- what they see

    def latest(self, key: str, fetch: Callable[[Any], T], every: float) -> T | None:
        """What `fetch(rt)` gave last; None until it is there. Never waits.

        The first to ask for a key has it fetched, for all; it is fetched anew every so many seconds as long as anybody
        goes on asking. When it has come, tabs are updated.
        """
        with self._lock:
            wanted = self._wanted.get(key)
            if wanted is None:
                wanted = self._wanted[key] = _Wanted(fetch, every, self._clock())
                self.nudge()
            wanted.asked_at = self._clock()
            return wanted.value

    def once(self, key: str, snapshot: Snapshot, make: Callable[[Snapshot], T]) -> T:
        """`make(snapshot)`, reckoned once for all sessions. Nobody may change what it gives."""
        known = self._once.get(key)
        if known is None or known[0] is not snapshot:
            known = self._once[key] = (snapshot, make(snapshot))
        return known[1]

    def age(self) -> float:
        """Seconds since the figures shown were true; 0 where there are none yet."""
        snapshot = self.look.snapshot
        return max(0.0, self._wall() - snapshot.wall) if snapshot else 0.0

    # -- asking

    def poll(self) -> None:
        """One round: the snapshot, then whatever else is due."""
        error = ""
        try:
            self._reap()
            snapshot = self.rt.status()
        except Exception as failed:  # a page must outlive its ledger's worst day
            snapshot, error = self.look.snapshot, _told(failed)
        fetched, trouble = self._fetch_due()
        error = error or trouble
        now, old = self._clock(), self.look
        same = error == old.error and not fetched and _standing(snapshot) == _standing(old.snapshot)
        if same and now - self._passed_on < REFRESH_SECONDS:
            return
        self._passed_on = now
        since = (old.since if old.error else self._wall()) if error else 0.0
        self.look = Look(snapshot, error, since, old.revision + 1)

    def _reap(self) -> None:
        now = self._clock()
        if now - self._reaped_at >= REAP_SECONDS:
            self._reaped_at = now
            self.rt.reap()

    def _fetch_due(self) -> tuple[bool, str]:
        """Whether anything new came beside the snapshot, and what went wrong."""
        now = self._clock()
        with self._lock:
            kept = {
                key: wanted
                for key, wanted in self._wanted.items()
                if now - wanted.asked_at < FORGET_SECONDS
            }
            self._wanted = kept
            due = [wanted for wanted in kept.values() if wanted.is_due(now)]
        came = False
        for wanted in due:
            wanted.fetched_at, wanted.trouble = now, ""
            try:
                value = wanted.fetch(self.rt)
            except Exception as failed:
                wanted.trouble = _told(failed)
                continue
            if value is not wanted.value:
                wanted.value, came = value, True
        return came, next(
            (wanted.trouble for wanted in self._wanted.values() if wanted.trouble), ""
        )

    def _run(self) -> None:
        while True:
            self._due.clear()
            self.poll()
            self._heard.set()
            with self._lock:
                if not len(self._sessions):
                    self._running = False
                    return
            self._due.wait(POLL_SECONDS)


def _standing(snapshot: Snapshot | None) -> Any:
    """Who holds what where, who waits, and what happened: news of that is passed on at once.

    The rest, such as which models are being used and what a card measures, changes all the time on a box at work, and
    waits for the next second: drawing it anew in twenty sessions is most of what they cost.
    """
    if snapshot is None:
        return None
    held = [
        (
            id,
            section.names,
            [
                (lease.name, lease.shares, lease.target, lease.phase, lease.keep, lease.importance)
                for lease in section.leases
            ],
        )
        for id, section in snapshot.sections.items()
    ]
    waiting = [(ticket.key, ticket.name, ticket.because) for ticket in snapshot.tickets]
    devices = [
        (view.device, view.limit_bytes, view.drained, view.blind) for view in snapshot.devices
    ]
    return held, waiting, devices, snapshot.events, snapshot.degraded, snapshot.governed


def _told(failed: Exception) -> str:
    if not isinstance(failed, (GpuError, OSError)):
        log.exception("the console could not read what it shows")
    return f"{failed}".strip() or type(failed).__name__


_watches: weakref.WeakValueDictionary[int, Watch] = weakref.WeakValueDictionary()
_making = threading.Lock()


def of(rt: Any) -> Watch:
    """The one Watch of a runtime."""
    with _making:  # by identity: the watch holds its runtime, so no other can be taken for it
        found = _watches.get(id(rt))
        if found is None or found.rt is not rt:
            found = _watches[id(rt)] = Watch(rt)
        return found
