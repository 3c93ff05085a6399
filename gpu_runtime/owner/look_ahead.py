"""Loads the models of waiting cells while the running cell still runs.

One thread makes one load at a time, and every request of a user is served first.
`scheduler/plan.py` decides which memory such a load may use. The module `notebook`
lists the running and the waiting cells. For a model without room, its files are read instead.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from .. import threads
from ..backends.formats import sources
from ..errors import GpuError
from ..facts import (
    HOST,
    Book,
    CellModels,
    Grant,
    ModelSpec,
    Request,
    Schedule,
    ScheduledModel,
    Wait,
    World,
)
from ..notebook import upcoming
from ..scheduler import plan as decisions
from ..scheduler import transitions as books
from ..scheduler.capacity import room
from ..scheduler.policies import policy
from . import acquire, arrivals, registry, release
from .resident import Place, Resident
from .session import Decision, Key, Session

log = logging.getLogger("gpu_runtime")

PAUSE_SECONDS = 0.25  # between two attempts while a model waits for room
SETTLE_SECONDS = 0.05  # the rest before the cells are read: Run All sends many at once
LONGEST_SETTLE_SECONDS = 1.0
REST = 20  # the rest is this many times the last reading's time, so that the cell is not slowed
MOST_ROUNDS = 8  # attempts to make room for one load
WHERE = {Place.AWAY: HOST, Place.GONE: "disk", Place.MOVING: "moving"}


class LookAhead:
    """Loads models ahead for one runtime."""

    def __init__(self, session: Session) -> None:
        """Loads for `session`, once `start` is called."""
        self._session = session
        self._lock = threading.RLock()  # protects the start and the end of the thread
        self._changed = threading.Event()
        # This event is never set. The thread pauses by a wait for it, because such a wait does not
        # prevent parking.
        self._never = threading.Event()
        self._works = False  # whether the thread runs
        # Models that were loaded ahead and not used since, with their uses before the load.
        self._guesses: dict[str, int] = {}
        self._ahead: set[str] = set()  # models on their device that were loaded ahead
        self._failed: set[str] = set()  # models that could not be loaded, until the cells change
        self._staged: set[str] = set()  # models whose files were read
        self._loading = ""  # the model that is being loaded ahead now
        self._why: dict[str, str] = {}  # model -> why it is not loaded now
        self.loaded = self.used = self.unused = 0

    # -- the thread

    def start(self) -> None:
        """Follows the upcoming cells of this process from now on. Called for each model that it registers.

        Before the first one, a cell of plain code starts no thread here.
        """
        settings = self._session.settings
        if settings.gpu_prefetch == "auto" and settings.enable_memory_governor:
            upcoming.followers.add(self)

    def wake(self) -> None:
        """Called when the cells have changed. Starts the loading thread if it does not run yet."""
        if self._session.closed or self._session.guest:
            return
        with self._lock:
            self._changed.set()
            if not self._works:
                threads.start(self._work)
                self._works = True

    def _work(self) -> None:
        try:
            self._follow_cells()
        except BaseException:
            # For example, a user's factory raised SystemExit. The next `wake` starts a new thread.
            with self._lock:
                self._works = False
            raise

    def _follow_cells(self) -> None:
        cells: tuple[CellModels, ...] = ()
        settle_seconds = SETTLE_SECONDS
        while True:
            try:
                if self._changed.is_set():
                    self._never.wait(settle_seconds)
                    self._changed.clear()
                    began = time.thread_time()
                    cells = self.cells()
                    rest = REST * (time.thread_time() - began)
                    settle_seconds = min(max(SETTLE_SECONDS, rest), LONGEST_SETTLE_SECONDS)
                waits = self._load_all(cells)
            except Exception as error:  # a guess must not disturb anything
                log.debug("look-ahead stopped: %s", error)
                waits = False
            if waits:
                self._changed.wait(PAUSE_SECONDS)
            with self._lock:
                if self._session.closed or not (waits or self._changed.is_set()):
                    self._works = False
                    return

    def _load_all(self, cells: tuple[CellModels, ...]) -> bool:
        """Loads what may be loaded now. Returns whether a model still waits for room."""
        while not self._session.closed and not self._changed.is_set():
            if not self.follow(cells):
                return False
            if not self.load_next(cells):
                return True
        return False

    # -- what is scheduled

    def cells(self) -> tuple[CellModels, ...]:
        """The running cell and the waiting cells, with their models."""
        session = self._session
        values = {
            id(r.value): r.spec.name
            for r in list(session.residents.values())
            if r.value is not None
        }
        names = registry.known_names(session)
        return upcoming.cells(names, lambda value: values.get(id(value), ""))

    def follow(self, cells: tuple[CellModels, ...]) -> list[str]:
        """Counts which loads ahead were useful. Gives the eviction policy the next use of each model.

        Returns the models of waiting `cells` that may still be loaded ahead.
        """
        session = self._session
        uses = decisions.next_uses(cells)
        session.rank = decisions.with_next_uses(
            policy(session.settings.gpu_policy), session.me, uses
        )
        self._count(uses)
        if all(cell.running for cell in cells):
            self._failed.clear()
            self._staged.clear()
        return [name for name, _ in _waiting(cells) if not self._is_done(name)]

    def _count(self, uses: dict[str, int]) -> None:
        with self._lock:
            for name, uses_before in list(self._guesses.items()):
                resident = self._session.residents.get(name)
                if resident is not None and resident.uses > uses_before:
                    self.used += 1
                elif name not in uses or not self._is_here(name):
                    self.unused += 1
                else:
                    continue
                del self._guesses[name]
            self._ahead = {name for name in self._ahead if self._is_here(name)}

    def requested(self, name: str) -> None:
        """Called when the model `name` is requested while it is on its device.

        If the model was loaded ahead of its use, the load is counted as useful.
        """
        with self._lock:
            if self._guesses.pop(name, None) is not None:
                self.used += 1

    def _is_done(self, name: str) -> bool:
        return name in self._failed or self._is_here(name)

    def _is_here(self, name: str) -> bool:
        resident = self._session.residents.get(name)
        return resident is not None and resident.place is Place.HERE

    # -- one load

    def load_next(self, cells: tuple[CellModels, ...]) -> bool:
        """Loads the next model that a waiting cell uses. Without room, reads the model's files.

        Returns True if a model was loaded, if its load failed, or if bytes were read.
        """
        running = [cell for cell in cells if cell.running]
        needed = {name for cell in running for name in cell.uses}
        missing = sorted(name for name in needed if not self._is_here(name))
        if missing:  # the running cell loads them itself, and needs the room
            because = f"the running cell uses {', '.join(missing)}, which comes first"
            self._why = {name: because for name, _ in _waiting(cells)}
            return False
        uses = decisions.next_uses(cells)
        spared = needed.union(*(cell.mentions for cell in running))
        for name, cell in _waiting(cells):
            if self._is_done(name):
                continue
            resident = registry.find(self._session, name)
            try:
                self._why.pop(name, None)
                if self._load(resident, cell, uses, spared):
                    return True
            except Exception as error:
                log.debug("%s was not loaded ahead: %s", name, error)
                self._failed.add(name)
                self._why[name] = f"it failed to load: {type(error).__name__}"
                return True
            return self._stage(resident)
        return False

    def _load(self, resident: Resident, cell: str, uses: dict[str, int], spared: set[str]) -> bool:
        """Loads one model if it may be loaded now. Returns whether the model was loaded.

        Raises the errors of a load.
        """
        session, name = self._session, resident.spec.name
        key = session.new_key(f"load {name} ahead")
        wanted = Request(
            key.text,
            acquire.wanted_lease(session, resident),
            resident.footprint(),
            session.clock(),
            acquire.placement(session, resident),
            wait=False,
        )

        def decide(book: Book, world: World) -> tuple[Book, Grant | Wait]:
            return decisions.load_ahead(book, wanted, world, session.rank, uses, spared, cell)

        try:
            for _ in range(MOST_ROUNDS):
                verdict = self._decide(decide)
                if isinstance(verdict, Grant):
                    self._perform(resident, verdict, key)
                    return True
                self._why[name] = verdict.because
                if not verdict.steps:
                    return False
                for step in verdict.steps:
                    session.uninterrupted(key, partial(release.step_aside, session, step, key))
            return False
        finally:
            session.done_with(key.note)

    def _decide(self, decide: Decision[Grant | Wait]) -> Grant | Wait:
        """The verdict on the load. A transaction is made only if the verdict changes the book."""
        session = self._session
        book, world = session.look()
        _, verdict = decide(books.publish(book, session.truth(), world), world)
        if isinstance(verdict, Wait) and not verdict.steps:
            return verdict
        return session.transact(decide, fresh=True)

    def _perform(self, resident: Resident, verdict: Grant, key: Key) -> None:
        session, name = self._session, resident.spec.name
        uses = resident.uses
        self._loading = name
        try:
            arrivals.perform(session, resident, verdict, None, key)
        finally:
            self._loading = ""
        self._why.pop(name, None)
        with self._lock:
            self._guesses[name] = uses
            self._ahead.add(name)
            self.loaded += 1
        # A model that no cell has used yet gets no grace period: a real request may evict it at
        # once.
        if resident.uses == uses:
            resident.last_used -= session.rules.grace_seconds

    def _stage(self, resident: Resident) -> bool:
        """Reads the files of a model for which there is no room yet.

        The files of each model are read once. Returns whether any bytes were read.
        """
        session, name = self._session, resident.spec.name
        if name in self._staged or resident.place is not Place.GONE:
            return False
        self._staged.add(name)
        free = room(*session.look()).get(HOST, 0)
        return stage_files(resident.spec, free // 2, lambda: session.closed) > 0

    # -- reading

    def schedule(self) -> Schedule:
        """The cells, their models, and what was loaded ahead; see Runtime.schedule."""
        cells = self.cells()
        self._count(decisions.next_uses(cells))
        shown = []
        for name, cell, running in _first_uses(cells):
            resident = self._session.residents.get(name)
            here = resident is not None and resident.place is Place.HERE
            where = "disk"
            if resident is not None:
                where = resident.lease.where if here else WHERE[resident.place]
            because = "" if here or running else self._why.get(name, "")
            ahead, loading = name in self._ahead, name == self._loading
            shown.append(ScheduledModel(name, cell, running, where, ahead, loading, because))
        return Schedule(
            self._session.settings.gpu_prefetch,
            cells,
            tuple(shown),
            self.loaded,
            self.used,
            self.unused,
        )


def _first_uses(cells: tuple[CellModels, ...]) -> list[tuple[str, str, bool]]:
    """A row for each used model: the model, its first cell, and whether this cell is running."""
    found: dict[str, tuple[str, str, bool]] = {}
    for cell in cells:
        for name in cell.uses:
            found.setdefault(name, (name, cell.cell, cell.running))
    return list(found.values())


def _waiting(cells: tuple[CellModels, ...]) -> list[tuple[str, str]]:
    """The models that waiting cells use and the running cell does not.

    Each model comes with the first cell that uses it.
    """
    return [(name, cell) for name, cell, running in _first_uses(cells) if not running]


# -- files in the system's page cache
#
# The cached files claim no memory, because the system may drop them at any time. They are read in
# full. POSIX_FADV_WILLNEED returned in 3 ms and made the later load slower: for 1.5 GiB the load took
# 2.5 s after the announcement, 1.0 s without any preparation, and 0.01 s after reading.

PIECE_BYTES = 8 << 20
WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth")


def stage_files(spec: ModelSpec, budget_bytes: int, stopped: Callable[[], bool]) -> int:
    """Reads the files with the weights of `spec`. Returns the number of bytes that were read.

    A file with which the sum would exceed `budget_bytes` is left out. Stops once `stopped()` is
    true.
    """
    done = 0
    piece = bytearray(PIECE_BYTES)
    for path in _files(spec):
        try:
            with path.open("rb", buffering=0) as file:
                if done + os.fstat(file.fileno()).st_size > budget_bytes:
                    continue
                while not stopped() and (count := file.readinto(piece)):
                    done += count
        except OSError:  # the load reports the error
            return done
    return done


def _files(spec: ModelSpec) -> Iterator[Path]:
    """The files with the weights of `spec`; none if its source is no path on this host."""
    if not isinstance(spec.source, str) or not spec.source:
        return
    path = Path(spec.source).expanduser()
    try:
        folder = path if path.exists() else sources.directory(spec.source, spec.name)
    except (GpuError, OSError, ImportError, ValueError):  # the load reports the error
        return
    files = sorted(folder.iterdir()) if folder.is_dir() else [folder]
    yield from (file for file in files if file.suffix in WEIGHTS and file.is_file())
