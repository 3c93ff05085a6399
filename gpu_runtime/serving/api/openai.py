"""The routes `/v1/*`, in the format of OpenAI's clients.

An answer is sent whole or as a stream. A long call can run as a job, which continues after its caller has disconnected.
The caller fetches the result later.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from ...errors import GpuError
from ...web import json_body
from ..breaker import refusal_of
from ..requests import Json, Refused, Reply
from ..store import Store
from ..thread_stream import in_thread
from .calls import CALLS, EVENTS, CallRoute, StrictRoute, Writer, in_own_words

T = TypeVar("T")
HEADERS_SECONDS = 1.0  # a stream that has not begun by then gets its headers, and what it waits for
# The same if its model must be loaded. A model that never fits is refused by then.
LOAD_HEADERS_SECONDS = 0.1
COMMENT_SECONDS = 5.0  # between two comments on what a stream waits for
_MESSAGE = {
    "type": "object",
    "required": ["role"],
    "properties": {"role": {"type": "string"}, "content": {}},
}
_TEXTS = {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
_MODEL = {
    "type": "string",
    "description": "a model's name, task:NAME, or provider:model for a cloud",
}
_OWN_FIELDS: dict[str, Json] = {
    "x_client_id": {
        "type": "string",
        "maxLength": 128,
        "description": "your program's name: selects its profile and cooldown",
    },
    "x_priority": {
        "description": "urgent, high, normal, low, batch, or a number: lower is more important"
    },
    "x_stay_warm": {
        "type": "number",
        "minimum": 0,
        "description": "seconds that the model stays on its device afterwards",
    },
    "x_cooldown": {
        "type": "number",
        "minimum": 0,
        "description": "seconds in which further calls of this client are refused",
    },
}
_STREAM_FIELDS: dict[str, Json] = {
    "stream": {"type": "boolean"},
    "max_tokens": {"type": "integer", "minimum": 1},
}
# The paths of calls that can be jobs, and their kinds.
ENDPOINTS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/embeddings": "embeddings",
    "/v1/images/generations": "images",
}
_JOB_SCHEMA = {
    "type": "object",
    "required": ["endpoint", "body"],
    "properties": {"endpoint": {"enum": list(ENDPOINTS)}, "body": {"type": "object"}},
}
_TEXT = {"type": "string"}
_CALLS: dict[str, tuple[str, str, Json]] = {  # kind -> path, summary, fields
    "chat": (
        "/chat/completions",
        "An answer to a conversation, whole or streamed",
        {"messages": {"type": "array", "minItems": 1, "items": _MESSAGE}},
    ),
    "completions": ("/completions", "The continuation of a text", {"prompt": _TEXTS}),
    "embeddings": ("/embeddings", "Vectors for texts", {"input": _TEXTS}),
    "images": ("/images/generations", "Images for a prompt", {"prompt": _TEXT}),
    "rerank": (
        "/rerank",
        "How well documents fit a query, the best first",
        {"query": _TEXT, "documents": {"type": "array", "minItems": 1}},
    ),
    "tokenize": ("/tokenize", "The tokens of a text", {"prompt": _TEXT}),
    "detokenize": (
        "/detokenize",
        "The text of tokens",
        {"tokens": {"type": "array", "minItems": 1, "items": {"type": "integer"}}},
    ),
}
# Paths that other servers have outside /v1: vLLM and llama-server those of tokens, and Cohere the other.
_OUTSIDE = {"/tokenize": "tokenize", "/detokenize": "detokenize", "/v2/rerank": "rerank"}
REFUSALS: dict[int | str, Json] = {
    400: {"description": "something in the body is wrong; the message names it"},
    404: {"description": "no such model or task"},
    409: {"description": "the model cannot be had while others use what it needs"},
    429: {"description": "this client is in cooldown; Retry-After has the seconds"},
    500: {"description": "the engine failed"},
    502: {"description": "the engine, or the cloud in its place, failed"},
    503: {
        "description": "not now: the queue is full, the model keeps failing, or no other model can answer"
    },
    504: {
        "description": "the budget is shorter than loading and answering would take, or is spent"
    },
    507: {"description": "the model does not fit"},
}


def visitor_name(request: Request) -> str:
    """The name of the visitor who sent `request`."""
    return request.scope["state"]["visitor"].name


def body_schema(required: Json, optional: Json) -> Json:
    """The OpenAPI schema of a body with the `required` and `optional` fields, which may have more fields."""
    return {
        "type": "object",
        "required": list(required),
        "properties": {**required, **optional},
        "additionalProperties": True,
    }


async def unless_gone(
    request: Request, work: Awaitable[T], more: asyncio.Future[Any] | None = None
) -> T:
    """The result of `work`. If the client of `request` leaves, cancels it and `more`, and raises Refused (499)."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Refused(499, "client_gone", "the client has left")
        more = None
        return task.result()
    finally:
        gone.cancel()
        for unfinished in (task, more):
            if unfinished is not None and not unfinished.done():
                unfinished.cancel()
                await asyncio.gather(unfinished, return_exceptions=True)
        del task, unfinished  # else a cycle: task -> error -> traceback -> this frame


