"""The agent of one host: a detached Ray actor that owns the leases of the fleet's models on the host.

Its runtime is one more owner in the host's book, beside the host's notebooks. All grants of the host are decided in
that book. The methods run in Ray's threads. Loads and offers have separate threads, so that an offer never waits.
"""

from __future__ import annotations

import _thread
import contextlib
import json
import logging
import os
import queue
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import replace

from ..attribution import on_behalf_of
from ..backends.processes import remote_calls
from ..backends.processes.model_processes import ProcessBackend, ProcessModel
from ..backends.processes.remote_calls import Packed
from ..errors import (
    EngineDied,
    FleetUnavailable,
    GpuError,
    NodeLost,
    NotAllowed,
    NotResident,
    UnknownModel,
)
from ..facts import HOST, THIS_PROCESS, HostRoom, Offer, PlanLevel
from ..files import replace_file
from ..runtime import Runtime
from ..scheduler.offers import offer_of, room_of
from ..threads import start
from . import cluster, wishes

log = logging.getLogger("gpu_runtime")
T = TypeVar("T")

# The number of threads for each kind of call. A client that waits for a model occupies a thread of "loads".
GROUPS = {"offers": 8, "loads": 64, "calls": 64, "verbs": 8}
WATCH_SECONDS = 0.3  # how often the jobs of clients are checked
NODE_LOOKS = 3  # after so many of these checks, the agent also checks its own node
# Backends whose models run in other processes. The agent itself loads no model's bytes.
IN_PROCESSES = ("fake", "llama_cpp", "transformers")
# The methods of Runtime that others may call through the agent.
READS = (
    "status models leases events evictions history decisions fragmentation health plan why doctor "
    "schedule specs who catalog allocator_maps backtest report"
).split()
VERBS = [*READS, *"preload evict restore move pin unpin resume drain defrag cancel".split()]


