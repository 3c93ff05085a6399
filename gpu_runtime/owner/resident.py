"""One model of this process: its place, its pins, and its movements, one at a time.

Nothing is decided in this module. A `Resident` holds this process's facts about one model: where
the model is, which blocks pin it, and when it was last used. The session publishes these facts.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from ..backends.base import Backend, Damaged, NotStill, Progress
from ..errors import GpuError, LoadFailed
from ..facts import (
    Declared,
    Drop,
    Footprint,
    Lease,
    Measurement,
    ModelSpec,
    Move,
    Share,
    Shares,
    encode_uses,
    merged_uses,
)
from ..units import show_bytes
from .pins import AnchorRef, Held, Training, called_by, govern_calls, release_calls, thread_of

MOVE_LOOK_SECONDS = 0.001  # between two looks at whether a move has ended


class Place(enum.Enum):
    """Where a model is."""

    HERE = "on its device"
    AWAY = "in RAM"
    GONE = "not loaded"
    MOVING = "being moved"


# A model that shares no pages of host memory with other processes.
_NOT_SHARED: dict[str, Any] = {"copy": "", "copy_bytes": 0, "copied_bytes": 0}
_HERE = Place.HERE  # every use reads it: this name takes 10 ns, `Place.HERE` takes 65


class Stays(Exception):
    """A model must stay: its weights exist nowhere else, its bytes have changed, or it is in use."""


def _unchanged(lease: Lease, handle: Any) -> Lease:
    """The value of `with_disk` until the registry sets another function."""
    return lease


def _nothing() -> None:
    """Stands for a weak reference that refers to no object."""


class Resident:
    """A model that this process knows, loaded or not."""

    def __init__(
        self,
        spec: ModelSpec,
        backend: Backend,
        owner: str,
        clock: Callable[[], float],
        origin: Any = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`origin` is the factory with which the model was registered, or None.

        `clock` returns seconds of CLOCK_BOOTTIME, `wall` epoch seconds.
        """
        self.spec = spec
        self.backend = backend
        self.origin = origin
        self.catalogued: ModelSpec | None = None  # the catalogue's specification, if it has one
        # The registry sets these.
        self.calling: Callable[[], Held]  # the block that a call on a kept reference runs in
        self.footprint: Callable[[], Footprint]  # the bytes it needs
        self.others: Callable[[], Iterable[Resident]] = tuple  # the models of this process
        # (kind, because); the registry sets it
        self.report_loss: Callable[[str, str], None] = lambda kind, because: None
        self.with_disk: Callable[[Lease, Any], Lease] = _unchanged  # see `disk.with_disk`
        self.place = Place.GONE
        self.lease = Lease(owner, spec.name)  # as last settled; meaningful while the model is held
        self.handle: Any = None  # the backend's, while the model is held
        self.value: Any = None  # what `use` yields
        # Protects place and pins; held for a few instructions. A signal handler of the user may use the
        # model in between.
        self.gate = threading.RLock()
        self.work = threading.Lock()  # held while bytes move
        self.stowing = threading.Lock()  # held while its bytes in RAM move to a disk
        self.stow_again_at = 0.0  # after a failure of the disk: when it is tried again
        self.room_seen_at = 0.0  # when the room on the disk was looked up
        self._worker = 0  # the thread that holds `work`
        self.pauses = False  # whether new uses wait for a request of another process
        self.is_forgotten = False  # for good: its name may be another model's
        self.pins: set[AnchorRef] = set()  # a weak reference for each block that uses the model
        self.training = Training(self.pins)
        self.shares_storages = False  # with other models, see `bases`
        self.last_used = self.pinned_since = 0.0
        self.uses = self.uses_counted = self._uses_noted = 0
        self.recent_uses = ""  # when it was used, see `facts.encode_uses`
        self.content = ""  # digest of its source's content, once it was loaded; empty: unknown
        self.failed_moves = 0  # in a row
        # Not a field of `lease`: two threads that replace the lease could undo each other's change.
        self.moves_again_at = 0.0
        self.ram_seconds = 0.0  # what its restore from RAM took, while its bytes are on a disk
        self.moved_seconds = 0.0  # what the copies of its last return took, all parts together
        self.returned_bytes = 0  # of the parts of a return that is under way
        self.shadow_bytes = 0  # bytes of the copy in host memory, while the model is on a card
        self.measured: Measurement | None = None  # an earlier load of live code, see `Sizing`
        self._pieces: tuple[int, ...] | None = None  # None if not computed yet
        self._was_pinned = False
        self._shell: Callable[[], Any] = _nothing  # a weak reference to an earlier load's object
        self._clock, self._wall = clock, wall

    def pieces(self) -> tuple[int, ...]:
        """Relative sizes of the model's pieces, between which the model may be divided.

        A model with one piece must stay whole. An empty tuple means that the model may be divided
        anywhere.
        """
        if self._pieces is None:
            self._pieces = self.backend.pieces(self.spec, self.origin)
        return self._pieces

    # -- using

    def enter(self, anchor: AnchorRef, waited: bool = False) -> bool:
        """Pins the model while the anchor lives. Returns False if the model is not on its device.

        `anchor` refers weakly to an object that lives as long as the use. A caller that has `waited`
        notes the time of its request as the time of the use. Any other caller gets False while new
        uses wait.
        """
        if self.place is not _HERE or (self.pauses and not waited):
            return False
        with self.gate:
            if self.place is not _HERE:
                return False
            self._pin(anchor)
            if waited:
                self._uses_noted += 1
        return True

    def _pin(self, anchor: AnchorRef) -> None:
        self._used_now()
        if not self.pins:
            self.pinned_since = self._clock()
        try:
            # Never bind the anchor to a name: a traceback would keep this frame and the pin alive.
            self.pins.add(weakref.ref(anchor(), self.pins.discard))
        except TypeError:  # the caller was interrupted meanwhile: the anchor is gone
            return
        self.uses += 1

    def bases(self) -> list[Resident]:
        """The models of this process that hold a part of this model's storages."""
        handles = getattr(self.handle, "bases", ())
        return [other for other in self.others() if other.handle in handles]

    def forwarded(self, result: Any) -> None:
        """Notes the result of a call with gradients enabled; see Training.forwarded."""
        for model in (self, *self.bases()) if self.shares_storages else (self,):
            model.training.forwarded(result)

    def in_use(self) -> bool:
        """Whether a block of code, an autograd graph or training forbids to move the model now."""
        return bool(self.training.pinned()) or self.kept_by_training()

    def kept_by_training(self) -> bool:
        """Whether training keeps the model on its device, even without any pin."""
        return self.lease.all_on_device and self.training.holds(self.handle)

    def called_by(self, thread: int) -> bool:
        """Whether the thread with the identifier `thread` calls, moves or loads the model now."""
        return self._worker == thread or any(called_by(pin) == thread for pin in self.pins.copy())

    def is_dropped(self) -> bool:
        """Whether the model is unloaded and no thread loads it now."""
        return self.place is Place.GONE and not self.work.locked()

    def pinned_by(self, thread: int) -> bool:
        """Whether the model is pinned by a block of the thread with the identifier `thread`."""
        return any(thread_of(pin) == thread for pin in self.pins.copy())

    def declared(self) -> Declared:
        """What other processes may know of the model while it is not loaded."""
        return Declared(self.spec.size or 0, self.spec.importance)

    def truth(self) -> Lease | None:
        """The current lease of the model, with its pins and last use. None if it is not loaded.

        The end of a pin has no time stamp. So a pin that ended since the last call counts as use
        until now, which is an upper bound.

        An importance passed to `use()` counts only while the model is pinned.
        """
        if self.handle is None:
            return None
        pins = self.training.pinned() or int(self.in_use())
        if self._was_pinned and not pins:
            self._used_now()
        self._was_pinned = bool(pins)
        if self.uses != self._uses_noted:  # at least once a second while it is used
            self._uses_noted = self.uses
            self.note_uses(encode_uses([self._wall() - (self._clock() - self.last_used)]))
        part = getattr(self.handle, "part", None)
        kept = getattr(self.handle, "kept", {})
        return replace(
            self.lease,
            pins=pins,
            pinned_since=self._used_since() if pins else 0.0,
            last_used=self.last_used,
            uses=self.uses,
            recent_uses=self.recent_uses,
            source=self.content,
            moves_again_at=self.moves_again_at,
            shadow_bytes=self.shadow_bytes,
            keep=self.spec.keep,
            residue=tuple([Share(card, size) for card, size in kept.items() if size]),
            **(part.claim if part is not None else _NOT_SHARED),
            importance=self.lease.importance if pins else self.spec.importance,
        )

    def _used_now(self) -> None:
        self.last_used = self._clock()

    def note_uses(self, recent: str) -> None:
        """Adds the times of use in `recent`, a text from `encode_uses`, to the remembered times."""
        self.recent_uses = merged_uses((self.recent_uses, recent), self._wall())

    def _used_since(self) -> float:
        """The time when the current use began; NEVER (0) if the time is not known."""
        return self.pinned_since if self.pins else self.training.kernel.state.busy_since

    def must_return_to(self) -> dict[str, int]:
        """Maps each device to the bytes that a model in host memory needs there to return.

        The value is 0 if the number of bytes on the device is not fixed. The result is empty if the
        model can return to any device, or if the model is not in host memory.
        """
        if self.handle is None or self.place is not Place.AWAY:
            return {}
        return self.backend.must_return_to(self.handle)

    # -- moving; the caller has reserved the room

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        """Holds the lock `work`. Meanwhile, calls of the model by this thread need no pin."""
        with self.work:
            self._worker = threading.get_ident()
            try:
                yield
            finally:
                self._worker = 0

    def load(
        self, shares: Shares, progress: Progress | None, more: Mapping[str, Any] | None = None
    ) -> tuple[Any, Shares, float]:
        """Loads the model. Returns the backend's handle, the measured shares, and the seconds.

        Callers of `use` do not see the model before `install`. `shares` are the bytes reserved on
        each device. `more` are options of backends that keep a copy of the model in host memory.
        """
        with self._working():
            began = time.perf_counter()
            shell = self._shell()
            self._shell = _weakly(shell)  # an interrupted load must not keep its bytes
            try:
                handle = self.backend.load(
                    self.spec, shares, self.origin, progress=progress, into=shell, **(more or {})
                )
                return handle, self.backend.measure(handle), time.perf_counter() - began
            except Exception:
                self._shell = lambda: shell
                raise

    def install(self, handle: Any, lease: Lease, anchor: AnchorRef | None) -> None:
        """Makes the loaded `handle` the model that `use` yields, pinned by `anchor` if given.

        Raises LoadFailed if the model was forgotten during the load.
        """
        value = self.backend.value(handle)
        pieces = self.backend.pieces(self.spec, self.origin, handle)
        govern_calls(value, self)
        lease = self.with_disk(lease, handle)
        with self.gate:
            self.require_known()
            lease = self.in_pieces(lease, handle)
            self.handle, self.value, self.lease, self._pieces = handle, value, lease, pieces
            self.shares_storages = bool(getattr(handle, "bases", ()))
            self.shadow_bytes = getattr(handle, "shadow_bytes", 0)
            self.place = Place.HERE if lease.all_on_device else Place.AWAY
            # A model that is loaded ahead of its use was not idle since the machine started.
            self.last_used = self._clock()
            if anchor is not None:
                self._pin(anchor)
                self._uses_noted += 1
        # An engine may end by itself. If it has ended already, the loss is reported now.
        if watch := getattr(handle, "watch", None):
            watch(functools.partial(self._lost, weakref.ref(handle)))

    @property
    def engines(self) -> tuple[int, ...]:
        """Process ids of the engine that computes the model; empty if this process computes it."""
        return getattr(self.handle, "pids", ())

    def _lost(self, of: Callable[[], Any], kind: str, because: str) -> None:
        """Releases the model after the end of its engine. `of` refers weakly to the model's handle.

        The loss is in the book before any caller of the model gets the error.
        """
        handle = of()
        with self.gate:
            if handle is None or self.handle is not handle:
                return
        self.lose()
        self.report_loss(kind, because)

    def lose(self) -> None:
        """Releases a gone or unusable model. The user's references work again after a reload."""
        self._drop()

    def begin_moving(self) -> bool:
        """Refuses new uses. Returns False if the model is in use, moving or not loaded."""
        with self.gate:
            if self.handle is None or self.place is Place.MOVING or self.training.blocks():
                return False
            # A model in host memory may return while an autograd graph of it still exists.
            if self.lease.all_on_device and self.in_use():
                return False
            self.place = Place.MOVING
        return True

    def await_move(self) -> None:
        """Waits for the end of a move of a module in training. Does not wait for other moves."""
        while True:
            with self.gate:
                handle: Any = self.handle if self.place is Place.MOVING else None
            if not hasattr(handle, "moves_in_training") or not self.training.lives(handle):
                return
            time.sleep(MOVE_LOOK_SECONDS)

    def stay(self) -> None:
        """Allows uses again after a move that was not made."""
        with self.gate:
            if self.handle is not None and not self.is_forgotten:
                self.place = Place.HERE if self.lease.all_on_device else Place.AWAY

    def move_or_drop(self, step: Move | Drop, shadow: bool = False) -> Shares:
        """Performs the step and returns the shares that are measured afterwards.

        If `shadow` is true, a model that returns to its card keeps its copy in host memory.

        If a drop would lose weights that exist nowhere else, this raises Stays and drops nothing.
        """
        with self._working():
            if self.handle is None:
                raise Stays("it was released meanwhile")
            if isinstance(step, Drop):
                if not self.backend.unchanged(self.handle):
                    if self.needed_elsewhere():
                        raise Stays("an autograd graph or a view needs its weights")
                    raise Stays("its weights differ from their source, so they exist nowhere else")
                self._unload()
                return ()
            try:
                more = {"shadow": True} if shadow else {}
                self.backend.move(self.handle, self.lease.after(step.shares), **more)
            except Damaged as error:
                raise self.damaged(error) from None
            except BaseException:
                if getattr(self.handle, "ended", False):  # an engine that did not sleep or wake
                    self._drop()
                else:
                    self.remeasure()  # bytes may have moved before the error
                raise
            finally:
                self.shadow_bytes = getattr(self.handle, "shadow_bytes", 0)
            return self.backend.measure(self.handle)

    def damaged(self, error: Damaged) -> GpuError:
        """The error of a move that found damaged bytes in a file. A model with a source is unloaded."""
        name, lost = self.spec.name, f"{show_bytes(error.bytes)} of {self.spec.name} cannot return"
        if self.droppable():
            self._unload()
            return GpuError(f"{lost}: {error.sentence}. {name} is loaded again from its source.")
        return GpuError(
            f"{lost}: {error.sentence}, and they exist nowhere else.\n"
            f"  To give them up and keep the rest:  rt.forget({name!r})"
        )

    def move_on(self, written: Any) -> None:
        """Frees the bytes in RAM that are `written` to a disk. Raises NotStill; see `Backend.move_on`."""
        with self._working():
            if self.handle is None:
                raise NotStill("it was released meanwhile")
            self.backend.move_on(self.handle, written)

    def settle_at(self, lease: Lease, anchor: AnchorRef | None = None) -> None:
        """Records where the model is now. `anchor`, if given, pins the model in the same step."""
        lease = self.with_disk(lease, self.handle)
        with self.gate:
            self.lease = lease
            if self.is_forgotten:  # nobody uses it any more; its bytes count until they are freed
                return
            self.place = Place.HERE if lease.all_on_device else Place.AWAY
            if anchor is not None:
                self._pin(anchor)
                self._uses_noted += 1

    def postpones_measuring(self) -> bool:
        """Whether a backward pass may be running now.

        While a backward pass may be running, only the next optimizer step measures the model.

        The autograd engine replaces gradients without holding the interpreter's lock. A thread that
        reads a gradient during a replacement crashes the process.
        """
        return self.training.postpones_measuring(self.handle)

    def stepped(self) -> None:
        """Called after each optimizer step, in the thread that trains. Measures the model if due."""
        self.training.stepped()
        if self.training.measure_due and self.work.acquire(False):
            try:
                self.training.measure_due = False
                self.remeasure()
            finally:
                self.work.release()

    def remeasure(self) -> bool:
        """Measures the model again. Returns whether its bytes have changed, such as by training."""
        if self.handle is None:
            return False
        shares = self.backend.measure(self.handle)
        self.note_droppable()
        if shares == (self.lease.filled or self.lease.shares):
            return False
        self.lease = self.in_pieces(self.lease.holding(shares), self.handle)
        return True

    def in_pieces(self, lease: Lease, handle: Any) -> Lease:
        """The `lease` with the bytes of the model's largest piece, if it can leave its card in parts.

        A model that claims more than its own bytes and its working memory (a whole card, for example)
        leaves as a whole. Some backends do not know the pieces of a model in parts. In this case the
        size stays that the `lease` already has.
        """
        size, claims_more = 0, lease.bytes > lease.own_bytes + lease.working_bytes
        if self.backend.can_move and not claims_more and self.spec.layout != "whole":
            size = self.backend.piece_bytes(handle) or (lease.piece_bytes if lease.in_parts else 0)
        return replace(lease, piece_bytes=size)

    def take_over(self) -> None:
        """After another model was forgotten: governs and counts the storages that both had."""
        if not hasattr(self.handle, "bases"):
            return
        govern_calls(self.value, self)
        if self.shares_storages:
            self.remeasure()

    def require_known(self) -> None:
        """Raises LoadFailed if the model was forgotten; another model may have its name since."""
        if self.is_forgotten:
            name = self.spec.name
            text = f"{name} was not loaded: it was forgotten meanwhile."
            raise LoadFailed(text, name=name, source=self.spec.source)

    def begin_forgetting(self) -> bool:
        """Refuses new uses and the end of a load for good. Returns False if the model is in use."""
        with self.gate:
            if self.training.blocks():
                return False
            self.is_forgotten = True
            if self.handle is not None:
                self.place = Place.MOVING
        return True

    def forget(self) -> None:
        """Frees the model's bytes for good. Bytes without a source stay in the user's object."""
        with self.work:
            if self.handle is not None:
                self._drop()

    def leave_to_parent(self) -> None:
        """In a forked child: makes the model's value a plain object, and replaces the locks."""
        release_calls(self.value)
        self.gate, self.work, self.stowing = threading.RLock(), threading.Lock(), threading.Lock()

    def _unload(self) -> None:
        """Drops the model. The next load fills its object again, so the user's hooks, modes and settings stay."""
        value = self.value
        self._drop()
        self._shell = lambda: value
        govern_calls(value, self, dropped=True)

    def _drop(self) -> None:
        handle, value = self.handle, self.value
        with self.gate:
            self.place, self.handle, self.value = Place.GONE, None, None
            self.shadow_bytes = self.returned_bytes = 0
        if handle is None:  # its engine has ended meanwhile
            return
        self.backend.drop(handle)
        self._shell = _weakly(value)

    def needed_elsewhere(self) -> bool:
        """Whether a live graph or a view needs the weights of the model."""
        return getattr(self.handle, "needed_elsewhere", bool)()

    def note_droppable(self) -> None:
        """Records whether the model could be dropped now. A live graph or a view prevents it.

        A forward pass has views of the weights, which end with the use. So during a use, only
        gradients prevent it.
        """
        if not hasattr(self.handle, "needed_elsewhere"):
            return
        uses, was_used = self.uses, bool(self.pins)
        droppable = self.droppable()
        used = was_used or self.uses != uses
        if droppable or not used or self.handle.has_gradients():
            self.lease = replace(self.lease, droppable=droppable)

    def droppable(self) -> bool:
        """Whether the source can restore the model, by a cheap check; see `Backend.droppable`."""
        return self.handle is not None and self.backend.droppable(self.handle)


def _weakly(value: Any) -> Callable[[], Any]:
    """A weak reference to `value`, or to nothing if `value` cannot be weakly referenced."""
    try:
        return _nothing if value is None else weakref.ref(value)
    except TypeError:  # a number or a tuple, for example
        return _nothing


def held_by(residents: Iterable[Resident], thread: int) -> tuple[str, ...]:
    """Ids of the leases that `thread` pins, as `owner/name`.

    The result also has modules in training, which the running cell keeps on their devices without a
    pin. A module in training can leave when the cell has ended.
    """
    held = [r for r in residents if r.pinned_by(thread) or (not r.pins and r.kept_by_training())]
    return tuple([r.lease.id for r in held])
