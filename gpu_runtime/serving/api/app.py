"""The HTTP API as one application: the routes of all modules in this folder, and their description.

To add a route, add it to a router in this folder. If the router is new, also include it here. If the first word of the
path is new, add it to `server._WORDS` too, and for programs with a key to `auth.API_PATHS`.

The gate of the server puts the visitor into `scope["state"]["visitor"]`. The application refuses every request
without a visitor. Every visitor may read, except the logs of engines. A call of a model needs a visitor who may call
models. Every other action needs a visitor who may act.
"""

from __future__ import annotations

import contextlib
import re
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from fastapi_offline import FastAPIOffline
from pydantic import BaseModel, ConfigDict, Field, StrictBool
from starlette.exceptions import HTTPException as StarletteError
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.routing import Match

from ...errors import GpuError
from ...files import newest_log, part_of
from ...safe_text import listed, nearest, quoted
from ...version import VERSION
from ..breaker import refusal_of
from ..metrics import Metrics
from ..records import MOST_DAYS, request_id, traceparent
from ..requests import Json, Refused
from ..store import Store
from . import anthropic, memory, ollama, openai, responses
from .calls import ACTS, CallRoute, StrictRequest, StrictRoute, caller
from .openai import Jobs

_REQUEST_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)
_TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
)
ANTHROPIC_PATH = "/v1/messages"
# The format of refusals, by the begin of the path. All other paths have OpenAI's.
_ERRORS = (
    (ANTHROPIC_PATH, anthropic.error_of),
    ("/api/v1/", Refused.body),
    ("/api/", ollama.error_of),
)
MOST_LOG_BYTES = 1 << 16  # in one answer
NEXT_LOG = "X-GPU-Log-Next"


class Config(BaseModel):
    """The settings that can be changed while the server runs."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)
    allow_cloud_fallback: StrictBool = Field(alias="allowCloudFallback")


def application(rt: Any, gateway: Callable[[], Any], store: Store | None = None) -> FastAPI:
    """The application over the runtime `rt`.

    The first call of `gateway()` makes the Gateway; each call returns it. `store` keeps the jobs.
    """
    app = base_application(gateway, store)
    app.include_router(memory.router(rt), dependencies=[KNOWN_QUERY])
    _add_engine_log(app)

    @app.get("/health", tags=["server"])
    def get_health() -> Json:
        """Whether the server works, and how full the cards are. The status is always 200."""
        return {"status": "ok", **memory.health(rt.health())}

    add_metrics(app, Metrics(rt, gateway))
    return app


def base_application(gateway: Callable[[], Any], store: Store | None) -> FastAPI:
    """The application with the routes that one host and a fleet share: calls, jobs, usage and settings."""
    app = FastAPIOffline(
        title="gpu-console",
        version=VERSION,
        docs_url="/docs",
        redoc_url=None,
        description="GPU memory that notebooks and programs share: models, memory, metrics. Every route needs the "
        "token: `Authorization: Bearer TOKEN`.",
    )
    app.router.route_class = StrictRoute
    app.state.jobs = Jobs(store=store)
    routes = openai.router(gateway, app.state.jobs)
    anthropic.add_route(routes, gateway)
    responses.add_route(routes, gateway)
    routers = routes, openai.outside_router(gateway), ollama.router(gateway)
    for router in routers:
        app.include_router(router)

    @app.get("/usage", tags=["server"])
    def get_usage(request: Request, days: int = Query(30, ge=1, le=MOST_DAYS)) -> Json:
        """Calls and tokens of the last days, today included, for each visitor and model. Days are those of UTC.

        The visitor of a key sees only its own rows.
        """
        visitor = request.scope["state"]["visitor"]
        only = visitor.name if visitor.api_only else None
        return {"object": "list", "days": days, "data": gateway().usage.of(days, only)}

    @app.get("/livez", tags=["server"])
    async def get_livez() -> Json:
        """Whether the server runs. A program on this machine needs no token for it."""
        return {"status": "ok"}

    @app.get("/readyz", tags=["server"], responses={503: {"description": "the server ends"}})
    async def get_readyz() -> Json:
        """Whether the server takes calls. A program on this machine needs no token for it."""
        gateway().require_open()
        return {"status": "ok"}

    @app.get("/api/v1/config", tags=["server"])
    def get_config() -> Json:
        """The settings that can be changed while the server runs."""
        return {"allowCloudFallback": gateway().guard.allowed}

    @app.put("/api/v1/config", tags=["server"])
    def put_config(config: Config, actor: str = ACTS) -> Json:
        """Changes the settings. They also hold after a restart of the server."""
        gateway().guard.allow(config.allow_cloud_fallback)
        return {"allowCloudFallback": gateway().guard.allowed}

    app.add_exception_handler(Refused, _refused)
    app.add_exception_handler(GpuError, _failed)
    app.add_exception_handler(StarletteError, _http_error)
    app.add_middleware(_RequireVisitor, calls=_call_routes(app, routers))
    return app


def _call_routes(app: FastAPI, routers: Iterable[APIRouter]) -> dict[str, Any]:
    """The applications that answer the calls of models, by path. Errors are answered as everywhere in `app`."""

    def answering(route: CallRoute) -> Any:
        async def answer(scope: Any, receive: Any, send: Any) -> None:
            request = StrictRequest(scope, receive)
            response = await route.endpoint(request, await caller(request))
            await response(scope, receive, send)

        return ExceptionMiddleware(answer, app.exception_handlers)

    routes = [route for router in routers for route in router.routes]
    return {route.path: answering(route) for route in routes if isinstance(route, CallRoute)}


def _add_engine_log(app: FastAPI) -> None:
    """Adds the route with the log of a model's engine, for visitors who may act: a log may contain texts of calls."""

    @app.get(
        "/v1/engines/{id:path}/log",
        tags=["models"],
        response_class=PlainTextResponse,
        responses={
            403: {"description": "a viewer may not read logs"},
            404: {"description": "no engine that is a process was started for this model"},
        },
    )
    def get_log(
        id: str, after: int = Query(0, ge=0, le=2**62), actor: str = ACTS
    ) -> PlainTextResponse:
        """The end of the log of the model's engine. To get only newer text later, pass the value of this answer's
        header X-GPU-Log-Next as `after`.
        """
        with contextlib.suppress(FileNotFoundError):  # the oldest logs are deleted
            if log := newest_log(id):
                text, end = part_of(log, after, MOST_LOG_BYTES)
                return PlainTextResponse(text, headers={NEXT_LOG: str(end)})
        why = f"{id[:64]!r} has no log: no engine that is a process was started for it here"
        raise Refused(404, "no_log", why, param="id")


