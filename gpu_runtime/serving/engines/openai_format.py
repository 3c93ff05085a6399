"""OpenAI's response format, made from the pieces that an engine writes.

This module is pure. The names of fields and objects are from OpenAI's API reference: Chat, Completions, Embeddings.
"""

from __future__ import annotations

import base64
import struct
import uuid
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from msgspec.structs import replace

from ...facts import Value
from ..requests import Json
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
        writer = LogprobsWriter(header.chat)
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
        writer, scores = LogprobsWriter(header.chat), None
        texts, thoughts, calls = [], [], []
        last = TextPiece()  # if no piece has `finish`, the gateway reports a cut-off answer
        async with aclosing(choice()) as pieces:
            async for piece in pieces:
                texts.append(piece.text)
                thoughts.append(piece.thought)
                scores = joined(scores, writer.field(piece.tokens, piece.text))
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

    def encoded(vector: Sequence[float]) -> Any:
        if encoding != "base64":
            return list(vector)
        return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()

    data = [
        {"object": "embedding", "index": at, "embedding": encoded(vector)}
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


# -- the probabilities of an answer's tokens, in the formats of Chat and Completions
#
# A probability is what the model computed for a token, before temperature, penalties, biases and grammars change it. It
# is given as its natural logarithm.

LEAST = -9999.0  # stands for a probability of zero, because JSON has no infinity
Scored = tuple[bytes, float]  # the bytes of a token, and the logarithm of its probability


class Token(Value):
    """A token that the model wrote. Its bytes may be only a part of a character."""

    data: bytes
    logprob: float | None  # None for the first token of a prompt
    top: tuple[Scored, ...] = ()  # the most probable tokens in its place, in order


def count_of(body: Mapping[str, Any]) -> int | None:
    """How many of the most probable tokens `body` requests for each token; None if it requests no probabilities.

    >>> count_of({"logprobs": True}), count_of({"logprobs": True, "top_logprobs": 2})  # Chat
    (0, 2)
    >>> count_of({"logprobs": 3}), count_of({}), count_of({"logprobs": False})  # the first: Completions
    (3, None, None)
    """
    wanted = body.get("logprobs")
    if wanted is None or wanted is False:
        return None
    return (body.get("top_logprobs") or 0) if wanted is True else wanted


class Unsent:
    """Holds each token that the model wrote until the text with the token's first byte is sent to the caller.

    The text may be sent later than its tokens are written, because the beginning of a stop string is held back.

    >>> unsent = Unsent()
    >>> for data in (b"Hel", b"lo", b" EN", b"D"):
    ...     unsent.add(Token(data, -0.5))
    >>> [token.data for token in unsent.take("Hello")]
    [b'Hel', b'lo']
    >>> [token.data for token in unsent.take_rest()]
    [b' EN', b'D']
    """

    def __init__(self) -> None:
        """There are no tokens and no text yet."""
        self._tokens: deque[Token] = deque()
        self._begin = 0  # where the first of the tokens begins, in bytes of the answer
        self._sent = 0  # bytes of the answer

    def add(self, token: Token) -> None:
        """Adds the next `token` that the model wrote."""
        self._tokens.append(token)

    def take(self, text: str) -> tuple[Token, ...]:
        """Removes and returns the tokens that begin in `text`, which is the next part of the answer."""
        self._sent += len(text.encode())
        taken = []
        while self._tokens and self._begin < self._sent:
            token = self._tokens.popleft()
            self._begin += len(token.data)
            taken.append(token)
        return tuple(taken)

    def take_rest(self) -> tuple[Token, ...]:
        """Removes and returns all tokens. Call this at the end of a text that no stop string has cut."""
        rest = tuple(self._tokens)
        self._tokens.clear()
        return rest


class LogprobsWriter:
    """Writes the field `logprobs` of one choice, whole or chunk by chunk."""

    def __init__(self, chat: bool) -> None:
        """Writes the format of Chat if `chat` is true, else the format of Completions."""
        self._chat = chat
        self._offset = 0  # in characters of the text of Completions

    def field(self, tokens: Iterable[Token], text: str) -> Json | None:
        """The field for the next `tokens`, which begin in `text`; None if there are none."""
        found = list(tokens)
        if not found:
            return None
        if self._chat:
            return {"content": [_entry(token) for token in found], "refusal": None}
        if found[0].logprob is None:  # a prompt may have tokens before its text, such as <s>
            self._offset = len(text) - sum(len(_text(token.data)) for token in found)
        offsets = []
        for token in found:
            offsets.append(max(0, self._offset))
            self._offset += len(_text(token.data))
        return {
            "tokens": [_name(token.data) for token in found],
            "token_logprobs": [_finite(token.logprob) for token in found],
            "top_logprobs": [_top(token) for token in found],
            "text_offset": offsets,
        }


def _entry(token: Token) -> Json:
    top = [_described(data, logprob) for data, logprob in token.top]
    return {**_described(token.data, token.logprob), "top_logprobs": top}


def _described(data: bytes, logprob: float) -> Json:
    return {"token": _text(data), "logprob": _finite(logprob), "bytes": list(data)}


def joined(one: Json | None, next: Json | None) -> Json | None:
    """The fields `one` and `next` of one choice, as one field.

    >>> joined({"content": [1], "refusal": None}, {"content": [2], "refusal": None})
    {'content': [1, 2], 'refusal': None}
    """
    if one is None or next is None:
        return one or next
    return {name: value and value + next[name] for name, value in one.items()}


def _top(token: Token) -> dict[str, float | None] | None:
    """The most probable tokens and the written `token`, with the logarithms of their probabilities."""
    if token.logprob is None:
        return None
    pairs = (*token.top, (token.data, token.logprob))
    return {_name(data): _finite(logprob) for data, logprob in pairs}


def _name(data: bytes) -> str:
    r"""The text of a token; for a part of a character its bytes, as in OpenAI's Completions.

    >>> _name(b"fox"), _name(b"\xe2\x80")
    ('fox', 'bytes:\\xe2\\x80')
    """
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LEAST)