class OpenAIWriter(Writer):
    """Sends the chunks as they are. An error after the start is the last event, as in OpenAI's streams."""

    def error(self, error: Json) -> bytes:
        return f"data: {json.dumps({'error': error})}\n\n".encode()

    async def events(self, reply: Reply) -> AsyncIterator[bytes]:
        assert reply.events is not None
        try:
            async for chunk in reply.events:
                yield b"data: %b\n\n" % json_body.written(chunk)
            yield b"data: [DONE]\n\n"
        finally:
            await reply.aclose()


async def answered(
    request: Request, gateway: Any, kind: str, body: Any, actor: str, writer: Writer
) -> Response:
    """The response to a call, whole or streamed, as `writer` writes it. Raises Refused, in the words of the writer.

    If a stream has no answer within HEADERS_SECONDS, or its model must be loaded, its headers are sent, and then what
    the call waits for. A refusal after that is the last event.
    """
    record = gateway.record(kind, actor)
    work = asyncio.ensure_future(gateway.answer(kind, body, actor, record))
    try:
        if not (isinstance(body, dict) and body.get("stream") is True):
            await unless_gone(request, work)
        elif not await unless_gone(request, _is_early(work, record.loads), work):
            return Sent(work, lambda: record.state(), writer)
        reply = work.result()
    except Refused as refused:
        raise in_own_words(refused, writer.paths) from None
    if reply.events is not None:
        return Sent(work, lambda: "", writer)
    content = json_body.written(writer.whole(reply))
    return Response(content, headers=reply.headers, media_type="application/json")


async def _is_early(work: asyncio.Future[Any], loads: asyncio.Event) -> bool:
    """Whether `work` ends before the headers of a stream are due. `loads` is set if a model is loaded for it."""
    load = asyncio.ensure_future(loads.wait())
    try:
        await asyncio.wait(
            {work, load}, timeout=HEADERS_SECONDS, return_when=asyncio.FIRST_COMPLETED
        )
        return await _done(work, LOAD_HEADERS_SECONDS) if load.done() else work.done()
    finally:
        load.cancel()


async def _done(task: asyncio.Future[Any], seconds: float) -> bool:
    """Whether `task` ends within so many `seconds`."""
    return bool((await asyncio.wait({task}, timeout=seconds))[0])


