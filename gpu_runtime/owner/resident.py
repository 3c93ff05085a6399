"""The live models of this process: who uses them now, and one step at a time on each.

Nothing is decided here. A `Resident` is the owner's own truth about one model: where it lies, who has it pinned, when
it was last used. The ledger learns of it when it is published.

*Pins.* A pin must end with its `with` block even when the stop button strikes inside `__exit__`, where a release
written in Python would never run. So a pin is no counter: it is the life of a small object that only the interpreter's
stack refers to while the block runs. When the block ends, however it ends, the object dies, and a weak reference's
callback, C code that no signal handler can interrupt, takes it off the set.
"""
from __future__ import annotations

import contextlib
import copyreg
import enum
import functools
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from msgspec.structs import replace

from .. import threads
from ..backends.registry import Backend, Progress
from ..facts import Drop, Footprint, Lease, Measurement, ModelSpec, Move, Shares


class Place(enum.Enum):
    """Where a model is, as far as `use` is concerned."""

    HERE = "on its device"
    AWAY = "in host memory"
    GONE = "not loaded"
    MOVING = "on its way"


class Anchor:
    """Lives exactly as long as a `with` block runs, and knows the thread that runs it."""

    __slots__ = ("thread", "__weakref__")

    def __init__(self) -> None:
        self.thread = threading.get_ident()


class Pin(weakref.ref):
    """A user of a model, known by the life of its anchor, and the thread it runs in."""

    __slots__ = ("thread",)

    def __new__(cls, anchor: Anchor, ended: Callable[[Any], None]) -> Pin:
        pin = super().__new__(cls, anchor, ended)
        pin.thread = anchor.thread
        return pin


class Stays(Exception):
    """A step must not be taken after all, and why: weights that exist nowhere else, or more bytes than reserved for."""


