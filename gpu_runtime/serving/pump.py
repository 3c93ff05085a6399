"""Work that blocks, in a thread of its own, heard piece by piece in the event loop."""
from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

from ..threads import start

Emit = Callable[[Any], None]


async def pumped(work: Callable[[Emit, threading.Event], None]) -> AsyncIterator[Any]:
    """What `work(emit, gone)` emits, as it comes. Raises what it raises.

    `gone` is set when nobody listens any more; the work should then end soon, and is waited for: an engine that still
    computes is not free for the next call.
    """
    loop = asyncio.get_running_loop()
    pieces: asyncio.Queue[tuple[Any, BaseException | None, bool]] = asyncio.Queue()
    gone = threading.Event()
    ended = asyncio.Event()

    def tell(piece: Any = None, error: BaseException | None = None, last: bool = False) -> None:
        try:
            loop.call_soon_threadsafe(hear, piece, error, last)
        except RuntimeError:  # the loop was closed
            gone.set()

    def hear(piece: Any, error: BaseException | None, last: bool) -> None:
        pieces.put_nowait((piece, error, last))
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
            piece, error, last = await pieces.get()
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