class Sent(StreamingResponse):
    """A streamed answer, whose headers may be sent before it has begun. Meanwhile comments say why it has not.

    Only server-sent events can have comments. It closes the reply even if the client left before the first event.
    """

    def __init__(
        self, work: asyncio.Future[Reply], state: Callable[[], str], writer: Writer
    ) -> None:
        """The answer that `work` returns, as `writer` writes it. `state()` is what the call waits for."""
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        headers |= work.result().headers if work.done() else {}
        super().__init__(self._parts(writer), media_type=writer.media_type, headers=headers)
        self._work, self._state = work, state

    async def _parts(self, writer: Writer) -> AsyncIterator[bytes]:
        while not self._work.done():
            if writer.media_type == EVENTS:
                yield f": {' '.join(self._state().split())}\n\n".encode()
            await _done(self._work, COMMENT_SECONDS)
        try:
            reply = self._work.result()
        except Refused as refused:
            yield writer.refusal(refused)
            return
        except GpuError as failed:
            yield writer.refusal(refusal_of(failed))
            return
        async for part in writer.events(reply):
            yield part

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Sends the answer. If the client leaves, it is cancelled once, and the end of the engine's work is awaited.

        Starlette would cancel it again and again, so that the model was released while a thread still computed.
        """
        try:
            with contextlib.suppress(Refused):  # the client has left
                await unless_gone(Request(scope, receive), self.stream_response(send))
        finally:
            self._work.cancel()
            await asyncio.wait({self._work})
            if not self._work.cancelled() and self._work.exception() is None:
                await self._work.result().aclose()


def router(gateway: Any, jobs: Jobs) -> APIRouter:
    """The routes below `/v1`, with the `jobs` of this server. `gateway()` returns the Gateway."""
    routes = APIRouter(prefix="/v1", route_class=StrictRoute)

    @routes.get("/models", tags=["models"])
    def get_models(request: Request) -> Json:
        """The models that this visitor can call."""
        return {"object": "list", "data": gateway().models(visitor_name(request))}

    @routes.get(
        "/models/{id:path}",
        tags=["models"],
        responses={404: {"description": "no such model or task"}},
    )
    def get_model(id: str, request: Request) -> Json:
        """One of the models that this visitor can call."""
        for row in gateway().models(visitor_name(request)):
            if row["id"] == id:
                return row
        text = f"there is no model {id[:64]!r}; see them: GET /v1/models"
        raise Refused(404, "model_not_found", text, param="model")

    for kind, (path, *_) in _CALLS.items():
        _add_call_route(routes, path, kind, gateway)

    @routes.post(
        "/jobs",
        status_code=202,
        tags=["jobs"],
        response_model=None,
        responses=REFUSALS,
        openapi_extra=request_body(_JOB_SCHEMA),
    )
    async def post_job(request: Request, actor: str = CALLS) -> JSONResponse:
        """Starts a call that continues without a connection. `endpoint` and `body` are the same as in a direct call."""
        gateway().require_open()
        job = jobs.start(gateway(), await request.json(), actor)
        return JSONResponse(job.as_json(), 202, headers={"Location": f"/v1/jobs/{job.id}"})

    @routes.get("/jobs", tags=["jobs"])
    def get_jobs(request: Request) -> Json:
        """The jobs that this visitor has started, without their results. The newest job is first."""
        return {"object": "list", "data": jobs.of(visitor_name(request))}

    @routes.get(
        "/jobs/{id}",
        tags=["jobs"],
        responses={404: {"description": "no such job, or its result was dropped"}},
    )
    def get_job(id: str) -> Json:
        """The state of a job, and its result once it is done."""
        return jobs.fetch(id)

    @routes.delete("/jobs/{id}", tags=["jobs"], responses={404: {"description": "no such job"}})
    async def delete_job(id: str, request: Request, actor: str = CALLS) -> Json:
        """Ends a job, and drops its result. A visitor with a key can only end the jobs of that key."""
        if not request.scope["state"]["visitor"].may_act and jobs.find(id).client != actor:
            raise Refused(403, "not_yours", "another visitor has started this job", param="id")
        return (await jobs.end(id)).as_json()

    return routes


def outside_router(gateway: Any) -> APIRouter:
    """The routes outside `/v1`, where other servers have them."""
    routes = APIRouter(route_class=StrictRoute)
    for path, kind in _OUTSIDE.items():
        _add_call_route(routes, path, kind, gateway)
    return routes


def add_call(
    routes: APIRouter,
    path: str,
    gateway: Any,
    schema: Json,
    answer: Callable[[Request, Any, Any, str], Coroutine[Any, Any, Any]],
    **described: str,
) -> None:
    """Adds the route `path` for calls, whose bodies have this `schema`, with the words in `described`.

    `gateway()` returns the Gateway, and `answer(request, body, gateway, actor)` the response.
    """

    async def post(request: Request, actor: str = CALLS) -> Any:
        return await answer(request, await request.json(), gateway(), actor)

    routes.add_api_route(
        path,
        post,
        methods=["POST"],
        tags=["models"],
        response_model=None,
        responses=REFUSALS,
        openapi_extra=request_body(schema),
        route_class_override=CallRoute,
        **described,  # type: ignore[arg-type]
    )


def _add_call_route(routes: APIRouter, path: str, kind: str, gateway: Any) -> None:
    async def answer(request: Request, body: Any, gateway: Any, actor: str) -> Response:
        return await answered(request, gateway, kind, body, actor, OpenAIWriter())

    _, summary, fields = _CALLS[kind]
    # Fields outside the schema are sent to the engine.
    optional = (_STREAM_FIELDS if kind in ("chat", "completions") else {}) | _OWN_FIELDS
    schema = body_schema({"model": _MODEL, **fields}, optional)
    words = {"summary": summary, "description": "Answers one call, whole or as a stream."}
    add_call(routes, path, gateway, schema, answer, name=kind, **words)


def request_body(schema: Json) -> Json:
    """The description of a body with this `schema`, for OpenAPI."""
    content = {"application/json": {"schema": schema}}
    return {"requestBody": {"required": True, "content": content}}


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


# -- jobs

MAX_JOBS = 256  # running and ended
KEPT_SECONDS = 3600.0  # how long a result is kept
_STORED = ("id", "endpoint", "created", "client", "status", "ended", "result", "error")


@dataclass(eq=False)
class Job:
    """A call that runs in the background. Its id cannot be guessed; any visitor who knows it may fetch the result."""

    endpoint: str
    created: float  # epoch seconds, as is `ended`
    client: str = ""  # the visitor who started it
    id: str = field(default_factory=lambda: f"job-{uuid.uuid4().hex}")
    status: str = "running"  # also in the queue; later: succeeded, failed or cancelled
    ended: float = 0.0
    result: Any = None
    error: Json | None = None
    task: asyncio.Task[None] | None = None
    was_fetched: bool = False  # the ended job, since this server started

    @staticmethod
    def of(row: Json, wall: float) -> Job:
        """The job that an earlier server stored as `row`. If it had not ended, it counts as failed at `wall`."""
        job = Job(**{name: row[name] for name in _STORED})
        if not job.ended:
            job.fail(wall, "the server ended while this job ran", "ended")
        return job

    def fail(self, wall: float, message: str, code: str) -> None:
        """Ends the job with an error at `wall` (epoch seconds)."""
        self.status, self.ended = "failed", wall
        self.error = {"message": message, "code": code}

    def row(self) -> Json:
        """The job as it is kept in the store."""
        return {name: getattr(self, name) for name in _STORED}

    def as_json(self) -> Json:
        """The job as JSON. Times are in epoch seconds, and `result` is the answer of the endpoint."""
        fields = {"id": self.id, "object": "job", "endpoint": self.endpoint, "status": self.status}
        fields["created"] = round(self.created, 3)
        more = {"ended": round(self.ended, 3), "error": self.error, "result": self.result}
        return {**fields, **{name: value for name, value in more.items() if value}}


class Jobs:
    """The jobs of one server, in its event loop. With a store, the results survive a restart of the server."""

    def __init__(self, wall: Callable[[], float] = time.time, store: Store | None = None) -> None:
        """`wall` returns epoch seconds. `store` has the jobs of the earlier server."""
        self._wall = wall
        self._store = store
        known = (Job.of(row, wall()) for row in (store.jobs() if store is not None else ()))
        self._jobs = {job.id: job for job in sorted(known, key=lambda job: job.created)}

    def start(self, gateway: Any, wanted: Any, client: str) -> Job:
        """Starts a call in the background for the visitor `client`, and returns its job. `gateway` answers the call.

        `wanted` has its `endpoint` and its `body`. Raises Refused with 400 if it is invalid, and with 503 if there are
        MAX_JOBS jobs, and none of them may be forgotten.
        """
        body = _checked_body(wanted)
        self._make_room(client)
        job = Job(wanted["endpoint"], self._wall(), client)
        self._jobs[job.id] = job
        job.task = asyncio.ensure_future(self._run(job, gateway, body, client))
        return job

    def find(self, id: str) -> Job:
        """The job with this `id`. Raises Refused, 404."""
        job = self._jobs.get(id)
        if job is None:
            text = f"there is no job {id[:64]!r}; results are kept for an hour"
            raise Refused(404, "no_job", text, param="id")
        return job

    def fetch(self, id: str) -> Json:
        """The job with this `id` as JSON. Once its result was fetched, it may make room. Raises Refused, 404."""
        job = self.find(id)
        job.was_fetched = bool(job.ended)
        return job.as_json()

    def of(self, client: str) -> list[Json]:
        """The jobs of the visitor `client` as JSON, without their results. The newest job is first."""
        rows = [job.as_json() for job in self.all() if job.client == client]
        return [{k: v for k, v in row.items() if k != "result"} for row in reversed(rows)]

    def all(self) -> list[Job]:
        """Every job that is kept."""
        return list(self._jobs.values())

    async def end(self, id: str) -> Job:
        """Cancels the job with this `id` if it still runs, forgets the job, and returns it. Raises Refused, 404."""
        job = self.find(id)
        if job.task and not job.task.done():
            job.task.cancel()
            await asyncio.gather(job.task, return_exceptions=True)
        self._forget(id)
        return job

    async def close(self) -> None:
        """Cancels the jobs that run. After a restart, the server lists the cancelled jobs as failed."""
        tasks = [job.task for job in self._jobs.values() if job.task and not job.task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._jobs.clear()

    def _forget(self, id: str) -> None:
        self._jobs.pop(id, None)
        if self._store is not None:
            self._store.drop_job(id)

    async def _keep(self, job: Job) -> None:
        row, store = job.row(), self._store
        if store is not None:
            await in_thread(lambda: store.put_job(job.id, row))

    async def _run(self, job: Job, gateway: Any, body: Json, client: str) -> None:
        await self._answer(job, gateway, body, client)
        await self._keep(job)

    async def _answer(self, job: Job, gateway: Any, body: Json, client: str) -> None:
        try:
            await self._keep(job)
            reply = await gateway.answer(ENDPOINTS[job.endpoint], body, client)
            job.result = reply.json
            job.status = "succeeded"
        except asyncio.CancelledError:
            job.status = "cancelled"
            raise
        except Refused as refused:
            job.status = "failed"
            job.error = refused.body()["error"]
        except Exception as error:
            job.fail(self._wall(), " ".join(str(error).split()), type(error).__name__)
        finally:
            job.ended = self._wall()

    def _make_room(self, client: str) -> None:
        """Forgets the results that are too old, and makes room for one more job of `client`.

        1. The oldest result that was fetched is forgotten.
        2. Otherwise the client with the most jobs loses its oldest result, if that client is not `client`.
        3. Otherwise Refused (503) is raised. A client's own results are not lost by its next job.
        """
        oldest_kept = self._wall() - KEPT_SECONDS
        for job in self.all():
            if job.ended and job.ended < oldest_kept:
                self._forget(job.id)
        if len(self._jobs) < MAX_JOBS:
            return
        done = sorted((job for job in self.all() if job.ended), key=lambda job: job.ended)
        unneeded = [job for job in done if job.was_fetched]  # 1
        if not unneeded:
            jobs_of = Counter(job.client for job in self.all())
            most = max(jobs_of, key=jobs_of.__getitem__)
            if jobs_of[client] < jobs_of[most]:
                unneeded = [job for job in done if job.client == most]  # 2
        if not unneeded:  # 3
            text = f"{MAX_JOBS} jobs run, or have results that were not fetched. Fetch or delete results"
            raise Refused(503, "full", text, 5.0)
        self._forget(unneeded[0].id)


def _checked_body(wanted: Any) -> Json:
    """Checks `wanted`, the request for a job, and returns the body of the job's call. Raises Refused, 400."""
    endpoint = wanted.get("endpoint") if isinstance(wanted, dict) else None
    if not isinstance(endpoint, str) or endpoint not in ENDPOINTS:
        text = f"endpoint must be one of {', '.join(ENDPOINTS)}"
        raise Refused(400, "bad_endpoint", text, param="endpoint")
    for name in wanted:
        if name not in ("endpoint", "body"):
            text = f"{name[:64]!r} is no field of a job; its call is in body"
            raise Refused(400, "bad_field", text, param=name[:64])
    body = wanted.get("body")
    if not isinstance(body, dict):
        text = "body must be the JSON object that the endpoint takes"
        raise Refused(400, "bad_body", text, param="body")
    if body.get("stream"):
        text = "a job's answer is not streamed: leave stream out"
        raise Refused(400, "no_stream", text, param="body")
    return body
