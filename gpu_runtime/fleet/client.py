"""The client of the fleet: what `gpu_runtime.fleet(...)` returns, and how a host joins it or leaves it."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from ..arguments import checked
from ..backends.processes import remote_calls
from ..catalog.files import Catalog
from ..errors import (
    AmbiguousName,
    BadSetting,
    Busy,
    EngineDied,
    FleetUnavailable,
    GpuError,
    NodeLost,
    UnknownModel,
)
from ..facts import Offer, Outcome, PlanLevel, Snapshot
from ..safe_text import quoted
from ..settings import Settings
from ..tables import table
from ..threads import import_whole
from ..units import parse_seconds
from . import cluster
from .agent import GROUPS, HostAgent
from .controller import Controller
from .hosts import FarRuntime, Hosts, attempts, awaited, on, refusal
from .wishes import Slot, Wishes

if TYPE_CHECKING:
    from pandas import DataFrame


log = logging.getLogger("gpu_runtime")

RACE_SECONDS = 2.0  # the longest wait for the room that a host has offered
# For this time after a use of a model, the next use tries the same host before it asks all hosts.
BELIEVED_SECONDS = 2.0
_COPIES = (PlanLevel.HERE, PlanLevel.RESTORE)  # levels of a host that has the model
ASK_AGAIN_SECONDS = 0.1  # between two questions to a process that is being restarted
SLICE_SECONDS = 5.0  # the longest wait for one host; then all hosts are asked again


class Fleet:
    """All hosts of a Ray cluster: where models run, and which models the hosts have.

    Open a fleet with `gpu_runtime.fleet("auto")`, or with the address of the cluster's head in place of "auto".
    """

    def __init__(self, address: str = "auto") -> None:
        """Connects to the cluster at `address`. Raises FleetUnavailable."""
        self._address = address
        cluster.connect(address)
        self._controller = controller()
        try:
            cluster.answer(self._controller.ready.remote(cluster.versions()))
        except (cluster.Gone, cluster.Unreachable) as error:
            raise FleetUnavailable(
                f"the fleet's controller does not answer ({error}).\n  See:  ray list actors",
                why=str(error),
            ) from None
        self._hosts = Hosts()
        # Model -> the host that has its only copy, and the time at which this entry expires.
        self._last: dict[str, tuple[str, float]] = {}

    def __repr__(self) -> str:
        hosts = ", ".join(self._hosts.names()) or "not read yet"
        return f"<Fleet at {self._address}; hosts: {hosts}>"

    # -- using -------------------------------------------------------------------------------------

    @checked
    def use(
        self,
        name: str,
        *,
        timeout: str | float | None = None,
        importance: str | int | None = None,
        retry: bool = False,
    ) -> FleetUse:
        """`with fleet.use("qwen") as model:` — uses the model on the host that is best for it now.

        Calls of `model` and of its attributes run on that host, which is `model.host`. `timeout` (seconds or "30s";
        None waits without limit) limits the wait for room. `importance` is the same as in `rt.use`.

        If the host dies, the call raises NodeLost. With `retry`, the model is used on another host instead. The earlier
        calls of the `with` block run again on the new host in their order, because the model there has not seen them.
        The results of these repeated calls are dropped. Then the lost call runs on the new host and returns. Pass
        `retry` if the calls may run twice.

        Entering raises DoesNotFit and Busy, which name each host with its reason, and UnknownModel.
        """
        limit = None if timeout is None else parse_seconds(timeout)
        return FleetUse(self, name, limit, importance, retry)

    def _obtain(
        self, hold: str, name: str, timeout: float | None, importance: Any
    ) -> tuple[str, Any]:
        """The host on which the use with the id `hold` has begun, and its agent. Raises the errors of `use`."""
        unsure: dict[str, Any] = {}  # agents that have not answered, and may have begun the use
        served_by = ""
        try:
            served_by, agent = self._where_it_was(hold, name, importance, unsure) or self._offered(
                hold, name, timeout, importance, unsure
            )
            return served_by, agent
        finally:
            for host, agent in unsure.items():
                if host != served_by:
                    on(agent, "leave", "verbs", hold)

    def _offered(
        self, hold: str, name: str, timeout: float | None, importance: Any, unsure: dict[str, Any]
    ) -> tuple[str, Any]:
        """As `_obtain`, on the host with the best offer. Adds agents to `unsure`."""
        began = time.monotonic()
        while True:
            offers, revision = self._choose(name)
            waited = time.monotonic() - began
            left = None if timeout is None else max(0.0, timeout - waited)

            def enter(offer: Offer, left: float | None = left, revision: int = revision) -> bool:
                patience = SLICE_SECONDS if offer.level is PlanLevel.WAIT else RACE_SECONDS
                if left is not None:
                    patience = min(patience, left)
                agent = self._agent(offer.host)
                call = on(
                    agent, "enter", "loads", hold, cluster.my_job(), name,
                    timeout=patience, importance=importance, revision=revision,
                )  # fmt: skip
                try:
                    return awaited(agent, call)
                except cluster.Unreachable:
                    unsure[offer.host] = agent
                    raise

            served = attempts(name, offers, enter)
            if served.host:
                self._remember(name, served.host, offers)
                return served.host, self._agent(served.host)
            for host in served.gone:
                self._forget(host)
            if offers:  # without offers, the error below reports that the fleet has no hosts
                self._require_known(name)
            waited = time.monotonic() - began
            error = refusal(name, offers, served, waited)
            try:
                if not isinstance(error, Busy) or (timeout is not None and waited >= timeout):
                    raise error
            finally:
                del error  # else its traceback would lead back to it, and keep the caller's frames
            if served.gone or not all(offer.answered for offer in offers):
                time.sleep(ASK_AGAIN_SECONDS)  # perhaps an agent is being restarted

    def _remember(self, name: str, host: str, offers: tuple[Offer, ...]) -> None:
        """The next use of `name` tries `host` first, unless the `offers` show other copies with perhaps fewer users."""
        copies = [offer for offer in offers if offer.level in _COPIES and offer.host != host]
        if copies:
            self._last.pop(name, None)
        else:
            self._last[name] = host, time.monotonic() + BELIEVED_SECONDS

    def _where_it_was(
        self, hold: str, name: str, importance: Any, unsure: dict[str, Any]
    ) -> tuple[str, Any] | None:
        """Pins the model `name` on the host of its last use, if it is there. Returns the host and its agent."""
        host, until = self._last.get(name, ("", 0.0))
        if time.monotonic() >= until:
            return None
        try:
            agent = self._agent(host)
            call = on(
                agent, "enter", "loads", hold, cluster.my_job(), name,
                timeout=0.0, importance=importance, only_here=True,
            )  # fmt: skip
            if cluster.answer(call, SLICE_SECONDS):
                return host, agent
        except (GpuError, cluster.Gone, cluster.Unreachable) as error:
            if isinstance(error, cluster.Unreachable):
                unsure[host] = agent
            log.debug("%s is no longer on %s: %s", name, host, error)
        self._last.pop(name, None)
        return None

    def _choose(self, name: str) -> tuple[tuple[Offer, ...], int]:
        return self._ask_controller("choose", name)

    def _wishes(self) -> Wishes:
        return self._ask_controller("wishes")

    def _holdings(self) -> dict[str, dict[str, tuple[str, int]]]:
        """For each host the models that its agent holds, each with its device and its bytes."""
        return self._hosts.ask("holdings", group="offers")[0]

    def _require_known(self, name: str) -> None:
        """Raises UnknownModel if the fleet has no wish for `name`."""
        wishes = self._wishes()
        if wishes.find(name) is None:
            none, advice = "The fleet has no model yet.", "Add it:  fleet.apply(FILE)"
            raise UnknownModel(name, wishes.names, none=none, advice=advice)

    def _ask_controller(self, method: str, *args: Any) -> Any:
        """The answer of the `method` of the controller. Calls again while the controller restarts."""
        while True:
            try:
                call = cluster.call(getattr(self._controller, method), *args)
                return cluster.answer(call, math.inf)
            except cluster.Unreachable:
                time.sleep(ASK_AGAIN_SECONDS)
            except cluster.Gone:
                self._controller = controller()

    def _agent(self, host: str) -> Any:
        """The agent of `host`. Raises Gone if this host is not in the fleet."""
        try:
            return self._hosts.agent(host)
        except cluster.Gone:
            self._hosts.refresh()
            return self._hosts.agent(host)

    def _forget(self, host: str) -> None:
        """Leaves `host` out until the controller offers this host again."""
        self._hosts.forget(host)
        for name, (last, _) in list(self._last.items()):
            if last == host:
                self._last.pop(name, None)

    def _withdraw(self, hold: str) -> None:
        """Ends the hold `hold` on every host, because the host of an interrupted request is not known."""
        for agent in self._hosts.agents():
            on(agent, "leave", "verbs", hold)

    # -- wishes ------------------------------------------------------------------------------------

    @checked
    def apply(
        self, file: str | os.PathLike[str], *, copies: int = 1, dedicated: bool = False
    ) -> dict[str, str]:
        """Makes the models of `file` known to all hosts, and loads `copies` of each model on as
        many hosts.

        `file` is a document as `gpu apply` reads it. With `copies=0` models are loaded when they
        are first used. With `dedicated` the models replace the dedicated set: dedicated models that
        are not in `file` are evicted. Larger models are placed first. The result has the hosts of
        each model, or why it is not loaded.

        Raises BadDocument.
        """
        with tempfile.TemporaryDirectory() as directory:
            catalog = Catalog(Settings.load(gpu_catalog=directory))
            names = {*catalog.apply(file).added}
            sizes = {spec.name: spec.size or 0 for spec in catalog.specs()}
            bodies = [
                (entry.name, entry.body, sizes[entry.name])
                for entry in catalog.entries().values()
                if entry.name in names
            ]
        self._last.clear()  # a model may have more copies now
        return self._ask_controller("apply", tuple(bodies), copies, dedicated)

    @checked
    def delete(self, name: str) -> Outcome:
        """Removes the model `name` from the fleet's wishes. A loaded model stays until it is evicted.

        Raises UnknownModel.
        """
        self._require_known(name)
        self._ask_controller("delete", name)
        return Outcome("delete", name, True, f"{name} is no longer wished")

    # -- acting ------------------------------------------------------------------------------------

    @checked
    def evict(self, name: str, *, timeout: str | float | None = 30.0) -> Outcome:
        """Evicts a model: `fleet.evict("qwen@box2")`, or `fleet.evict("qwen")` if only one host has the model.

        Raises AmbiguousName, UnknownModel, StillInUse, Busy.
        """
        bare, _, host = name.partition("@")
        if not host:
            self._hosts.refresh()
            held = self._holdings()
            holders = [host for host, models in sorted(held.items()) if bare in models]
            if len(holders) > 1:
                raise AmbiguousName(bare, tuple(f"{bare}@{host}" for host in holders))
            if not holders:
                names = tuple({model for models in held.values() for model in models})
                none, advice = "No host holds a model.", "See:  gpu fleet"
                raise UnknownModel(bare, names, none=none, advice=advice)
            [host] = holders
        return FarRuntime(self, host).evict(bare, timeout=timeout)

    @checked
    def drain(self, host: str, *, undo: bool = False) -> Outcome:
        """Closes `host` to models, and loads its wished models on other hosts. `undo` opens the host again.

        A model in use stays until the `with` blocks that use it end. Raises FleetUnavailable for an
        unknown host.
        """
        self._require_host(host)
        self._ask_controller("drain", host, undo)
        words = "takes models again" if undo else "takes no more models"
        return Outcome("drain", host, True, f"{host} {words}")

    @checked
    def create_slot(self, model: str, host: str, devices: str | Iterable[str]) -> Outcome:
        """Loads `model` on exactly these `devices` of `host`, and keeps the wish for this slot.

        `devices` are cards of `host`: `"cuda:1"`, or `"cuda:0,1"` for two cards. After a restart of the host's agent,
        the model is loaded on the same cards again. A model that is loaded on other cards of the host moves.

        Raises UnknownModel, UnknownDevice, DoesNotFit, StillInUse, Busy, FleetUnavailable.
        """
        self._require_host(host)
        cards = _cards(devices)
        FarRuntime(self, host).require_cards(cards)
        slot = Slot(model, host, cards)
        where = self._ask_controller("create_slot", slot)
        return Outcome("slot", slot.id, True, f"{model} is on {where} of {host}", where=where)

    @checked
    def delete_slot(self, slot: str) -> Outcome:
        """Removes the wish for `slot` (`"qwen@box2"`), and evicts its model from its host unless the model is in use.

        Raises UnknownModel if there is no such slot.
        """
        known = tuple(wish.id for wish in self._wishes().slots)
        if slot not in known:
            raise UnknownModel(
                slot, known, none="There is no slot.", advice="See:  gpu fleet slots"
            )
        self._ask_controller("delete_slot", slot)
        return Outcome("slot", slot, True, f"{slot} is no longer wished")

    def slots(self) -> DataFrame:
        """A table of the models on cards, with one row for each card.

        Columns: slot, model, host, device, bytes, active (the number of `with` blocks that use the
        model now), and wished (whether `create_slot` placed the model).
        """
        self._hosts.refresh()
        wished = {slot.id for slot in self._wishes().slots}
        found, _ = self._hosts.ask("slots")
        rows = [
            (f"{model}@{host}", model, host, device, size, active, f"{model}@{host}" in wished)
            for host in sorted(found)
            for model, device, size, active in found[host]
        ]
        return table(rows, "slot model host device bytes active wished".split())

    def _require_host(self, name: str) -> None:
        """Raises FleetUnavailable if no living host has this `name`."""
        hosts = self.hosts()
        if name not in hosts:
            raise FleetUnavailable(
                f"no host is called {quoted(name)}. The fleet has {', '.join(hosts) or 'none'}.",
                why="unknown host",
            )

    @checked
    def host(self, name: str) -> FarRuntime:
        """The runtime of the host `name`, with the same methods as `rt`.

        Raises FleetUnavailable if no living host has this name. The methods also raise NodeLost.
        """
        self._require_host(name)
        return FarRuntime(self, name)

    # -- reading -----------------------------------------------------------------------------------

    @checked
    def plan(self, name: str) -> tuple[Offer, ...]:
        """What each host offers for the model `name`, the best offer first. Nothing changes.

        Raises UnknownModel.
        """
        self._require_known(name)
        return self._choose(name)[0]

    @checked
    def status(self, *, timeout: str | float = cluster.READ_SECONDS) -> tuple[Snapshot, ...]:
        """A snapshot of each host, by name.

        Hosts that do not answer within `timeout` (seconds or "30s") are left out, and a warning
        names them. If no host has answered by then, the wait for the first answer continues for up
        to a minute in all.
        """
        found = self._read("status", seconds=parse_seconds(timeout))
        return tuple(replace(found[host], host=host) for host in sorted(found))

    def _read(self, verb: str, *args: Any, seconds: float = cluster.READ_SECONDS) -> dict[str, Any]:
        """What `rt.VERB(*args)` returns on each host. Silent hosts are left out, with a warning."""
        self._hosts.refresh()
        longest = max(seconds, cluster.ANSWER_SECONDS)
        found, missing = self._hosts.ask(
            "verb", verb, args, {}, timeout=seconds, longest=longest, enough=bool
        )
        for host, why in sorted(missing.items()):
            log.warning("%s is left out of %s: %s", host, verb, why)
        return found

    def hosts(self) -> tuple[str, ...]:
        """The names of the hosts that have joined and whose nodes are alive."""
        self._hosts.refresh()
        return self._hosts.names()

    def joined(self) -> frozenset[str]:
        """The names of the hosts that have joined and not left. Some may be dead or silent."""
        return frozenset(host.name for host in cluster.stored_hosts().values())

    def models(self) -> DataFrame:
        """A table of the models of all hosts: the rows of `rt.models()` of each host, with the column `host`."""
        return self._table("models")

    def leases(self) -> DataFrame:
        """A table of the leases of all hosts: the rows of `rt.leases()` of each host, with the column `host`."""
        return self._table("leases")

    def _table(self, verb: str) -> DataFrame:
        import_whole("pandas")
        import pandas

        found = self._read(verb)
        frames = [found[host].assign(host=host) for host in sorted(found)]
        return pandas.concat(frames, ignore_index=True) if frames else pandas.DataFrame()

    @checked
    def why(self, name: str) -> dict[str, tuple[Any, ...]]:
        """The last decisions on the model `name` by host, the newest first. Raises UnknownModel."""
        self._require_known(name)
        found = self._read("why", name)
        return {host: events for host, events in sorted(found.items()) if events}

    def close(self) -> None:
        """Disconnects this process from the cluster. The uses of models by this process end."""
        cluster.leave()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _cards(devices: str | Iterable[str]) -> tuple[str, ...]:
    """The ids of the cards in `devices`: `"cuda:0,1"` names two cards.

    >>> _cards("cuda:0,1"), _cards(["sim:1"])
    (('cuda:0', 'cuda:1'), ('sim:1',))
    """
    if not isinstance(devices, str):
        return tuple(devices)
    kind, _, numbers = devices.partition(":")
    return tuple(f"{kind}:{number.strip()}" for number in numbers.split(","))


def open_fleet(address: str = "auto") -> Fleet:
    """The fleet at `address`; see `gpu_runtime.fleet`."""
    if not isinstance(address, str) or not address:
        raise FleetUnavailable(
            "the address of a fleet is a text, such as auto or box1:6379.", why="no address"
        )
    return Fleet(address)


# -- a model on another host, as a client uses it

PING_SECONDS = 1.0
MOST_HOSTS = 4  # that may be lost under one call: a call that kills its host must not kill all
# The most calls of a block that run again on another host, and the most bytes of their arguments.
MOST_CALLS, MOST_BYTES = 1000, 256 << 20


class _Made(NamedTuple):
    """A call, as it is sent."""

    path: tuple[str, ...]
    given: remote_calls.Packed  # the arguments


class _Path:
    """A model on another host, or an attribute of it. If this object is called, the call runs on that host."""

    def __init__(self, use: FleetUse, path: tuple[str, ...] = ()) -> None:
        self._use, self._path = use, path

    def __getattr__(self, name: str) -> _Path:
        if name.startswith("_"):
            raise AttributeError(name)
        return _Path(self._use, (*self._path, name))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._use.call(self._path, args, kwargs)

    def __repr__(self) -> str:
        attribute = f"{'.'.join(self._path)} of " if self._path else ""
        return f"<{attribute}{self._use.name} on {self._use.host}>"


class RemoteModel(_Path):
    """The model of a `with fleet.use(…)` block. An attribute of this object is an attribute of the model on its host.

    `model.generate(**words)` runs on the model's host. Tensors are sent to the model's device, and results come back in
    host memory.
    """

    @property
    def host(self) -> str:
        """The name of the host that runs the model now."""
        return self._use.host


class FleetUse:
    """`with fleet.use("qwen") as model:` — the model on one of the hosts, pinned while the block runs."""

    def __init__(
        self, fleet: Any, name: str, timeout: float | None, importance: Any, retry: bool
    ) -> None:
        self._fleet, self.name, self._retry = fleet, name, retry
        self._timeout, self._importance = timeout, importance
        self.host = ""
        self._hold = ""
        self._agent: Any = None
        self._made: list[_Made] = []  # with `retry`, the calls of the block that were answered
        self._made_bytes = 0
        self._copy = 0  # the number of the model's copy that the block uses now, from 0
        self._moving = threading.RLock()  # held while the model is obtained on another host

    def __enter__(self) -> RemoteModel:
        self._obtain()
        return RemoteModel(self)

    def __exit__(self, *_: object) -> None:
        self._leave()

    def _obtain(self) -> None:
        # The client makes the id, so that it can withdraw a request that is interrupted.
        self._hold = secrets.token_hex(8)
        try:
            self.host, self._agent = self._fleet._obtain(
                self._hold, self.name, self._timeout, self._importance
            )
        except BaseException:
            self._fleet._withdraw(self._hold)
            raise

    def _leave(self) -> None:
        agent, self._agent = self._agent, None
        if agent is not None:
            on(agent, "leave", "verbs", self._hold)

    def serve(self, begin: Callable[[Any, str], Any]) -> Any:
        """The result of `begin` on the host of the model; see `HostAgent.serve`. Raises the same errors as `call`."""
        return self._on_a_living_host(lambda: on(self._agent, "serve", "verbs", begin))

    def withdraw(self) -> None:
        """Ends the use, or the wait for a host. Any thread may call this method."""
        self._fleet._withdraw(self._hold)

    def call(self, path: tuple[str, ...], args: Any, kwargs: Any) -> Any:
        """The result of a call on the model.

        Raises the error of the call, EngineDied if the model's process died, and NodeLost if the host died. With
        `retry`, the model is then used again on another host or in a new process, and the calls of the `with` block run
        again there.
        """
        # Only the model's process and this process unpack values. A call that may run again has
        # copies of its arrays, because the caller may change them.
        dumps = cluster.ray().cloudpickle.dumps
        made = _Made(path, remote_calls.pack((args, kwargs), dumps=dumps, share=not self._retry))
        found = self._on_a_living_host(lambda: self._send(made))
        if self._retry:
            self._made.append(made)
            self._made_bytes += len(made.given[0])
        # The buffers are copied: Ray's memory is read-only, and must be freed.
        data, *buffers = remote_calls.packed_in(found)
        return remote_calls.unpack((data, *map(bytearray, buffers)))

    def _send(self, made: _Made) -> Any:
        order = self._hold, made.path, remote_calls.uncopied(made.given)
        message = remote_calls.message(remote_calls.pack(order))
        return on(self._agent, "call", "calls", message)

    def _on_a_living_host(self, send: Callable[[], Any]) -> Any:
        for attempt in range(1, MOST_HOSTS + 1):
            copy, agent = self._copy, self._agent
            if agent is None:
                raise NodeLost(self.name, self.host, "the block has ended")
            try:
                return awaited(agent, send())
            except EngineDied:
                if not self._retry or attempt == MOST_HOSTS:
                    raise
                self._run_again(copy, elsewhere=False)
            except (cluster.Gone, cluster.Unreachable, NodeLost) as error:
                why = error.facts["why"] if isinstance(error, NodeLost) else self._why_lost()
                log.warning("%s was lost on %s: %s", self.name, self.host, why)
                host = self.host
                self._fleet._forget(host)
                if not self._retry or attempt == MOST_HOSTS:
                    raise NodeLost(self.name, host, why) from None
                self._run_again(copy, elsewhere=True)
        raise AssertionError  # the last attempt returns or raises

    def _run_again(self, lost: int, *, elsewhere: bool) -> None:
        """Runs the calls of the `with` block again on a new copy of the model, which replaces the copy number `lost`.

        Does nothing if another thread has already replaced it. With `elsewhere`, the new copy is on another host, else
        in the model's new process on the same host. Raises NodeLost if the calls are too many.
        """
        with self._moving:
            if self._copy != lost:
                return
            if len(self._made) > MOST_CALLS or self._made_bytes > MOST_BYTES:
                why = f"the block has made {len(self._made)} calls, too many to run them again"
                raise NodeLost(self.name, self.host, why)
            if elsewhere:
                self._leave()
                self._obtain()
            self._copy += 1
            for made in self._made:
                self._on_a_living_host(partial(self._send, made))

    def _why_lost(self) -> str:
        """Why a call has no answer: the host is gone, it is silent, or only the connection broke."""
        try:
            cluster.answer(on(self._agent, "ready", "offers"), PING_SECONDS)
        except cluster.Gone:
            return "its host is gone"
        except cluster.Unreachable:
            return "its host does not answer"
        return "the connection to its host broke"


# -- a host joins or leaves the fleet here, and the controller is found or started here


CARDS_HERE = "cuda"
JOIN_SECONDS = 120.0  # the agent's process starts, and its runtime opens


def controller() -> Any:
    """The handle of the controller. If there is no controller, one is started."""
    module = cluster.ray()
    options = module.remote(Controller).options(
        name=cluster.CONTROLLER,
        namespace=cluster.NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=-1,
        max_concurrency=64,
    )
    return options.remote()


def join(
    *,
    name: str = "",
    devices: str = "",
    ledger: str | None = None,
    address: str = "auto",
    node: str = "",
) -> Outcome:
    """Makes this machine a host of the fleet. Starts its agent, which owns the leases of the models.

    `name` is the name of the host; the default is the machine's name. `devices` are the cards as in GPU_DEVICES;
    simulated cards must be named, as in `sim:2x24GiB`. `ledger` is the URL of the host's ledger, by default that of the
    machine's configuration, as for its notebooks. `address` is the address of Ray's head. `node` is the id of the Ray
    node; the default is the node of this machine. A machine that is in the fleet stays as it is. Raises
    FleetUnavailable, also if it is in the fleet with another name, other devices, another ledger or other versions.
    """
    cluster.connect(address)
    cluster.require_token()
    module = cluster.ray()
    node = node or module.get_runtime_context().get_node_id()
    host = _free_name(name or socket.gethostname().partition(".")[0], node)
    given = os.environ.get("GPU_DEVICES", "")
    asked = {"host": name and host, "devices": devices, "ledger": ledger}
    # Ray hides cards from processes that did not claim them. There `auto` would find no card.
    devices = devices or (given if given not in ("", "auto") else CARDS_HERE)
    cards = int(cluster.living_nodes().get(node, {}).get("Resources", {}).get("GPU", 0))
    agent = _start_agent(host, node, cards, devices, ledger)
    try:
        told = cluster.answer(on(agent, "ready", "offers", again=True), JOIN_SECONDS)
    except (GpuError, cluster.Gone, cluster.Unreachable) as error:
        module.kill(agent)
        if isinstance(error, BadSetting) and devices == CARDS_HERE:
            raise FleetUnavailable(
                f"{host} has no CUDA card that is visible here, so it has nothing to share.\n"
                "  For a drill with simulated cards:  gpu fleet join --devices sim:24GiB",
                why=str(error),
            ) from None
        if isinstance(error, GpuError):
            raise
        raise FleetUnavailable(
            f"the agent of {host} did not start ({error}). Does another Ray job use its GPUs?\n"
            "  See:  ray status",
            why=str(error),
        ) from None
    if told["versions"] != cluster.versions():
        raise FleetUnavailable(
            f"this machine is in the fleet already, with an agent of other versions: {told['host']}.\n"
            "  First take it out:  gpu fleet leave",
            why="versions differ",
        )
    if any(value and value != told[what] for what, value in asked.items()):
        raise FleetUnavailable(
            f"this machine is in the fleet already: as {told['host']}, with {told['devices']}"
            f" and {told['ledger'] or 'the ledger of its notebooks'}.\n"
            "  To change that, first take it out:  gpu fleet leave",
            why="joined already",
        )
    host, devices = told["host"], told["devices"]  # an agent that ran already keeps its own
    cluster.store_host(node, host)
    with contextlib.suppress(cluster.Gone, cluster.Unreachable):  # it reads the hosts later
        cluster.answer(controller().hosts.remote())
    return Outcome("join", host, True, f"{host} has joined the fleet, with {devices}")


def _start_agent(host: str, node: str, cards: int, devices: str, ledger: str | None) -> Any:
    """Starts the agent of `host` on its `node`. It claims all `cards` in Ray, so that no other task gets them."""
    import_whole("ray.util.scheduling_strategies")
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    module = cluster.ray()
    return (
        module.remote(concurrency_groups=GROUPS)(HostAgent)
        .options(
            name=cluster.AGENT + node,
            namespace=cluster.NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            num_gpus=cards,
            max_restarts=-1,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        .remote(host, devices, ledger, cluster.versions())
    )


def _free_name(wanted: str, node: str) -> str:
    """The name `wanted`, or another one if a living host of another node has it."""
    alive = cluster.living_nodes()
    taken = {
        joined.name
        for other, joined in cluster.stored_hosts().items()
        if other in alive and other != node
    }
    return f"{wanted}-{node[:6]}" if wanted in taken else wanted


def leave(*, node: str = "", address: str = "auto") -> Outcome:
    """Takes this machine out of the fleet: frees the models of its agent, and ends the agent.

    `node` is the id of the Ray node; the default is the node of this machine. Raises FleetUnavailable.
    """
    cluster.connect(address)
    module = cluster.ray()
    node = node or module.get_runtime_context().get_node_id()
    joined = cluster.stored_hosts().get(node)
    if joined is None:
        raise FleetUnavailable("this machine is in no fleet.", why="not joined")
    name = joined.name
    cluster.unstore(cluster.HOSTS + node.encode())
    began = time.monotonic()
    with contextlib.suppress(cluster.Gone, cluster.Unreachable):  # it has ended, or it hangs
        agent = cluster.actor(cluster.AGENT + node)
        try:
            cluster.answer(on(agent, "stop", "verbs"))
        finally:
            module.kill(agent)
    took = time.monotonic() - began
    return Outcome("leave", name, True, f"{name} has left the fleet", seconds=took)
