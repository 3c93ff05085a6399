"""A model pinned for exactly as long as its calls last.

Getting a model may take minutes, and a pin belongs to the thread that took it; so each hold has a thread of its own,
which sits in `with rt.use(model)` until it is told to let go. The event loop never waits for the ledger.
"""

from __future__ import annotations

import _thread
import asyncio
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...facts import Wait
from ...threads import start

if TYPE_CHECKING:
    from ...runtime import Runtime


CLOSING_SECONDS = 10.0


class Hold:
    """`ready` becomes what `use` yields, or the error that it raised. `ended` is done once the pin is gone."""

    def __init__(self, model: str, importance: int, loop: asyncio.AbstractEventLoop) -> None:
        self.model, self.importance = model, importance
        self.told = False  # whether somebody has heard the error
        self.ready: asyncio.Future[Any] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.began = 0.0
        self.waits = False  # the ledger has it in line
        self.in_use: frozenset[str] = frozenset()  # models of this process that it waits for
        self._loop = loop
        self._gone = threading.Event()

    def let_go(self) -> None:
        """Ends the pin, or the wait for it. A load that has begun is finished; its model stays, in use by nobody."""
        self._gone.set()

    @property
    def let_go_of(self) -> bool:
        return self._gone.is_set()

    def _tell(
        self, future: asyncio.Future[Any], result: Any, error: BaseException | None = None
    ) -> None:
        def settle() -> None:
            if future.done():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
                future.exception()  # looked at: whoever asked may have left meanwhile

        try:
            self._loop.call_soon_threadsafe(settle)
        except RuntimeError:  # the loop has been closed: nobody waits any more
            pass


class Abandoned(Exception):
    """Nobody wanted the model any more."""


class _LetGo(BaseException):
    """Ends a wait in the ledger that nobody wants any more. Not an Exception: it is nobody's to handle."""


class Holds:
    """Takes models in hand, each in a thread of its own.

    `waiting()` is called in the loop when a hold begins to wait for others; `loaded(model, seconds)` in the hold's
    thread when a model has come that was not on its device, with the time since it had its room.
    """

    def __init__(
        self,
        rt: Runtime,
        waiting: Callable[[], None],
        loaded: Callable[[str, float], None],
        clock: Callable[[], float],
    ) -> None:
        self._rt, self._waiting, self._loaded, self._clock = rt, waiting, loaded, clock
        self._mine = f"{rt.status().owner.id}/"  # how the ledger's names of our models begin
        self._by_thread: dict[int, Hold] = {}
        rt.tell_waits(self._told)

    def take(self, model: str, importance: int) -> Hold:
        """Begins to pin the model, for a call of that importance."""
        hold = Hold(model, importance, asyncio.get_running_loop())
        start(lambda: self._run(hold))
        return hold

    async def ended(self, model: str) -> None:
        """Comes back once the pins of that model that were let go of are gone: their threads take a moment."""
        ending = [
            hold.ended
            for hold in list(self._by_thread.values())
            if hold.model == model and hold.let_go_of
        ]
        if ending:
            await asyncio.wait(ending, timeout=CLOSING_SECONDS)

    async def close(self) -> None:
        """Lets go of what is still held, and waits a while for the ends."""
        holds = list(self._by_thread.values())
        for hold in holds:
            hold.let_go()
        if holds:
            await asyncio.wait([hold.ended for hold in holds], timeout=CLOSING_SECONDS)
        self._rt.tell_waits(None)

    def _run(self, hold: Hold) -> None:
        me = _thread.get_ident()
        self._by_thread[me] = hold
        try:
            was_here, hold.began = self._rt.here(hold.model), self._clock()
            with self._rt.use(hold.model, importance=self._rank(hold)) as value:
                if not was_here:
                    self._loaded(hold.model, self._clock() - hold.began)
                hold._tell(hold.ready, value)
                del value  # the frame must not keep a model that has left
                hold._gone.wait()
        except _LetGo:
            hold._tell(hold.ready, None, Abandoned(hold.model))
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits
            hold._tell(hold.ready, None, error)
        finally:
            self._by_thread.pop(me, None)
            hold._tell(hold.ended, None)

    def _rank(self, hold: Hold) -> int:
        """The call's importance, among all notebooks' too, as far as the operator's caps let this server ask."""
        if hold.importance >= self._rt.spec(hold.model).importance:
            return hold.importance
        cap = self._rt.status().rules.cap
        return max(hold.importance, (cap.importance if cap else None) or 0)

    def _told(self, model: str, wait: Wait | None) -> None:
        """The ledger's word, in the hold's own thread, each time its wait is looked at."""
        hold = self._by_thread.get(_thread.get_ident())
        if hold is None or wait is None:
            return
        if hold.let_go_of:
            raise _LetGo
        hold.began = self._clock()  # it has no room yet
        in_use = frozenset(
            id[len(self._mine) :] for id in wait.blockers if id.startswith(self._mine)
        )
        if not hold.waits or in_use != hold.in_use:
            hold.waits, hold.in_use = True, in_use
            hold._loop.call_soon_threadsafe(self._waiting)
