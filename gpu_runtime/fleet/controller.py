"""The controller of the fleet: a named Ray actor that stores wishes and chooses hosts.

A wish is a model that the fleet should hold. Only wishes are stored, at Ray's head. The agents know where the models
are, so nothing is lost if the controller dies. No model's data passes through the controller. Each method may run
twice, because Ray repeats calls after a restart.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import msgspec

from ..errors import GpuError, NodeLost
from ..facts import THIS_PROCESS, HostRoom, Offer, PlanLevel
from ..scheduler.offers import largest_first, likeliest_first, may_serve, ranked
from ..threads import start
from . import cluster, wishes
from .hosts import FleetAnswer, Hosts, attempts, awaited, on

log = logging.getLogger("gpu_runtime")

WATCH_SECONDS = 0.25  # how often the nodes are read
CHECK_SECONDS = 5.0  # how often the copies of all wished models are counted
SLOT_SECONDS = 30.0  # how long a new slot waits for room on its cards
MOST_PLANNED = 8  # hosts that make a plan for one decision
LOAD_SECONDS = 5.0  # how long a wished model waits for room on one host


def _can_serve(found: Iterable[Offer | HostRoom]) -> bool:
    """Whether one of the hosts with these offers or rooms may serve. If so, slower hosts need not be awaited."""
    return any(
        may_serve(answer) if isinstance(answer, HostRoom) else answer.level is not PlanLevel.NEVER
        for answer in found
    )


class Controller:
    """Chooses hosts for models, and keeps the wished copies loaded."""

    def __init__(self) -> None:
        """Reads the stored wishes, and begins to watch the nodes."""
        self._wishes = wishes.load(cluster.stored(cluster.WISHES))
        self._lock = threading.Lock()
        self._hosts = Hosts()
        self._silent: dict[str, float] = {}  # host without an answer -> end of its exclusion
        self._loading: set[str] = set()  # models (names) and slots (ids) that are being loaded
        self._filling: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)  # by model
        self._hosts.refresh()
        start(self._watch)

    def ready(self, theirs: Mapping[str, str]) -> int:
        """The process id of the controller. Raises FleetUnavailable if the caller's versions `theirs` differ."""
        cluster.require_equal_versions(theirs, THIS_PROCESS)
        return os.getpid()

    # -- wishes ------------------------------------------------------------------------------------

    def wishes(self) -> wishes.Wishes:
        """The wishes that are stored."""
        return self._wishes

    def apply(
        self, bodies: Iterable[tuple[str, dict[str, Any], int]], copies: int, dedicated: bool
    ) -> dict[str, str]:
        """Stores wishes for the models in `bodies`, and loads them, the largest first.

        `bodies` has the name, the entry and the bytes (0: unknown) of each model. The result has the hosts of each
        model, or why it is not loaded.
        """
        listed = list(bodies)
        new = [wishes.Wish(name, body, copies, dedicated) for name, body, _ in listed]
        before = self._wishes
        self._change(lambda old: wishes.applied(old, new, dedicated=dedicated))
        dropped = set(before.names) - set(self._wishes.names)
        for name in dropped:
            # Wait for a copy that is being loaded for the old wish, and evict that copy too.
            with self._filling[name]:
                for host, models in self._holdings().items():
                    if name in models:
                        self._evict(name, host)
        sizes = [(name, size) for name, _, size in listed]
        return {name: self._fill(name) for name in largest_first(sizes)}

    def delete(self, name: str) -> None:
        """Removes the wish for `name`. A loaded model stays until it is evicted."""
        self._change(lambda old: wishes.without(old, name))

    def drain(self, host: str, undo: bool) -> None:
        """Closes `host` to models, and loads its wished models on other hosts. `undo` opens the host again."""
        self._hosts.refresh()
        self._change(lambda old: wishes.with_drain(old, host, undo=undo))
        self._hosts.ask("learn", self._wishes.revision, hosts=[host])
        self._fill_all_later()

    def create_slot(self, slot: wishes.Slot) -> str:
        """Stores `slot`, and loads its model on its cards. Returns their names. Raises the error of the load.

        After an error, the slot is not kept, and an earlier slot of the model on this host is wished again.
        """
        before = self._wishes
        self._change(lambda old: wishes.with_slot(old, slot))
        try:
            return self._fill_slot(slot, SLOT_SECONDS)
        except (GpuError, cluster.Gone, cluster.Unreachable) as error:
            known = [wished for wished in before.slots if wished.id == slot.id]
            self._change(lambda old: wishes.without_slot(old, slot.id))
            if known:
                self._change(lambda old: wishes.with_slot(old, known[0]))
            if isinstance(error, GpuError):
                raise
            # To the client, Gone and Unreachable would mean this controller, and it would ask again.
            raise NodeLost(slot.model, slot.host, str(error)) from None

    def delete_slot(self, id: str) -> None:
        """Removes the slot `id`, and evicts the slot's model from the slot's host."""
        self._change(lambda old: wishes.without_slot(old, id))
        model, _, host = id.partition("@")
        self._hosts.ask("learn", self._wishes.revision, hosts=[host])
        self._evict(model, host)

    def _fill_slot(self, slot: wishes.Slot, timeout: float) -> str:
        agent = self._hosts.agent(slot.host)
        order = slot.model, slot.devices, self._wishes.revision, timeout
        return awaited(agent, on(agent, "place", "loads", *order, again=True))

    def _change(self, change: Any) -> None:
        with self._lock:
            new = change(self._wishes)
            if new is not self._wishes:
                data = msgspec.json.encode(new)
                wishes.load(data)  # raises, before all hosts read a value of another type
                cluster.store(cluster.WISHES, data)
                self._wishes = new

    # -- choosing ----------------------------------------------------------------------------------

    def hosts(self) -> dict[str, str]:
        """The id of the node of each host, by the name of the host."""
        self._hosts.refresh()
        return self._hosts.nodes()

    def choose(
        self, name: str, without: Iterable[str] = (), for_wish: bool = False
    ) -> tuple[tuple[Offer, ...], int]:
        """The offers for the model `name`, the best offer first, and the revision of the wishes.

        `for_wish` is as in `HostAgent.offer`. The hosts in `without` are left out. A drained host is listed with the
        level `never`, a host without an answer with `answered` False. A host that did not answer lately is not asked,
        unless no host answered lately. With more than eight hosts, all hosts first report their room, and the best
        eight make a plan. If none of them can take the model, for example because they lack its engine, the next eight
        hosts do.
        """
        without = set(without)
        drained = set(self._wishes.drained)
        found = [host for host in self._hosts.names() if host not in without]
        open_hosts = [host for host in found if host not in drained]
        revision = self._wishes.revision
        now = time.monotonic()
        # `_ask` excludes silent hosts for a while; without others they are asked.
        asked = [host for host in open_hosts if self._silent.get(host, 0.0) < now] or open_hosts
        reasons = {host: cluster.SILENT for host in set(open_hosts) - set(asked)}
        reasons |= {host: "it is drained" for host in found if host in drained}
        if len(asked) > MOST_PLANNED:
            rooms, missing = self._ask("room", asked, name, revision)
            listed = likeliest_first(rooms.values())
            small = {host for host in listed[MOST_PLANNED:] if not may_serve(rooms[host])}
            reasons |= missing | {host: "its cards are too small or drained" for host in small}
            asked = [host for host in listed if host not in small]
        offers: dict[str, Offer] = {}
        while asked and not _can_serve(offers.values()):
            more, missing = self._ask("offer", asked[:MOST_PLANNED], name, revision, for_wish)
            offers, reasons, asked = offers | more, reasons | missing, asked[MOST_PLANNED:]
        silent = (cluster.SILENT, cluster.GONE)
        others = [
            Offer(host, name, PlanLevel.NEVER, why, answered=why not in silent)
            for host, why in sorted(reasons.items())
        ]
        return ranked([*offers.values(), *others]), revision

    def _ask(
        self, method: str, hosts: list[str], *args: Any
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """The answers of the agents of `hosts` to `method`, and the reasons of hosts without an answer.

        The latter are excluded for CHECK_SECONDS. Slow hosts are awaited longer until one may serve.
        """
        found, missing = self._hosts.ask(
            method,
            *args,
            group="offers",
            hosts=hosts,
            timeout=cluster.OFFER_SECONDS,
            longest=cluster.FIRST_SECONDS,
            enough=_can_serve,
        )
        until = time.monotonic() + CHECK_SECONDS
        self._silent |= {host: until for host in missing}
        return found, missing

    # -- copies ------------------------------------------------------------------------------------

    def _holdings(self) -> dict[str, dict[str, tuple[str, int]]]:
        """The models of each host that answers. Each model has its device and its bytes."""
        return self._hosts.ask("holdings", group="offers", timeout=cluster.OFFER_SECONDS)[0]

    def _fill(self, name: str) -> str:
        """Loads the missing copies of `name`, in one thread at a time. Returns its hosts, or why no host has it."""
        if not self._wishes.copies(name):
            return "on request"
        with self._filling[name]:
            held, drained = self._holdings(), self._wishes.drained
            has = {host for host, models in held.items() if name in models and host not in drained}
            while len(has) < self._wishes.copies(name):  # which may change meanwhile
                served = self._place(name, has)
                if served.host:
                    has.add(served.host)
                    continue
                why = "; ".join(f"{host}: {text}" for host, text in sorted(served.reasons.items()))
                if not has:
                    return f"not loaded ({why or 'no host'})"
                copies = f"{len(has)} of {self._wishes.copies(name)} copies"
                return f"{', '.join(sorted(has))} ({copies}; {why or 'no other host'})"
        return ", ".join(sorted(has)) or "on request"

    def _place(self, name: str, has: set[str]) -> FleetAnswer:
        """Loads one more copy of the wished model `name`, on a host that is not in `has`."""
        offers, revision = self.choose(name, has, for_wish=True)
        if has:  # copies are spread: of equal offers, the host with the most free memory is first
            offers = tuple(sorted(offers, key=lambda offer: (offer.level.order, -offer.left_bytes)))

        def load(offer: Offer) -> str:
            agent = self._hosts.agent(offer.host)
            call = on(agent, "load", "loads", name, revision, LOAD_SECONDS)
            return awaited(agent, call)

        return attempts(name, offers, load)

    def _evict(self, name: str, host: str) -> None:
        """Evicts the model `name` from `host`. If it is in use, it stays, and this is logged."""
        try:
            call = on(self._hosts.agent(host), "verb", "verbs", "evict", (name,), {})
            cluster.answer(call, LOAD_SECONDS)
        except (GpuError, cluster.Gone, cluster.Unreachable) as error:
            log.info("%s stays on %s: %s", name, host, error)

    def _fill_all_later(self) -> None:
        """Loads all missing copies, the largest models first, each model in a thread of its own."""
        held = self._holdings()
        drained = set(self._wishes.drained)
        sizes = {name: size for models in held.values() for name, (_, size) in models.items()}
        missing = []
        for wish in self._wishes.models:
            copies = sum(
                wish.name in models for host, models in held.items() if host not in drained
            )
            if copies < wish.copies and wish.name not in self._loading:
                missing.append((wish.name, sizes.get(wish.name, 0)))
        for slot in self._wishes.slots:
            empty = slot.host in held and slot.model not in held[slot.host]
            if empty and slot.host not in drained and slot.id not in self._loading:
                self._in_background(slot.id, partial(self._fill_slot, slot, LOAD_SECONDS))
        for name in largest_first(missing):
            self._in_background(name, partial(self._fill, name))

    def _in_background(self, name: str, fill: Callable[[], str]) -> None:
        """Calls `fill` in a new thread. Until it ends, `name` (a model or a slot) is in `_loading`."""

        def run() -> None:
            try:
                log.info("%s: %s", name, fill())
            except Exception as error:  # noqa: BLE001 - tried again at the next check
                log.warning("%s was not loaded: %s", name, error)
            finally:
                self._loading.discard(name)

        self._loading.add(name)
        start(run)

    # -- watching ----------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Reads the living nodes again and again. Loads wished models of lost hosts on other hosts."""
        next_check = time.monotonic() + CHECK_SECONDS
        while True:
            time.sleep(WATCH_SECONDS)
            try:
                gone = self._hosts.refresh()
                if gone:
                    log.warning("hosts are gone: %s", ", ".join(gone))
                if gone or time.monotonic() >= next_check:
                    next_check = time.monotonic() + CHECK_SECONDS
                    self._fill_all_later()
            except Exception as error:  # noqa: BLE001 - the head restarts: ask again
                log.debug("the fleet cannot be watched: %s", error)
