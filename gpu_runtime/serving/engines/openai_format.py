"""Answers in OpenAI's shapes, from what engines say piece by piece.

Pure. The names of fields and objects are OpenAI's: API reference, Chat, Completions, Embeddings.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

from ...facts import Value


class Piece(Value):
    """A part of an answer's text; the last one says how it ended and what it took."""

    text: str = ""
    finish: str = ""  # stop or length
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Header(Value):
    """What all parts of one answer have in common."""

    id: str
    created: int
    model: str
    chat: bool

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **more,
        }

    def part(
        self, text: str | None, finish: str | None = None, first: bool = False
    ) -> dict[str, Any]:
        if not self.chat:
            return self.chunk(
                [{"index": 0, "text": text or "", "finish_reason": finish, "logprobs": None}]
            )
        delta: dict[str, Any] = {"role": "assistant"} if first else {}
        if text is not None:
            delta["content"] = text
        return self.chunk([{"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}])

    def whole(self, text: str, last: Piece) -> dict[str, Any]:
        inner: dict[str, Any] = (
            {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        )
        choice = {"index": 0, **inner, "finish_reason": last.finish, "logprobs": None}
        return {
            "id": self.id,
            "object": "chat.completion" if self.chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": [choice],
            "usage": usage(last),
        }


def usage(last: Piece) -> dict[str, int]:
    return {
        "prompt_tokens": last.prompt_tokens,
        "completion_tokens": last.completion_tokens,
        "total_tokens": last.prompt_tokens + last.completion_tokens,
    }


async def streamed(
    pieces: AsyncGenerator[Piece], header: Header, body: dict[str, Any]
) -> AsyncIterator[dict[str, Any]]:
    """The chunks of a streamed answer; with `stream_options.include_usage` the last one has the usage and no choice.

    None comes before the engine has said something: what fails until then is told by a status, or answered by another.
    """
    last, begun = Piece(finish="stop"), not header.chat
    async with aclosing(pieces):
        async for piece in pieces:
            if not begun:
                begun = True
                yield header.part("", first=True)
            if piece.text:
                yield header.part(piece.text)
            if piece.finish:
                last = piece
    yield header.part(None, last.finish)
    options = body.get("stream_options")
    if isinstance(options, dict) and options.get("include_usage"):
        yield header.chunk([], usage=usage(last))


async def gathered(pieces: AsyncGenerator[Piece], header: Header) -> dict[str, Any]:
    """The whole answer at once."""
    texts, last = [], Piece(finish="stop")
    async with aclosing(pieces):
        async for piece in pieces:
            texts.append(piece.text)
            if piece.finish:
                last = piece
    return header.whole("".join(texts), last)


def embeddings(
    vectors: Sequence[Sequence[float]], model: str, tokens: int, encoding: str | None
) -> dict[str, Any]:
    """Vectors as numbers, or as the base64 of little-endian float32s, which OpenAI's own client asks for."""

    def written(vector: Sequence[float]) -> Any:
        if encoding != "base64":
            return list(vector)
        return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()

    data = [
        {"object": "embedding", "index": at, "embedding": written(vector)}
        for at, vector in enumerate(vectors)
    ]
    return {
        "object": "list",
        "data": data,
        "model": model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


class StopText:
    """Cuts a text at the first of some stop strings, however it comes in pieces.

    >>> stop = StopText(["END"])
    >>> [stop.feed(text) for text in ("one E", "N", "D two")], stop.hit
    (['one ', '', ''], True)
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.hit = False

    def feed(self, text: str) -> str:
        """What may be told by now: all but an end that may be the beginning of a stop string."""
        if self.hit:
            return ""
        text = self._held + text
        at = min((found for stop in self._stops if (found := text.find(stop)) >= 0), default=-1)
        if at >= 0:
            self.hit, self._held = True, ""
            return text[:at]
        keep = max(
            (
                size
                for stop in self._stops
                for size in range(1, len(stop))
                if text.endswith(stop[:size])
            ),
            default=0,
        )
        self._held = text[len(text) - keep :] if keep else ""
        return text[: len(text) - keep] if keep else text

    def rest(self) -> str:
        """What was held back for nothing."""
        held, self._held = self._held, ""
        return held


def stops_of(body: dict[str, Any]) -> list[str]:
    stop = body.get("stop")
    return [stop] if isinstance(stop, str) else list(stop or ())


def tokens_wanted(body: dict[str, Any]) -> int | None:
    """How many tokens the answer may have; None: nobody said."""
    return body.get("max_completion_tokens") or body.get("max_tokens")
