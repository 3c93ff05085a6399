"""Talking to a llama.cpp model through the methods of `llama_cpp.Llama`, in a thread.

The prompt is made here, from the model's own chat template, so that thinking mode and an overriding template reach it,
its tokens can be counted, and every answer can be ended early. With tools, or where the model has no template, the
library's own chat handler makes it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from ...facts import ModelSpec, Value
from ..queue.thread_stream import Emit, in_thread, pumped
from ..requests import Refused
from .base import TextSpeaker, cannot
from .openai_format import Piece, stops_of, tokens_wanted

_PASSED_ON = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "presence_penalty",
    "frequency_penalty",
    "repeat_penalty",
    "seed",
    "mirostat_mode",
    "mirostat_tau",
    "mirostat_eta",
    "logit_bias",
)
_BY_THE_LIBRARY = (
    "tools",
    "functions",
    "response_format",
    "logprobs",
    "top_logprobs",
)  # its chat handlers know these


class Facts(Value):
    """What a model says of itself, asked once: each question is a way to another process and back."""

    template: str | None
    tokens: dict[str, str]
    context: int


_facts: weakref.WeakKeyDictionary[Any, tuple[ModelSpec, Facts]] = weakref.WeakKeyDictionary()


class LlamaSpeaker(TextSpeaker):
    """`value` has llama.cpp's methods; it may live in another process."""

    kind = "a llama.cpp model"

    @property
    def facts(self) -> Facts:
        spec, known = _facts.get(self.value, (None, None))
        if (
            known is None or spec != self.spec
        ):  # a catalogue may have given it another context since
            known = self._asked()
            _facts[self.value] = self.spec, known
        return known

    def _asked(self) -> Facts:
        metadata = dict(self.value.metadata or {})
        ids = {
            f"{name}_token": metadata.get(f"tokenizer.ggml.{name}_token_id")
            for name in ("bos", "eos")
        }
        tokens = {
            name: _text(self.value.detokenize([int(id)], special=True))
            for name, id in ids.items()
            if id is not None
        }
        return Facts(metadata.get("tokenizer.chat_template"), tokens, int(self.value.n_ctx()))

    def template(self) -> str | None:
        return self.facts.template

    def tokens(self) -> dict[str, str]:
        return self.facts.tokens

    async def answer(self, kind: str, body: dict[str, Any], think: bool | None) -> dict[str, Any]:
        if kind == "chat" and self._by_the_library(body):
            said = await in_thread(lambda: self.value.create_chat_completion(**self._plain(body)))
            return {**said, "model": self.spec.name}
        return await super().answer(kind, body, think)

    async def stream(
        self, kind: str, body: dict[str, Any], think: bool | None
    ) -> AsyncIterator[dict[str, Any]]:
        by_library = kind == "chat" and self._by_the_library(body)
        async with aclosing(
            self._streamed(body) if by_library else super().stream(kind, body, think)
        ) as chunks:
            async for chunk in chunks:
                yield chunk

    def _by_the_library(self, body: dict[str, Any]) -> bool:
        return any(body.get(name) for name in _BY_THE_LIBRARY)

    def _plain(self, body: dict[str, Any]) -> dict[str, Any]:
        known = (*_PASSED_ON, *_BY_THE_LIBRARY, "messages", "stop", "tool_choice", "function_call")
        most = {"max_tokens": tokens_wanted(body)} if tokens_wanted(body) else {}
        return {name: body[name] for name in known if body.get(name) is not None} | most

    async def _streamed(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        def work(emit: Emit, gone: threading.Event) -> None:
            _read(self.value.create_chat_completion(**self._plain(body), stream=True), emit, gone)

        async with aclosing(pumped(work)) as chunks:
            async for chunk in chunks:
                yield {**chunk, "model": self.spec.name}

    def pieces(self, kind: str, body: dict[str, Any], think: bool | None) -> AsyncGenerator[Piece]:
        def work(emit: Emit, gone: threading.Event) -> None:
            most = tokens_wanted(body)
            given = {name: body[name] for name in _PASSED_ON if body.get(name) is not None}
            told = self.value.write(
                self.prompt(kind, body, think),
                kind != "chat",
                most,
                bool(body.get("stream")),
                stop=stops_of(body),
                stream=True,
                **given,
            )

            def tell(part: dict[str, Any]) -> None:
                if "too_long" in part:
                    raise too_long(self.spec.name, part["too_long"], most, self.facts.context)
                emit(Piece(**part))

            _read(told, tell, gone)

        return pumped(work)

    async def vectors(self, texts: list[str]) -> tuple[list[list[float]], int]:
        if self.spec.model_type != "embedding":
            return await super().vectors(texts)
        said = await in_thread(lambda: self.value.create_embedding(texts))
        return [row["embedding"] for row in said["data"]], said["usage"]["prompt_tokens"]


def too_long(model: str, prompt: int, most: int | None, context: int) -> Refused:
    """That prompt and answer do not fit in the context, with the figures."""
    asked = (
        f" and {most} are asked for in answer" if most else ", which leaves no room for an answer"
    )
    return cannot(
        model,
        f"its context is {context} tokens; the prompt has {prompt}{asked}",
        "max_tokens" if most and prompt < context else "messages",
    )


def _read(chunks: Any, tell: Emit, gone: threading.Event) -> None:
    """Reads an iterator until its end, or until nobody listens; then it is closed, which ends the generation."""
    try:
        for chunk in chunks:
            if gone.is_set():
                return
            tell(chunk)
    finally:
        chunks.close()


def _text(said: Any) -> str:
    return said.decode("utf-8", "replace") if isinstance(said, bytes) else str(said)
