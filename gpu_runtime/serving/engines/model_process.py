"""The adapter of models that run in separate processes. Each call goes to an adapter in the model's process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing
from typing import Any

from ...facts import ModelSpec
from ..queue.thread_stream import Emit, in_thread, stream_from_thread

MakeAdapter = Callable[[Any, ModelSpec, Any], Any]


class ProcessAdapter:
    """Sends each call to the process of a model, where the model's own adapter answers the call."""

    counts_tokens = True

    def __init__(self, value: Any, spec: ModelSpec, make_adapter: MakeAdapter) -> None:
        """The adapter of `value`, which is the model of `spec` in a process of its own.

        `make_adapter(value, spec, http)` makes the model's adapter in that process, where `http` is None. It must be a
        module-level function, so that the model's process can import it.
        """
        self._value, self._given = value, (make_adapter, spec)

    async def answer(self, kind: str, body: dict[str, Any], think: bool | None) -> dict[str, Any]:
        """See `EngineAdapter.answer`, which has the same parameters `kind`, `body` and `think`."""
        [found] = await in_thread(
            lambda: list(self._value.stream(_whole, *self._given, kind, body, think))
        )
        return found

    async def stream(
        self, kind: str, body: dict[str, Any], think: bool | None
    ) -> AsyncIterator[dict[str, Any]]:
        """See `EngineAdapter.stream`, which has the same parameters `kind`, `body` and `think`."""

        def work(emit: Emit, cancelled: Any) -> None:
            """Emits the chunks of the answer, in a thread."""
            chunks = self._value.stream(_chunks, *self._given, kind, body, think)
            for chunk in chunks:
                if cancelled.is_set():
                    chunks.close()
                    return
                emit(chunk)

        async with aclosing(stream_from_thread(work)) as chunks:
            async for chunk in chunks:
                yield chunk


def _whole(
    value: Any, make_adapter: MakeAdapter, spec: ModelSpec, *call: Any
) -> Iterator[dict[str, Any]]:
    """Yields one item, the whole answer to a call. Runs in the process of the model.

    `call` has the arguments of `EngineAdapter.answer`: the kind, the body, and whether to think.
    """
    yield asyncio.run(make_adapter(value, spec, None).answer(*call))


def _chunks(
    value: Any, make_adapter: MakeAdapter, spec: ModelSpec, *call: Any
) -> Iterator[dict[str, Any]]:
    """Yields the chunks of the answer to a call. Runs in the process of the model. For `call` see `_whole`."""
    with asyncio.Runner() as runner:
        chunks: AsyncGenerator[dict[str, Any]] = make_adapter(value, spec, None).stream(*call)
        try:
            while (chunk := runner.run(_next(chunks))) is not None:
                yield chunk
        finally:
            runner.run(chunks.aclose())


async def _next(chunks: AsyncGenerator[dict[str, Any]]) -> dict[str, Any] | None:
    return await anext(chunks, None)
