"""Runs coroutines in tests, either to their end or step by step, without sleeping."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

from tests.clock import PATIENCE


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs an `async def` test in its own event loop, within bounded time."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(PATIENCE):
                await test(*args, **kwargs)

        asyncio.run(bounded())

    return run


async def settle() -> None:
    """Returns after every task that can run now has run."""
    for _ in range(20):
        await asyncio.sleep(0)


async def until(true: Callable[[], Any]) -> None:
    """Returns once `true()` is true. Tests use it to wait for the work of threads."""
    while not true():
        await asyncio.sleep(0.001)
