"""Evicts a model some time after its last call, to host memory if host memory has room.

This module does not reserve memory. A model is evicted earlier if another model needs the room.
Source: Model Boss, InferenceQueue, per-category stay_warm.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

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
