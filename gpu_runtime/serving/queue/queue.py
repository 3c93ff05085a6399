"""The calls that wait, in one event loop: who may start is decided in `order`, and done here.

A call takes a turn: `async with queue.turn("qwen", importance=10) as turn:` waits for its place, then gives the model,
pinned until the last turn of that model ends. Whoever goes away while waiting leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from ...facts import NORMAL
from ..requests import Refused
from .model_hold import Hold
from .order import Engine, Next, Place, Waiting, next_out

RATES = 64  # ends that the rate of the queue is told from
LONGEST_RETRY = 60.0


class Turn:
    """One call's turn at a model. `value` is what `rt.use` yields."""

    def __init__(self, waiting: Waiting, started: asyncio.Future[Any]) -> None:
        self.waiting, self.started = waiting, started
        self.value: Any = None
        self.waited_seconds = 0.0


class _Running:
    """What one model is doing: the hold that pins it, and how many calls of it run."""

    def __init__(self) -> None:
        self.hold: Hold | None = None
        self.active = 0
        self.spent = False  # its engine failed: what the hold has in hand may be dead

    @property
    def ready(self) -> bool:
        return self.hold is not None and self.hold.ready.done()


class LoadShared(Exception):
    """A model could not be had; another call that wanted it was told why, and is the one to count. `error` is why."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


class Queue:
    """Puts calls in order and gives them their models.

    `take(model, importance)` begins to pin a model, `here(model)` says whether it is on its device, and
    `concurrency(model)` how many calls it can run at once. `limit`: so many may wait; further ones are refused.
    """

    def __init__(
        self,
        take: Callable[[str, int], Hold],
        here: Callable[[str], bool],
        concurrency: Callable[[str], int],
        *,
        clock: Callable[[], float],
        limit: int = 256,
    ) -> None:
        self._take, self._here, self._concurrency = take, here, concurrency
        self._clock, self.limit = clock, limit
        self._keys = itertools.count(1)
        self._waiting: dict[int, Turn] = {}
        self._models: dict[str, _Running] = {}
        self._ends: deque[float] = deque(maxlen=RATES)
        self.closed = False  # nothing begins any more
        self.loads = 0  # begun, for models that were not on their device

    @asynccontextmanager
    async def turn(self, model: str, importance: int = NORMAL) -> AsyncIterator[Turn]:
        """The call's turn. Raises Refused (503) where too many wait; what loading the model raises, or LoadShared."""
        if len(self._waiting) >= self.limit:
            seconds = self.retry_after()
            raise Refused(
                503,
                "queue_full",
                f"{len(self._waiting)} calls wait already, and no more can. "
                f"Try again in {seconds:.0f} s.",
                seconds,
                depth=len(self._waiting),
            )
        began = self._clock()
        turn = Turn(
            Waiting(next(self._keys), model, importance, began),
            asyncio.get_running_loop().create_future(),
        )
        self._waiting[turn.waiting.key] = turn
        try:
            self.look()
            hold = await turn.started
            try:
                turn.value = (
                    hold.ready.result() if hold.ready.done() else await asyncio.shield(hold.ready)
                )
            except asyncio.CancelledError:
                raise
            except BaseException as error:
                if hold.told:
                    raise LoadShared(error) from error
                hold.told = True
                raise
            turn.waited_seconds = self._clock() - began
            yield turn
        finally:
            turn.value = None
            self._leave(turn)

    def look(self) -> None:
        """Does what can be done now: at every arrival and end, and when a load has ended or begins to wait."""
        settled = True
        while settled:  # what was let go of may be taken anew by those who wait for it
            if self._waiting and not self.closed:
                waiting = [turn.waiting for turn in self._waiting.values()]
                self._carry_out(next_out(waiting, self._engines(), self._clock()))
            idle = [model for model, running in self._models.items() if not running.active]
            settled = (
                any([self._settle(model) for model in idle])
                and bool(self._waiting)
                and not self.closed
            )

    def _engines(self) -> dict[str, Engine]:
        names = {*self._models, *(turn.waiting.model for turn in self._waiting.values())}
        return {model: self._engine(model) for model in names}

    def _engine(self, model: str) -> Engine:
        running, many = self._models.get(model) or _Running(), self._concurrency(model)
        hold = running.hold
        if hold is None:
            return Engine(Place.WARM if self._here(model) else Place.COLD, running.active, many)
        if (
            running.spent
        ):  # no more of its calls start, until those that run have ended and it is taken anew
            return Engine(Place.WARM, running.active, running.active)
        if running.ready or (
            running.active and not hold.waits
        ):  # a start of a model that was here, not yet confirmed
            return Engine(Place.WARM, running.active, many)
        return Engine(Place.LOADING, running.active, many, hold.in_use)

    def _carry_out(self, out: Next) -> None:
        for key in out.start:
            turn = self._waiting[key]
            running = self._begin(turn.waiting.model, turn.waiting.importance)
            self._give(turn, running, running.hold)
        for model in out.load:
            self.loads += 1
            self._begin(model, self._best(model))

    def _give(self, turn: Turn, running: _Running, hold: Hold | None) -> None:
        """Its place is the call's from here on, until `_leave`; also where its task was cancelled this very moment."""
        del self._waiting[turn.waiting.key]
        running.active += 1
        if not turn.started.done():
            turn.started.set_result(hold)

    def _best(self, model: str) -> int:
        return min(
            turn.waiting.importance
            for turn in self._waiting.values()
            if turn.waiting.model == model
        )

    def _begin(self, model: str, importance: int) -> _Running:
        running = self._models.setdefault(model, _Running())
        if running.hold is None:
            running.spent = False
            hold = running.hold = self._take(model, importance)
            hold.ready.add_done_callback(lambda ready: self._taken(model, hold))
        return running

    def _taken(self, model: str, hold: Hold) -> None:
        """The model is pinned, or could not be had: then all who wait for it go and hear why from the hold."""
        running = self._models.get(model)
        if running is None or running.hold is not hold:
            return
        if hold.ready.exception() is not None:
            running.hold = None
            for turn in [turn for turn in self._waiting.values() if turn.waiting.model == model]:
                self._give(turn, running, hold)
        self.look()

    def _settle(self, model: str) -> bool:
        """No call of the model runs: its pin ends, unless it is being loaded for somebody who waits. True: it ended."""
        running = self._models[model]
        if (
            running.hold is not None
            and not running.ready
            and not self.closed
            and any(turn.waiting.model == model for turn in self._waiting.values())
        ):
            self._in_earnest(model, running, running.hold)
            return False
        del self._models[model]
        if running.hold is None:
            return False
        running.hold.let_go()
        return True

    def _in_earnest(self, model: str, running: _Running, hold: Hold) -> None:
        """A load that stands in the ledger's line for a lesser call is asked for anew for a more important one."""
        best = self._best(model)
        if hold.waits and best < hold.importance:
            hold.let_go()
            running.hold = None
            self._begin(model, best)

    def _leave(self, turn: Turn) -> None:
        if (
            self._waiting.pop(turn.waiting.key, None) is None
        ):  # it was given its place, though it may not know
            self._ends.append(self._clock())
            running = self._models.get(turn.waiting.model)
            if running is not None and running.active:
                running.active -= 1
        self.look()

    def renew(self, model: str) -> None:
        """A call of the model failed by its engine: the next take it in hand anew, once those that run have ended."""
        running = self._models.get(model)
        if running is not None:
            running.spent = True

    def retry_after(self) -> float:
        """Seconds in which as many calls ended, lately, as wait now: from 1 to 60; 1 where too few have."""
        if len(self._ends) < 2:
            return 1.0
        each = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return min(LONGEST_RETRY, max(1.0, each * len(self._waiting)))

    def depth(self) -> dict[str, int]:
        """How many calls wait, by model."""
        return dict(Counter(turn.waiting.model for turn in self._waiting.values()))

    def active(self) -> dict[str, int]:
        """How many calls run, by model."""
        return {model: running.active for model, running in self._models.items() if running.active}