class HostAgent:
    """The agent of one host, which clients and the controller call. Ray creates it on its host."""

    def __init__(
        self, host: str, devices: str, ledger: str | None, theirs: Mapping[str, str]
    ) -> None:
        """The agent of `host`. `devices` and `ledger` are values of the settings GPU_DEVICES and GPU_LEDGER.

        `theirs` are the versions of the process that makes the host join. An error of the start is raised by `ready`,
        because Ray would report an error of the constructor only as a dead actor.
        """
        self.host, self._devices, self._ledger = host, devices, ledger
        self._revision = -1
        self._wished: tuple[str, ...] = ()  # the models in the wishes, as last read
        self._removed: tuple[str, ...] = ()  # models that were wished earlier, and no longer are
        self._drained = False
        self._learning, self._serving = threading.Lock(), threading.Lock()
        self._served: Any = None
        self._trouble: GpuError | None = None
        try:
            cluster.require_token()
            cluster.require_equal_versions(theirs, "the process that joins this host")
            self._open()
        except GpuError as error:
            self._trouble = error

    def _open(self) -> None:
        devices, ledger = self._devices, self._ledger
        # At each start, the catalogue is empty. It is filled from the wishes at Ray's head.
        self._catalogue = Path(tempfile.mkdtemp(prefix="gpu-fleet-"))
        self._file = self._catalogue / "fleet.json"
        self.rt = Runtime(devices=devices, ledger=ledger, catalog=str(self._catalogue))
        cards = self.rt.probe.cards
        named = devices.startswith("sim:")
        if not cards or (self.rt.simulated and not named):
            self.rt.close()
            raise FleetUnavailable(
                f"{self.host} has no visible card, so it cannot join.\n"
                "  For a drill:  gpu fleet join --devices sim:2x24GiB",
                why="no card",
            )
        self.rt._session.backends.update(
            (name, ProcessBackend(name, devices, self.rt.probe)) for name in IN_PROCESSES
        )
        self.holds = FleetHolds(self.rt, self.host)
        start(self._watch)

    def ready(self) -> dict[str, Any]:
        """What this agent is, and was started with. Raises the error of its start, as every method does."""
        self._require_started()
        more = {"host": self.host, "devices": self._devices, "ledger": self._ledger}
        return {"pid": os.getpid(), "versions": cluster.versions(), **more}

    def _require_started(self) -> None:
        """Raises the error of the start, as of an agent that Ray has started again after an upgrade of its host."""
        if self._trouble is not None:
            raise self._trouble.with_traceback(None)

    # -- what this host would take -----------------------------------------------------------------

    def learn(self, revision: int) -> wishes.Wishes | None:
        """Reads the wishes from Ray's head, applies and returns them; None if this `revision` is known already."""
        self._require_started()
        if revision <= self._revision:
            return None
        with self._learning:
            if revision <= self._revision:
                return None
            found = wishes.load(cluster.stored(cluster.WISHES))
            bodies = wishes.bodies_on(found, self.host)
            replace_file(self._file, "\n".join(map(json.dumps, bodies)).encode())
            known = {*self._removed, *self._wished}
            self._removed = tuple(known.difference(found.names))
            self._wished = found.names
            self.rt._set_wished(wishes.marks(found, self.host))
            is_drained = self.host in found.drained
            if is_drained != self._drained:
                for view in self.rt.status().cards:
                    self.rt.drain(view.device.id, undo=not is_drained, timeout=0.0)
                self._drained = is_drained
            self._revision = found.revision
            return found

    def offer(self, name: str, revision: int, for_wish: bool = False) -> Offer:
        """What this host offers for the model `name`: a plan, or the reason why it cannot take the model.

        With `for_wish`, the model is only wished: it takes free room, or evicts models that are wished less, and never
        waits for other models. Never raises GpuError.
        """
        try:
            self.learn(revision)
            self._require_wish(name)
            plan = self.rt._plan_wished(name) if for_wish else self.rt.plan(name)
            users = self.holds.users(name)
            if plan.level is PlanLevel.WAIT:
                users += len(self.rt.status().waiting)
            found = offer_of(plan, self.host, users)
            if for_wish and plan.level is PlanLevel.WAIT:
                found = replace(found, level=PlanLevel.NEVER)
            return replace(found, because=self._from_afar(found.because))
        except GpuError as error:
            return Offer(self.host, name, PlanLevel.NEVER, self._from_afar(str(error)))

    def _from_afar(self, text: str) -> str:
        """The `text` for readers in other processes: there this process is the agent of its host."""
        return text.replace(THIS_PROCESS, f"the agent of {self.host}")

    @contextlib.contextmanager
    def _errors_from_afar(self) -> Iterator[None]:
        """The errors that are raised in this block are for readers in other processes."""
        try:
            yield
        except GpuError as error:
            error.args = (self._from_afar(str(error)),)
            raise

    def _require_wish(self, name: object) -> None:
        """Raises UnknownModel if the wish for `name` was removed: the runtime would still plan a load of it."""
        if name in self._removed:
            raise UnknownModel(
                str(name),
                self._wished,
                none="The fleet has no model.",
                advice="Its wish was removed. Add it again:  fleet.apply(FILE)",
            )

    def _require_open(self, name: str) -> None:
        """Raises NotAllowed if this host is drained."""
        if self._drained:
            why = "it is drained"
            raise NotAllowed(f"{self.host} is drained.", name=name, user="", because=why)

    def room(self, name: str, revision: int) -> HostRoom:
        """The free room of this host, and whether this host has the model `name`."""
        self.learn(revision)
        book, world = self.rt._session.look()
        try:
            spec = self.rt.spec(name)
            need, may_split = spec.size or 0, spec.layout != "single"
        except GpuError:  # this host does not know the model
            need, may_split = 0, True
        return room_of(
            self.host,
            book,
            world,
            need_bytes=need,
            may_split=may_split,
            name=name,
            owner=self.rt._session.me,
        )

    def holdings(self) -> dict[str, tuple[str, int]]:
        """The models that this agent has on a device or in host memory, each with its device and bytes."""
        self._require_started()
        return {
            name: (lease.where, lease.bytes)
            for name, lease in self.rt.status().own_leases.items()
            if lease.shares and (lease.on_device or lease.where == HOST)
        }

    # -- models ------------------------------------------------------------------------------------

    def enter(
        self,
        hold: str,
        job: str,
        name: str,
        *,
        timeout: float | None,
        importance: Any = None,
        only_here: bool = False,
        revision: int = 0,
    ) -> bool:
        """Pins the model `name` on its device, under the id `hold`, for a client of the Ray job `job`.

        Returns True when it is pinned; False if `only_here` and it is not on its device. Raises NotAllowed if the host
        is drained, and the errors of `rt.use`.
        """
        self.learn(revision)
        if only_here and not self.rt.here(name):
            return False
        self._require_open(name)
        with self._errors_from_afar():
            self.holds.enter(FleetHold(hold, job, name), timeout, importance)
        return True

    def call(self, message: Any) -> Any:
        """Runs a call. `message` has the packed arguments of `FleetHolds.call`; the result is packed too."""
        hold, path, given = remote_calls.unpack(remote_calls.packed_in(message))
        return remote_calls.message(self.holds.call(hold, path, given))

    def leave(self, hold: str) -> None:
        """Ends the hold with the id `hold`. If there is no such hold, nothing happens."""
        self.holds.release(hold)

    def load(self, name: str, revision: int, timeout: float) -> str:
        """Loads the wished model `name` and returns its devices. Raises the errors of `rt.use`.

        `timeout` (seconds) limits the wait for room; the load may take longer.
        """
        self.learn(revision)
        self._require_open(name)
        with self._errors_from_afar():
            return self.rt._load_wished(name, timeout)

    def place(self, name: str, devices: tuple[str, ...], revision: int, timeout: float) -> str:
        """Loads the model `name` on exactly these `devices`, and returns their names.

        If it is elsewhere on this host, it is first unloaded, also from host memory: it returns from there only to the
        cards that it was registered for. Raises StillInUse, DoesNotFit, Busy, UnknownDevice.
        """
        self.learn(revision)
        lease = self.rt.status().own_leases.get(name)
        if lease is not None and lease.shares:
            if {share.device for share in lease.shares} == set(devices):
                return lease.where
            with self._errors_from_afar():
                self.rt.evict(name, drop=True)
        return self.load(name, revision, timeout)

    def slots(self) -> list[tuple[str, str, int, int]]:
        """A row for each card of each model: the model, the card, the bytes on it, and the model's users."""
        self._require_started()
        return [
            (name, share.device, share.bytes, self.holds.users(name))
            for name, lease in sorted(self.rt.status().own_leases.items())
            for share in lease.shares
            if share.device != HOST
        ]

    def verb(self, name: str, args: Any, kwargs: Any, person: str = "") -> Any:
        """The result of the runtime's method `name`, which must be in VERBS. The journal names the `person`."""
        if name not in VERBS:
            raise GpuError(f"{name} is no verb of a host; these are: {', '.join(VERBS)}.")
        self._require_started()
        if name in ("plan", "preload") and args:
            self.learn(self._revision + 1)  # reads the wishes, even if they have not changed
            self._require_wish(args[0])
        with on_behalf_of(person), self._errors_from_afar():
            return getattr(self.rt, name)(*args, **kwargs)

    def serve(self, begin: Callable[[Runtime, str], T]) -> T:
        """The result of the first `begin(runtime, address)`, which starts this host's HTTP server at its address."""
        with self._serving:
            if self._served is None:
                address = cluster.ray().util.get_node_ip_address()
                self._served = begin(self.rt, address)
            return self._served

    def stop(self) -> None:
        """Ends all uses and frees all models. The caller then removes the actor."""
        if self._trouble is None:
            self.rt.close()
            shutil.rmtree(self._catalogue, ignore_errors=True)

    # -- clients and nodes that ended --------------------------------------------------------------

    def _watch(self) -> None:
        """Ends the uses of clients that have ended, and this process if Ray declared its node dead."""
        looks = 0
        while not self.rt._closed:
            time.sleep(WATCH_SECONDS)
            looks += 1
            try:
                # Ray does not report the end of a client.
                if len(self.holds) and (count := self.holds.release_jobs(cluster.ended_jobs())):
                    log.info("%s: ended %d uses of clients that have ended", self.host, count)
                if looks % NODE_LOOKS == 0 and cluster.is_given_up():
                    # This process was frozen, and its clients use other hosts already.
                    log.warning("%s was declared dead, and ends", self.host)
                    os._exit(1)
            except Exception as error:  # noqa: BLE001 - the head restarts: ask again
                log.debug("the head does not answer: %s", error)


