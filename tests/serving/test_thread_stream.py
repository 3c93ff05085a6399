"""Blocking work, heard in the event loop: in order, with its errors, and never left running."""

from __future__ import annotations

import asyncio
import threading

import pytest

from gpu_runtime.serving.queue.thread_stream import in_thread, stream_from_thread
from tests.serving.loops import in_loop, until


@in_loop
async def test_pieces_come_in_their_order_and_the_error_last():
    """What was said before it failed is heard."""

    def work(emit, cancelled):
        for n in range(100):
            emit(n)
        raise RuntimeError("broke")

    heard = []
    with pytest.raises(RuntimeError, match="broke"):
        async for piece in stream_from_thread(work):
            heard.append(piece)
    assert heard == list(range(100))


@in_loop
async def test_whoever_stops_listening_waits_for_the_end_of_the_work():
    """An engine that still computes is not free for the next call."""
    ended = threading.Event()

    def work(emit, cancelled):
        emit(1)
        cancelled.wait()
        ended.set()

    pieces = stream_from_thread(work)
    assert await anext(pieces) == 1
    await pieces.aclose()
    assert ended.is_set()


@in_loop
async def test_a_cancelled_listener_ends_the_work_too():
    """As a client that goes away."""
    began, ended = threading.Event(), threading.Event()

    def work(emit, cancelled):
        began.set()
        cancelled.wait()
        ended.set()

    async def listen():
        async for _ in stream_from_thread(work):
            pass

    task = asyncio.ensure_future(listen())
    await until(began.is_set)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


@in_loop
async def test_one_answer_from_a_thread():
    """Its result, or its error."""
    assert await in_thread(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: 1 / 0)
