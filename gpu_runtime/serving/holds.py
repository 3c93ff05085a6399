"""Pins a model exactly as long as its calls last, and evicts it some time after its last call.

A hold is one pin, or the wait for it. A model on its device is pinned in the event loop, which takes a few
microseconds. Bringing any other model to its device may take minutes, so its hold has a thread, which stays inside
`with rt.use(model)` until the hold is released. The event loop never waits for the ledger.
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import sys
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from ..facts import Wait
from ..threads import start_short

if TYPE_CHECKING:
    from ..runtime import Runtime


LIBRARIES = ("torch", "transformers", "llama_cpp")  # imported by the first load that needs them
# A load goes on so long after its last call has left. A client whose time-out is shorter than the load finds it
# again, and a client that has ended does not keep the card.
LEFT_SECONDS = 5.0
CLOSING_SECONDS = 10.0  # the longest wait until the threads of released holds have ended


def _imported() -> tuple[bool, ...]:
    return tuple(name in sys.modules for name in LIBRARIES)


class Hold:
    """One pin of a `model` for a call of this `importance`, or the wait for that pin. Its futures belong to `loop`."""

    def __init__(self, model: str, importance: int, loop: asyncio.AbstractEventLoop) -> None:
        self.model = model
        self.importance = importance
        self.error_reported = False  # whether a call has already received the error of `ready`
        # Becomes the object that `rt.use` yields, or the error that it raises.
        self.ready: asyncio.Future[Any] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()  # done when the pin is gone
        self.began = 0.0  # by the clock; until the memory is granted, set at each wait
        self.waits = False  # whether its request waits in the ledger now
        self.waited = False  # whether its request had to wait
        self.because = ""  # why its request waits
        self.waits_for: frozenset[str] = frozenset()  # models of this process that block it
        self._loop = loop
        self.thread = 0  # the thread that brings the model to its device
        self._release = threading.Event()
        self._ending = threading.Lock()
        self._over = False  # whether the thread has ended the pin, or nothing may keep its load
        self._late: asyncio.TimerHandle | None = None  # when the load of a released hold is stopped
        self.stop_load: Callable[[int], None] | None = None  # stops the load of a thread
        self._block: Any = None  # the `with` block of a pin that has no thread

    def pin_if_here(self, block: Any) -> bool:
        """Enters `block`, the result of `rt.use`, in the event loop, if the model is on its device. Returns whether."""
        found = block.enter_if_here()
        if found:
            self._block = block
            self.ready.set_result(*found)
        return bool(found)

    def release(self) -> None:
        """Ends the pin, or the wait for it. A load that has begun goes on for LEFT_SECONDS; see `keep_again`."""
        self._release.set()
        if self.stop_load is not None and not self.ready.done():
            self._late = self._loop.call_later(LEFT_SECONDS, self._stop_unless_kept)
        block, self._block = self._block, None
        if block is not None:
            block.__exit__(None, None, None)
            self.ended.set_result(None)

    def _stop_unless_kept(self) -> None:
        """Stops the load if no call has kept this hold since `release`. From now on none can keep it."""
        with self._ending:
            unwanted = self.released and not self._over and not self.ready.done()
            self._over = self._over or unwanted
            if unwanted and self.stop_load is not None:
                self.stop_load(self.thread)  # the thread cannot leave this hold meanwhile

    def keep_again(self) -> bool:
        """Undoes `release` for a new call, while the load of a call that has left goes on. Returns whether it did."""
        with self._ending:
            if self._over or not self.released or self.waits or self.ready.done():
                return False
            self._release.clear()
        if self._late is not None:
            self._late.cancel()
        return True

    @property
    def released(self) -> bool:
        """Whether `release` was called."""
        return self._release.is_set()

    def leave(self) -> None:
        """The thread leaves this hold, and may do other work from now on."""
        with self._ending:
            self._over = True

    def ends_now(self) -> bool:
        """Whether this hold is released. If so, `keep_again` keeps it no more."""
        with self._ending:
            self._over = self._over or self.released
        return self._over

    def call_in_loop(self, function: Callable[[], None]) -> None:
        """Runs `function` in the event loop of this hold, unless the loop is closed."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing waits any more
            self._loop.call_soon_threadsafe(function)

    def settle(
        self, future: asyncio.Future[Any], result: Any, error: BaseException | None = None
    ) -> None:
        """Sets the `result` or the `error` of `future`, from any thread, unless it is done."""

        def settle() -> None:
            if future.done():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
                future.exception()  # marks it as read: the caller may have left in the meantime

        self.call_in_loop(settle)


