"""Chooses the adapter that calls a model. Defines those of fake models, and of models in processes of their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from typing import Any

from ...facts import ModelSpec
from ...threads import Cancellation
from ..requests import Json
from ..thread_stream import Emit, emit_each, stream_from_thread
from .base import EngineAdapter, TextAdapter, cannot
from .openai_format import TextPiece, max_tokens_of

LOOK_SECONDS = 0.1  # between two looks whether the caller of a whole answer has left


class EchoAdapter(TextAdapter):
    """The adapter of a fake model, which answers with its prompt, word by word."""

    kind = "a fake model"
    LAST_MESSAGE = "{% for m in messages %}{{ m['content'] if loop.last else '' }}{% endfor %}"

    def template(self) -> str:
        """A chat template whose prompt has only the last message."""
        return self.LAST_MESSAGE

    async def pieces(
        self, kind: str, body: dict[str, Any], think: bool | None
    ) -> AsyncGenerator[TextPiece]:
        """Yields the words of the prompt, at most as many as `body` allows."""
        prompt = self.prompt(kind, body, think)
        words = str(self.value(prompt)).split(" ")
        written = words[: max_tokens_of(body)]
        if body.get("echo"):
            yield TextPiece(str(prompt))
        for at, word in enumerate(written):
            yield TextPiece(word if at == 0 else f" {word}")
            await asyncio.sleep(0)  # lets other tasks run, so that a disconnect is noticed
        yield TextPiece(
            finish="length" if len(written) < len(words) else "stop",
            prompt_tokens=len(words),
            completion_tokens=len(written),
        )

    async def vectors(
        self, texts: list[str | list[int]], truncate: bool
    ) -> tuple[list[list[float]], int]:
        """A vector [letters or tokens, 1] for each of the `texts`, and the words or tokens in all of them."""
        words = sum(len(text.split() if isinstance(text, str) else text) for text in texts)
        return [[float(len(text)), 1.0] for text in texts], words

    async def scores(self, query: str, documents: list[str]) -> tuple[list[float], int]:
        """The part of the query's words that each document has, from 0 to 1, and the number of words read."""
        wanted = set(query.split())
        found = [document.split() for document in documents]
        scores = [len(wanted.intersection(words)) / max(1, len(wanted)) for words in found]
        return scores, len(query.split()) + sum(map(len, found))


class ProcessAdapter:
    """Sends each call to the separate process of a model, where the model's own adapter answers the call."""

    counts_tokens = True

    def __init__(self, value: Any, spec: ModelSpec) -> None:
        self._value, self._spec = value, spec

    async def answer(self, kind: str, body: Json, think: bool | None) -> Json:
        *_, found = [item async for item in self._items(_whole, kind, body, think)]
        return found

    def stream(self, kind: str, body: Json, think: bool | None) -> AsyncGenerator[Json]:
        return self._items(_chunks, kind, body, think)

    def _items(self, function: Callable[..., Iterator[Any]], *call: Any) -> AsyncGenerator[Any]:
        """The items of `function(value, spec, *call)`, which runs in the process of the model."""

        def work(emit: Emit, cancelled: Cancellation) -> None:
            emit_each(self._value.stream(function, self._spec, *call), emit, cancelled)

        return stream_from_thread(work)


def _whole(value: Any, spec: ModelSpec, *call: Any) -> Iterator[Json | None]:
    """Yields the whole answer to a `call` (kind, body, think). Runs in the process of the model.

    Before it, yields None every LOOK_SECONDS. If the caller has left, the generator is closed there, and the work ends.
    """
    with asyncio.Runner() as runner:  # its end cancels the task
        task = runner.get_loop().create_task(adapter_for(value, spec, None).answer(*call))
        while not runner.run(asyncio.wait({task}, timeout=LOOK_SECONDS))[0]:
            yield None
        yield task.result()


def _chunks(value: Any, spec: ModelSpec, *call: Any) -> Iterator[Json]:
    """Yields the chunks of the answer to a `call`. Runs in the process of the model."""
    with asyncio.Runner() as runner:
        chunks: Any = adapter_for(value, spec, None).stream(*call)
        try:
            while (chunk := runner.run(_next(chunks))) is not None:
                yield chunk
        finally:
            runner.run(chunks.aclose())


async def _next(chunks: AsyncIterator[Json]) -> Json | None:
    return await anext(chunks, None)


def adapter_for(value: Any, spec: ModelSpec, http: Any) -> EngineAdapter:
    """The adapter of `value`, which `rt.use` yielded for `spec`; `http` is for servers. Raises Refused."""
    if hasattr(value, "run_there"):
        return ProcessAdapter(value, spec)
    if hasattr(type(value), "base_url"):  # reading the value's own takes time: it is checked
        from .openai_http import HttpAdapter

        return HttpAdapter(spec.name, value, http, spec)
    if hasattr(value, "create_chat_completion"):
        from .llama_cpp import LlamaCppAdapter

        return LlamaCppAdapter(value, spec)
    if spec.backend == "fake":
        return EchoAdapter(value, spec)
    if hasattr(value, "config") and hasattr(value, "forward"):
        from .transformers import TransformersAdapter

        return TransformersAdapter(value, spec)
    why = f"it is a {type(value).__name__}, and no adapter here can call one"
    raise cannot(spec.name, why, "model")