class Resident:
    """One registered model of this process, loaded or not."""

    def __init__(self, spec: ModelSpec, backend: Backend, owner: str, clock: Callable[[], float],
                 origin: Any = None) -> None:
        self.spec = spec
        self.backend = backend
        self.origin = origin  # the factory it was registered with
        self.adopted = False  # the user's own module: never emptied, only let go
        self.catalogued: ModelSpec | None = None  # as the catalogue last said, where it was not registered here
        self.calling: Callable[[], Held]  # what a call on a kept reference runs under; the runtime's to give
        self.footprint: Callable[[], Footprint]  # the bytes it needs; the runtime's to give
        self.tell_loss: Callable[[str, str], None] = lambda kind, because: None  # in the book; the runtime's to give
        self.place = Place.GONE
        self.lease = Lease(owner, spec.name)  # as last settled; meaningful while the model is held
        self.handle: Any = None  # the backend's, while the model is held
        self.value: Any = None  # what `use` yields
        self.gate = threading.Lock()  # held for a few instructions: place and pins change under it
        self.work = threading.Lock()  # held while bytes travel
        self.pins: set[Pin] = set()
        self.last_used = self.pinned_since = 0.0
        self.uses = self.uses_counted = 0
        self._pieces: tuple[int, ...] | None = None  # None: not asked yet
        self.measured: Measurement | None = None  # after an earlier load, where its source cannot be known again
        self._was_pinned = False
        self._shell: Callable[[], Any] = lambda: None  # the object of an earlier load, if somebody still holds it
        self._clock = clock

    def pieces(self) -> tuple[int, ...]:
        """Sizes, in proportion, of what it may be cut between; one: it must stay whole; none: it may be cut
        anywhere."""
        if self._pieces is None:
            self._pieces = self.backend.pieces(self.spec, self.origin)
        return self._pieces

    # -- using

    def enter(self, anchor: Callable[[], Anchor | None]) -> bool:
        """Pins the model for as long as the anchor lives; False where it is not on its device now."""
        with self.gate:
            if self.place is not Place.HERE:
                return False
            self._pin(anchor)
        return True

    def _pin(self, anchor: Callable[[], Anchor | None]) -> None:
        self.last_used = self._clock()
        if not self.pins:
            self.pinned_since = self.last_used
        if anchor() is None:  # whoever asked was interrupted meanwhile
            return
        # The anchor itself is never bound to a name here: a traceback would keep this frame, and the pin, alive.
        self.pins.add(Pin(anchor(), self.pins.discard))
        self.uses += 1

    def pinned_by(self, thread: int) -> bool:
        return any(pin.thread == thread for pin in self.pins.copy())

    def truth(self) -> Lease | None:
        """The lease as this process knows it, pins and last use included; None where nothing is held.

        A pin that ended since the last look counts as use until now: an upper bound, since its end leaves no stamp.
        Asked for urgently for one block, it is no more than itself again once that ends.
        """
        if self.handle is None:
            return None
        pins = len(self.pins)
        if self._was_pinned and not pins:
            self.last_used = self._clock()
        self._was_pinned = bool(pins)
        return replace(self.lease, pins=pins, pinned_since=self.pinned_since if pins else 0.0,
                       last_used=self.last_used, uses=self.uses,
                       importance=self.lease.importance if pins else self.spec.importance)

    # -- travelling; the caller has reserved the room

    def load(self, shares: Shares, progress: Progress | None) -> tuple[Any, Shares, float]:
        """The backend's handle, the bytes measured, and the seconds it took. Nothing is installed yet."""
        with self.work:
            began = time.perf_counter()
            handle = self.backend.load(self.spec, shares, self.origin, progress=progress, into=self._shell())
            return handle, self.backend.measure(handle), time.perf_counter() - began

    def install(self, handle: Any, lease: Lease, anchor: Callable[[], Anchor | None] | None) -> None:
        """Makes the loaded model the one that `use` yields, pinned by its loader."""
        value = self.backend.value(handle)
        pieces = self.backend.pieces(self.spec, self.origin, handle)
        govern_calls(value, self)
        with self.gate:
            self.handle, self.value, self.lease, self._pieces = handle, value, lease, pieces
            self.place = Place.HERE if lease.on_device else Place.AWAY
            self.last_used = self._clock()  # loaded ahead of its use, it has not been idle since the machine started
            if anchor is not None:
                self._pin(anchor)
        if watch := getattr(handle, "watch", None):  # an engine may end by itself; if it has already, we hear it now
            watch(functools.partial(self._lost, weakref.ref(handle)))

    @property
    def engines(self) -> tuple[int, ...]:
        """The processes that it runs in, where that is not this one."""
        return getattr(self.handle, "pids", ())

    def _lost(self, of: Callable[[], Any], kind: str, because: str) -> None:
        """Its engine has ended by itself: nothing is held any more, and the book is told before any caller is."""
        handle = of()
        with self.gate:
            if handle is None or self.handle is not handle:
                return
        self.lose()
        self.tell_loss(kind, because)

    def lose(self) -> None:
        """Lets go of what is gone already, or cannot be used any more; whoever kept the object can go on with it
        later."""
        self._drop()

    def begin_moving(self) -> bool:
        """Closes the door to new users; False where somebody is inside."""
        with self.gate:
            if self.pins or self.handle is None or self.place is Place.MOVING:
                return False
            self.place = Place.MOVING
        return True

    def stay(self) -> None:
        """Opens the door again: the model did not move after all."""
        with self.gate:
            if self.handle is not None:
                self.place = Place.HERE if self.lease.on_device else Place.AWAY

    def carry(self, step: Move | Drop) -> Shares:
        """Performs the step and returns the bytes measured afterwards. Raises Stays instead of losing a weight."""
        with self.work:
            if isinstance(step, Drop):
                if not self.backend.unchanged(self.handle):
                    raise Stays("its weights differ from their source, so they exist nowhere else")
                self._drop()
                return ()
            self.backend.move(self.handle, step.shares)
            return self.backend.measure(self.handle)

    def settle_at(self, lease: Lease, anchor: Callable[[], Anchor | None] | None = None) -> None:
        """The model lies elsewhere now; `anchor` pins it before anybody else can move it on."""
        with self.gate:
            self.lease = lease
            self.place = Place.HERE if lease.on_device else Place.AWAY
            if anchor is not None:
                self._pin(anchor)

    def remeasure(self) -> bool:
        """Whether its bytes have changed since it settled: gradients, optimizer state, new layers."""
        if self.handle is None or (self.lease.filled or self.lease.shares) == (shares := self.backend.measure(self.handle)):
            return False
        self.lease = self.lease.holding(shares)
        return True

    def forget(self) -> None:
        """Frees the model's bytes, for good; an adopted module stays with its user, where it lies."""
        with self.work:
            if self.adopted:
                with self.gate:
                    self.place, self.handle, self.value = Place.GONE, None, None
            elif self.handle is not None:
                self._drop()

    def _drop(self) -> None:
        handle, value = self.handle, self.value
        with self.gate:
            self.place, self.handle, self.value = Place.GONE, None, None
        if handle is None:  # an engine that has ended meanwhile
            return
        self.backend.drop(handle)
        try:
            self._shell = weakref.ref(value)
        except TypeError:  # fakes yield values that cannot be referred to weakly
            self._shell = lambda: None

    def droppable(self) -> bool:
        return self.handle is not None and self.backend.droppable(self.handle)


def held_by(residents: Iterable[Resident], thread: int) -> tuple[str, ...]:
    """Ids of the leases that this thread pins."""
    return tuple(r.lease.id for r in residents if r.pins and r.pinned_by(thread))


# -- calls on a kept reference --------------------------------------------------------------------------------------

_residents: weakref.WeakKeyDictionary[Any, Resident] = weakref.WeakKeyDictionary()


