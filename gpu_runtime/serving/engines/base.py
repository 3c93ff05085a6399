"""One way to talk to every kind of engine: an OpenAI-shaped body goes in, OpenAI-shaped dicts come out.

What `rt.use` yields decides which: a handle with a `base_url` is spoken to over HTTP, a proxy with llama.cpp's methods
in a thread, a transformers module by `generate`, and a fake model answers with what it was asked.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, Protocol

from ...errors import GpuError
from ...facts import ModelSpec
from ..requests import Refused
from ..routing.profiles import thought
from . import chat_template
from .openai_format import Header, Piece, embeddings, gathered, streamed

TEXT_TYPES = ("llm", "embedding", "reranker")
SILENT_TYPES = ("embedding", "reranker", "diffusion")


class Speaker(Protocol):
    """Talks to one model for the length of one call.

    Raises Refused (400) for what the model cannot be asked, EngineFailed or an error of the engine where it fails.
    """

    async def answer(
        self, kind: str, body: dict[str, Any], think: bool | None
    ) -> dict[str, Any]: ...

    def stream(
        self, kind: str, body: dict[str, Any], think: bool | None
    ) -> AsyncIterator[dict[str, Any]]: ...


class EngineFailed(GpuError):
    """An engine did not answer as it should. Attributes: name, why."""


def cannot(model: str, why: str, param: str | None = None) -> Refused:
    """That the model cannot be asked this, whoever asks."""
    return Refused(400, "not_supported", f"{model} cannot be asked this: {why}", param=param)


def require(kind: str, spec: ModelSpec) -> None:
    """That a model of that type can be asked this, before it is loaded for nothing and others leave for it. Raises
    Refused, 400."""
    if kind == "images" and spec.model_type in TEXT_TYPES:
        raise cannot(
            spec.name,
            f"it is of type {spec.model_type} and makes no images; those are for type diffusion",
            "model",
        )
    if kind in ("chat", "completions") and spec.model_type in SILENT_TYPES:
        raise cannot(spec.name, f"it is of type {spec.model_type} and writes no text", "model")
    if kind == "embeddings" and (
        spec.model_type == "diffusion"
        or spec.backend == "llama_cpp"
        and spec.model_type != "embedding"
    ):
        raise cannot(
            spec.name, f"it is of type {spec.model_type}; embeddings want type embedding", "model"
        )


class TextSpeaker:
    """What all engines have in common that give text piece by piece, and vectors."""

    kind = "a model"

    def __init__(self, value: Any, spec: ModelSpec) -> None:
        self.value, self.spec = value, spec

    def pieces(self, kind: str, body: dict[str, Any], think: bool | None) -> AsyncGenerator[Piece]:
        """The answer to what `prompt` makes of the body; that may take a while, and is done where the engine works."""
        raise cannot(self.spec.name, f"{self.kind} writes no text")

    def prompt(self, kind: str, body: dict[str, Any], think: bool | None) -> Any:
        """What the engine is given: the conversation by its chat template, or the text as it came."""
        if kind == "completions":
            return body["prompt"]
        template = chat_template.override(self.spec.options) or self.template()
        messages, switches = thought(body["messages"], think, template)
        try:
            if template is None:
                raise cannot(
                    self.spec.name,
                    "it has no chat template; give it one (chat_template in the catalogue), "
                    "or use /v1/completions",
                )
            tools = {"tools": body["tools"]} if body.get("tools") else {}
            return chat_template.render(template, messages, **self.tokens(), **tools, **switches)
        except chat_template.BadConversation as error:
            raise Refused(400, "bad_conversation", str(error), param="messages") from None

    def template(self) -> str | None:
        """The chat template that came with the model."""
        return None

    def tokens(self) -> dict[str, str]:
        """How it writes the beginning and the end of a sequence."""
        return {}

    async def vectors(self, texts: list[str]) -> tuple[list[list[float]], int]:
        """An embedding of each text, and the tokens read."""
        raise cannot(
            self.spec.name,
            f"it is of type {self.spec.model_type}; embeddings want type embedding",
            "model",
        )

    async def answer(self, kind: str, body: dict[str, Any], think: bool | None) -> dict[str, Any]:
        if kind == "embeddings":
            wanted = body["input"]
            vectors, tokens = await self.vectors(
                [wanted] if isinstance(wanted, str) else list(wanted)
            )
            return embeddings(vectors, self.spec.name, tokens, body.get("encoding_format"))
        self._require_text(kind, body)
        return await gathered(self.pieces(kind, body, think), self._header(kind))

    async def stream(
        self, kind: str, body: dict[str, Any], think: bool | None
    ) -> AsyncIterator[dict[str, Any]]:
        self._require_text(kind, body)
        async with aclosing(
            streamed(self.pieces(kind, body, think), self._header(kind), body)
        ) as chunks:
            async for chunk in chunks:
                yield chunk

    def _header(self, kind: str) -> Header:
        prefix = "chatcmpl" if kind == "chat" else "cmpl"
        return Header(
            f"{prefix}-{uuid.uuid4().hex}", int(time.time()), self.spec.name, kind == "chat"
        )

    def _require_text(self, kind: str, body: dict[str, Any]) -> None:
        if kind == "images":
            raise cannot(
                self.spec.name, "it makes no images; those are for type diffusion", "model"
            )
        if (body.get("n") or 1) != 1:
            raise cannot(self.spec.name, "it gives one answer at a time", "n")
