"""What the routes share: a strict reader of bodies, who may call a route, and the translation of other formats."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from typing import Any

from fastapi import Depends, HTTPException, Request
from fastapi.routing import APIRoute

from ...web import json_body
from ..engines.openai_format import joined_calls
from ..requests import Json, Refused, Reply, bad


class StrictRequest(Request):
    """A request whose JSON is read strictly. FastAPI's own reader accepts NaN and lone surrogates."""

    async def json(self) -> Any:
        """The body. Raises Refused (400) if it is no JSON, and (415) if it is compressed."""
        if not hasattr(self, "_json"):
            encoding = self.headers.get("content-encoding", "")
            if encoding.lower() not in ("", "identity"):
                text = f"the body is compressed ({encoding[:60]}); send it as plain JSON"
                raise Refused(415, "bad_body", text)
            try:
                self._json = json_body.parsed(await self.body())
            except ValueError as error:
                raise Refused(400, "bad_body", str(error)) from None
        return self._json


class StrictRoute(APIRoute):
    """A route whose handler gets a StrictRequest."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Any]]:
        """The handler. A body that FastAPI would parse is parsed before, for its own error."""
        original = super().get_route_handler()
        has_body = self.body_field is not None

        async def handle(request: Request) -> Any:
            strict = StrictRequest(request.scope, request.receive)
            kind = request.headers.get("content-type", "json")
            if has_body and "json" in kind and await strict.body():
                await strict.json()
            return await original(strict)

        return handle


class CallRoute(StrictRoute):
    """A route that `application` answers without FastAPI's routing, a seventh of the time of a short call."""


async def _actor(request: Request) -> str:
    """The name of the visitor who sent `request`. Raises HTTPException (403) if the visitor may not act.

    FastAPI would call a function that is not async in a thread, which takes a third of the time of a short call.
    """
    visitor = request.scope["state"]["visitor"]
    if not visitor.may_act:
        needed = "that takes the operator's token, and a server that is not read-only"
        raise HTTPException(403, f"{visitor.name} may look and not act: {needed}")
    return visitor.name


async def caller(request: Request) -> str:
    """The name of the visitor who sent `request`. Raises HTTPException (403) if the visitor may not call models."""
    visitor = request.scope["state"]["visitor"]
    return visitor.name if visitor.may_call else await _actor(request)


# The name of the visitor as a parameter of a route, which refuses visitors who may not act, or not call models.
ACTS, CALLS = Depends(_actor), Depends(caller)


# -- routes whose format is not OpenAI's
#
# Such a route translates the request into a chat in OpenAI's format, and the answer back into the route's own format.

EVENTS = "text/event-stream"
# A pattern of a chat's field, and the path in the route's own body.
Paths = tuple[tuple[str, str], ...]


def in_own_words(refused: Refused, paths: Paths) -> Refused:
    """The refusal of a chat, with the path of the wrong field as it is in the route's own body.

    >>> refused = Refused(400, "bad_field", "max_tokens=0 cannot be used", param="max_tokens")
    >>> in_own_words(refused, (("max_tokens", "max_output_tokens"),)).message
    'max_output_tokens=0 cannot be used'
    """
    field = str(refused.facts.get("param") or "")
    for pattern, path in paths:
        found = re.match(pattern, field)
        if not found:
            continue
        own = found.expand(path) + field[found.end() :]
        text = refused.message
        if text.startswith(field):
            text = own + text[len(field) :]
        facts = {**refused.facts, "param": own}
        return Refused(refused.status, refused.code, text, refused.retry_after, **facts)
    return refused


def require_object(body: Any) -> None:
    """Raises Refused (400) if `body` is not a JSON object."""
    if not isinstance(body, Mapping):
        raise Refused(400, "bad_body", "the body must be a JSON object")


def chat_fields(body: Any, same: tuple[str, ...]) -> Json:
    """The fields of `body` that a chat has under the `same` name, and ours; for a stream, also `stream_options`."""
    require_object(body)
    chat = {name: value for name, value in body.items() if name in same or name[:2] == "x_"}
    if chat.get("stream"):
        chat["stream_options"] = {"include_usage": True}
    return chat


