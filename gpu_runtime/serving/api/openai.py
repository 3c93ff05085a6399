"""`/v1/*`: models as OpenAI's clients call them, whole or word by word, and long work as jobs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, StreamingResponse

from ..requests import Refused, Reply
from .jobs import ENDPOINTS, Jobs

T = TypeVar("T")
_MESSAGE = {
    "type": "object",
    "required": ["role"],
    "properties": {"role": {"type": "string"}, "content": {}},
}
_FIELDS: dict[str, dict[str, Any]] = {
    "chat": {"messages": {"type": "array", "minItems": 1, "items": _MESSAGE}},
    "completions": {
        "prompt": {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
    },
    "embeddings": {
        "input": {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
    },
    "images": {"prompt": {"type": "string"}},
}
_STREAMS = ("chat", "completions")


class Gone(Exception):
    """The client has hung up."""


def schema(kind: str) -> dict[str, Any]:
    """The body of such a call, as OpenAPI says it; fields that are not named here are the engine's to know."""
    fields = {
        "model": {
            "type": "string",
            "description": "a model's name, task:NAME, or provider:model for a cloud",
        },
        **_FIELDS[kind],
    }
    extra: dict[str, Any] = {
        "x_client_id": {
            "type": "string",
            "maxLength": 128,
            "description": "your program's name: its profile and pace",
        },
        "x_priority": {
            "description": "urgent, high, normal, low, batch, or a number: lower is more important"
        },
        "x_stay_warm": {
            "type": "number",
            "minimum": 0,
            "description": "seconds that the model is kept afterwards",
        },
        "x_cooldown": {
            "type": "number",
            "minimum": 0,
            "description": "seconds in which this client may not call",
        },
    }
    if kind in _STREAMS:
        extra = {
            "stream": {"type": "boolean"},
            "max_tokens": {"type": "integer", "minimum": 1},
            **extra,
        }
    return {
        "type": "object",
        "required": list(fields),
        "properties": fields | extra,
        "additionalProperties": True,
    }


async def read_json(request: Request) -> Any:
    """The request's body. Raises Refused, 400, for what is no JSON, and for NaN, which is none either."""
    try:
        return json.loads(await request.body(), parse_constant=_no_number)
    except RecursionError:
        raise Refused(400, "bad_body", "the body is nested too deeply") from None
    except ValueError as error:  # also UnicodeDecodeError
        raise Refused(400, "bad_body", f"the body is no JSON: {error}") from None


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is no JSON number")


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """What the work gives; where the client hangs up first, the work is cancelled and Gone is raised."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Gone
        return task.result()
    finally:
        for one in (gone, task):
            if not one.done():
                one.cancel()
                await asyncio.gather(one, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def events(reply: Reply) -> AsyncIterator[bytes]:
    """The answer as server-sent events. What fails half-way is told as the last of them, as OpenAI does."""
    try:
        assert reply.events is not None
        async for chunk in reply.events:
            yield b"data: %b\n\n" % msgspec.json.encode(chunk)
        yield b"data: [DONE]\n\n"
    except Refused as refused:
        yield f"data: {json.dumps(refused.body())}\n\n".encode()
    finally:
        await reply.aclose()


class Sent(StreamingResponse):
    """An answer on its way, closed also where its client hung up before the first word: then nobody ever reads it."""

    def __init__(self, reply: Reply) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"} | reply.headers
        super().__init__(events(reply), media_type="text/event-stream", headers=headers)
        self._reply = reply

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._reply.aclose()


def router(gateway: Any, jobs: Jobs, acts: Any) -> APIRouter:
    """The routes. `gateway()` gives the Gateway; `acts` lets only those through who may act, and answers their name."""
    routes = APIRouter(prefix="/v1")

    @routes.get("/models", tags=["models"])
    def get_models() -> dict[str, Any]:
        """The models that can be asked for."""
        return {"object": "list", "data": gateway().models()}

    def add(kind: str, path: str, words: str) -> None:
        async def post(request: Request, who: str = acts) -> Any:
            body = await read_json(request)
            try:
                reply = await unless_gone(request, gateway().answer(kind, body, who))
            except Gone:
                return JSONResponse({}, 499)  # nobody reads it
            if reply.events is None:
                return JSONResponse(reply.json, headers=reply.headers)
            return Sent(reply)

        routes.add_api_route(
            path,
            post,
            methods=["POST"],
            name=kind,
            summary=words,
            tags=["models"],
            response_model=None,
            responses=REFUSALS,
            openapi_extra={
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": schema(kind)}},
                }
            },
        )

    add("chat", "/chat/completions", "An answer to a conversation, whole or word by word")
    add("completions", "/completions", "How a text goes on")
    add("embeddings", "/embeddings", "Vectors for texts")
    add("images", "/images/generations", "Pictures for a prompt")

    @routes.post(
        "/jobs",
        status_code=202,
        tags=["jobs"],
        response_model=None,
        responses=REFUSALS,
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {
                    "application/json": {
                        "schema": {
                            "type": "object",
                            "required": ["endpoint", "body"],
                            "properties": {
                                "endpoint": {"enum": list(ENDPOINTS)},
                                "body": {"type": "object"},
                            },
                        }
                    }
                },
            }
        },
    )
    async def post_job(request: Request, who: str = acts) -> JSONResponse:
        """Long work: the call is made whether or not anybody waits. `endpoint` and `body` as it would be called."""
        job = jobs.start(gateway(), await read_json(request), who)
        return JSONResponse(job.told(), 202, headers={"Location": f"/v1/jobs/{job.id}"})

    @routes.get(
        "/jobs/{id}",
        tags=["jobs"],
        responses={404: {"description": "no such job, or it is long over"}},
    )
    def get_job(id: str) -> dict[str, Any]:
        """How a job stands; its result once it is done."""
        return jobs.find(id).told()

    @routes.delete("/jobs/{id}", tags=["jobs"], responses={404: {"description": "no such job"}})
    async def delete_job(id: str, who: str = acts) -> dict[str, Any]:
        """Ends a job, and forgets one that is done."""
        return (await jobs.end(id)).told()

    return routes


REFUSALS: dict[int | str, dict[str, Any]] = {
    400: {"description": "something in the body is wrong; the message names it"},
    404: {"description": "no such model or task"},
    409: {"description": "it cannot be had while others use what it needs"},
    429: {"description": "this client is in cooldown; Retry-After says how long"},
    500: {"description": "the engine failed"},
    502: {"description": "the engine, or the cloud in its place, failed"},
    504: {
        "description": "the budget is shorter than loading and answering would take, or is spent"
    },
    503: {
        "description": "not now: the queue is full, the model keeps failing, or nothing can answer in its place"
    },
    507: {"description": "the model does not fit"},
}
