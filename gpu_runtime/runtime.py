"""Runtime: the public facade, the one object that users hold.

Each public method is a docstring and one call into `owner/`. The package `scheduler/` decides, and
`owner/` carries the decisions out.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

from . import attribution
from .arguments import KEYWORDS, checked, read_all
from .backends.base import Progress, Stillness
from .catalog.files import Catalog, Catalogued
from .devices.probe import Probe, open_probe
from .errors import BadSetting
from .facts import (
    AllocatorMap,
    Applied,
    Decisions,
    Event,
    Evidence,
    Health,
    History,
    LeaseId,
    ModelSpec,
    Outcome,
    OutOfMemoryStory,
    Plan,
    Replayed,
    Schedule,
    Snapshot,
    Wait,
    away_word,
)
from .notebook import notebook_path
from .owner import (
    acquire,
    arrivals,
    checkpoints,
    doctor,
    history,
    holdings,
    kernel,
    lifetime,
    load_and_plan,
    maintenance,
    operations,
    out_of_memory,
    registry,
    status,
)
from .owner.history import ALL_POLICIES, DEVICES, HOSTS, NO_DISK, recorded_events
from .owner.kernel import Kernel
from .owner.monitor import Monitor
from .owner.operations import ASK_SECONDS
from .owner.pins import Held
from .owner.resident import Place
from .owner.session import Session
from .scheduler import transitions as books
from .settings import Settings
from .units import counted

if TYPE_CHECKING:
    from pandas import DataFrame

    from .owner.doctor import Report


class Runtime:
    """Shares this machine's GPU memory among the models of this process and of all other processes.

    An argument that is not given has the value of its setting. Any other setting is a keyword too:
    `Runtime(devices="sim:2x24GiB", ledger="memory:", gpu_memory_max_percent=0.9)`.
    """

    @checked
    def __init__(
        self,
        *,
        devices: str | None = None,
        ledger: str | None = None,
        catalog: str | None = None,
        policy: str | None = None,
        clock: Callable[[], float] | None = None,
        wall: Callable[[], float] = time.time,
        probe: Probe | None = None,
        monitor: bool = True,
        **settings: Any,
    ) -> None:
        """Opens the ledger and the devices.

        `devices` is `auto`, `cuda` or text such as `sim:2x24GiB`. `ledger` is a URL, `catalog` a
        directory, and `policy` the name of the eviction policy; each is the setting of this name with
        `gpu_` before it, which may be given instead. `clock` returns seconds of
        CLOCK_BOOTTIME and `wall` epoch seconds. Tests replace `clock`, `wall` and `probe`. Without
        `monitor` the caller must call `tick`. Raises BadSetting, LedgerUnavailable, ProbeFailed.
        """
        short = {"devices": devices, "ledger": ledger, "catalog": catalog, "policy": policy}
        for name, value in short.items():
            if value is not None and settings.get(f"gpu_{name}") is not None:
                raise BadSetting(name, value, f"given once, and gpu_{name} is given too")
            settings[f"gpu_{name}"] = settings.get(f"gpu_{name}") if value is None else value
        self.settings = Settings.load(**settings)
        cpu_only = self.settings.development_cpu_only
        self.probe = probe or open_probe(self.settings.gpu_devices, cpu_only=cpu_only)
        self._clock = clock or partial(time.clock_gettime, time.CLOCK_BOOTTIME)
        self._wall = wall
        self._catalogue = Catalogued(Catalog(self.settings), lambda: self.probe.devices)
        self._closing = threading.RLock()
        self._is_inherited = False  # True in a forked child that has not used this runtime yet
        self._wants_monitor = monitor
        self._open()
        _runtimes.add(self)

    def _open(self) -> None:
        self._opened = lifetime.open_session(
            self.settings, self.probe, self._catalogue, clock=self._clock, wall=self._wall
        )
        if self._wants_monitor:
            self._opened.monitor = Monitor(self.tick, partial(maintenance.rest, self._opened))

    @property
    def _session(self) -> Session:
        """This process as an owner. Raises LedgerUnavailable once the runtime is closed."""
        return self._reopened() if self._opened.closed else self._opened

    def _reopened(self) -> Session:
        """This process as a new owner, at the first use of the runtime in a forked child.

        The new owner holds no memory. The parent's models stay in the child as plain objects.
        Raises LedgerUnavailable if the ledger cannot be opened, or if the runtime was closed.
        """
        with self._closing:
            if self._is_inherited:
                self._open()
                self._is_inherited = False
        if self._opened.closed:
            raise lifetime.closed_error(self._opened)
        return self._opened

    @property
    def _closed(self) -> bool:
        return self._opened.closed and not self._is_inherited

    def __repr__(self) -> str:
        if self._closed:
            return "<Runtime, closed>"
        count, url = len(self._opened.residents), self._opened.ledger.url
        devices = ", ".join(map(str, self.probe.devices))
        return f"<Runtime with {counted(count, 'model')} on {devices}; ledger {url}>"

    @property
    def guest(self) -> bool:
        """True for the runtime of a command, which only sends requests and holds no model."""
        return self._opened.guest

    @guest.setter
    def guest(self, value: bool) -> None:
        self._session.guest = value

    # -- models

    @checked
    def register(
        self,
        name: str,
        source: Any = None,
        *,
        backend: str = "auto",
        size: str | int | None = None,
        importance: str | int = "normal",
        keep: bool = False,
        keep_alive: str | float = 0.0,
        layout: str = "auto",
        model_type: str = "",
        quantization: str = "",
        devices: str | tuple[str, ...] = (),
        restore_on_call: bool = True,
        **options: Any,
    ) -> ModelSpec:
        """Makes a model known by `name`. Nothing is loaded yet.

        `source` is a Hugging Face model directory, a downloaded hub id, a GGUF file, a callable
        that returns an nn.Module, or an existing module (see `adopt`). `backend` loads the model;
        "auto" chooses one by the source. `size` is the declared memory, such as "8 GiB".
        `importance` is urgent, high, normal, low, batch or a number (lower is more important).
        `keep` forbids eviction. `keep_alive` is the time (seconds or "5m") after its last use from
        which on the idle model may leave by itself; it reserves nothing. `layout` says how the
        model may be divided over `devices`, ids such as "cuda:1". `model_type` and `quantization`
        describe the model. With `restore_on_call=False`, a call on a kept reference raises
        NotResident while the model is away. The backend gets the `options`, and refuses an option
        that it does not use. A second, equal call changes nothing.

        Raises NotAModel, BadSize, BadSetting, AlreadyRegistered, UnknownDevice.
        """
        named = locals()
        given = {keyword: named[keyword] for keyword in KEYWORDS} | options
        if registry.is_module(source):
            adopted = registry.adopted_with(given)
            return self.adopt(name, source, restore_on_call=restore_on_call, **adopted)
        return registry.register(self._session, name, source, given, restore_on_call)

    @checked
    def adopt(
        self,
        name: str,
        module: Any,
        *,
        optimizer: Any = None,
        importance: str | int = "normal",
        keep: bool = False,
        keep_alive: str | float = 0.0,
        model_type: str = "",
        restore_on_call: bool = True,
    ) -> ModelSpec:
        """Governs an existing `module`, with its `optimizer` if it is in training.

        The module's weights exist nowhere else, so they are never dropped. The parameters
        `importance`, `keep`, `keep_alive`, `model_type` and `restore_on_call` are as in `register`.

        Raises CannotGovern, AlreadyRegistered, NotAllowed, BadSetting.
        """
        named = locals()
        given = {keyword: named[keyword] for keyword in registry.OF_A_MODULE}
        return registry.adopt(self._session, name, module, optimizer, given, restore_on_call)

    @checked
    def forget(self, name: str) -> None:
        """Frees the memory of the model `name`, and its name. An adopted module stays in place, as
        your object. Raises UnknownModel, StillInUse.
        """
        registry.forget(self._session, name)

    @checked
    def specs(self) -> tuple[ModelSpec, ...]:
        """The specifications of the models that are registered in this process."""
        return status.specs(self._session)

    @checked
    def spec(self, name: str) -> ModelSpec:
        """The specification of the model `name`, here or in the catalogue. Raises UnknownModel."""
        return registry.find(self._session, name).spec

    @checked
    def _source_facts(self, name: str) -> tuple[Evidence, str]:
        """What the source of the model `name` shows before a load, and its chat template.

        The template is empty if the source has none. Raises UnknownModel.
        """
        return operations.source_facts(self._session, name)

    @checked
    def here(self, name: str) -> bool:
        """Whether the model `name` is on its device now. This reads no ledger and no device."""
        resident = self._session.residents.get(name)
        return resident is not None and resident.place is Place.HERE

    def _pauses(self, name: str) -> bool:
        """Whether new uses of the model `name` wait for a request of another process."""
        resident = self._session.residents.get(name)
        return resident is not None and resident.pauses

    def _away_word(self, name: str) -> str:
        """What the model `name` is called in RAM, as on the console; empty if it is not there."""
        resident = self._session.residents.get(name)
        return "" if resident is None or resident.handle is None else away_word(resident.lease)

    # -- using

    def use(
        self,
        name: str,
        *,
        importance: str | int | None = None,
        timeout: str | float | None = None,
        keep_alive: str | float | None = None,
        **unknown: Any,
    ) -> Held:
        """`with rt.use("qwen") as model:` — the model, on its device while the block runs.

        Idle models are evicted to make room. If models in use occupy the memory, the block waits at
        most `timeout` (seconds or "30s"; None means no limit). In this block, `importance` and
        `keep_alive` replace the values of the registration.

        Raises UnknownModel, DoesNotFit, MemoryLimitExceeded, NotAllowed (a cap), Busy (`timeout`), WaitEnded (a
        person ended the wait), Deadlock, LoadFailed, LedgerUnavailable; in the block also OutOfMemory.
        """
        session = self._session
        resident = session.residents.get(name) if type(name) is str else None
        plainly = importance is None and timeout is None and keep_alive is None and not unknown
        # Checking the arguments costs 1 µs. It is not needed for the plain name of a known model.
        if not plainly or resident is None or resident.catalogued:
            wishes = {"importance": importance, "timeout": timeout, "keep_alive": keep_alive}
            name, importance, timeout, keep_alive = read_all("use", unknown, name=name, **wishes)
            resident = registry.find(session, name)
        return acquire.Use(session, resident, importance, timeout, keep_alive)

    @checked
    def lease(
        self,
        size: str | int | None,
        *,
        purpose: str = "",
        importance: str | int = "normal",
        timeout: str | float | None = None,
    ) -> Held:
        """`with rt.lease("8 GiB", purpose="training") as block:` — memory for your own code.

        `size` is claimed in the ledger until the block ends. On a real card, torch cannot allocate
        more than `size`. If `size` is None, nothing is claimed, and the use is only measured. Other
        users see `purpose`, by default the file's name. `importance`, `timeout`: see `use`.

        Raises BadSize, DoesNotFit, NotAllowed (a cap), Busy (`timeout`), WaitEnded (a person ended the wait),
        Deadlock, LedgerUnavailable; in the block also OutOfMemory.
        """
        return acquire.lease_memory(self._session, size, purpose, importance, timeout)

    # -- acting

    @checked
    def on_behalf_of(self, name: str) -> AbstractContextManager[None]:
        """`with rt.on_behalf_of("ann"):` — journals this thread's actions as done for ann.

        The `name` is only for display. Permissions still depend on this process's user.
        """
        return attribution.on_behalf_of(name)

    @checked
    def load(
        self,
        name: str,
        source: Any = None,
        *,
        progress: Progress | None = None,
        timeout: str | float | None = None,
        **options: Any,
    ) -> Outcome:
        """Registers the model `name` if it is new, and loads it.

        `source` and `options` are as in `register`, `progress` and `timeout` as in `preload`. A
        registered model that is not loaded gets these options. Raises the errors of both methods.
        """
        given = {option: value for option, value in options.items() if value is not None}
        return load_and_plan.load(
            self._session, self.register, name, source, given, progress=progress, timeout=timeout
        )

    @checked
    def preload(
        self,
        name: str | LeaseId,
        *,
        progress: Progress | None = None,
        timeout: str | float | None = None,
        wait: bool = True,
    ) -> Outcome:
        """Loads the model onto its device now, so that the next `use` does not wait.

        `progress(bytes, total)` is called during the load. `timeout` limits the wait and the load
        together. Without `wait` the model is loaded in the background, and a failure is logged.
        Raises the errors of `use`.
        """
        session = self._session
        return operations.preload(session, name, progress=progress, timeout=timeout, wait=wait)

    restore = preload

    @checked
    def evict(
        self,
        name: str | LeaseId,
        *,
        timeout: str | float | None = ASK_SECONDS,
        wait: bool = True,
        drop: bool = False,
        lost: bool = False,
        force: bool = False,
    ) -> Outcome:
        """Evicts the model to RAM, or unloads it if RAM has no room.
        `qwen@4121` or a LeaseId names another process's model. `train.ipynb` names all memory of a
        notebook, also of its own code. `*` names all idle models. With `drop`, a model that can be
        loaded again leaves RAM too. Another process gets a request, and has `timeout`
        seconds. Without `wait` the request is only written. With `lost`, `name` is the pid of a
        process that may have ended, and the outcome lists its memory. `force` also ends the leases
        of this process; use it only if you know that the process has ended.

        Raises DoesNotFit if the model cannot leave, StillInUse, UnknownModel, AmbiguousName, Busy,
        NotAllowed, GpuError.
        """
        if lost:
            return operations.evict_lost(self._session, str(name), force=force)
        return operations.evict(self._session, name, timeout=timeout, wait=wait, drop=drop)

    @checked
    def cancel(self, name: str | LeaseId, *, timeout: str | float | None = ASK_SECONDS) -> Outcome:
        """Ends the wait of the request for `name`. The waiting cell raises WaitEnded.

        `qwen@4121` names a request of another process, `train.ipynb` the request of a notebook.
        Only the request's user and operators may end its wait. Raises GpuError, AmbiguousName,
        NotAllowed, Busy.
        """
        return operations.cancel(self._session, name, timeout)

    @checked
    def move(
        self,
        name: str | LeaseId,
        device: str | Iterable[str],
        *,
        timeout: str | float | None = ASK_SECONDS,
    ) -> Outcome:
        """Moves an idle model: `rt.move("qwen", "cuda:1")`, or `"cuda:0,1"` for both cards.

        Only free memory is used: room on `device` is reserved first, and nothing is evicted.
        `qwen@4121` names another process's model; that process has `timeout` seconds for the move.

        Raises UnknownDevice, DoesNotFit, StillInUse, NotResident, Busy.
        """
        return operations.move(self._session, name, device, timeout=timeout)

    @checked
    def pin(self, name: str | LeaseId) -> Outcome:
        """Keeps the model `name` on its device until `unpin`. Raises UnknownModel, NotAllowed."""
        return operations.set_keep(self._session, name, "pin")

    @checked
    def unpin(self, name: str | LeaseId) -> Outcome:
        """Allows the eviction of the model `name` again. Raises UnknownModel, NotAllowed."""
        return operations.set_keep(self._session, name, "unpin")

    @checked
    def park(self, who: str = "", *, checkpoint: bool = False, yes: bool = False) -> Outcome:
        """Moves a notebook's memory to RAM. `who` is its file name or pid; empty: this notebook.

        With `who="never"` this notebook's memory returns and stays; `"asked"` ends that.
        The memory returns before a cell that may need it. With `checkpoint`, `who` is the pid of
        any process, and the driver moves its memory. Without `yes`, that call only lists the risks.
        """
        if checkpoint:
            return checkpoints.park(self._session, who, yes)
        return kernel.park(self._session, who)

    @checked
    def hibernate(self, who: str = "") -> Outcome:
        """Moves a notebook's memory to its disk (`GPU_PARK_DIR`), and gives back the RAM. `who` is as in `park`.

        The process stays, and the memory returns before a cell that may need it. Raises GpuError.
        """
        return kernel.hibernate(self._session, who)

    @checked
    def unpark(self, who: str = "", *, checkpoint: bool = False) -> Outcome:
        """Brings back the memory of the notebook `who`; with `checkpoint`, `who` is any pid."""
        return (checkpoints if checkpoint else kernel).unpark(self._session, who)

    @checked
    def resume(self, process: str) -> Outcome:
        """Continues a stopped `process`: a pid or a notebook's file name. Raises NotAllowed."""
        return operations.resume(self._session, process)

    @checked
    def interrupt(self, process: str, *, end: bool = False) -> Outcome:
        """Ends the running cell of `process`, a pid or a notebook's file name, as the stop button does.

        With `end`, the process ends, and its variables are lost. Raises NotAllowed.
        """
        return operations.interrupt(self._session, process, end)

    @checked
    def attach_kernel(self, stillness: Stillness) -> Kernel:
        """This process's kernel, for the front end that runs its cells; see owner/kernel.py."""
        session = self._session
        if session.kernel is None:
            session.kernel = Kernel(session, stillness)
        else:
            session.kernel.follow(stillness)
        return session.kernel

    @checked
    def defrag(self, process: str = "", *, timeout: str | float | None = 5.0) -> Outcome:
        """Frees unused memory of the allocators of all processes that take this user's requests.

        `process` selects one process by its pid, its owner id, or its model (`qwen@4121`). The
        `timeout` is for all processes together. Raises UnknownModel, AmbiguousName, NotAllowed, Busy.
        """
        return operations.defrag(self._session, process, timeout)

    @checked
    def free(self, name: str | None = None) -> Outcome:
        """Releases outputs, the last error, garbage and caches, or deletes the variable `name`.

        Raises GpuError for an unknown name.
        """
        return holdings.free(self._session, name)

    @checked
    def drain(
        self, device: str, *, undo: bool = False, timeout: str | float | None = 5.0
    ) -> Outcome:
        """Closes the card `device` to new leases and moves idle models off. `undo` ends the drain.

        A drain applies to all processes of the ledger until it is undone or the machine restarts.
        Waits at most `timeout` seconds for idle models to leave. Raises UnknownDevice, NotAllowed.
        """
        return operations.drain(self._session, device, undo=undo, timeout=timeout)

    @checked
    def tell_waits(
        self,
        told: Callable[[str, Wait | None], None] | None,
        arrived: Callable[[Any], None] | None = None,
    ) -> None:
        """Sets the functions that are called while a thread of this process waits or loads.

        A thread that waits for room calls `told(name, wait)` after each decision. When the wait has
        ended, `wait` is None. `arrived` gets an `Arrival` when a load or restore begins and ends.
        """
        self._session.on_wait, self._session.on_arrival = told, arrived

    def _others_wait(self) -> bool:
        """Whether a use of another process waits. Each cell calls this: 4 µs, where `status` takes 0.8 ms."""
        tickets = self._session.read_book().tickets
        return any(ticket.verb == "use" and ticket.owner != self._session.me for ticket in tickets)

    # -- for the agent of a fleet's host

    def _set_wished(self, wished: Mapping[str, int]) -> None:
        """Publishes how much the fleet wishes each model on this host; see `Lease.wished`."""
        if wished != self._session.wished:
            self._session.wished = dict(wished)
            self._session.publish()

    def _plan_wished(self, name: str) -> Plan:
        """A dry run of `_load_wished`. Raises the errors of `plan`."""
        return load_and_plan.plan(self._session, name, None, {}, None, for_wish=True)

    def _load_wished(self, name: str, timeout: float) -> str:
        """Loads a wished model and returns its devices; see `operations.load_wished`."""
        return operations.load_wished(self._session, name, timeout)

    # -- reading

    @checked
    def status(self) -> Snapshot:
        """A snapshot of the current devices, leases, queue and recent events."""
        maintenance.keep_helpers_alive(self._session)
        return status.snapshot(self._session)

    @checked
    def reap(self) -> int:
        """Removes owners that are proven dead, and returns the number of these owners.

        The monitor of each process checks only two owners in a round. This method checks all owners.
        """
        return self._session.reap()

    @checked
    def status_all(self) -> tuple[Snapshot, ...]:
        """A snapshot of this host, then of every other host that shares the ledger, by name."""
        return self.status(), *status.other_hosts(self._session)

    @checked
    def models(self) -> DataFrame:
        """A table of every model that is registered here, held anywhere, or in the catalogue."""
        return status.models(self._session)

    @checked
    def leases(self) -> DataFrame:
        """A table of leases: owner, model, device and bytes, with one row for each share."""
        return status.leases(self._session)

    @checked
    def events(self, limit: int | None = None) -> DataFrame:
        """A table of the last `limit` events with their reasons. The newest event is last."""
        return status.events(recorded_events(self._session, limit))

    @checked
    def evictions(self, limit: int | None = None) -> DataFrame:
        """A table of the last `limit` events in which a model left its device or RAM."""
        return status.events(recorded_events(self._session, limit, actions=books.LEFT))

    @checked
    def history(self, seconds: str | float = 900.0, points: int = 600) -> History:
        """The use of every device in the last `seconds`, and the events in this period.

        Each device has at most `points` moments, and the last moment is now. If more were recorded,
        only the one with the most memory in use is kept of each stretch of time. The figures of a
        moment hold until the next moment. But a step that is over a minute, and longer than the
        other steps, is a gap in the record. History goes back 24 h, also over a restart of the
        machine. A ledger in memory has only the present. Raises BadSize, BadSetting.
        """
        return status.history(self._session, self.status(), seconds, points)

    @checked
    def report(
        self, since: str | float = "7d", by: str = "user", *, text: bool = False
    ) -> DataFrame | str:
        """Who used the cards, who held them idle and who waited, since `since` (seconds or "7d") ago.

        The rows are by "user", "notebook", "model" or "card", the largest first. `card_h` are hours of a
        whole card: in use, idle, blocking and outside. `waited_h` are hours of waiting. The other columns
        are GiB-hours: in use, idle, `blocking` (idle while another process waited for the card), outside
        (programs without a lease), parked in RAM, on a disk, and saved: in use by others, where there would
        have been no room without parking. With "waits", a row says how long a user waited for memory that
        another one held. With "time", there is a row for each minute, hour or day, which begins at `time`
        (UTC). With `text`, the result is a text fit for a mail.

        The account is a minute old at most. It counts only times in which it was recorded: while any
        process used the ledger. A ledger in memory keeps nothing. Raises BadSize, BadSetting.
        """
        return history.report(self._session, since, by, text)

    @checked
    def decisions(self, limit: int | None = 100) -> tuple[Event, ...]:
        """The last `limit` grants, waits and refusals with reasons. The newest one is first."""
        return recorded_events(self._session, limit, actions=books.DECISIONS)[::-1]

    @checked
    def fragmentation(self) -> DataFrame:
        """A table of each process's allocator on each card. Missing figures are empty."""
        return status.fragmentation(self._session)

    @checked
    def who(self, who: str = "") -> DataFrame:
        """A table of the names in this process that hold device memory. Its `attrs` have sums.

        If `who` is another notebook's file name or process id, the table is of the other process. A
        search takes about 3 s at most. Raises GpuError, NotAllowed, Busy.
        """
        return status.holders(holdings.who(self._session, who))

    @checked
    def allocator_maps(self) -> tuple[AllocatorMap, ...]:
        """The maps of the allocators of all processes, with their segments and blocks.

        Another process usually publishes its map within 2 s of a change.
        """
        return self._session.maps.all(self._session.read_book())

    @checked
    def health(self) -> Health:
        """Whether the host has a problem, and the gravest problem in one line."""
        return status.health(self.status())

    @checked
    def plan(
        self,
        name_or_size: str | int,
        source: Any = None,
        *,
        timeout: str | float | None = None,
        **options: Any,
    ) -> Plan:
        """A dry run of `load`, or of leasing a size: what would happen now, and why.

        `name_or_size` may also be an unregistered path, a hub id, or a name that contains its size
        (`llama-7B-Q4_K_M`). `source`, `timeout` and `options` are as in `load`: for example,
        `context_length` (tokens) and `sequences` add the memory of a KV cache. The result's
        `command` is what to type to carry the plan out.

        Raises UnknownModel, UnknownSize, BadSize, BadSetting, and LoadFailed for a damaged file.
        """
        given = {option: value for option, value in options.items() if value is not None}
        return load_and_plan.plan(self._session, name_or_size, source, given, timeout)

    @checked
    def why(
        self, name: str = "", *, replay: bool = False, oom: bool = False
    ) -> Decisions | tuple[Replayed, ...] | OutOfMemoryStory:
        """The last decisions on the model or notebook `name`, or here. Raises UnknownModel, GpuError.

        The newest is first. If `name` would need room now, `leavers` of the result is what may leave for
        it, as in `Plan`. With `replay`, the recorded decisions are made again; `name` may be a decision's
        number. With `oom`, why the last cell of this notebook that ran out of memory did so.
        """
        if oom:
            return out_of_memory.last(self._session)
        return load_and_plan.why(self._session, name, replay)

    @checked
    def backtest(
        self,
        requests: str | os.PathLike[str] | None = None,
        models: str | os.PathLike[str] | None = None,
        *,
        days: float | None = None,
        policy: str | Iterable[str] = ALL_POLICIES,
        engine: str | Iterable[str] = "full",
        device: str | Iterable[str] = DEVICES,
        host: str | Iterable[str] = HOSTS,
        disk: str = NO_DISK,
    ) -> DataFrame:
        """Replays a history, and shows how long users wait with each policy, card and RAM.

        The history is in the CSV files `requests` and `models`. Without files, the history is the
        journal of the last `days` days (7). `policy`, `engine`, `device` and `host` are lists of
        words, or strings of words with commas. A word of `device` or `host` is a size such as "80GB", or a
        percentage of the bytes of all models, such as "50%"; so is `disk`, which takes what
        RAM has no room for: notebooks, and models whose load is slower. Raises BadSetting, GpuError.
        """
        choices: dict[str, Any] = {"days": days, "policy": policy, "engine": engine}
        choices |= {"device": device, "host": host, "disk": disk}
        return history.backtest(self._session, requests, models, **choices)

    @checked
    def schedule(self) -> Schedule:
        """The waiting cells of this notebook, their models, and the models loaded ahead."""
        return self._session.look_ahead.schedule()

    @checked
    def doctor(self) -> Report:
        """A report to paste: versions, drivers, devices, ledger, settings, refusals. No secrets."""
        return doctor.report(self._session)

    @checked
    def console(self) -> Any:
        """The operator's console, a Panel object, live in a notebook. Raises GpuError."""
        return status.console(self)

    @property
    def simulated(self) -> bool:
        """Whether the devices are simulated."""
        return self.probe.simulated

    # -- the catalogue

    @checked
    def apply(self, file: str | os.PathLike[str]) -> Applied:
        """Writes all models of `file` into the catalogue. Loaded models do not change.

        After an error, nothing is written. Raises BadDocument, which names file, line and field,
        and CatalogUnavailable.
        """
        return self._catalogue.catalog.apply(file)

    @checked
    def catalog(self) -> DataFrame:
        """A table of the catalogue's models. Raises CatalogUnavailable, BadDocument."""
        return status.catalog(self._catalogue.catalog.specs())

    @checked
    def catalog_names(self) -> tuple[str, ...]:
        """The names of the catalogue's models; empty if the catalogue cannot be read."""
        return self._catalogue.names()

    @checked
    def inspect(self, name: str, format: str = "") -> Any:
        """The catalogue's entry for `name` in a form that `apply` accepts.

        `format` is "" for a dict, or `yaml` or `json`. Raises UnknownModel, CatalogUnavailable.
        """
        return self._catalogue.catalog.inspect(name, format)

    @checked
    def delete(self, name: str) -> Outcome:
        """Removes the model `name` from the catalogue. A loaded model stays until it is evicted.

        Raises UnknownModel, CatalogUnavailable.
        """
        return status.delete(self._session, name)

    # -- the monitor, and the end

    @checked
    def tick(self) -> float:
        """Runs one round of the monitor. Returns the seconds until the next round."""
        return maintenance.tick(self._session, notebook_path())

    @checked
    def close(self) -> None:
        """Frees all models, and this runtime's entry in the book. Adopted modules stay usable."""
        with self._closing:
            self._is_inherited = False
            if self._opened.closed:
                return
            self._opened.closed = True
        lifetime.close(self._opened)

    def _stop_loads(self, why: str) -> None:
        """Ends the loads that run now with an error that says `why`."""
        arrivals.stop_all_loads(self._session, why)

    def _leave_load(self, thread: int, why: str) -> None:
        """Ends the wait of `thread` for a model, or the load if no other request waits for it."""
        arrivals.leave_request(self._session, thread, why)

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _forked(self) -> None:
        """Closes the runtime in a forked child. The parent's ledger and models are not touched."""
        self._closing = threading.RLock()
        if self._opened.closed:
            return
        self._is_inherited = self._opened.closed = True
        for resident in self._opened.residents.values():
            resident.leave_to_parent()


_runtimes = lifetime.remembered_until_exit()
