"""OpenAI's response format, made from the pieces that an engine writes.

This module is pure. The names of fields and objects are from OpenAI's API reference: Chat, Completions, Embeddings.
"""

from __future__ import annotations

import base64
import struct
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from msgspec.structs import replace

from ...facts import Value
from ..requests import Json
from . import logprobs
from .logprobs import Token
from .tool_calls import joined_calls


class TextPiece(Value):
    """A piece of an answer's text. The last piece has `finish` and the token counts."""

    text: str = ""
    thought: str = ""  # what the model thinks before its answer
    finish: str = ""  # stop, length or tool_calls
    prompt_tokens: int = 0
    completion_tokens: int = 0
    calls: tuple[Json, ...] = ()  # parts of tool calls, in OpenAI's format for streams
    tokens: tuple[Token, ...] = ()  # of text and thought, if the call requests probabilities
    room: int = 0  # the most tokens of the answer, if the context has room for fewer than requested


class Header(Value):
    """The fields that all chunks of one answer share."""

    id: str
    created: int
    model: str
    chat: bool

    def chunk(self, choices: list[Json], **more: Any) -> Json:
        """One chunk of a stream with these `choices` and `more` fields."""
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return {**self._fields(kind, choices), **more}

    def part(
        self,
        text: str | None,
        finish: str | None = None,
        *,
        index: int = 0,
        first: bool = False,
        thought: str = "",
        calls: Sequence[Json] = (),
        scores: Json | None = None,
    ) -> Json:
        """One chunk of choice `index`; the `first` of a chat has the role, the last `finish`. `scores`: `logprobs`."""
        end = {"finish_reason": finish, "logprobs": scores}
        if not self.chat:
            return self.chunk([{"index": index, "text": text or "", **end}])
        delta: Json = {"role": "assistant"} if first else {}
        if text is not None:
            delta["content"] = text
        if thought:
            delta["reasoning_content"] = thought
        if calls:
            delta["tool_calls"] = list(calls)
        return self.chunk([{"index": index, "delta": delta, **end}])

    def whole(self, answers: Sequence[tuple[str, TextPiece, Json | None]], n: int) -> Json:
        """The whole answer, with one choice for each of the `answers`, of which each prompt has `n`.

        An answer is its text, its last piece, which has all thoughts, and the field `logprobs`.
        """
        choices = []
        for index, (text, last, scores) in enumerate(answers):
            content: Json = {"text": text}
            if self.chat:
                message: Json = {"role": "assistant", "content": text}
                if last.thought:
                    message["reasoning_content"] = last.thought
                if last.calls:
                    message |= {"content": text or None, "tool_calls": list(last.calls)}
                content = {"message": message}
            end = {"finish_reason": last.finish, "logprobs": scores}
            choices.append({"index": index, **content, **end})
        kind = "chat.completion" if self.chat else "text_completion"
        counts = usage([last for _, last, _ in answers], n)
        return {**self._fields(kind, choices), "usage": counts}

    def _fields(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def usage(lasts: Sequence[TextPiece], n: int = 1) -> dict[str, int]:
    """OpenAI's `usage` from the last piece of each choice. A prompt is counted once for its `n` choices."""
    prompt = sum(last.prompt_tokens for last in lasts[::n])
    completion = sum(last.completion_tokens for last in lasts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


Pieces = AsyncGenerator[TextPiece]


async def stream_chunks(
    choices: Sequence[Callable[[], Pieces]], header: Header, body: Json
) -> AsyncIterator[Json]:
    """Yields the chunks of a streamed answer. Each of the `choices` is a function that returns the choice's pieces.

    All chunks have the fields of `header`. The choices are written one after the other. With
    `stream_options.include_usage` in `body` the last chunk has the usage and no choice. No chunk is sent before the
    first piece, so an error before it can become an HTTP status, or another model can answer. A chunk has `x_gpu` if
    the answer is limited to fewer tokens than requested.
    """
    lasts = []
    for index, choice in enumerate(choices):
        last = TextPiece()  # if no piece has `finish`, the gateway reports a cut-off answer
        begun = False
        writer = logprobs.LogprobsWriter(header.chat)
        async with aclosing(choice()) as pieces:
            async for piece in pieces:
                if not begun and (header.chat or piece.room):
                    first = header.part("", index=index, first=True)
                    yield {**first, **_limit(piece)}
                begun = True
                scores = writer.field(piece.tokens, piece.text)
                if piece.thought:
                    yield header.part(None, index=index, thought=piece.thought, scores=scores)
                    scores = None
                if piece.text or scores:
                    yield header.part(piece.text, index=index, scores=scores)
                if piece.calls:
                    yield header.part(None, index=index, calls=piece.calls)
                if piece.finish:
                    last = piece
        yield header.part(None, last.finish, index=index)
        lasts.append(last)
    if asks_usage(body):
        yield header.chunk([], usage=usage(lasts, body.get("n") or 1))


def _limit(piece: TextPiece) -> Json:
    return {"x_gpu": {"max_tokens": piece.room}} if piece.room else {}


async def whole_answer(choices: Sequence[Callable[[], Pieces]], header: Header, body: Json) -> Json:
    """The whole answer, made from the pieces of each choice. `stream_chunks` describes the arguments."""
    answers, limit = [], {}
    for choice in choices:
        writer, scores = logprobs.LogprobsWriter(header.chat), None
        texts, thoughts, calls = [], [], []
        last = TextPiece()  # if no piece has `finish`, the gateway reports a cut-off answer
        async with aclosing(choice()) as pieces:
            async for piece in pieces:
                texts.append(piece.text)
                thoughts.append(piece.thought)
                scores = logprobs.joined(scores, writer.field(piece.tokens, piece.text))
                calls += piece.calls
                limit |= _limit(piece)
                if piece.finish:
                    last = piece
        last = replace(last, thought="".join(thoughts), calls=joined_calls(calls))
        answers.append(("".join(texts), last, scores))
    return {**header.whole(answers, body.get("n") or 1), **limit}


def embeddings(
    vectors: Sequence[Sequence[float]], model: str, tokens: int, encoding: str | None
) -> Json:
    """The answer with these `vectors` of `model`; `tokens` is the number of tokens that were read.

    With the `encoding` "base64", as OpenAI's own client requests it, a vector is the base64 of little-endian float32s,
    else a list of numbers.
    """
    data = [
        {"object": "embedding", "index": at, "embedding": _encoded(vector, encoding)}
        for at, vector in enumerate(vectors)
    ]
    return {
        "id": f"embd-{uuid.uuid4().hex}",  # Mistral's clients read no answer without it
        "object": "list",
        "data": data,
        "model": model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def rerank_answer(scores: Sequence[float], model: str, tokens: int, body: Json) -> Json:
    """The answer with `scores` of the documents in `body`, the best first, as Cohere's and Jina's clients read it."""
    best = sorted(range(len(scores)), key=lambda index: -scores[index])
    results = []
    for index in best[: body.get("top_n")]:
        row: Json = {"index": index, "relevance_score": scores[index]}
        if body.get("return_documents"):
            document = body["documents"][index]
            row["document"] = {"text": document} if isinstance(document, str) else document
        results.append(row)
    return {
        "id": f"rerank-{uuid.uuid4().hex}",
        "object": "list",
        "model": model,
        "results": results,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def _encoded(vector: Sequence[float], encoding: str | None) -> Any:
    if encoding != "base64":
        return list(vector)
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def stops_of(body: Json) -> list[str]:
    """The stop strings of `body`."""
    stop = body.get("stop")
    return [stop] if isinstance(stop, str) else list(stop or ())


def max_tokens_of(body: Json) -> int | None:
    """The most tokens that the answer to `body` may have, or None if `body` sets no limit."""
    given = body.get("max_completion_tokens")
    return body.get("max_tokens") if given is None else given


def wants_json(body: Json) -> bool:
    """Whether the answer to the chat in `body` must be JSON."""
    format = body.get("response_format")
    return isinstance(format, dict) and format.get("type") not in (None, "text")


def asks_usage(body: Json) -> bool:
    """Whether the caller asks in `body` that the stream ends with the usage."""
    options = body.get("stream_options")
    return isinstance(options, dict) and bool(options.get("include_usage"))
