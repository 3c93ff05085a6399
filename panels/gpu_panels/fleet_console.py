"""The console of a fleet: a bar for each host above the tabs, and the tabs of the chosen host.

All sessions share the snapshots and the runtimes of the hosts. The page's URL contains the host, and a session never
changes its host. So an action can only reach the host that was on the page when the button of the action was drawn.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import panel as pn
from msgspec.structs import replace

from gpu_runtime.errors import FleetUnavailable, NodeLost
from gpu_runtime.facts import Snapshot
from gpu_runtime.fleet import cluster
from gpu_runtime.fleet.hosts import FarRuntime
from gpu_runtime.rendering import answers
from gpu_runtime.rendering.html import esc
from gpu_runtime.web.auth import Visitor

from . import console, poller
from .poller import Poller
from .widgets import Prose

log = logging.getLogger("gpu_runtime")

READ_SECONDS = 1.0  # between two requests to all hosts
HOSTS_A_SECOND = 20  # a larger fleet is read less often
# The longest wait of a call for the answer to its own request. An answer that arrives later is read by a later call.
BRIEF_SECONDS = 0.2
PATIENCE_SECONDS = 3.0  # a host that does not answer for so long is shown as silent
# The poller calls these verbs. They must not block the poller, so they wait for an answer for a short time only.
POLLED = ("status", "history", "catalog", "allocator_maps", "plan")


class Overview(NamedTuple):
    """The hosts of a fleet, as they were when they were last read."""

    hosts: tuple[Snapshot, ...] = ()  # sorted by name; of a silent host its last snapshot
    silent: Mapping[str, float] = MappingProxyType({})  # host -> epoch seconds of its last answer


class HostRuntime(FarRuntime):
    """The runtime of one host, shared by all sessions that show this host.

    At most one request for the snapshot is unanswered. A frozen host answers it when it runs again.
    """

    def __init__(self, hosts: FleetHosts, host: str) -> None:
        super().__init__(hosts.fleet, host)
        self._hosts = hosts
        self.seen: Snapshot | None = None  # the last answer
        self.seen_at = 0.0  # in epoch seconds
        self.alive = True  # whether the fleet lists the host
        self.asked: Any = None  # the request that has no answer yet
        self._asked_at = 0.0  # by the clock of FleetHosts
        self._failed = False  # whether the last request ended with an error

    def reap(self) -> None:
        """Does nothing: the host's agent removes dead owners."""

    def overview(self) -> Overview:
        return self._hosts.read()

    def status(self) -> Snapshot:
        """A new snapshot of the host, changed by `seen_from_outside`. Raises FleetUnavailable."""
        return seen_from_outside(self._call("status", (), {}), self.host)

    def last_status(self) -> Snapshot:
        """The last snapshot of the host, after at most BRIEF_SECONDS for a new one. Raises FleetUnavailable."""
        self._hosts.question([self])
        if self.seen is None or self.is_silent():
            raise self._silence()
        return seen_from_outside(self.seen, self.host)

    # -- the request; `FleetHosts` calls `ask` and `take` while it holds its lock

    def ask(self, now: float) -> None:
        """Requests the host's snapshot, unless the host is dead or an earlier request has no answer yet."""
        if self.alive and self.asked is None:
            try:
                self.asked, self._asked_at = self._send("status", (), {}), now
            except cluster.Gone:  # it is shown as silent
                self._failed = True

    def brief_left(self, now: float) -> float:
        return self._asked_at + BRIEF_SECONDS - now

    def take(self, now: float) -> None:
        """Takes the answer to the last request, after it has arrived. `now` is in epoch seconds."""
        question, self.asked = self.asked, None
        try:
            self.seen, self.seen_at = replace(cluster.answer(question, 0.0), host=self.host), now
            self._failed = False
        except Exception as error:  # noqa: BLE001 - a host without an answer is silent
            log.debug("%s does not answer: %s", self.host, error)
            self._failed = True

    def is_silent(self) -> bool:
        """Whether the host is dead, its last answer was an error, or it did not answer for PATIENCE_SECONDS."""
        return not self.alive or self._failed or self._unanswered(PATIENCE_SECONDS)

    def _unanswered(self, seconds: float) -> bool:
        """Whether the host got a request at least `seconds` ago and has not answered."""
        return self.asked is not None and self._hosts.clock() - self._asked_at >= seconds

    def _silence(self) -> FleetUnavailable:
        return FleetUnavailable(f"{self.host} does not answer.", why="silent")

    def _call(self, verb: str, args: Any, kwargs: Any, patience: float | None = None) -> Any:
        """As FarRuntime._call. A verb that is POLLED waits PATIENCE_SECONDS at most, and raises FleetUnavailable."""
        if verb not in POLLED:
            return super()._call(verb, args, kwargs)
        if self.is_silent():
            raise self._silence()
        try:
            return super()._call(verb, args, kwargs, PATIENCE_SECONDS)
        except NodeLost:  # nothing was lost but this answer
            raise self._silence() from None


