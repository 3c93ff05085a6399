"""The live models of this process: who uses them now, and one step at a time on each.

Nothing is decided here. A `Resident` is the owner's own truth about one model: where it lies, who has it pinned, when
it was last used. The ledger learns of it when it is published.

*Pins.* A pin must end with its `with` block even when the stop button strikes inside `__exit__`, where a release
written in Python would never run. So a pin is no counter: it is the life of a small object that only the interpreter's
stack refers to while the block runs. When the block ends, however it ends, the object dies, and a weak reference's
callback, C code that no signal handler can interrupt, takes it off the set.
"""

from __future__ import annotations

import enum
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from msgspec.structs import replace

from ..backends.base import Backend, Progress
from ..facts import Drop, Footprint, Lease, Measurement, ModelSpec, Move, Shares
from .governed_calls import govern_calls
from .pins import Anchor, Held, Pin


class Place(enum.Enum):
    """Where a model is, as far as `use` is concerned."""

    HERE = "on its device"
    AWAY = "in host memory"
    GONE = "not loaded"
    MOVING = "on its way"


class Stays(Exception):
    """A step must not be taken after all, and why: weights that exist nowhere else, or more bytes than reserved for."""


class Resident:
    """One registered model of this process, loaded or not."""

    def __init__(
        self,
        spec: ModelSpec,
        backend: Backend,
        owner: str,
        clock: Callable[[], float],
        origin: Any = None,
    ) -> None:
        self.spec = spec
        self.backend = backend
        self.origin = origin  # the factory it was registered with
        self.adopted = False  # the user's own module: never emptied, only let go
        self.catalogued: ModelSpec | None = (
            None  # as the catalogue last said, where it was not registered here
        )
        self.calling: Callable[
            [], Held
        ]  # what a call on a kept reference runs under; the runtime's to give
        self.footprint: Callable[[], Footprint]  # the bytes it needs; the runtime's to give
        self.report_loss: Callable[[str, str], None] = lambda kind, because: (
            None
        )  # in the book; the runtime's to give
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
        self.measured: Measurement | None = (
            None  # after an earlier load, where its source cannot be known again
        )
        self._was_pinned = False
        self._shell: Callable[[], Any] = lambda: (
            None
        )  # the object of an earlier load, if somebody still holds it
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
        return replace(
            self.lease,
            pins=pins,
            pinned_since=self.pinned_since if pins else 0.0,
            last_used=self.last_used,
            uses=self.uses,
            importance=self.lease.importance if pins else self.spec.importance,
        )

    # -- travelling; the caller has reserved the room

    def load(self, shares: Shares, progress: Progress | None) -> tuple[Any, Shares, float]:
        """The backend's handle, the bytes measured, and the seconds it took. Nothing is installed yet."""
        with self.work:
            began = time.perf_counter()
            handle = self.backend.load(
                self.spec, shares, self.origin, progress=progress, into=self._shell()
            )
            return handle, self.backend.measure(handle), time.perf_counter() - began

    def install(
        self, handle: Any, lease: Lease, anchor: Callable[[], Anchor | None] | None
    ) -> None:
        """Makes the loaded model the one that `use` yields, pinned by its loader."""
        value = self.backend.value(handle)
        pieces = self.backend.pieces(self.spec, self.origin, handle)
        govern_calls(value, self)
        with self.gate:
            self.handle, self.value, self.lease, self._pieces = handle, value, lease, pieces
            self.place = Place.HERE if lease.on_device else Place.AWAY
            self.last_used = (
                self._clock()
            )  # loaded ahead of its use, it has not been idle since the machine started
            if anchor is not None:
                self._pin(anchor)
        if watch := getattr(
            handle, "watch", None
        ):  # an engine may end by itself; if it has already, we hear it now
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
        self.report_loss(kind, because)

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
        if self.handle is None or (self.lease.filled or self.lease.shares) == (
            shares := self.backend.measure(self.handle)
        ):
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


# -- work that the stop button must not cut in half -----------------------------------------------------------------