# -- models that clients of the fleet use on this host, with one thread for each use (a hold)
#
# A pin belongs to the thread that took it. So each hold has its own thread, which stays inside `with rt.use(model)`
# until the hold is released. Each call of a client runs in the thread that receives the call.

MOST_RELEASED = 1000  # releases that arrived before their hold, and are remembered


class _HoldReleased(BaseException):
    """Raised in a thread that waits for room, once the hold of that thread was released.

    It is no Exception, so that no `except Exception` between the wait and `FleetHolds` catches it.
    """


class FleetHold:
    """One use of `model` by a client of the Ray `job`, or the wait for the use."""

    def __init__(self, id: str, job: str, model: str) -> None:
        self.id, self.job, self.model = id, job, model
        self.ready: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self.released = threading.Event()
        self.value: Any = None  # the model, from the beginning of the use to its end
        self.calling = threading.Lock()  # held during a call: the calls of a hold run one by one


class FleetHolds:
    """All holds of this `host`, by their ids, over its runtime `rt`."""

    def __init__(self, rt: Any, host: str) -> None:
        self._rt, self._host = rt, host
        self._all: dict[str, FleetHold] = {}
        # Ids that were released before their hold began: the release may arrive first.
        self._released_early: deque[str] = deque(maxlen=MOST_RELEASED)
        self._changing = threading.Lock()  # of the two above
        self._by_thread: dict[int, FleetHold] = {}
        rt.tell_waits(self._on_wait)

    def enter(self, hold: FleetHold, timeout: float | None, importance: Any) -> None:
        """Waits until the model of `hold` is on its device. Parameters and errors are those of `rt.use`."""
        with self._changing:
            if hold.id in self._released_early:
                raise NodeLost(hold.model, self._host, "the client has ended")
            if earlier := self._all.get(hold.id):
                earlier.released.set()  # its client has got no answer, and requests the use again
            self._all[hold.id] = hold
        start(lambda: self._run(hold, timeout, importance))
        error = hold.ready.get()
        try:
            if error is not None:
                with self._changing:
                    if self._all.get(hold.id) is hold:
                        del self._all[hold.id]
                raise error
        finally:
            del error

    def call(self, id: str, path: tuple[str, ...], given: Packed) -> Packed:
        """The packed result of a call on the model of the hold `id`. Raises the errors of the call.

        `path` and `given` are as in `remote_calls.run`. Raises NodeLost if there is no such hold, because the agent has
        been restarted, or if the model's process is gone for good.
        """
        hold = self._all.get(id)
        if hold is None:
            raise NodeLost("", self._host, "its agent has been restarted")
        with hold.calling:
            if hold.released.is_set():
                raise NodeLost(hold.model, self._host, "the use has ended")
            try:
                if isinstance(hold.value, ProcessModel):
                    return hold.value.run_there(path, given)
                return remote_calls.run(hold.value, path, given)
            except (EngineDied, NotResident):
                if self._rt.here(hold.model):
                    raise
                raise NodeLost(hold.model, self._host, "its process is gone") from None

    def release(self, id: str) -> None:
        """Ends the use of the model of the hold `id`, or the wait for it. A call that runs is completed."""
        with self._changing:
            if hold := self._all.pop(id, None):
                hold.released.set()
            else:
                self._released_early.append(id)

    def release_jobs(self, ended: set[str]) -> int:
        """Ends all holds of the jobs in `ended`. Returns the number of these holds."""
        dead = [hold.id for hold in list(self._all.values()) if hold.job in ended]
        for id in dead:
            self.release(id)
        return len(dead)

    def users(self, model: str) -> int:
        """The number of holds on `model`, including the holds that still wait for room."""
        return sum(hold.model == model for hold in list(self._all.values()))

    def __len__(self) -> int:
        return len(self._all)

    def _run(self, hold: FleetHold, timeout: float | None, importance: Any) -> None:
        thread = _thread.get_ident()
        self._by_thread[thread] = hold
        try:
            with self._rt.use(hold.model, timeout=timeout, importance=importance) as value:
                hold.value = value
                hold.ready.put(None)
                hold.released.wait()
                with hold.calling:  # a call that runs is completed
                    del hold.value, value
        except _HoldReleased:
            hold.ready.put(NodeLost(hold.model, self._host, "the client has ended"))
        except BaseException as error:  # noqa: BLE001 - raised where the client waits
            hold.ready.put(error)
        finally:
            self._by_thread.pop(thread, None)
            hold.released.set()

    def _on_wait(self, model: str, wait: Any) -> None:
        """Called in a hold's thread when its request must wait. Raises _HoldReleased if the hold was released."""
        hold = self._by_thread.get(_thread.get_ident())
        if hold is not None and wait is not None and hold.released.is_set():
            raise _HoldReleased
