"""The poller reads the runtime for all sessions, and each session shows the poller's last result.

A session is one open page. Twenty sessions need only one read of the ledger. The poller has its own thread, so a ledger
that does not answer does not block a page. The thread runs only while a session is open. Panel is not imported here.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from gpu_runtime import threads
from gpu_runtime.errors import GpuError
from gpu_runtime.facts import Snapshot

from .data.members import hours_of, seen_by
from .data.rows import FirstSeen

log = logging.getLogger("gpu_runtime")
T = TypeVar("T")
S = TypeVar("S")

POLL_SECONDS = 0.5  # between two polls; after an action the next poll starts at once
# Between two publications of an unchanged snapshot, for figures that change with time
REFRESH_SECONDS = 1.0
# Between two checks for dead processes; the console may be the only process left
REAP_SECONDS = 1.0
FORGET_SECONDS = 60.0  # data that no session requests for so long is dropped


class PollResult(NamedTuple):
    """The last snapshot, and whether the ledger still answers."""

    snapshot: Snapshot | None = None  # None if no snapshot has been read yet
    error: str = ""  # why the snapshot is not new; empty if it is new
    since: float = 0.0  # when the error began, in epoch seconds
    revision: int = 0  # changes whenever the result changes
    missing: str = ""  # why other data, such as the catalogue, is not new; empty if it is new


@dataclass
class _Fetched:
    """Data that sessions request in addition to the snapshot."""

    fetch: Callable[[Any], Any]
    every: float
    requested_at: float
    fetched_at: float | None = None
    value: Any = None
    error: str = ""  # why the last fetch failed; empty if it did not

    def is_wanted(self, now: float) -> bool:
        """Whether some session still requests it."""
        return now - self.requested_at < 2 * self.every + REFRESH_SECONDS

    def is_due(self, now: float) -> bool:
        """Whether it was never fetched, or is old and still wanted."""
        if self.fetched_at is None:
            return True
        return now - self.fetched_at >= self.every and self.is_wanted(now)


class Poller:
    """Polls one runtime for all sessions. Call the function `of` to get the poller of a runtime."""

    def __init__(
        self,
        rt: Any,
        read: Callable[[], Snapshot] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        start: Callable[[Callable[[], None]], Any] = threads.start,
    ) -> None:
        """`read` returns the snapshot of `rt`, by default `rt.status`. `clock` and `wall` return seconds."""
        self.rt, self._read = rt, read or (lambda: rt.status())
        self.result = PollResult()
        self.first_seen = FirstSeen()  # all sessions show these times of problems
        # A function that returns the figures of the page's server, or None if this server serves no
        # models. The function is called in the event loop.
        self.serving: Callable[[], Any] | None = None
        self._clock, self._wall, self._start = clock, wall, start
        # The references are weak, so a session that was not closed properly is dropped too.
        self._sessions: weakref.WeakSet[Any] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._running = False
        self._due, self._answered = threading.Event(), threading.Event()
        self._fetched: dict[str, _Fetched] = {}
        self._once: dict[str, tuple[Any, Any]] = {}
        self._published_at = self._reaped_at = 0.0

    # -- sessions

    def join(self, session: Any) -> None:
        """Adds `session`. The runtime is polled as long as there is a session."""
        with self._lock:
            self._sessions.add(session)
            if self._running:
                return
            self._running = True
            self._answered.clear()
        self._start(self._run)

    def leave(self, session: Any) -> None:
        """Removes `session`. When the last session is removed, the poller's thread ends."""
        self._sessions.discard(session)
        self.nudge()

    def first(self, timeout: float) -> PollResult:
        """Waits for the first result since polling began, for at most `timeout` seconds. Returns the last result."""
        self._answered.wait(timeout)
        return self.result

    def nudge(self) -> None:
        """Polls at once, for example after an action."""
        self._due.set()

    # -- what sessions read

    def latest(self, key: str, fetch: Callable[[Any], T], every: float) -> T | None:
        """The last value of `fetch(rt)`, or None before the first one. This method never waits.

        All sessions share the value of `key`. It is fetched every `every` seconds while a session requests it.
        """
        with self._lock:
            fetched = self._fetched.get(key)
            if fetched is None:
                fetched = self._fetched[key] = _Fetched(fetch, every, self._clock())
                self.nudge()
            fetched.requested_at = self._clock()
            return fetched.value

    def report(self, since: str, by: str, every: float) -> Any:
        """The rows of `rt.report(since, by)`, or None while they are being read; see `latest`."""
        fetch = lambda rt: rt.report(since, by).to_dict("records")
        return self.latest(f"hours: {since} {by}", fetch, every)

    def once(self, key: str, source: S, compute: Callable[[S], T]) -> T:
        """The result of `compute(source)`, kept under `key` until `source` is another object. Do not change it."""
        known = self._once.get(key)
        if known is None or known[0] is not source:
            known = self._once[key] = (source, compute(source))
        return known[1]

    # -- polling

    def poll(self) -> None:
        """Does one round: reads the snapshot and fetches everything else that is due."""
        error = ""
        try:
            self._reap()
            snapshot = self._read()
        except Exception as failure:  # any error of the ledger is shown; the page must not fail
            snapshot, error = self.result.snapshot, _error_text(failure)
        has_new_value, fetch_error = self._fetch_due()
        self._publish(snapshot, error, fetch_error, has_new_value)

    def _publish(
        self, snapshot: Snapshot | None, error: str, missing: str, has_new_value: bool
    ) -> None:
        """Publishes the result for the sessions. Urgent changes are published at once, other changes once a second."""
        now, old = self._clock(), self.result
        is_same = (
            (error, missing) == (old.error, old.missing)
            and not has_new_value
            and _urgent_part(snapshot) == _urgent_part(old.snapshot)
        )
        if is_same and now - self._published_at < REFRESH_SECONDS:
            return
        self._published_at = now
        since = 0.0
        if error:
            since = old.since if old.error else self._wall()
        self.result = PollResult(snapshot, error, since, old.revision + 1, missing)

    def _reap(self) -> None:
        now = self._clock()
        if now - self._reaped_at >= REAP_SECONDS:
            self._reaped_at = now
            self.rt.reap()

    def _fetch_due(self) -> tuple[bool, str]:
        """Fetches all values that are due. Returns whether any is new, and the first error of those still wanted."""
        now = self._clock()
        with self._lock:
            self._fetched = {
                key: fetched
                for key, fetched in self._fetched.items()
                if now - fetched.requested_at < FORGET_SECONDS
            }
            due = [fetched for fetched in self._fetched.values() if fetched.is_due(now)]
        has_new_value = False
        for fetched in due:
            fetched.fetched_at, fetched.error = now, ""
            try:
                value = fetched.fetch(self.rt)
            except Exception as failure:
                fetched.error = _error_text(failure)
                continue
            if value is not fetched.value:
                fetched.value, has_new_value = value, True
        errors = [one.error for one in list(self._fetched.values()) if one.is_wanted(now)]
        return has_new_value, next(filter(None, errors), "")

    def _run(self) -> None:
        while True:
            self._due.clear()
            self.poll()
            self._answered.set()
            with self._lock:
                if not len(self._sessions):
                    self._running = False
                    return
            self._due.wait(POLL_SECONDS)


