"""The hosts of the fleet: their names, their agents, and calls to all agents at once."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from . import cluster


class Hosts:
    """The hosts whose nodes are alive, with the handles of their agents."""

    def __init__(self) -> None:
        # Host -> (the id of its node and the serial number of its join, the handle of its agent).
        self._handles: dict[str, tuple[tuple[str, str], Any]] = {}
        self._lock = threading.Lock()

    def refresh(self) -> tuple[str, ...]:
        """Reads the hosts from Ray. Returns the names of the hosts that are gone since the last
        call of `refresh`.

        A host that has left, or whose node is dead, is gone.
        """
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

        `method` is called with `args` on all `hosts` at once; None means all hosts. `timeout` and
        `patience` (the keywords `longest` and `enough`) are passed to `cluster.answers`.
        """
        references = {}
        for host in self.names() if hosts is None else hosts:
            handle = self._handles.get(host)
            if handle is not None:
                references[host] = on(handle[1], method, group, *args)
        return cluster.answers(references, timeout, **patience)


def on(agent: Any, method: str, group: str, *args: Any, **kwargs: Any) -> Any:
    """Calls the `method` of an `agent` in the `group` of its threads. Returns the reference of the
    call.
    """
    return cluster.call(getattr(agent, method).options(concurrency_group=group), *args, **kwargs)
