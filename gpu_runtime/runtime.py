"""Runtime: the one object that users hold.

It registers models, hands them out, and answers every question the faces ask. What is decided is decided in the
planner; what is carried out is carried out by the keeper.
"""

from __future__ import annotations

import atexit
import itertools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from . import attribution, threads
from .backends.base import Backend, Progress, is_out_of_memory
from .backends.missing import AbsentBackend
from .backends.registry import LAYERED, backend_for, backend_names, open_backend
from .catalog.entries import require_loadable
from .catalog.resolve import Catalogued
from .catalog.store import Catalog
from .devices.probe import Probe, open_probe
from .devices.sampler_client import Sampling
from .errors import (
    AlreadyRegistered,
    AmbiguousName,
    BadSetting,
    Busy,
    CannotGovern,
    GpuError,
    LedgerUnavailable,
    NotAllowed,
    NotLoaded,
    NotResident,
    ProbeFailed,
    StillInUse,
    UnknownModel,
)
from .facts import (
    AllocatorMap,
    Applied,
    Book,
    Event,
    Grant,
    Health,
    History,
    Lease,
    Level,
    ModelSpec,
    Move,
    Outcome,
    Owner,
    Plan,
    Refuse,
    Request,
    Section,
    Snapshot,
    Wait,
    World,
)
from .facts import parse_importance as importance_of
from .ledgers import default_url, host_config, open_ledger
from .ledgers.access import journal_in
from .owner import console_hook, defragment, doctor, dry_run, failures, migrate
from .owner import drain as draining
from .owner.allocator_maps import Maps
from .owner.blocks import Block
from .owner.governed_calls import release_calls
from .owner.monitor import Breaker, Monitor
from .owner.pins import Anchor, Held
from .owner.resident import Place, Resident
from .owner.session import DOZE_SECONDS, LOOKS_PER_SECOND, POLL_SECONDS, Keeper, log
from .scheduler import device_names, explain, quotas, unresponsive
from .scheduler import transitions as books
from .scheduler.capacity import room_and_blind
from .scheduler.placement import check_layout, check_policy
from .scheduler.plan import plan
from .scheduler.pressure import views
from .scheduler.queue import queue
from .scheduler.recall import Order, answer, foreign
from .scheduler.unmanaged import stranger_bytes, strangers
from .settings import Settings
from .telemetry.journal import Journal
from .telemetry.measurements import Measurements, measurements_in
from .telemetry.moments import moments_of
from .telemetry.recorder import record_in
from .threads import finish
from .units import MIB, parse_room, parse_seconds, show_bytes, show_seconds

if TYPE_CHECKING:
    from pandas import DataFrame

    from .ledgers.redis.scripts import HostPage
    from .owner.doctor import Report

ASK_SECONDS = 30.0
RECORD_AFTER_SECONDS = (
    5.0  # that a runtime on simulated cards has lived, before its host is given a helper
)