class Abandoned(Exception):
    """Raised when a hold is released before its model is pinned."""


class _Released(BaseException):
    """Raised in the thread of a hold that was released while the thread waits in the ledger.

    It is no Exception, so that no `except Exception` between the wait and `Holds` catches it.
    """


class Holds:
    """Pins models."""

    def __init__(
        self,
        rt: Runtime,
        waiting: Callable[[], None],
        loaded: Callable[[str, float], None],
        clock: Callable[[], float],
    ) -> None:
        """`rt` is the runtime whose models are pinned; `clock` returns seconds.

        `waiting()` is called in the loop when a hold begins or ends to wait for others. `loaded(model, seconds)` is
        called in the hold's thread after a load, with the time since the model's memory was granted.
        """
        self._rt = rt
        self._waiting = waiting
        self._loaded = loaded
        self._clock = clock
        self._own_prefix = f"{rt.status().owner.id}/"  # of our models' names in the ledger
        self._by_thread: dict[int, Hold] = {}
        self._holds: WeakSet[Hold] = WeakSet()
        rt.tell_waits(self._on_wait)

    def take(self, model: str, importance: int) -> Hold:
        """Begins to pin `model` for a call of this `importance`, and returns the hold at once."""
        for hold in list(self._holds):
            if hold.ended.done():
                self._holds.discard(hold)  # else every later call would look at it
            elif hold.model == model and hold.keep_again():
                return hold
        hold = Hold(model, importance, asyncio.get_running_loop())
        hold.stop_load = partial(self._rt._leave_load, why="all its callers have left")
        self._holds.add(hold)
        if self._rt.here(model):
            use = self._rt.use(model, importance=importance)
            if hold.pin_if_here(use):
                return hold
        start_short(lambda: self._run(hold))
        return hold

    async def ended(self, model: str) -> None:
        """Waits up to 10 s until the threads of all released holds of `model` have ended their pins."""
        holds = [hold for hold in self._holds if hold.model == model and hold.released]
        ending = [hold.ended for hold in holds if not hold.ended.done()]
        if ending:
            await asyncio.wait(ending, timeout=CLOSING_SECONDS)

    async def close(self) -> None:
        """Releases all holds, and waits up to 10 s until their threads have ended."""
        holds = [hold for hold in self._holds if not hold.ended.done()]
        for hold in holds:
            hold.release()
        if holds:
            await asyncio.to_thread(self._rt._stop_loads, "the server ends")
            await asyncio.wait([hold.ended for hold in holds], timeout=CLOSING_SECONDS)
        self._rt.tell_waits(None)

    def _run(self, hold: Hold) -> None:
        thread = _thread.get_ident()
        self._by_thread[thread] = hold
        hold.thread = thread
        try:
            was_here = self._rt.here(hold.model)
            imported = _imported()
            hold.began = self._clock()
            with self._rt.use(hold.model, importance=self._importance(hold)) as value:
                if not was_here and _imported() == imported:  # the first import is no load
                    self._loaded(hold.model, self._clock() - hold.began)
                hold.settle(hold.ready, value)
                del value  # this frame must not keep a model that was evicted
                while not hold.ends_now():
                    hold._release.wait()
        except _Released:  # no call waits for the model any more
            hold.settle(hold.ready, None, Abandoned(hold.model))
        except BaseException as error:  # noqa: BLE001 - raised where the call waits
            hold.settle(hold.ready, None, error)
        finally:
            hold.leave()
            self._by_thread.pop(thread, None)
            hold.settle(hold.ended, None)

    def _importance(self, hold: Hold) -> int:
        """The importance of the call of `hold`, which the ledger compares with the requests of all processes.

        If it is more important than its model is by its registration, the operator's caps for this server limit it.
        """
        if hold.importance >= self._rt.spec(hold.model).importance:
            return hold.importance
        cap = self._rt.status().rules.cap
        highest_allowed = (cap.importance if cap else None) or 0
        return max(hold.importance, highest_allowed)

    def _on_wait(self, model: str, wait: Wait | None) -> None:
        """Called in a hold's thread each time the ledger lets its request wait; `wait` is None once it is granted."""
        hold = self._by_thread.get(_thread.get_ident())
        if hold is None:
            return
        if wait is None:
            self._note_wait(hold, False, frozenset())
            return
        if hold.ends_now():
            raise _Released
        hold.began = self._clock()  # the memory is not granted yet, so the load has not begun
        prefix = self._own_prefix
        own = [id for id in wait.blockers if id.startswith(prefix)]
        blockers = frozenset(id.removeprefix(prefix) for id in own)
        hold.waited, hold.because = True, wait.because
        self._note_wait(hold, True, blockers)

    def _note_wait(self, hold: Hold, waits: bool, blockers: frozenset[str]) -> None:
        if (waits, blockers) != (hold.waits, hold.waits_for):
            hold.waits, hold.waits_for = waits, blockers
            hold.call_in_loop(self._waiting)


