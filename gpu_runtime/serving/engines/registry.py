"""Chooses the adapter that calls a model, and defines the adapter of fake models."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from ...facts import ModelSpec
from .base import EngineAdapter, TextAdapter, cannot
from .openai_format import TextPiece, max_tokens_of


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
        """Yields the words of the model's answer to `prompt(kind, body, think)`, at most as many as `body` allows."""
        prompt = self.prompt(kind, body, think)
        words = str(self.value(prompt)).split(" ")
        limit = max_tokens_of(body)
        limit = len(words) if limit is None else limit
        written = words[:limit]
        if body.get("echo"):
            yield TextPiece(str(prompt))
        for at, word in enumerate(written):
            yield TextPiece(word if at == 0 else f" {word}")
            await asyncio.sleep(0)  # lets other tasks run, so that a disconnect is noticed
        yield TextPiece(
            finish="length" if limit < len(words) else "stop",
            prompt_tokens=len(words),
            completion_tokens=len(written),
        )

    async def vectors(
        self, texts: list[str | list[int]], truncate: bool
    ) -> tuple[list[list[float]], int]:
        """A vector [length, 1] for each of the `texts`, and the number of words or tokens in all of them.

        The length of a text is in characters; the length of a list of tokens is in tokens.
        """
        words = sum(len(text.split() if isinstance(text, str) else text) for text in texts)
        return [[float(len(text)), 1.0] for text in texts], words

    async def scores(self, query: str, documents: list[str]) -> tuple[list[float], int]:
        """A score for each of the `documents`, and the number of words read.

        The score is the part of the query's words that the document has, from 0 to 1.
        """
        wanted = set(query.split())
        found = []
        count = len(query.split())
        for document in documents:
            words = document.split()
            count += len(words)
            found.append(len(wanted.intersection(words)) / max(1, len(wanted)))
        return found, count


def adapter_for(value: Any, spec: ModelSpec, http: Any) -> EngineAdapter:
    """The adapter of `value`, which is the object that `rt.use` yielded for the model of `spec`.

    `http` is the client for engines that are servers. Raises Refused if no adapter fits.
    """
    if hasattr(value, "run_there"):
        from .model_process import ProcessAdapter

        return ProcessAdapter(value, spec, adapter_for)
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
