"""Reads a fleet for the console: the last snapshot of every host, and a runtime for each host.

All sessions share the snapshots and the runtimes. Panel is not imported here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from msgspec.structs import replace

from gpu_runtime.errors import FleetUnavailable, NodeLost
from gpu_runtime.facts import Snapshot
from gpu_runtime.fleet.far_runtime import FarRuntime

READ_SECONDS = 1.0  # between two readings of all hosts
HOSTS_A_SECOND = 20  # a larger fleet is read less often
PATIENCE_SECONDS = 3.0  # a host that does not answer for so long is shown as silent
# The poller calls these verbs. They must not block it, so they wait for a short time only.
POLLED = ("status", "history", "catalog", "allocator_maps", "plan")


class Overview(NamedTuple):
    """The hosts of a fleet as they were read last."""

    hosts: tuple[Snapshot, ...] = ()  # by name; the last snapshot of a host that is silent
    silent: Mapping[str, float] = MappingProxyType({})  # host -> since when, in epoch seconds


class HostRuntime(FarRuntime):
    """The runtime of one host, for the poller of the sessions that chose this host."""

    def __init__(self, hosts: FleetHosts, host: str) -> None:
        super().__init__(hosts.fleet, host)
        self._hosts = hosts

    def reap(self) -> None:
        """Does nothing: the host's agent removes dead owners."""

    def overview(self) -> Overview:
        """All hosts of the fleet; see `FleetHosts.read`."""
        return self._hosts.read()

    def status(self) -> Snapshot:
        """The snapshot of the host, as the console sees it. Raises FleetUnavailable."""
        try:
            return seen_from_outside(FarRuntime.__getattr__(self, "status")(), self.host)
        except (NodeLost, FleetUnavailable):
            raise self._silence() from None

    def _silence(self) -> FleetUnavailable:
        return FleetUnavailable(f"{self.host} does not answer.", why="silent")

    def _patience(self, verb: str) -> float | None:
        if verb not in POLLED:
            return None
        if self.host in self._hosts.last.silent:
            raise self._silence()
        return PATIENCE_SECONDS


def seen_from_outside(snapshot: Snapshot, host: str) -> Snapshot:
    """The `snapshot` that the fleet's agent on `host` has read, changed for readers in other processes.

    In the result the agent's process is called `agent of HOST`, and not `this process`.
    """
    agent = snapshot.owner
    sections = dict(snapshot.sections)
    if agent.id in sections:
        named = replace(agent, notebook=f"agent of {host}")
        sections[agent.id] = replace(sections[agent.id], owner=named)
    # The models of the agent's section are listed in its `names`, and `specs` are the reader's own.
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
        """Reads no host yet. `clock` and `wall` return seconds."""
        self.fleet, self.last = fleet, Overview()
        self._clock, self._wall = clock, wall
        self._runtimes: dict[str, HostRuntime] = {}
        self._next_read = 0.0
        self._lock = threading.Lock()

    def read(self) -> Overview:
        """Every host, with its last figures if it is silent. The hosts are read once a second at most.

        A silent host is listed until it answers, or until it leaves the fleet.
        """
        with self._lock:
            if self._clock() < self._next_read:
                return self.last
            found = {one.host: one for one in self.fleet.status(timeout=PATIENCE_SECONDS)}
            pause = max(READ_SECONDS, len(found) / HOSTS_A_SECOND)
            self._next_read = self._clock() + pause
            known = {one.host: one for one in self.last.hosts}
            left = set() if known.keys() <= found.keys() else known.keys() - self.fleet.joined()
            now = self._wall()
            silent = {
                host: self.last.silent.get(host, now)
                for host in sorted(known.keys() - found.keys() - left)
            }
            shown = known | found
            hosts = tuple(shown[host] for host in sorted(shown.keys() - left))
            self.last = Overview(hosts, silent)
            return self.last

    def runtime(self, host: str) -> HostRuntime | None:
        """The runtime of `host`, or of the first host if the fleet knows no such host.

        The result is the same for each call. Without hosts it is None.
        """
        names = [one.host for one in (self.last if self.last.hosts else self.read()).hosts]
        if not names:
            return None
        chosen = host if host in names else names[0]
        return self._runtimes.setdefault(chosen, HostRuntime(self, chosen))
