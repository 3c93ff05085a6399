"""The hosts of the fleet: their names, their agents, calls to all agents at once, and the order of their offers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from .. import attribution
from ..errors import (
    Busy,
    Deadlock,
    DoesNotFit,
    LoadFailed,
    NodeLost,
    NotAllowed,
    OutOfMemory,
    UnknownDevice,
    UnknownModel,
)
from ..facts import Offer, PlanLevel
from . import cluster
from .agent import READS, VERBS
from .cluster import Gone, Unreachable


class Hosts:
    """The hosts whose nodes are alive, with the handles of their agents."""

    def __init__(self) -> None:
        # Host -> (the id of its node and the serial number of its join, the handle of its agent).
        self._handles: dict[str, tuple[tuple[str, str], Any]] = {}
        self._lock = threading.Lock()

    def refresh(self) -> tuple[str, ...]:
        """Reads the hosts from Ray. Returns those that have left, or whose nodes have died, since the last call."""
        with self._lock:  # a thread that read earlier must not write later
            alive = cluster.living_nodes()
            joined = cluster.stored_hosts()
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

    def agents(self) -> list[Any]:
        """The handles of all agents."""
        return [agent for _, agent in self._handles.copy().values()]

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


def on(agent: Any, method: str, group: str, *args: Any, again: bool = False, **kwargs: Any) -> Any:
    """Calls the `method` of an `agent` in the `group` of its threads. Returns the reference of the call.

    With `again`, Ray waits while the agent is being restarted, and may make the call twice.
    """
    options = {"concurrency_group": group, "max_task_retries": -1 if again else 0}
    return cluster.call(getattr(agent, method).options(**options), *args, **kwargs)


def awaited(agent: Any, reference: Any) -> Any:
    """The value of the call `reference` of the `agent`, however long it takes. Raises Unreachable if it is stopped."""
    return cluster.answer(
        reference, cluster.SIGN_SECONDS, lambda: on(agent, "ready", "offers", again=True)
    )


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

    def _send(self, verb: str, args: Any, kwargs: Any) -> Any:
        """Calls the `verb` on the host, and returns the reference of its result. Raises Gone."""
        agent, person = self._fleet._agent(self.host), attribution.speaking_for()
        return on(agent, "verb", "verbs", verb, args, kwargs, person, again=verb in READS)

    def require_cards(self, names: Iterable[str]) -> None:
        """Raises UnknownDevice if the host has no card of one of the `names`."""
        cards = [view.device.id for view in self.status().cards]
        for name in names:
            if name not in cards:
                raise UnknownDevice(name, tuple(f"{card} of {self.host}" for card in cards))

    def __getattr__(self, verb: str) -> Any:
        if verb not in VERBS:
            raise AttributeError(
                f"the runtime of {self.host} has no {verb!r} here. It has: {', '.join(VERBS)}"
            )

        def far(*args: Any, **kwargs: Any) -> Any:
            return self._call(verb, args, kwargs)

        far.__name__ = verb
        return far

    def _call(self, verb: str, args: Any, kwargs: Any, patience: float | None = None) -> Any:
        """The result of the `verb`, for which this waits `patience` seconds (None: while it runs). Raises NodeLost."""
        try:
            call = self._send(verb, args, kwargs)
            if patience is not None:
                return cluster.answer(call, patience)
            return awaited(self._fleet._agent(self.host), call)
        except (cluster.Gone, cluster.Unreachable) as error:
            self._fleet._forget(self.host)
            self._fleet._require_host(self.host)
            raise NodeLost("", self.host, str(error)) from None


# -- the hosts in the order of their offers, until one of them serves the model
#
# This part does not know Ray. `attempt` is the call that a host answers or refuses.

log = logging.getLogger("gpu_runtime")

_PASSING = (Busy, Deadlock, OutOfMemory)  # a later attempt may succeed
# After such an error, the next host is tried.
NEXT_HOST = (*_PASSING, DoesNotFit, NotAllowed, LoadFailed, UnknownModel)


class FleetAnswer(NamedTuple):
    """The host that served a model; empty if no host did."""

    host: str
    reasons: dict[str, str]  # host -> why it did not serve the model
    gone: tuple[str, ...]  # hosts that died or did not answer meanwhile
    errors: tuple[Exception, ...] = ()  # if no host served the model, the errors of those tried


def attempts(name: str, offers: Iterable[Offer], attempt: Callable[[Offer], Any]) -> FleetAnswer:
    """Calls `attempt` with one offer after the other, until one call of `attempt` succeeds.

    If a host has become busy since its offer, the next one is tried. Offers of the level `never` are not tried.
    """
    listed = list(offers)
    able = [offer for offer in listed if offer.level is not PlanLevel.NEVER]
    reasons = {offer.host: offer.because for offer in listed if offer.level is PlanLevel.NEVER}
    gone: list[str] = []
    errors: list[Exception] = []
    for number, offer in enumerate(able, start=1):
        log.info("%s: attempt %d/%d on %s (%s)", name, number, len(able), offer.host, offer.level)
        try:
            attempt(offer)
            return FleetAnswer(offer.host, reasons, tuple(gone))
        except NEXT_HOST as error:
            reasons[offer.host] = str(error).partition("\n")[0]
            errors.append(error)
        except (Gone, Unreachable) as error:
            reasons[offer.host] = f"it does not answer ({error})"
            gone.append(offer.host)
    return FleetAnswer("", reasons, tuple(gone), tuple(errors))


def refusal(name: str, offers: Iterable[Offer], served: FleetAnswer, waited: float) -> Exception:
    """The error for a model that no host served, after `waited` seconds. It names every host with its reason.

    It is Busy if a later attempt may succeed, or if a host has not answered. Else it is LoadFailed if a host had room
    and could not load the model, else DoesNotFit.
    """
    listed, reasons = list(offers), served.reasons
    each = "\n".join(f"  {host}: {reason}" for host, reason in sorted(reasons.items()))
    if not reasons:
        return DoesNotFit(
            f"{name} has no host: the fleet has none that takes models.\n"
            "  On each host:  gpu fleet join",
            **_facts(name, listed),
        )
    errors = served.errors
    answered = all(offer.answered for offer in listed)
    none_offers = all(offer.level is PlanLevel.NEVER for offer in listed)
    is_final = bool(errors) and not served.gone and not any(isinstance(e, _PASSING) for e in errors)
    if answered and (none_offers or is_final):
        if is_final and any(isinstance(error, LoadFailed) for error in errors):
            text = f"{name} was loaded by no host of the fleet.\n{each}"
            return LoadFailed(text, name=name, source="")
        return DoesNotFit(f"{name} fits on no host of the fleet.\n{each}", **_facts(name, listed))
    return Busy(
        f"{name} was not served by any host within {waited:.0f} s.\n{each}",
        name=name,
        waited_seconds=waited,
        because=each,
        hosts=dict(reasons),
    )


def _facts(name: str, offers: list[Offer]) -> dict[str, object]:
    return {
        "name": name,
        "need_bytes": max((offer.need_bytes for offer in offers), default=0),
        "budget_bytes": 0,
        "device": "",
        "holders": (),
        "considered": (),
        "hosts": {offer.host: offer.because for offer in offers},
    }
