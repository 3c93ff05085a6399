"""Blocking work in a thread, whose values are read in the event loop.

The values keep their order, errors reach the reader, and no work is left running.
"""

import asyncio
import threading

import pytest

from gpu_runtime.serving.thread_stream import in_thread, stream_from_thread
from tests.serving.loops import until


async def test_values_arrive_in_order_and_the_error_last():

    def work(emit, cancelled):
        for n in range(100):
            emit(n)
        raise RuntimeError("broke")

    values = []
    with pytest.raises(RuntimeError, match="broke"):
        async for value in stream_from_thread(work):
            values.append(value)
    assert values == list(range(100))


@pytest.mark.parametrize("how", ["closed", "cancelled"])
async def test_a_reader_that_stops_ends_the_work_and_waits_for_its_end(how):
    """An engine that still computes cannot take the next call. A disconnected client cancels the reading task."""
    began, ended = threading.Event(), threading.Event()

    def work(emit, cancelled):
        emit(1)
        began.set()
        cancelled.wait()
        ended.set()

    async def read():
        async for _ in stream:
            pass

    stream = stream_from_thread(work)
    if how == "closed":
        assert await anext(stream) == 1
        await stream.aclose()
    else:
        task = asyncio.ensure_future(read())
        await until(began.is_set)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert ended.is_set()


async def test_one_value_from_a_thread():
    assert await in_thread(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: 1 / 0)
