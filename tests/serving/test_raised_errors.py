"""The error of a refused call is gone with its last reference, without a garbage collection.

The call's frames have the prompt and the model's object. An error that its own traceback leads back to keeps these
frames until the next collection, which is rare in `gpu serve`.
"""

import asyncio
import gc
import time
import weakref
from collections.abc import Awaitable, Iterator
from typing import Any

import pytest

from gpu_runtime.serving.api.openai import unless_gone
from gpu_runtime.serving.engines.base import EngineFailed
from gpu_runtime.serving.thread_stream import in_thread
from tests.clock import PATIENCE
from tests.serving.harness import harness
from tests.serving.loops import settle, until

ALONE = {"sequences": 1, "context_length": 64}  # one call at a time


class Broken(Exception):
    """An error of a test; the built-in ones take no weak references."""


def broken() -> None:
    raise Broken


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def error_of(work: Awaitable[Any]) -> list[weakref.ref[BaseException]]:
    """Weak references to the error that `work` raises, and to the causes of this error."""
    try:
        await work
    except Exception as error:
        found, one = [], error
        while one is not None and weakref.ref(one) not in found:
            found.append(weakref.ref(one))
            one = one.__cause__ or one.__context__
        del one
        return found
    raise AssertionError("nothing was raised")


async def kept(errors: list[weakref.ref[BaseException]]) -> list[str]:
    """The classes of the `errors` that still exist after all tasks have run, and the thread that raised them."""
    end = time.monotonic() + PATIENCE
    await settle()
    while any(error() is not None for error in errors) and time.monotonic() < end:
        await asyncio.sleep(0.001)
    return [type(error()).__name__ for error in errors if error() is not None]


async def test_the_error_of_a_failed_engine_is_not_kept():
    failed = EngineFailed("qwen failed: HTTP 500", name="qwen", why="HTTP 500")
    async with harness(qwen=4, scripts={"qwen": [failed]}) as k:
        del failed
        assert await kept(await error_of(k.chat("qwen"))) == []


async def test_the_refusal_of_a_full_queue_is_not_kept():
    """The refusal was its own cause."""
    gate = asyncio.Event()
    settings, options = {"gpu_serve_queue": 1}, {"qwen": ALONE}
    async with harness(qwen=4, scripts={"qwen": [gate]}, options=options, settings=settings) as k:
        calls = [asyncio.ensure_future(k.chat("qwen"))]
        await until(lambda: k.gateway.state().running == {"qwen": 1})
        calls.append(asyncio.ensure_future(k.chat("qwen")))
        await until(lambda: k.gateway.state().waiting == {"qwen": 1})
        errors = await error_of(k.chat("qwen"))
        gate.set()
        await asyncio.gather(*calls)
        assert len(errors) == 1 and await kept(errors) == []


async def test_the_error_of_a_thread_or_of_a_request_is_not_kept():
    class Staying:
        async def receive(self) -> Any:
            await asyncio.Event().wait()

    assert await kept(await error_of(in_thread(broken))) == []
    assert await kept(await error_of(unless_gone(Staying(), in_thread(broken)))) == []  # type: ignore[arg-type]