# -- keep warm: the eviction some time after the last call, to host memory if host memory has room
#
# This reserves no memory. A model is evicted earlier if another model needs the room.
# Source: Model Boss, InferenceQueue, per-category stay_warm.

STAY_WARM_SECONDS = {"diffusion": 900.0, "llm": 300.0, "vision": 60.0}
DEFAULT_SECONDS = 300.0  # for all other types
RETRY_SECONDS = 5.0  # until the next try to evict a model that was in use


def stay_warm_seconds(seconds: float | None, model_type: str) -> float:
    """The `seconds` that the caller set, or the default of the `model_type` if `seconds` is None.

    >>> stay_warm_seconds(None, "diffusion"), stay_warm_seconds(None, "embedding"), stay_warm_seconds(0.0, "llm")
    (900.0, 300.0, 0.0)
    """
    default = STAY_WARM_SECONDS.get(model_type, DEFAULT_SECONDS)
    return default if seconds is None else seconds


class KeepWarm:
    """Evicts each model when its keep-warm time is over."""

    def __init__(self, clock: Callable[[], float], evict: Callable[[str], Awaitable[bool]]) -> None:
        """`clock` returns seconds. `evict(model)` returns False if the model is in use."""
        self._clock = clock
        self._evict = evict
        self._until: dict[str, float] = {}
        self._evict_soon: set[str] = set()  # models to evict as soon as no call holds them
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def keep(self, model: str, seconds: float, *, wished: bool = False) -> None:
        """Sets the time of the eviction of `model` to `seconds` from now, at the end of each call that it has answered.

        If `wished`, the caller has set this time, and it replaces the time that was set before. A default time only
        replaces an earlier one. After `evict_soon`, the eviction is due at once.
        """
        now = self._clock()
        until = now + seconds
        if not wished:
            until = max(self._until.get(model, 0.0), until)
        self._until[model] = now if model in self._evict_soon else until
        self._schedule()

    def evict_soon(self, model: str) -> None:
        """Evicts `model` as soon as no call holds it, before its time. The next call brings it back."""
        self._evict_soon.add(model)
        self._until[model] = self._clock()
        self._schedule()

    def until(self, model: str) -> float | None:
        """The time by the clock at which `model` is evicted, or None if no time is set."""
        return self._until.get(model)

    def evict_due(self) -> None:
        """Evicts the models whose keep-warm time is over."""
        now = self._clock()
        for model in [name for name, until in self._until.items() if until <= now]:
            del self._until[model]
            task = asyncio.ensure_future(self._try_to_evict(model))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._schedule()

    async def close(self) -> None:
        """Forgets the keep-warm times of all models, and waits for evictions that have begun."""
        self._closed = True
        self._until.clear()
        self._schedule()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _try_to_evict(self, model: str) -> None:
        if await self._evict(model):
            self._evict_soon.discard(model)
        elif not self._closed:
            # The model is in use by a call of this server, whose end sets a new time, or by another process.
            self._until.setdefault(model, self._clock() + RETRY_SECONDS)
            self._schedule()

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._until and not self._closed:
            delay = max(0.0, min(self._until.values()) - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay, self.evict_due)
