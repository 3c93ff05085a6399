"""Which engine adapter answers for a model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from ...facts import ModelSpec
from .base import Speaker, TextSpeaker, cannot
from .openai_format import Piece


class EchoSpeaker(TextSpeaker):
    """A fake model's: it answers with the prompt that it was given, word by word."""

    kind = "a fake model"
    WORD = "{% for m in messages %}{{ m['content'] if loop.last else '' }}{% endfor %}"

    def template(self) -> str:
        return self.WORD

    async def pieces(
        self, kind: str, body: dict[str, Any], think: bool | None
    ) -> AsyncGenerator[Piece]:
        words = str(self.value(self.prompt(kind, body, think))).split(" ")
        most = body.get("max_completion_tokens") or body.get("max_tokens") or len(words)
        said = words[:most]
        for at, word in enumerate(said):
            yield Piece(word if at == 0 else f" {word}")
            await asyncio.sleep(0)  # so that others are heard, and whoever goes away is noticed
        yield Piece(
            finish="length" if most < len(words) else "stop",
            prompt_tokens=len(words),
            completion_tokens=len(said),
        )

    async def vectors(self, texts: list[str]) -> tuple[list[list[float]], int]:
        return [[float(len(text)), 1.0] for text in texts], sum(len(text.split()) for text in texts)


def speaker_for(value: Any, spec: ModelSpec, http: Any) -> Speaker:
    """Who talks to what `rt.use` yielded. `http` is the client for engines that are servers. Raises Refused."""
    if hasattr(value, "base_url"):
        from .openai_http import RemoteSpeaker

        return RemoteSpeaker(spec.name, value, http, spec)
    if hasattr(value, "create_chat_completion"):
        from .llama_cpp import LlamaSpeaker

        return LlamaSpeaker(value, spec)
    if spec.backend == "fake":
        return EchoSpeaker(value, spec)
    if hasattr(value, "config") and hasattr(value, "forward"):
        from .transformers import ModuleSpeaker

        return ModuleSpeaker(value, spec)
    raise cannot(
        spec.name,
        f"it is a {type(value).__name__}, and nothing here knows how to talk to one",
        "model",
    )