def add_metrics(app: FastAPI, metrics: Any) -> None:
    @app.get("/metrics", tags=["server"], response_class=Response)
    def get_metrics(request: Request) -> Response:
        """Figures for Prometheus."""
        body, kind = metrics.text(request.headers.get("accept", ""))
        return Response(body, headers={"Content-Type": kind})


class _RequireVisitor:
    """Refuses every request without a visitor. Adds a request id to each answer. HEAD takes the route for GET."""

    def __init__(self, app: Any, calls: Mapping[str, Any]) -> None:
        """Passes POST requests for the paths of `calls` to the application there, all others to `app`."""
        self._app = app
        self._calls = calls

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            send = _with_request_id(scope, send)
        if scope["type"] == "http" and scope.get("state", {}).get("visitor") is None:
            text = "this application has no gate, so no request is admitted"
            body = Refused(401, None, text).body()
            answer = JSONResponse(body, 401, {"WWW-Authenticate": "Bearer"})
            return await answer(scope, receive, send)
        if scope.get("method") == "HEAD":  # the server leaves out the body
            scope = {**scope, "method": "GET"}
        call = self._calls.get(scope["path"]) if scope.get("method") == "POST" else None
        await (call or self._app)(scope, receive, send)


def _with_request_id(scope: Any, send: Any) -> Any:
    """A function like `send` that also adds the header `X-Request-Id` to the answer.

    The id, which the request log gets too, is the one that the client has sent if it is valid, else a new one. The log
    and the engine also get the client's `traceparent`, if it is valid.
    """
    given = dict(scope["headers"])
    traced = given.get(b"traceparent", b"").decode("latin-1")
    traceparent.set(traced if _TRACEPARENT.fullmatch(traced) else "")
    sent = given.get(b"x-request-id", b"").decode("latin-1")
    id = sent if _REQUEST_ID.fullmatch(sent) else f"req-{uuid.uuid4().hex}"
    request_id.set(id)

    async def send_with_id(message: Any) -> None:
        if message["type"] == "http.response.start":
            names = [b"x-request-id"]
            if scope["path"].startswith(ANTHROPIC_PATH):
                names.append(b"request-id")  # where Anthropic's client reads it
            headers = [*message.get("headers", ()), *((name, id.encode()) for name in names)]
            message = {**message, "headers": headers}
        await send(message)

    return send_with_id


async def _known_query(request: Request) -> None:
    """Refuses (400) a query parameter that the route lacks. Programs that watch servers may add some to `/health`."""
    known = [parameter.alias for parameter in request.scope["route"].dependant.query_params]
    for name in request.query_params:
        if name not in known and request.scope["path"] != "/health":
            all_known = f"Known: {listed(known)}." if known else "There is none."
            text = f"no parameter here is called {quoted(name)}. {nearest(name, known)}{all_known}"
            raise Refused(400, "bad_parameter", text, param=name[:60])


KNOWN_QUERY = Depends(_known_query)


async def _refused(request: Request, refused: Any, **more: Any) -> Response:
    path = request.scope["path"]
    body = next((body for begin, body in _ERRORS if path.startswith(begin)), Refused.body)
    return JSONResponse({**body(refused), **more}, refused.status, headers=refused.headers)


async def _failed(request: Request, error: Any) -> Response:
    return await _refused(request, refusal_of(error))


async def _http_error(request: Request, error: Any) -> Response:
    """The response for an HTTP `error`, in the format of all errors of its path."""
    text = _no_route(request) if error.detail == "Not Found" else str(error.detail)
    answer = await _refused(request, Refused(error.status_code, None, text), detail=error.detail)
    answer.headers.update(error.headers or {})
    return answer


def _no_route(request: Request) -> str:
    """A message about the path of `request`, which has no route. Suggests a path if /v1 is missing or twice in it."""
    path = request.scope["path"]
    for meant in (f"/v1{path}", path[path.rfind("/v1/") :]):
        scope = {**request.scope, "path": meant}
        routes = request.app.router.routes
        if meant != path and any(route.matches(scope)[0] is not Match.NONE for route in routes):
            return (
                f"there is no {path[:64]}; did you mean {meant[:64]}? The base URL of OpenAI's clients ends in "
                "/v1, the base URL of Anthropic's and Ollama's clients does not"
            )
    return f"there is no {path[:64]}; GET /docs shows all paths"