def seen_from_outside(snapshot: Snapshot, host: str) -> Snapshot:
    """The `snapshot` for readers in other processes: the agent on `host` is no longer `this process`."""
    agent = snapshot.owner
    sections = dict(snapshot.sections)
    if agent.id in sections:
        named = replace(agent, notebook=f"agent of {host}")
        sections[agent.id] = replace(sections[agent.id], owner=named)
    # The snapshot's `owner` is its reader. The reader's id must differ from the agent's, so the reader gets another
    # serial number. The reader has registered no models, so `specs` is empty.
    reader = replace(agent, serial=-1)
    return replace(snapshot, host=host, owner=reader, sections=sections, specs=())


class FleetHosts:
    """The hosts that one console shows."""

    def __init__(
        self,
        fleet: Any,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Creates the object without reading a host. `clock` and `wall` return seconds."""
        self.fleet, self.last, self.clock = fleet, Overview(), clock
        self._wall = wall
        self._runtimes: dict[str, HostRuntime] = {}
        self._listed: list[HostRuntime] = []  # by name
        self._next_read = 0.0
        self._lock = threading.Lock()

    def read(self) -> Overview:
        """Every host, with its last figures, which are requested at most once a second.

        The call waits for BRIEF_SECONDS at most, so a silent host delays no other host. A silent host is listed until
        it answers, or until it leaves the fleet.
        """
        with self._lock:
            if is_due := self.clock() >= self._next_read:
                self._list()
                pause = max(READ_SECONDS, len(self._listed) / HOSTS_A_SECOND)
                self._next_read = self.clock() + pause
        self.question(self._listed if is_due else ())
        with self._lock:
            hosts = tuple(rt.seen for rt in self._listed if rt.seen is not None)
            silent = {rt.host: rt.seen_at for rt in self._listed if rt.is_silent()}
            if [*map(id, hosts)] != [*map(id, self.last.hosts)] or silent != self.last.silent:
                self.last = Overview(hosts, silent)
            return self.last

    def question(self, asked: Iterable[HostRuntime]) -> None:
        """Requests the snapshots of the hosts `asked`, and collects the answers of all hosts."""
        with self._lock:
            self._collect()
            for rt in asked:
                rt.ask(self.clock())
            now = self.clock()
            left = {rt.asked: rt.brief_left(now) for rt in asked if rt.asked is not None}
        recent = {question: seconds for question, seconds in left.items() if seconds > 0}
        if recent:
            cluster.ended(recent, max(recent.values()))
        with self._lock:
            self._collect()

    def _collect(self) -> None:
        asked = {rt.asked: rt for rt in self._runtimes.values() if rt.asked is not None}
        if asked:
            for question in cluster.ended(asked, 0.0):
                asked[question].take(self._wall())

    def _list(self) -> None:
        """Reads which hosts are alive, and drops the hosts that have left the fleet."""
        alive = {*self.fleet.hosts()}
        names = {rt.host for rt in self._listed}
        if not names <= alive:
            names &= self.fleet.joined()
        self._listed = [self._runtime(name) for name in sorted(names | alive)]
        for rt in self._runtimes.values():
            rt.alive = rt.host in alive

    def _runtime(self, host: str) -> HostRuntime:
        return self._runtimes.setdefault(host, HostRuntime(self, host))

    def runtime(self, host: str) -> HostRuntime | None:
        """The one runtime of `host`, else of the first host; None without hosts."""
        if not self._listed:
            self.read()
        names = [rt.host for rt in self._listed]
        if not names:
            return None
        return self._runtime(host if host in names else names[0])


class HostChooser:
    """The bars of all hosts. The name of a host is a link to the console of that host."""

    def __init__(self, host: str) -> None:
        self._host = host
        self.panel = Prose(margin=(12, 0, 0, 0))

    def update(self, poller: Poller, title: str) -> None:
        """Shows the hosts as `poller` has read them. The links to other hosts open the tab `title`."""
        found = poller.latest("hosts", HostRuntime.overview, READ_SECONDS) or Overview()
        key = f"hosts {self._host} {title}"
        self.panel.show(
            poller.once(
                key, found, lambda view: answers.as_chooser(*view, chosen=self._host, tab=title)
            )
        )


def page_of(fleet: Any) -> Any:
    """A function that makes the page of a visitor. The page shows the hosts of the `fleet`."""
    hosts = FleetHosts(fleet)

    def page(visitor: Visitor) -> Any:
        """The console of the host that the page's URL names, or of the first host."""
        query = console.query_of_page()
        rt = hosts.runtime(query.get("host", ""))
        if rt is None:
            return pn.pane.HTML(esc(answers.NO_HOSTS))
        return console.page(visitor, poller.of(rt, rt.last_status), HostChooser(rt.host))

    return page