class Runtime:
    """Shares this machine's GPU memory among the models of this process, and with every other process of the ledger.

    Every argument defaults to its setting; further keywords are settings by their names in small letters:
    `Runtime(devices="sim:2x24GiB", ledger="memory:", gpu_memory_max_percent=0.9)`. Raises BadSetting.
    """

    guest = False  # True: a command's, which asks others and holds no model itself

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
        self.settings = Settings.load(
            gpu_devices=devices,
            gpu_ledger=ledger,
            gpu_catalog=catalog,
            gpu_policy=policy,
            **settings,
        )
        check_policy(self.settings.gpu_placement)
        cpu_only = self.settings.development_cpu_only or self.settings.inference_gpu_layers == 0
        self.probe = probe or open_probe(self.settings.gpu_devices, cpu_only=cpu_only)
        self._clock = clock or _boot_seconds
        self._wall = wall
        self._catalogue = Catalogued(Catalog(self.settings), lambda: self.probe.devices)
        self._backends: dict[str, Backend] = {}
        self._lock = (
            threading.Lock()
        )  # of the registry and of the monitor's start; never held while loading
        self._monitor_wanted = monitor
        self._numbers = itertools.count(1)
        self._open()
        _runtimes.add(self)

    def _open(self) -> None:
        known, slug = host_config.read(self.settings.gpu_config_file), _slug(self.probe)
        url = self.settings.gpu_ledger or shared_url(known.ledger, slug) or default_url(slug)
        ledger = open_ledger(url, notebook=notebook_path())
        try:
            self.probe.rename(device_names.names(self.probe.devices, ledger.read()))
            self._check_index()
        except BaseException:
            ledger.close()
            raise
        directory = getattr(ledger, "directory", None)  # of this boot; the journal outlives it
        journal = Journal(journal_in(directory.parent) if directory else None)
        self._kept = Keeper(
            ledger,
            self.probe,
            self.settings,
            journal,
            clock=self._clock,
            wall=self._wall,
            machine=known,
            measurements=Measurements(measurements_in(directory.parent) if directory else None),
        )
        self.probe.follow(directory, url)
        # Of simulated cards there is nothing to measure; what they were used for is written down all the same.
        self._recording = (
            Sampling(directory, url, simulated=True) if directory and self.probe.simulated else None
        )
        self._record = record_in(directory) if directory else None
        self._opened_at = time.monotonic()
        self._maps = Maps(ledger, self.probe, clock=self._clock, wall=self._wall)
        self._breaker = Breaker()
        self._monitor: Monitor | None = None
        self._woken = self._dozing = False
        self._acting: set[str] = set()
        self._checked_at = self._clock()
        self._closed = False

    def _check_index(self) -> None:
        """Raises BadSetting where INFERENCE_GPU_INDEX names no card that this process sees."""
        index = self.settings.inference_gpu_index
        cards = [device for device in self.probe.devices if not device.is_host]
        if index is not None and index not in {card.index for card in cards}:
            raise BadSetting(
                "INFERENCE_GPU_INDEX",
                index,
                "the index of a GPU that this process sees: "
                + ", ".join(f"{card.index} ({card.id})" for card in cards),
            )

    @property
    def _keeper(self) -> Keeper:
        """Who carries things out. Raises LedgerUnavailable, in the same words whatever was asked, once this is
        closed."""
        if self._closed:
            raise LedgerUnavailable(
                f"this runtime was closed, and its ledger {self._kept.ledger.url} with it.\n"
                "  Open another:  rt = gpu_runtime.runtime()",
                path=self._kept.ledger.url,
            )
        return self._kept

    # -- models

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
        devices: tuple[str, ...] = (),
        restore_on_call: bool = True,
        **options: Any,
    ) -> ModelSpec:
        """Makes a model known by name; nothing is loaded yet.

        `source` is a Hugging Face model directory, a downloaded hub id, a callable that returns an nn.Module, or a
        module that you have already (then see `adopt`). Registering the same again changes nothing.
        Raises NotAModel, BadSize, AlreadyRegistered, UnknownDevice.
        """
        _check_name(name)
        if _is_module(source):
            return self.adopt(
                name,
                source,
                importance=importance,
                keep=keep,
                keep_alive=keep_alive,
                restore_on_call=restore_on_call,
                **options,
            )
        chosen = backend_for(source, backend)
        text = os.fspath(source) if isinstance(source, (str, os.PathLike)) else ""
        if self.settings.inference_gpu_layers is not None and chosen in LAYERED:
            options.setdefault("gpu_layers", self.settings.inference_gpu_layers)
        if self.settings.gpu_trust_remote_code and chosen == "transformers":
            options.setdefault("trust_remote_code", True)
        spec = ModelSpec(
            name,
            chosen,
            source=text,
            size=None if size is None else parse_room(size),
            model_type=model_type or "other",
            quantization=quantization,
            importance=importance_of(importance),
            keep=keep,
            keep_alive=parse_seconds(keep_alive),
            layout=check_layout(layout),
            devices=self._known_devices(devices),
            options=options,
        )
        origin = source if callable(source) and not text else None
        known = self._keeper.residents.get(name)
        if known is not None:
            if known.spec == spec and _same_code(known.origin, origin):
                return spec
            if known.catalogued is None or known.place is not Place.GONE:
                raise AlreadyRegistered(name)
            self._keeper.residents.pop(
                name, None
            )  # the catalogue's, not loaded: what is registered here wins
        resident = self._resident(spec, origin, restore_on_call)
        resident.footprint()  # what cannot be loaded is said now, not at the first use
        return self._add(resident)

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
        """Takes a module that you have already into care, with its optimizer where it is in training.

        Its weights exist nowhere else, so they are moved, never dropped. Raises CannotGovern, AlreadyRegistered.
        """
        _check_name(name)
        if not _is_module(module):
            kind = type(module).__name__
            raise CannotGovern(
                f"{name!r} cannot be governed: a {kind} is no torch.nn.Module.", name=name, why=kind
            )
        known = self._keeper.residents.get(name)
        if known is not None:
            if known.value is module:
                return known.spec
            raise AlreadyRegistered(name)
        for other in list(self._keeper.residents.values()):
            if other.value is module:
                raise CannotGovern(
                    f"this module is in care already, as {other.spec.name!r}; its bytes would count "
                    f"twice.",
                    name=name,
                    why=f"it is {other.spec.name}",
                )
        spec = ModelSpec(
            name,
            "torch",
            model_type=model_type or "other",
            importance=importance_of(importance),
            keep=keep,
            keep_alive=parse_seconds(keep_alive),
        )
        self._require_allowed(name, spec.importance, keep)
        resident = self._resident(spec, None, restore_on_call)
        resident.adopted = True
        handle = resident.backend.adopt(spec, module, optimizer)  # type: ignore[attr-defined]
        shares = resident.backend.measure(handle)
        now = self._clock()
        lease = replace(
            resident.lease,
            shares=shares,
            settled_at=now,
            last_used=now,
            importance=spec.importance,
            keep=keep,
            keep_alive=spec.keep_alive,
            backend="torch",
            model_type=spec.model_type,
        )
        resident.install(handle, lease, None)
        spec = self._add(resident)
        self._keeper.decide(
            lambda book, world: (
                books.note(
                    book,
                    world,
                    lease,
                    "adopted",
                    "request",
                    f"{name} was adopted where it lies, on {lease.where}.",
                    size=lease.bytes,
                ),
                None,
            )
        )
        return spec

    def _resident(self, spec: ModelSpec, origin: Any, restore_on_call: bool) -> Resident:
        resident = Resident(spec, self._backend(spec.backend), self._keeper.me, self._clock, origin)
        resident.calling = lambda: self._calling(resident, restore_on_call)
        resident.tell_loss = lambda kind, because: failures.tell(
            self._kept, resident, kind, because
        )
        resident.footprint = lambda: self._keeper.sizing.footprint(
            resident, self._keeper.places(resident)
        )
        return resident

    def _backend(self, name: str) -> Backend:
        backend = self._backends.get(name)
        if backend is None:
            made = (
                open_backend(name, self.probe, self.settings)
                if name in backend_names()
                else AbsentBackend(name)
            )
            backend = self._backends.setdefault(name, made)
        return backend

    def _add(self, resident: Resident) -> ModelSpec:
        with self._lock:
            if resident.spec.name in self._keeper.residents:
                raise AlreadyRegistered(resident.spec.name)
            first = not self._keeper.residents
            self._keeper.residents[resident.spec.name] = resident
        if first:
            self._awake()
        self._keeper.announce()  # from now on others can ask for it by its name
        return resident.spec

    def _awake(self) -> None:
        """Starts the monitor with the first model: whoever only looks needs none."""
        if not self.settings.enable_memory_governor:
            return
        with self._lock:
            if self._woken:
                return
            self._woken = True
            if self._monitor_wanted:
                self._monitor = Monitor(self.tick, self._keeper.rest)
                self._monitor.start()
                self._kept.activity.watchers.add(self._stir)
        budget = sum(self._keeper.limits[d.id] for d in self.probe.devices if not d.is_host)
        log.info(
            "GovernedModelManager initialized with memory governor (gpu_budget=%dMB)", budget // MIB
        )

    def forget(self, name: str) -> None:
        """Gives a model up: its memory is freed and its name free. An adopted module stays with you, where it lies.

        Raises UnknownModel, StillInUse.
        """
        resident = self._mine(name)
        if resident.pins:
            raise self._in_use(resident)
        release_calls(resident.value)
        resident.forget()
        self._keeper.residents.pop(resident.spec.name, None)
        self.probe.empty_cache()
        self._keeper.decide(lambda book, world: (book, None))

    def specs(self) -> tuple[ModelSpec, ...]:
        """The models registered in this process."""
        return tuple(resident.spec for resident in list(self._keeper.residents.values()))

    def spec(self, name: str) -> ModelSpec:
        """What is known of a model that this process can load, the catalogue's included. Raises UnknownModel."""
        return self._mine(name).spec

    def here(self, name: str) -> bool:
        """Whether a use of the model would find it on its device at this moment; nothing is asked or measured."""
        resident = self._keeper.residents.get(name)
        return resident is not None and resident.place is Place.HERE

    # -- using

    def use(
        self,
        name: str,
        *,
        importance: str | int | None = None,
        timeout: str | float | None = None,
        keep_alive: str | float | None = None,
    ) -> Held:
        """`with rt.use("qwen") as model:` — the model, on its device for the length of the block.

        Whoever is idle steps aside for it; what is in use is waited for, at most `timeout` seconds (None: for ever).
        Raises UnknownModel, DoesNotFit, Busy, Deadlock, LoadFailed; and OutOfMemory, as a readable report, where the
        device ran out inside the block.
        """
        resident = self._mine(name)
        return self._use(resident, importance, timeout, keep_alive)

    def _use(
        self,
        resident: Resident,
        importance: str | int | None,
        timeout: str | float | None,
        keep_alive: str | float | None,
    ) -> Held:
        def start(anchor: Callable[[], Anchor | None]) -> Any:
            if not resident.enter(anchor):
                self._obtain(resident, anchor, importance, timeout, keep_alive, None)
            if self._dozing:
                self._wake()
            return resident.value

        return Held(start, partial(self._finish, resident=resident))

    def _obtain(
        self,
        resident: Resident,
        anchor: Callable[[], Anchor | None] | None,
        importance: str | int | None,
        timeout: str | float | None,
        keep_alive: str | float | None,
        progress: Progress | None,
    ) -> None:
        spec = resident.spec
        require_loadable(spec)
        self._keeper.obtain(
            resident,
            anchor,
            progress=progress,
            importance=spec.importance if importance is None else importance_of(importance),
            keep_alive=spec.keep_alive if keep_alive is None else parse_seconds(keep_alive),
            timeout=None if timeout is None else parse_seconds(timeout),
        )

    def _calling(self, resident: Resident, restore: bool) -> Held:
        """What a call on a kept reference runs under."""
        if not restore and resident.place is not Place.HERE:
            raise NotResident(
                f"{resident.spec.name} is {resident.place.value}, and was registered with restore_on_call=False.\n"
                f"  Call it inside:  with rt.use({resident.spec.name!r}) as model:",
                name=resident.spec.name,
                where=resident.place.value,
            )
        return self._use(resident, None, None, None)

    def _finish(self, error: BaseException | None, resident: Resident | None = None) -> None:
        """An out-of-memory error that leaves a block is raised again as one readable report. Nothing is rerun.

        One by which the driver has let the model down is raised as what it means for whoever goes on.
        """
        if (
            error is not None
            and resident is not None
            and (lost := failures.struck(self._keeper, resident, error))
        ):
            raise lost from error
        if error is None or not is_out_of_memory(error) or getattr(error, "report", None):
            return
        report = self._keeper.out_of_memory(error)
        self._keeper.make_room_after(error)
        raise report from error

    def lease(
        self,
        size: str | int | None,
        *,
        purpose: str = "",
        importance: str | int = "normal",
        timeout: str | float | None = None,
    ) -> Held:
        """`with rt.lease("8 GiB", purpose="training") as block:` — room for your own code.

        Claimed in the ledger, capped in torch where there is a card, given back at the end whatever happens. Others
        see the purpose; where none is said, the notebook's or the script's name. `size=None` claims nothing, and only
        measures. Raises BadSize, DoesNotFit, Busy.
        """
        wanted, rank = 0 if size is None else parse_room(size), importance_of(importance)
        seconds = None if timeout is None else parse_seconds(timeout)
        said = purpose or os.path.basename(self._keeper.owner.notebook or sys.argv[0]) or "python"
        name = f"{said}#{next(self._numbers)}"
        running: list[Block] = []

        def start(anchor: Callable[[], Anchor | None]) -> Block:
            self._awake()
            lease = self._keeper.lease_block(name, wanted, anchor, importance=rank, timeout=seconds)
            device = next(d for d in self.probe.devices if d.id == lease.shares[0].device)
            running.append(Block(lease, device, self.probe.place(device.id).torch))
            return running[0]

        def finish(error: BaseException | None) -> None:
            for block in running:
                block.end()
            self._keeper.end_block(name)
            self._finish(error)

        return Held(start, finish)

    # -- acting

    def on_behalf_of(self, name: str) -> AbstractContextManager[None]:
        """`with rt.on_behalf_of("ann, console"):` — what this thread does meanwhile is told as done for that person.

        A name for display: what may be done goes by this process's user, as ever.
        """
        return attribution.on_behalf_of(name)

    def preload(
        self, name: str, *, progress: Progress | None = None, timeout: str | float | None = None
    ) -> Outcome:
        """Brings the model onto its device now, so that the next `use` finds it there. Raises as `use`."""
        if not self.guest and self._by_key(name) is None and self._catalogue.spec(name):
            name = self._mine(
                name
            ).spec.name  # the catalogue's are ours as much as if they were registered here
        owner, bare = self._resolve(name, loadable=True)
        if owner != self._keeper.me:
            return self._asked("preload", owner, bare, timeout)
        resident = self._mine(bare)
        began = self._clock()
        already = resident.place is Place.HERE
        if not already:
            self._obtain(resident, None, None, timeout, None, progress)
        lease = resident.lease
        because = f"{bare} is on {lease.where}" + (" already" if already else "")
        taken = 0 if already else lease.bytes
        self._keeper.acted("preload", bare, because, taken)
        return Outcome("preload", bare, True, because, taken, lease.where, self._clock() - began)

    restore = preload

    def evict(
        self, name: str, *, timeout: str | float | None = ASK_SECONDS, wait: bool = True
    ) -> Outcome:
        """Makes the model step aside: to host memory, or, where that is full, to its source.

        Another process's model is named `qwen@4121`; its owner is asked. Raises StillInUse, UnknownModel, Busy.
        """
        owner, bare = self._resolve(name)
        if owner != self._keeper.me:
            return self._asked("evict", owner, bare, timeout, wait)
        resident = self._mine(bare)
        began = self._clock()
        step = self._keeper.evict(resident, f"{bare} was evicted by hand.", by=self._keeper.person)
        if step is None:
            where = "host" if resident.place is Place.AWAY else "disk"
            return Outcome("evict", bare, True, f"{bare} is on no device", 0, where)
        freed = sum(share.bytes for share in step.source)
        where = "host" if isinstance(step, Move) else "disk"
        return Outcome(
            "evict",
            bare,
            True,
            f"{bare} stepped aside to {where}; {show_bytes(freed)} came free",
            freed,
            where,
            self._clock() - began,
        )

    def move(
        self, name: str, device: str | Iterable[str], *, timeout: str | float | None = ASK_SECONDS
    ) -> Outcome:
        """Carries an idle model from its card to others: `rt.move("qwen", "cuda:1")`, or `"cuda:0,1"` for both.

        Only free memory is spent: its room there is reserved first, and nobody steps aside. Another process's model is
        named `qwen@4121`; its owner is asked. Raises UnknownDevice, DoesNotFit, StillInUse, NotResident, Busy.
        """
        owner, bare = self._resolve(name)
        cards = migrate.cards(self._keeper, bare, device)
        if owner != self._keeper.me:
            return self._asked("move", owner, bare, timeout, places=cards)
        return migrate.move(self._keeper, self._mine(bare), cards, by=self._keeper.person)

    def pin(self, name: str) -> Outcome:
        """Keeps the model on its device: nothing but `unpin` or its owner lets it go."""
        return self._keep(name, "pin")

    def unpin(self, name: str) -> Outcome:
        """Lets the model leave its device again when somebody needs the room."""
        return self._keep(name, "unpin")

    def _keep(self, name: str, verb: str) -> Outcome:
        owner, bare = self._resolve(name, loadable=True)
        if owner != self._keeper.me:
            return self._asked(verb, owner, bare, ASK_SECONDS)
        resident = self._mine(bare)
        keep = verb == "pin"
        self._require_allowed(bare, resident.spec.importance, keep)
        resident.spec = replace(resident.spec, keep=keep)
        resident.lease = replace(resident.lease, keep=keep)
        self._keeper.decide(lambda book, world: (book, None))
        away = (
            ""
            if resident.place is Place.HERE
            else f" once it is there; it is {resident.place.value} now"
        )
        told = (
            f"{bare} is kept on its device{away}" if keep else f"{bare} may leave its device again"
        )
        self._keeper.acted(verb, bare, told)
        return Outcome(
            verb,
            bare,
            True,
            told,
            0,
            resident.lease.where if resident.handle is not None else "disk",
        )

    def _require_allowed(self, name: str, importance: int, keep: bool) -> None:
        """Raises NotAllowed where the operator's caps on this user forbid holding a model so."""
        if because := quotas.forbidden(name, importance, keep, self._keeper.rules.cap):
            raise NotAllowed(
                f"{because}.\n  The operator can change it.",
                name=name,
                because=because,
                user=self._keeper.owner.user,
            )

    def defrag(self, process: str = "", *, timeout: str | float | None = 5.0) -> Outcome:
        """Gives memory back that allocators hold and nobody uses: of every process that this user may ask, or of one.

        `process` is its number (`4121`), its id in the book, or a model that it has (`qwen@4121`). What stays is cut up
        between blocks in use. Raises UnknownModel, AmbiguousName; and NotAllowed, GpuError and Busy where the one that
        was named does not.
        """
        return defragment.defrag(self, process, timeout)

    def _empty_cache(self) -> int:
        """Gives this process's cache back, and says so in its maps; the bytes."""
        freed = self.probe.empty_cache()
        self._maps.publish(at_once=True)
        return freed

    def drain(
        self, device: str, *, undo: bool = False, timeout: str | float | None = 5.0
    ) -> Outcome:
        """Takes no new leases on that card from now on, whoever asks, and moves what is idle there away; `undo` ends
        that.

        It holds for all processes of the ledger until it is undone or the machine restarts. Raises UnknownDevice, and
        NotAllowed where others share the cards and this user is no operator.
        """
        return draining.drain(
            self._keeper,
            device,
            undo=undo,
            timeout=0.0 if timeout is None else parse_seconds(timeout),
        )

    def _asked(
        self,
        verb: str,
        owner: str,
        name: str,
        timeout: str | float | None,
        wait: bool = True,
        must: bool = True,
        places: tuple[str, ...] = (),
    ) -> Outcome:
        """What came of asking another owner."""
        book = self._keeper.ledger.read()
        if because := self._foreign(verb, book.owner(owner), name):
            self._keeper.decline(verb, f"{owner}/{name}", because)
            raise NotAllowed(
                f"{because}.", name=name, because=because, user=self._keeper.owner.user
            )
        self._awake()
        before = book.lease(owner, name)
        seconds = None if timeout is None else parse_seconds(timeout)
        verdict = self._keeper.ask(
            verb, f"{owner}/{name}", timeout=seconds, wait=wait, places=places
        )
        if isinstance(verdict, Grant):
            size = before.bytes if before and verb == "evict" else verdict.bytes
            return Outcome(
                verb,
                name,
                True,
                verdict.because,
                size,
                verdict.lease.where if verdict.lease.shares else "",
            )
        if isinstance(verdict, Refuse):
            if not must:
                return Outcome(verb, name, False, verdict.because)
            because = verdict.because.rstrip(".") + "."
            raise (
                StillInUse(because, name=name, lease=f"{owner}/{name}", owner=owner)
                if verdict.kind in ("in use", "kept")
                else GpuError(because, name=name)
            )
        if wait and must:
            raise Busy(
                f"{verdict.because}, and has not answered for {show_seconds(seconds or 0)}.\n"
                f"  It answers once its kernel runs again. Watch:  %gpu status",
                name=name,
                waited_seconds=seconds,
                because=verdict.because,
            )
        return Outcome(verb, name, False, verdict.because)

    def tell_waits(self, told: Callable[[str, Wait | None], None] | None) -> None:
        """Has `told(name, wait)` called in the waiting thread, each time a wait is looked at, and with None at its
        end."""
        self._keeper.on_wait = told

    def _foreign(self, verb: str, owner: Owner | None, name: str) -> str:
        """Why this may not be asked of that owner, as it would answer itself; empty where it may."""
        keeper, mine = self._keeper, self._keeper.owner.user
        if verb == "evict" or owner is None or owner.user == mine or keeper.asker(mine).operator:
            return ""
        return foreign(mine, verb, name, owner)

    # -- looking

    def status(self) -> Snapshot:
        """Everything a face needs, as of now."""
        self._look_after()
        book, world = self._look()
        keeper = self._keeper
        seen = views(book, world)
        governed = self.settings.enable_memory_governor
        if not governed:
            seen = tuple(replace(view, level=Level.UNKNOWN) for view in seen)
        beyond = stranger_bytes(book, world)
        free, blind = room_and_blind(book, world)
        seen = tuple(
            replace(
                view,
                stranger_bytes=beyond.get(view.device.id),
                blind=blind.get(view.device.id, ""),
                room_bytes=None if view.device.id in blind else free.get(view.device.id),
            )
            for view in seen
        )
        waiting = queue(book, world)
        tickets = (*waiting, *(ticket for ticket in book.tickets if ticket not in waiting))
        found = Snapshot(
            world.now,
            world.wall,
            keeper.owner,
            seen,
            book.sections,
            tickets,
            book.events,
            self.specs(),
            all(view.device.simulated or view.device.is_host for view in seen),
            governed,
            self._breaker.told() or self.probe.trouble(world.rules.stale_seconds),
            keeper.ledger.url,
            books.totals(book),
            strangers(book, world, self.probe.people()),
            rules=world.rules,
        )
        return replace(found, unanswered=unresponsive.unanswered(found, world.rules))

    def reap(self) -> int:
        """Removes from the book whoever is proven dead, as every process with a model does once a second; how many.

        For those who only look, where nobody else may be left to notice a death.
        """
        return self._keeper.reap()

    def status_all(self) -> tuple[Snapshot, ...]:
        """This host as `status` shows it, then every other host that shares the ledger (one in Redis), by name."""
        read_all = getattr(self._keeper.ledger, "read_all", None)
        others = (
            [page for page in read_all() if page.host != self._keeper.owner.boot]
            if read_all
            else []
        )
        return self.status(), *(
            self._far(page) for page in sorted(others, key=lambda page: page.name)
        )

    def _far(self, page: HostPage) -> Snapshot:
        """Another host's page. Its stamps are of its own clock, so its newest one stands for now."""
        book, wall = page.book or Book(), self._wall()
        stamps = [lease.last_used for lease in book.leases()] + [
            lease.settled_at for lease in book.leases()
        ]
        now = max(
            [
                *stamps,
                *(ticket.refreshed for ticket in book.tickets),
                *(sample.taken_at for sample in book.samples.values()),
            ],
            default=0.0,
        )
        world = World(now, wall, book.devices, dict(book.limits), book.samples, self._keeper.rules)
        return Snapshot(
            now,
            wall,
            self._keeper.owner,
            views(book, world) if book.limits else (),
            book.sections,
            queue(book, world),
            book.events,
            (),
            any(device.simulated for device in book.devices),
            degraded="" if page.book else "a newer version wrote this page, or it cannot be read",
            ledger=self._keeper.ledger.url,
            totals=books.totals(book),
            host=page.name,
            seen_seconds=page.seen_seconds,
        )

    def _look_after(self) -> None:
        """Sees to it that the host's helper lives; on simulated cards not for a runtime that may be gone in a
        moment."""
        self.probe.look_after()
        if self._recording and time.monotonic() - self._opened_at > RECORD_AFTER_SECONDS:
            self._recording.look_after()

    def _look(self) -> tuple[Book, World]:
        """The book, our own section as we know it, and the devices: the book's where others put them there."""
        keeper = self._keeper
        book, world = keeper.look(), keeper.world()
        if keeper.residents or keeper.blocks or keeper.me in book.sections:
            book = books.publish(book, keeper.truth(), world)
        elif book.sections and book.devices:
            world = replace(world, devices=book.devices, limits={**world.limits, **book.limits})
        return book, world

    def models(self) -> DataFrame:
        """Every model registered here or held by anybody."""
        from .owner import frames

        book, world = self._look()
        sizes = {}
        for resident in list(self._keeper.residents.values()):
            try:
                sizes[resident.spec.name] = resident.footprint().bytes
            except GpuError:  # a source that has gone since it was registered: its size is unknown
                continue
        registered = [
            resident.spec
            for resident in list(self._keeper.residents.values())
            if not resident.catalogued
        ]
        return frames.models(
            registered, book.sections, self._keeper.me, sizes, world.now, self._catalogue.specs()
        )

    # -- the catalogue

    def apply(self, file: str | os.PathLike[str]) -> Applied:
        """Puts the models of a file in the catalogue: all of them, or none. What is loaded stays as it was loaded.

        Raises BadDocument, which names file, line and field, and CatalogUnavailable.
        """
        return self._catalogue.catalog.apply(file)

    def catalog(self) -> DataFrame:
        """The models of the catalogue. Raises CatalogUnavailable, BadDocument."""
        from .owner import frames

        return frames.catalog(self._catalogue.catalog.specs())

    def catalog_names(self) -> tuple[str, ...]:
        """The names of the catalogue's models; none where it cannot be read."""
        return self._catalogue.names()

    def inspect(self, name: str, format: str = "") -> Any:
        """What the catalogue says of a model, as `apply` takes it again: a dict, or text in `yaml` or `json`.

        Raises UnknownModel, CatalogUnavailable.
        """
        return self._catalogue.catalog.inspect(name, format)

    def delete(self, name: str) -> Outcome:
        """Takes a model out of the catalogue. Where it is loaded, it stays until it is evicted.

        Raises UnknownModel, CatalogUnavailable.
        """
        sections = self._keeper.ledger.read().sections.values()
        entry = self._catalogue.catalog.delete(name)
        holders = [section.owner.label for section in sections if section.lease(entry.name)]
        loaded = (
            f"; it is still loaded by {', '.join(holders)}, and stays there until it leaves"
            if holders
            else ""
        )
        return Outcome(
            "delete", entry.name, True, f"{entry.name} is no longer in the catalogue{loaded}"
        )

    def leases(self) -> DataFrame:
        """Who holds what on which device, one row a share."""
        from .owner import frames

        book, world = self._look()
        return frames.leases(self._keeper.as_known(book), world.now)

    def events(self, limit: int | None = None) -> DataFrame:
        """What happened and why, the newest last."""
        from .owner import frames

        return frames.events(self._keeper.history(limit))

    def evictions(self, limit: int | None = None) -> DataFrame:
        """The events in which a model left its device or the warm pool."""
        from .owner import frames

        return frames.events(self._keeper.history(limit, actions=books.LEFT))

    def history(self, seconds: str | float = 900.0, points: int = 600) -> History:
        """How every device was used in the last `seconds`, at most `points` moments of each, and what happened
        meanwhile.

        Of moments that lie too close together the fullest one is kept; the newest is of now. Between two moments
        nothing changed, unless they are further apart than a minute and than the others: then nobody was there. It
        goes back 24 h, also beyond a restart of the machine; of a ledger in memory there is only now.
        Raises BadSize, BadSetting.
        """
        if points < 1:
            raise BadSetting("points", points, "a number of moments, 1 or more")
        seen, back = self.status(), parse_seconds(seconds)
        since, now = seen.wall - back, moments_of(seen.devices, seen.sections.values(), seen.wall)
        before = self._record.between(since, seen.wall, points - 1) if self._record else ()
        return History((*before, *now), self._keeper.history(since=since), back)

    def decisions(self, limit: int | None = 100) -> tuple[Event, ...]:
        """Grants, waits and refusals, the newest first; each says why, and most what else was considered."""
        return self._keeper.history(limit, actions=books.DECISIONS)[::-1]

    def fragmentation(self) -> DataFrame:
        """What each process's allocator holds on each card; one that does not tell has a row of unknowns."""
        from .owner import frames

        book, _ = self._look()
        sections = {self._keeper.me: Section(self._keeper.owner)} | self._keeper.as_known(book)
        return frames.fragmentation(self._maps.all(book), sections, self.status().devices)

    def allocator_maps(self) -> tuple[AllocatorMap, ...]:
        """How the allocators of all processes of the ledger have cut what they hold: segments, and blocks in them.

        This process's as it is now, the others' as they published it last: within 2 s of a change, as a rule.
        """
        return self._maps.all(self._keeper.look())

    def health(self) -> Health:
        """One line on the fullest card."""
        snapshot = self.status()
        cards = [view for view in snapshot.devices if not view.device.is_host]
        fullest = max(cards, key=lambda view: view.pressure)
        used = [view.measured_bytes for view in cards]
        total = sum(view.device.total_bytes for view in cards)
        percent = None if None in used or not total else round(100 * sum(used) / total, 1)  # type: ignore[arg-type]
        level = fullest.level if snapshot.governed else Level.UNKNOWN
        return Health(
            level is not Level.CRITICAL and not snapshot.degraded,
            level,
            percent,
            snapshot.degraded or _HEALTH[level],
        )

    def plan(
        self,
        name_or_size: str | int,
        *,
        context_length: int | None = None,
        sequences: int | None = None,
        dtype: str | None = None,
    ) -> Plan:
        """What `use` of that model (or a lease of that size) would do now, and why; nothing is done.

        Also for what nobody has registered: a path, a hub id, or a name that tells its size (`llama-7B-Q4_K_M`).
        With `context_length` or `sequences` room for that use is reckoned too, with `dtype` the weights as converted.
        Raises UnknownModel, UnknownSize, BadSize, BadSetting, and LoadFailed for a damaged file.
        """
        keeper = self._keeper
        options = {
            key: value
            for key, value in (
                ("context_length", context_length),
                ("sequences", sequences),
                ("dtype", dtype),
            )
            if value is not None
        }
        asked = self._subject(name_or_size, options)
        book, world = keeper.look(), keeper.world()
        book = books.publish(book, keeper.truth(), world)
        request = Request("plan", asked.wanted, asked.footprint, world.now, asked.rules, wait=False)
        return replace(plan(book, request, world, keeper.rank), obstacle=asked.obstacle)

    def _subject(self, words: str | int, options: dict[str, Any]) -> dry_run.Subject:
        """What a plan is asked about: first what is ours, then a size, then another process's, then what lies there."""
        name, keeper = str(words), self._keeper
        resident = keeper.residents.get(name) or self._by_key(name) or self._from_catalogue(name)
        if resident is None:
            if (size := dry_run.size_in(words)) is not None:
                return dry_run.of_bytes(size, keeper)
            try:
                owner, bare = self._resolve(name, loadable=True)
                section = keeper.ledger.read().sections[owner]
                return dry_run.of_lease(section.lease(bare) or Lease(owner, bare), section.owner)
            except (UnknownModel, KeyError):
                return dry_run.of_nobody(
                    dry_run.unregistered(name, self._names(), keeper, options), keeper
                )
        return dry_run.of_resident(resident, keeper, options)

    def why(self, name: str) -> tuple[Event, ...]:
        """The last decisions on this model, the newest first. Raises UnknownModel where there never was one."""
        bare = name.partition("@")[0]
        resident = self._by_key(bare)
        events = self._keeper.history(20, resident.spec.name if resident else bare)
        if not events and resident is None and self._catalogue.spec(bare) is None:
            raise UnknownModel(bare, self._names())
        return events[::-1]

    def doctor(self) -> Report:
        """One report to paste: versions, drivers, devices, ledger, settings, last refusals. No secrets."""
        return doctor.report(self)

    def console(self) -> Any:
        """The operator's console over this runtime, as a Panel object; in a notebook it is live. Raises GpuError."""
        return console_hook.console(self)

    @property
    def simulated(self) -> bool:
        return self.probe.simulated

    # -- names

    def _mine(self, name: str) -> Resident:
        """A model of ours, the catalogue's included. Raises UnknownModel, CatalogUnavailable."""
        resident = self._keeper.residents.get(name) or self._by_key(name)
        if resident is not None and resident.catalogued and resident.place is Place.GONE:
            self._refresh(resident)
        elif resident is None and (made := self._from_catalogue(name)):
            with self._lock:
                resident = self._keeper.residents.setdefault(made.spec.name, made)
            self._awake()
        if resident is None or resident.spec.name not in self._keeper.residents:
            raise UnknownModel(name, self._names())
        return resident

    def _from_catalogue(self, name: str) -> Resident | None:
        """The catalogue's model of that name, as one of ours that is not loaded; not yet among the residents."""
        spec = self._catalogue.spec(name)
        if spec is None:
            return None
        resident = self._resident(spec, None, restore_on_call=True)
        resident.catalogued = spec
        return resident

    def _refresh(self, resident: Resident) -> None:
        """What the catalogue says by now of a model that is not loaded; out with it where that is nothing any more."""
        spec = self._catalogue.spec(resident.spec.name)
        if spec == resident.catalogued or not resident.work.acquire(
            False
        ):  # it is being loaded, as it was
            return
        try:
            if spec is None:
                self._keeper.residents.pop(resident.spec.name, None)
            else:
                resident.spec = resident.catalogued = spec
                resident.backend = self._backend(spec.backend)
        finally:
            resident.work.release()

    def _names(self) -> tuple[str, ...]:
        return tuple({*self._keeper.residents, *self.catalog_names()})

    def _by_key(self, name: str) -> Resident | None:
        """A model of ours by its name, or by `type:name:quantization`."""
        for resident in list(self._keeper.residents.values()):
            if name in (resident.spec.name, resident.spec.key):
                return resident
        return None

    def _resolve(self, name: str, loadable: bool = False) -> tuple[str, str]:
        """Owner id and model name: mine, else the only other one that holds (or can load) it.

        Raises UnknownModel, AmbiguousName.
        """
        bare, at, pid = name.rpartition("@")
        if not at or not pid.isdigit():
            bare, pid = name, ""
        if not pid or pid == str(os.getpid()):
            resident = self._by_key(bare)
            if resident is not None:
                return self._keeper.me, resident.spec.name
        sections = self._keeper.ledger.read().sections
        found = [
            (id, section.owner.pid)
            for id, section in sections.items()
            if (section.lease(bare) or (loadable and bare in section.names))
            and (not pid or pid == str(section.owner.pid))
        ]
        if len(found) == 1:
            return found[0][0], bare
        if found:
            raise AmbiguousName(bare, tuple(f"{bare}@{pid}" for _, pid in found))
        if not pid and (spec := self._catalogue.spec(bare)):
            if self.guest:
                require_loadable(spec)
                raise NotLoaded(spec.name)
            return self._keeper.me, spec.name
        known = {
            *self._names(),
            *(
                f"{lease.name}@{section.owner.pid}"
                for section in sections.values()
                for lease in section.leases
                if section.owner.id != self._keeper.me
            ),
        }
        raise UnknownModel(name, tuple(known))

    def _in_use(self, resident: Resident) -> GpuError:
        book, world = self._look()
        lease = book.lease(self._keeper.me, resident.spec.name) or resident.lease
        return explain.still_here(book, self._keeper.me, lease, "in use", world)

    def _known_devices(self, devices: tuple[str, ...]) -> tuple[str, ...]:
        from .errors import UnknownDevice

        known = tuple(device.id for device in self.probe.devices if not device.is_host)
        for device in (devices,) if isinstance(devices, str) else devices:
            if device not in known:
                raise UnknownDevice(device, known)
        return (devices,) if isinstance(devices, str) else tuple(devices)

    # -- the monitor's tick

    def tick(self) -> float:
        """One round of the monitor: publish, reap, obey, relieve. Returns the seconds until the next is due."""
        keeper = self._keeper
        keeper.notebook = (
            notebook_path() or keeper.notebook
        )  # some front ends say it only after the kernel has started
        self._look_after()
        book = keeper.ledger.read()
        # Not sooner: until its ticket is gone an order that is done may be read once more, and would be done once more.
        self._acting.intersection_update([ticket.key for ticket in book.tickets])
        keeper.reap_near(book)
        keeper.bound(book, keeper.world())  # others come and go
        keeper.remeasure()
        keeper.tell_overstays()
        keeper.follow_up()
        keeper.journal.flush()
        keeper.vacate()
        self._maps.publish()
        quiet = keeper.quiet(book)
        for order in () if quiet else keeper.obey():
            if order.key not in self._acting:
                self._acting.add(order.key)
                threads.start(partial(self._carry_out, order))
        now = self._clock()
        if (
            now - self._checked_at >= self.settings.pressure_check_interval_seconds
            and self._breaker.allows(now)
        ):
            self._checked_at = now
            self._check(now)
        if quiet and not keeper.in_use():
            return self._doze(len(book.sections))
        return POLL_SECONDS

    def _doze(self, owners: int) -> float:
        """Seconds to sleep while nobody wants anything: longer in a crowd, since any of them notices what happens to
        others, and a use or a ring wakes this one."""
        seconds = min(DOZE_SECONDS, max(POLL_SECONDS, owners / LOOKS_PER_SECOND))
        self._dozing = seconds > POLL_SECONDS
        # Looked at again after it was said: who comes meanwhile sees that, or is seen here.
        if self._dozing and self._keeper.in_use():
            self._dozing = False
            return POLL_SECONDS
        return seconds

    def _stir(self) -> None:
        """A cell began: it is told within a second, however long the monitor was to sleep."""
        if self._dozing and not self._closed:
            self._wake()

    def _wake(self) -> None:
        self._dozing = False
        self._keeper.ledger.ring([self._keeper.me])

    def _check(self, now: float) -> None:
        try:
            self.probe.check(now, self._keeper.rules.stale_seconds)
        except ProbeFailed as error:
            self._breaker.failed(now, explain.first_line(error))
            return
        self._breaker.succeeded()
        self._keeper.relieve()

    def _carry_out(self, order: Order) -> None:
        """Does what another process asked for, and answers in the book."""
        if self._closed:
            return
        keeper = self._keeper
        try:
            if order.refused:
                raise NotAllowed(
                    order.refused, name=order.name, user=order.by, because=order.refused
                )
            if order.name and order.name not in keeper.residents:
                raise UnknownModel(
                    order.name, tuple(keeper.residents)
                )  # a name chooses among ours, and does nothing else
            if order.verb in ("preload", "restore"):
                outcome = self.preload(order.name, timeout=ASK_SECONDS)
            elif order.verb == "move":
                outcome = migrate.move(
                    keeper, keeper.residents[order.name], order.places, by=order.who
                )
            elif order.verb == "defrag":
                freed = self._empty_cache()
                outcome = Outcome("defrag", "", True, f"{show_bytes(freed)} came free", freed)
            else:
                outcome = self._keep(order.name, order.verb)
            asked = f", as {order.who} asked" if order.who else ""
            action, because, size = order.verb, outcome.because + asked, outcome.bytes
        except GpuError as error:
            action, because, size = "failed", explain.first_line(error), 0
        try:
            keeper.decide(
                lambda book, world: (
                    answer(book, world, keeper.me, order, action, because, size),
                    None,
                )
            )
        except GpuError as error:
            self._acting.discard(order.key)  # unanswered, it is to be done again
            log.warning("%s", error)

    # -- the end

    def close(self) -> None:
        """Gives everything back and leaves the book. Adopted modules stay where they are, no longer governed."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        keeper = self._kept
        keeper.activity.watchers.discard(self._stir)
        if self._monitor:
            self._monitor.stop(lambda: keeper.ledger.ring([keeper.me]))
        residents = list(keeper.residents.values())
        engines = [resident for resident in residents if resident.engines]
        for resident in residents:
            release_calls(resident.value)
            if resident not in engines:
                resident.forget()
        threads.side_by_side(
            [resident.forget for resident in engines]
        )  # each may take seconds to end in order
        keeper.residents.clear()
        keeper.blocks.clear()
        try:
            if keeper.me in keeper.ledger.read().sections:
                keeper.decide(lambda book, world: (books.resign(book, keeper.me), None))
        except GpuError as error:  # whoever looks next will find us dead
            log.debug("left without a word: %s", error)
        keeper.journal.flush()
        keeper.ledger.close()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _forked(self) -> None:
        """In a forked child nothing is owned: another owner, an empty pool, and the parent's models as plain
        objects."""
        if self._closed:
            return
        for resident in self._kept.residents.values():
            release_calls(resident.value)
        self._lock = threading.Lock()
        try:
            self._open()
        except GpuError as error:
            log.warning("%s", error)


_HEALTH = {
    Level.LOW: "Memory usage normal",
    Level.MODERATE: "Memory usage moderate",
    Level.HIGH: "Memory pressure high; idle models step aside when others need the room",
    Level.CRITICAL: "Memory pressure critical",
    Level.UNKNOWN: "The memory governor is off",
}

_runtimes: weakref.WeakSet[Runtime] = weakref.WeakSet()


def _in_child() -> None:
    for runtime in list(_runtimes):
        runtime._forked()


def _at_exit() -> None:
    finish()
    for runtime in list(_runtimes):
        runtime.close()


os.register_at_fork(after_in_child=_in_child)
atexit.register(_at_exit)


def notebook_path() -> str:
    """The notebook this kernel runs, where its front end says so; empty while it does not.

    Jupyter sets a variable of the environment; Visual Studio Code, and some servers, set one in the notebook's own
    names, and may do so only after the kernel has started.
    """
    if path := os.environ.get("JPY_SESSION_NAME"):
        return path
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    names = getattr(shell, "user_ns", None) or {}
    found = (names.get(name) for name in ("__vsc_ipynb_file__", "__session__"))
    return next((path for path in found if isinstance(path, str) and path), "")


def _boot_seconds() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def shared_url(ledger: str, slug: str) -> str:
    """The machine's shared ledger, or its part for a simulated world; empty where there is none."""
    return f"{ledger}/{slug}" if slug and ledger.startswith("sqlite:") else ledger


def _slug(probe: Probe) -> str:
    """Keeps the books of different simulated boxes apart; a real machine has one."""
    if not probe.simulated:
        return ""
    cards = [device for device in probe.devices if not device.is_host]
    host = next((d for d in probe.devices if d.is_host and d.simulated), None)
    sizes = "-".join(dict.fromkeys(show_bytes(card.total_bytes).replace(" ", "") for card in cards))
    return f"sim-{len(cards)}x{sizes}" + (
        f"-host{show_bytes(host.total_bytes).replace(' ', '')}" if host else ""
    )


def _check_name(name: str) -> None:
    if not isinstance(name, str) or not name.strip() or "@" in name or name != name.strip():
        raise BadSetting("name", name, "some text without '@' or spaces around it")


def _is_module(source: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(source, torch.nn.Module)


def _same_code(one: Any, other: Any) -> bool:
    """Whether two factories are the same text: a notebook cell run twice defines its function anew."""
    if one is other:
        return True
    code = getattr(one, "__code__", None), getattr(other, "__code__", None)
    return (
        None not in code
        and code[0] == code[1]
        and one.__closure__ is None
        and other.__closure__ is None
    )
