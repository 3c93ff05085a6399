"""The runtime of another host of the fleet, whose verbs the host's agent carries out."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

from .. import attribution
from ..errors import NodeLost, UnknownDevice
from . import cluster
from .agent import VERBS
from .hosts import on


class FarRuntime:
    """The verbs of a runtime, carried out on another host: `fleet.host("box2").status()`."""

    def __init__(self, fleet: Any, host: str) -> None:
        """The runtime of `host` in the `fleet`."""
        self._fleet, self.host = fleet, host

    def __repr__(self) -> str:
        return f"<Runtime of {self.host}>"

    def on_behalf_of(self, name: str) -> AbstractContextManager[None]:
        """`with far.on_behalf_of("ann"):` — the host's journal names `name` for the actions of this
        thread.
        """
        return attribution.on_behalf_of(name)

    def _patience(self, verb: str) -> float | None:
        """The longest wait for the answer of `verb`, in seconds. None waits without limit. A
        subclass may set a limit.
        """
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
            """Calls the verb on the host, and returns the verb's result."""
            try:
                patience = self._patience(verb)
                return cluster.answer(self._send(verb, args, kwargs), patience)
            except (cluster.Gone, cluster.Unreachable) as error:
                self._fleet._forget(self.host)
                self._fleet._require_host(self.host)
                raise NodeLost("", self.host, str(error)) from None

        far.__name__ = verb
        return far