class MemberPoller:
    """A poller as the session of a member uses it: with the member's own processes, and sums for other users."""

    serving = None
    SHARED = ("now: past",)  # data without names of other users' notebooks and models

    def __init__(self, poller: Poller, member: str) -> None:
        """`member` is the name of the user on this machine."""
        self._all, self._member = poller, member
        self.rt = poller.rt
        self.first_seen = FirstSeen()
        self.join, self.leave, self.nudge = poller.join, poller.leave, poller.nudge

    @property
    def result(self) -> PollResult:
        """The last result, with the part of the snapshot that the member sees."""
        found = self._all.result
        if found.snapshot is None:
            return found
        seen = self.once("seen", found.snapshot, lambda snapshot: seen_by(snapshot, self._member))
        return found._replace(snapshot=seen)

    def first(self, timeout: float) -> PollResult:
        """As Poller.first."""
        self._all.first(timeout)
        return self.result

    def latest(self, key: str, fetch: Callable[[Any], T], every: float) -> T | None:
        """As Poller.latest, and None for data that a member does not see."""
        return self._all.latest(key, fetch, every) if key in self.SHARED else None

    def report(self, since: str, by: str, every: float) -> Any:
        """As Poller.report: the rows that the member sees; see GPU_CONSOLE_HOURS."""
        found = self._all.report(since, by, every)
        others = self.rt.settings.gpu_console_hours == "all"
        return found and self.once(
            f"hours: {since} {by}", found, lambda rows: hours_of(rows, by, self._member, others)
        )

    def once(self, key: str, source: S, compute: Callable[[S], T]) -> T:
        """As Poller.once. The sessions of this member share the result."""
        return self._all.once(f"{self._member}: {key}", source, compute)


def _urgent_part(snapshot: Snapshot | None) -> Any:
    """The part of `snapshot` whose changes are published at once: holders, places, the queue, events.

    All other changes, such as the measured figures and which models are in use, are published within a second. On a
    busy machine these figures change all the time, and with twenty sessions, drawing them is most of the cost.
    """
    if snapshot is None:
        return None
    part_of_lease = attrgetter("name", "shares", "target", "phase", "keep", "importance")
    held = [(id, [*map(part_of_lease, holder.leases)]) for id, holder in snapshot.sections.items()]
    waiting = [(ticket.key, ticket.name, ticket.because) for ticket in snapshot.tickets]
    devices = [
        (view.device, view.limit_bytes, view.drained, view.blind) for view in snapshot.devices
    ]
    return (
        held,
        snapshot.names,
        waiting,
        devices,
        snapshot.events,
        snapshot.degraded,
        snapshot.governed,
    )


def _error_text(failure: Exception) -> str:
    """The text of the `failure`, for the page. A defect (no GpuError or OSError) is logged with its traceback."""
    if not isinstance(failure, (GpuError, OSError)):
        log.exception("the console could not read its data")
    return f"{failure}".strip() or type(failure).__name__


_pollers: weakref.WeakValueDictionary[int, Poller] = weakref.WeakValueDictionary()
_making = threads.freed(threading.Lock())


def of(rt: Any, read: Callable[[], Snapshot] | None = None) -> Poller:
    """The one poller of the runtime `rt`. Only the first call for `rt` uses `read`; see `Poller`."""
    with _making:  # the key is id(rt); the poller holds the runtime, so the id stays unique
        found = _pollers.get(id(rt))
        if found is None or found.rt is not rt:
            found = _pollers[id(rt)] = Poller(rt, read)
        return found


def for_visitor(rt: Any, visitor: Any) -> Poller | MemberPoller:
    """The poller of the runtime `rt` for the page of the `visitor`."""
    member = getattr(visitor, "member", "")
    return MemberPoller(of(rt), member) if member else of(rt)
