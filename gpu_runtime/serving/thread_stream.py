"""Blocking work in its own thread, whose results reach the event loop one by one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import closing
from typing import Any

from ..threads import Cancellation, start_short

Emit = Callable[[Any], None]


async def stream_from_thread(work: Callable[[Emit, Cancellation], None]) -> AsyncGenerator[Any]:
    """Yields the values that `work(emit, cancelled)` emits, as they arrive. Raises the error that `work` raises.

    `cancelled` is set when the reader of the stream has stopped; `work` should then end soon. The stream waits for
    that, because an engine that still computes cannot take the next call.
    """
    loop = asyncio.get_running_loop()
    results: deque[tuple[Any, BaseException | None, bool]] = deque()  # value, error, whether last
    cancelled = Cancellation()
    ended = asyncio.Event()
    arrived = asyncio.Event()
    wake_pending = False  # whether a wake of the loop is under way, so that no other is needed

    def emit(value: Any = None, error: BaseException | None = None, last: bool = False) -> None:
        nonlocal wake_pending
        results.append((value, error, last))
        if wake_pending and not last:
            return
        wake_pending = True
        try:
            loop.call_soon_threadsafe(wake, last)
        except RuntimeError:  # the loop was closed
            cancelled.set()

    def wake(last: bool) -> None:
        nonlocal wake_pending
        wake_pending = False  # before `results` is read: a later value wakes the loop again
        arrived.set()
        if last:
            ended.set()

    def run() -> None:
        try:
            work(emit, cancelled)
        except BaseException as error:  # noqa: BLE001 - raised where the reader waits
            emit(None, error, True)
        else:
            emit(None, None, True)

    start_short(run)
    try:
        while True:
            await arrived.wait()
            arrived.clear()
            while results:
                value, error, last = results.popleft()
                if error is not None:
                    raise error
                if last:
                    return
                yield value
    finally:
        cancelled.set()
        error = None  # else a cycle: error -> traceback -> this frame -> error
        await _whole_wait(ended)


async def _whole_wait(event: asyncio.Event) -> None:
    """Waits for `event`. If this task is cancelled meanwhile, that takes effect when the event is set."""
    was_cancelled = False
    while not event.is_set():
        try:
            await event.wait()
        except asyncio.CancelledError:  # raised below, once the thread has ended
            was_cancelled = True
    if was_cancelled:
        raise asyncio.CancelledError()


async def in_thread(work: Callable[[], Any]) -> Any:
    """Returns the value of `work()`, run in a thread. A cancelled task still waits until `work` has ended."""
    return await in_thread_until(lambda cancelled: work())


async def in_thread_until(work: Callable[[Cancellation], Any]) -> Any:
    """Returns the value of `work(cancelled)`, run in a thread.

    If the task that awaits the value is cancelled, the event `cancelled` is set, and `work` must then end soon.
    """
    stream = stream_from_thread(lambda emit, cancelled: emit(work(cancelled)))
    [value] = [value async for value in stream]
    return value


def emit_each(chunks: Any, emit: Emit, cancelled: Cancellation) -> None:
    """Emits the `chunks` until `cancelled` is set. Closes their generator, which ends the work of its engine."""
    with closing(chunks):
        for chunk in chunks:
            if cancelled.is_set():
                return
            emit(chunk)
