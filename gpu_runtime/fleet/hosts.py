"""The hosts of the fleet: their names, their agents, calls to all agents at once, and the runtime of one of them."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

from .. import attribution
from ..errors import NodeLost, UnknownDevice
from . import cluster
from .agent import VERBS


class Hosts:
    """The hosts whose nodes are alive, with the handles of their agents."""

    def __init__(self) -> None:
        # Host -> (the id of its node and the serial number of its join, the handle of its agent).
        self._handles: dict[str, tuple[tuple[str, str], Any]] = {}
        self._lock = threading.Lock()

    def refresh(self) -> tuple[str, ...]:
        """Reads the hosts from Ray. Returns those that have left, or whose nodes have died, since the last call."""
        alive = cluster.living_nodes()
        joined = cluster.stored_hosts()
        with self._lock:
            before = dict(self._handles)
            found: dict[str, tuple[tuple[str, str], Any]] = {}
            for node, (name, serial) in joined.items():
                if node not in alive:
                    continue
                known = before.get(name)
                if known is not None and known[0] == (node, serial):
                    found[name] = known
                    continue
                try:
                    found[name] = (node, serial), cluster.actor(cluster.AGENT + node)
                except cluster.Gone:  # the agent has just ended; it counts as a lost host
                    continue
            self._handles = found
            return tuple(sorted(before.keys() - found.keys()))

    def names(self) -> tuple[str, ...]:
        """The names of the hosts, sorted."""
        return tuple(sorted(self._handles))

    def nodes(self) -> dict[str, str]:
        """The id of the node of each host, by the name of the host."""
        return {host: node for host, ((node, _), _) in self._handles.items()}

    def agent(self, host: str) -> Any:
        """The handle of the agent of `host`. Raises Gone."""
        found = self._handles.get(host)
        if found is None:
            raise cluster.Gone(host)
        return found[1]

    def forget(self, host: str) -> None:
        """Leaves `host` out until the next `refresh`."""
        with self._lock:
            self._handles.pop(host, None)

    def ask(
        self,
        method: str,
        *args: Any,
        group: str = "verbs",
        hosts: Iterable[str] | None = None,
        timeout: float = cluster.ANSWER_SECONDS,
        **patience: Any,
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """The answers of the agents by host; and for each host without an answer the reason.

        `method` is called with `args` on all `hosts` at once; None means all hosts. `timeout` and `patience` (the
        keywords `longest` and `enough`) are passed to `cluster.answers`.
        """
        references = {}
        for host in self.names() if hosts is None else hosts:
            handle = self._handles.get(host)
            if handle is not None:
                references[host] = on(handle[1], method, group, *args)
        return cluster.answers(references, timeout, **patience)


def on(agent: Any, method: str, group: str, *args: Any, **kwargs: Any) -> Any:
    """Calls the `method` of an `agent` in the `group` of its threads. Returns the reference of the call."""
    return cluster.call(getattr(agent, method).options(concurrency_group=group), *args, **kwargs)


class FarRuntime:
    """The verbs of a runtime, carried out on another host: `fleet.host("box2").status()`."""

    def __init__(self, fleet: Any, host: str) -> None:
        """The runtime of `host` in the `fleet`."""
        self._fleet, self.host = fleet, host

    def __repr__(self) -> str:
        return f"<Runtime of {self.host}>"

    def on_behalf_of(self, name: str) -> AbstractContextManager[None]:
        """In this block, the host's journal names `name` for the actions of this thread."""
        return attribution.on_behalf_of(name)

    def _patience(self, verb: str) -> float | None:
        """The longest wait for the answer of `verb`, in seconds; None: no limit. A subclass may set one."""
        return None

    def _send(self, verb: str, args: Any, kwargs: Any) -> Any:
        """Calls the `verb` on the host, and returns the reference of its result. Raises Gone."""
        agent = self._fleet._agent(self.host)
        return on(agent, "verb", "verbs", verb, args, kwargs, attribution.speaking_for())

    def require_cards(self, names: Iterable[str]) -> None:
        """Raises UnknownDevice if the host has no card of one of the `names`."""
        cards = [view.device.id for view in self.status().devices if not view.device.is_host]
        for name in names:
            if name not in cards:
                raise UnknownDevice(name, tuple(f"{card} of {self.host}" for card in cards))

    def __getattr__(self, verb: str) -> Any:
        if verb not in VERBS:
            raise AttributeError(
                f"the runtime of {self.host} has no {verb!r} here. It has: {', '.join(VERBS)}"
            )

        def far(*args: Any, **kwargs: Any) -> Any:
            try:
                patience = self._patience(verb)
                return cluster.answer(self._send(verb, args, kwargs), patience)
            except (cluster.Gone, cluster.Unreachable) as error:
                self._fleet._forget(self.host)
                self._fleet._require_host(self.host)
                raise NodeLost("", self.host, str(error)) from None

        far.__name__ = verb
        return far
