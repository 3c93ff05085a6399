"""How long a model stays on its device after its last call: then it steps aside, to RAM where there is room.

It may have to go sooner, when another needs the room: this is no promise to hold memory against others.
Source: Model Boss, InferenceQueue, per-category stay_warm.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

STAY_WARM_SECONDS = {"diffusion": 900.0, "llm": 300.0, "vision": 60.0}
OTHERS_SECONDS = 300.0
AGAIN_SECONDS = 5.0  # how soon to try again with a model that is in use


def wished(seconds: float | None, model_type: str) -> float:
    """How long the model is to stay: as its caller said, else by its type.

    >>> wished(None, "diffusion"), wished(None, "embedding"), wished(0.0, "llm")
    (900.0, 300.0, 0.0)
    """
    return STAY_WARM_SECONDS.get(model_type, OTHERS_SECONDS) if seconds is None else seconds


class Warmth:
    """Puts models away when their time is over. `put_away(model)` says whether the model has gone."""

    def __init__(
        self, clock: Callable[[], float], put_away: Callable[[str], Awaitable[bool]]
    ) -> None:
        self._clock, self._put_away = clock, put_away
        self._until: dict[str, float] = {}
        self._leaving: set[str] = set()  # to go as soon as no call holds it
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def keep(self, model: str, seconds: float) -> None:
        """A call has ended. Of several wishes the longest counts; an earlier call's is not shortened by a later one."""
        now = self._clock()
        self._until[model] = (
            now if model in self._leaving else max(self._until.get(model, 0.0), now + seconds)
        )
        self._schedule()

    def leave(self, model: str) -> None:
        """It goes at the end of the calls that hold it, whatever was wished; its next call loads it anew."""
        self._leaving.add(model)
        self._until[model] = self._clock()
        self._schedule()

    def until(self, model: str) -> float | None:
        """When its time is over; None: it is not waited for."""
        return self._until.get(model)

    def look(self) -> None:
        """Puts away those whose time is over."""
        now = self._clock()
        for model in [name for name, until in self._until.items() if until <= now]:
            del self._until[model]
            task = asyncio.ensure_future(self._go(model))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._schedule()

    async def _go(self, model: str) -> None:
        if await self._put_away(model):
            self._leaving.discard(model)
        elif (
            not self._closed
        ):  # a call of ours holds it, whose end brings it here again, or somebody else
            self._until.setdefault(model, self._clock() + AGAIN_SECONDS)
            self._schedule()

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._until and not self._closed:
            first = min(self._until.values())
            self._timer = asyncio.get_running_loop().call_later(
                max(0.0, first - self._clock()), self.look
            )

    async def close(self) -> None:
        self._closed = True
        self._until.clear()
        self._schedule()
        await asyncio.gather(*self._tasks, return_exceptions=True)