def functions(tools: Any, function: Callable[[str, Any], Json]) -> dict[str, list[Json]]:
    """The field `tools` of a chat. `function(place, tool)` translates each of `tools`; `place` is for messages."""
    if not isinstance(tools or [], list):
        raise bad("tools", tools, "a list of tools")
    made = [function(f"tools[{at}]", tool) for at, tool in enumerate(tools or ())]
    return {"tools": made} if made else {}


def logprobs_of(choice: Mapping[str, Any]) -> list[Json]:
    """The tokens of a chat's `choice` with their probabilities; none if the call did not request them."""
    return (choice.get("logprobs") or {}).get("content") or []


def named_event(kind: str, **fields: Any) -> bytes:
    """A server-sent event of this `kind`, with `fields` as its data."""
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


class Writer:
    """Writes the answer to one call in another format. A stream's chunks become events of the type `media_type`."""

    paths: Paths = ()
    media_type = EVENTS

    def __init__(self) -> None:
        self.model, self.finish = "", "stop"
        self.usage: Any = None
        self.run = ""  # what the open block has: thinking or text; empty: no block is open
        self._begun = False
        self._calls: list[Json] = []  # parts of calls

    def whole(self, reply: Reply) -> Json:
        """The answer in `reply`, which is not streamed."""
        return reply.json or {}

    def begin(self, chunk: Json) -> Iterable[bytes]:
        """The events before the first `chunk`."""
        return ()

    def tokens(self, entries: list[Json]) -> None:
        """Takes the probabilities of the next tokens, in a chat's format. Most formats have no place for them."""

    def begin_run(self) -> list[bytes]:
        """The events at the begin of a block: of consecutive thoughts, or of consecutive text (`run`)."""
        return []

    def piece(self, text: str) -> bytes:
        """The event for a piece of the open block."""
        raise NotImplementedError

    def end_run(self) -> list[bytes]:
        """The events at the end of a block."""
        return []

    def close_run(self) -> list[bytes]:
        """Ends the open block, if there is one. Returns its last events."""
        found = self.end_run() if self.run else []
        self.run = ""
        return found

    def pieces(self, thought: str, text: str) -> Iterable[bytes]:
        """The events for a piece of thoughts and a piece of text. Either piece may be empty."""
        for kind, piece in (("thinking", thought), ("text", text)):
            if not piece:
                continue
            if self.run != kind:
                yield from self.close_run()
                self.run = kind
                yield from self.begin_run()
            yield self.piece(piece)

    def end(self, calls: list[Json]) -> Iterable[bytes]:
        """The last events. `calls` are the tool calls in OpenAI's format."""
        raise NotImplementedError

    def error(self, error: Json) -> bytes:
        """The last event of a stream that ends with this `error`. The `error` is in OpenAI's format."""
        raise NotImplementedError

    def refusal(self, refused: Refused) -> bytes:
        """The only event of a stream whose call was `refused` after its headers were sent."""
        return self.error(in_own_words(refused, self.paths).body()["error"])

    async def events(self, reply: Reply) -> AsyncIterator[bytes]:
        """Yields a streamed `reply` as events. An error after the stream has started is the last event."""
        assert reply.events is not None
        try:
            async for chunk in reply.events:
                if "error" in chunk and "choices" not in chunk:
                    yield self.error(chunk["error"])
                    return
                for event in self._read(chunk):
                    yield event
            for event in self.end(list(joined_calls(self._calls))):
                yield event
        finally:
            await reply.aclose()

    def _read(self, chunk: Json) -> Iterable[bytes]:
        if not self._begun:
            self._begun, self.model = True, chunk.get("model", "")
            yield from self.begin(chunk)
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {"content": choice.get("text")}
            thought, text = delta.get("reasoning_content") or "", delta.get("content") or ""
            self.tokens(logprobs_of(choice))
            if thought or text:
                yield from self.pieces(thought, text)
            self._calls += delta.get("tool_calls") or ()
            self.finish = choice.get("finish_reason") or self.finish