def govern_calls(value: Any, resident: Resident) -> None:
    """Makes a call of a module, its `forward` and its `generate` pin it for the length of the call, and bring it back
    if away.

    The module's class becomes a subclass of itself. An attribute on the instance would be simpler, but a deep copy
    would carry it along and call the original's weights.
    """
    if hasattr(value, "_calls_under"):  # a proxy of ours: it pins by itself
        value._calls_under = resident.calling
        return
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.nn.Module):
        return
    if not hasattr(type(value), "_gpu_base"):
        value.__class__ = _governed_class(type(value))
    _residents[value] = resident


def release_calls(value: Any) -> None:
    """Gives a module that leaves our care its own class back; a proxy of ours governs its calls no more."""
    if hasattr(value, "_calls_under"):
        value._calls_under = contextlib.nullcontext
        return
    base = getattr(type(value), "_gpu_base", None)
    if base is not None:
        value.__class__ = base
        _residents.pop(value, None)


@functools.cache
def _governed_class(base: type) -> type:
    body: dict[str, Any] = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__,
                            "_gpu_base": base, "__reduce_ex__": _reduce_as_base}
    # A call as well as its `forward`: what brings inputs to a model's card asks first where that is now.
    for name in ("__call__", "forward", "generate"):
        original = getattr(base, name, None)
        if callable(original):
            body[name] = _pinning(original)
    return type(base.__name__, (base,), body)


def _pinning(original: Callable[..., Any]) -> Callable[..., Any]:
    inner = original.__name__ == "forward"

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        resident = _residents.get(self)
        if resident is None:  # a copy of a governed module is nobody's
            return original(self, *args, **kwargs)
        if inner and resident.pinned_by(threading.get_ident()):  # by the call that has led here: it is one use
            return original(self, *args, **kwargs)
        with resident.calling():
            return original(self, *args, **kwargs)

    return call


def _reduce_as_base(self: Any, protocol: int) -> Any:
    """Pickles and copies as the class that the user wrote."""
    governed = type(self)
    made, args, *rest = super(governed, self).__reduce_ex__(protocol)
    if args and args[0] is governed and made is copyreg.__newobj__:  # pickle insists on the object's own class there
        made, args = copyreg._reconstructor, (governed._gpu_base, object, None)
    return made, args, *rest


# -- work that the stop button must not cut in half -----------------------------------------------------------------

MOST_SECONDS = 60.0
_moving: set[object] = set()


def finish() -> None:
    """Waits for work that goes on though nobody waits for it any more: an interpreter that ends would cut it in
    half."""
    until = time.monotonic() + MOST_SECONDS
    while _moving and time.monotonic() < until:
        time.sleep(0.01)


def uninterrupted(work: Callable[[], Any]) -> Any:
    """Runs `work` in a thread of its own, where no KeyboardInterrupt is delivered, and waits for it.

    An interrupt ends the waiting, not the work: a move once begun finishes, and settles itself.
    """
    outcome: list[Any] = []

    def run() -> None:
        _moving.add(mark := object())
        try:
            outcome.append((work(), None))
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits
            outcome.append((None, error))
        finally:
            _moving.discard(mark)

    threads.start(run).wait()
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


class _Leave:
    """`__exit__`, looked up on a `Held`: a C callable that alone keeps the anchor alive.

    The interpreter looks `__exit__` up before it calls `__enter__`, keeps what it got on its stack, and drops it
    when the block has ended, at whatever instruction an interrupt strikes. `contextlib.ExitStack` looks it up on the
    class instead; it gets a plain function, and the anchor lives as long as the stack holds the `Held`.
    """

    def __get__(self, held: Held | None, kind: type | None = None) -> Any:
        if held is None:
            return _leave_late
        anchor = Anchor()
        held._anchor = weakref.ref(anchor)
        leave = functools.partial(_leave, held._finish)
        leave.anchor = anchor  # type: ignore[attr-defined]
        return leave


def _leave(finish: Callable[[BaseException | None], None], kind: Any, error: Any, trace: Any) -> None:
    finish(error)


def _leave_late(held: Held, kind: Any, error: Any, trace: Any) -> None:
    held._kept = None
    held._finish(error)


class Held:
    """A `with` block that holds something for exactly as long as it runs, whatever interrupts it.

    `start(anchor)` gives what the block yields, and registers the anchor (a weak reference) with whatever is held;
    `finish(error)` runs at the end for what is better done at once, but nothing may depend on its running.
    """

    __slots__ = ("_start", "_finish", "_anchor", "_kept")

    def __init__(self, start: Callable[[Callable[[], Anchor | None]], Any],
                 finish: Callable[[BaseException | None], None]) -> None:
        self._start, self._finish = start, finish
        self._anchor: Callable[[], Anchor | None] | None = None
        self._kept: Anchor | None = None

    def __enter__(self) -> Any:
        anchor, self._anchor = self._anchor, None
        if anchor is None:  # entered by hand, or by an ExitStack
            self._kept = Anchor()
            anchor = weakref.ref(self._kept)
        return self._start(anchor)

    __exit__ = _Leave()
