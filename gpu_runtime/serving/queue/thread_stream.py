"""Work that blocks, in a thread of its own, heard piece by piece in the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any

from ...threads import start

Emit = Callable[[Any], None]


async def pumped(work: Callable[[Emit, threading.Event], None]) -> AsyncGenerator[Any]:
    """What `work(emit, gone)` emits, as it comes. Raises what it raises.

    `gone` is set when nobody listens any more; the work should then end soon, and is waited for: an engine that still
    computes is not free for the next call.
    """
    loop = asyncio.get_running_loop()
    pieces: deque[tuple[Any, BaseException | None, bool]] = deque()
    gone, ended, news = threading.Event(), asyncio.Event(), asyncio.Event()
    called = False  # the loop has been woken, and has not looked yet: what comes meanwhile needs no call of its own

    def tell(piece: Any = None, error: BaseException | None = None, last: bool = False) -> None:
        nonlocal called
        pieces.append((piece, error, last))
        if called and not last:
            return
        called = True
        try:
            loop.call_soon_threadsafe(hear, last)
        except RuntimeError:  # the loop was closed
            gone.set()

    def hear(last: bool) -> None:
        nonlocal called
        called = False  # before the pieces are looked at: one that comes later calls again
        news.set()
        if last:
            ended.set()

    def run() -> None:
        try:
            work(tell, gone)
        except BaseException as error:  # noqa: BLE001 - handed to whoever listens
            tell(None, error, True)
        else:
            tell(None, None, True)

    start(run)
    try:
        while True:
            await news.wait()
            news.clear()
            while pieces:
                piece, error, last = pieces.popleft()
                if error is not None:
                    raise error
                if last:
                    return
                yield piece
    finally:
        gone.set()
        await ended.wait()


async def in_thread(work: Callable[[], Any]) -> Any:
    """What the work returns; waited for also by whoever does not want it any more."""
    answer: list[Any] = []
    async for piece in pumped(lambda emit, gone: emit(work())):
        answer.append(piece)
    return answer[0]
