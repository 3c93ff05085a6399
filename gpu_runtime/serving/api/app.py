"""The HTTP API as one application: the routes of all modules in this folder, and their description.

To add a route, add it to a router in this folder. If the router is new, also include it here.

The gate of the server puts the visitor into `scope["state"]["visitor"]`. The application refuses every request
without a visitor. Every visitor may read, except the logs of engines. A call of a model needs a visitor who may call
models. Every other action needs a visitor who may act.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Query, Request
from fastapi.responses import JSONResponse, Response
from fastapi_offline import FastAPIOffline
from pydantic import BaseModel, ConfigDict, Field, StrictBool
from starlette.exceptions import HTTPException as StarletteError
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.routing import Match

from ...errors import BadSetting, DoesNotFit, GpuError, NotAllowed, UnknownModel
from ...safe_text import listed, nearest, quoted
from ..request_log import request_id
from ..requests import Refused
from ..store import Store
from ..usage import MOST_DAYS
from . import anthropic, engine_logs, fleet, memory, ollama, openai, responses
from .fleet_metrics import FleetMetrics
from .jobs import Jobs
from .metrics import Metrics
from .strict_route import CallRoute, StrictRequest, StrictRoute

Send = Callable[[Any], Awaitable[None]]
_REQUEST_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)
ANTHROPIC_PATH = "/v1/messages"
# The format of refusals, by the begin of the path. All other paths have OpenAI's.
_ERRORS = (
    (ANTHROPIC_PATH, anthropic.error_of),
    ("/api/v1/", Refused.body),
    ("/api/", ollama.error_of),
)
READS = ("GET", "HEAD", "OPTIONS")
# An error gets the HTTP status of the first class here that matches. All other errors get 503.
_STATUSES = ((BadSetting, 400), (UnknownModel, 404), (NotAllowed, 403), (DoesNotFit, 507))


class Config(BaseModel):
    """The settings that can be changed while the server runs."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)
    allow_cloud_fallback: StrictBool = Field(alias="allowCloudFallback")


def application(
    rt: Any, gateway: Callable[[], Any], version: str, store: Store | None = None
) -> FastAPI:
    """The application over the runtime `rt`; its description shows the `version`.

    The first call of `gateway()` makes the Gateway; each call returns it. `store` keeps the jobs.
    """
    app = _application(gateway, version, store)
    app.include_router(memory.router(rt, ACTS), dependencies=[KNOWN_QUERY])
    app.include_router(engine_logs.router(ACTS))
    metrics = Metrics(rt, lambda: gateway().state(), lambda: gateway().figures.collect())

    @app.get("/health", tags=["server"])
    def get_health() -> dict[str, Any]:
        """Whether the server works, and how full the cards are. The status is always 200."""
        return {"status": "ok", **memory.health(rt.health())}

    add_metrics(app, metrics)
    return app


def fleet_application(
    models: Any, gateway: Callable[[], Any], version: str, store: Store | None = None
) -> FastAPI:
    """The application of `gpu serve --fleet`. `models` reads the models of the fleet's hosts. See `application`."""
    app = _application(gateway, version, store)
    app.include_router(fleet.router(models, ACTS), dependencies=[KNOWN_QUERY])
    add_metrics(app, FleetMetrics(models, gateway))
    return app


def _application(gateway: Callable[[], Any], version: str, store: Store | None) -> FastAPI:
    """The application with the routes that one host and a fleet share: calls, jobs, usage and settings."""
    app = FastAPIOffline(
        title="gpu-console",
        version=version,
        docs_url="/docs",
        redoc_url=None,
        description="GPU memory that notebooks and programs share: models, memory, metrics. Every route needs the "
        "token: `Authorization: Bearer TOKEN`.",
    )
    app.router.route_class = StrictRoute
    calls = Depends(_caller)
    app.state.jobs = Jobs(store=store)
    routes = openai.router(gateway, app.state.jobs, calls)
    anthropic.add_route(routes, gateway, calls)
    responses.add_route(routes, gateway, calls)
    routers = routes, openai.outside_router(gateway, calls), ollama.router(gateway, version, calls)
    for router in routers:
        app.include_router(router)
    _add_usage(app, gateway)
    _add_probes(app, gateway)
    _add_config_routes(app, gateway, ACTS)
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
            response = await route.endpoint(request, await _caller(request))
            await response(scope, receive, send)

        return ExceptionMiddleware(answer, app.exception_handlers)

    routes = [route for router in routers for route in router.routes]
    return {route.path: answering(route) for route in routes if isinstance(route, CallRoute)}


def _add_usage(app: FastAPI, gateway: Callable[[], Any]) -> None:
    @app.get("/usage", tags=["server"])
    def get_usage(request: Request, days: int = Query(30, ge=1, le=MOST_DAYS)) -> dict[str, Any]:
        """Calls and tokens of the last days, today included, for each visitor and model. Days are those of UTC.

        The visitor of a key sees only its own rows.
        """
        visitor = request.scope["state"]["visitor"]
        only = visitor.name if visitor.api_only else None
        return {"object": "list", "days": days, "data": gateway().usage.of(days, only)}


def _add_probes(app: FastAPI, gateway: Callable[[], Any]) -> None:
    @app.get("/livez", tags=["server"])
    async def get_livez() -> dict[str, Any]:
        """Whether the server runs. A program on this machine needs no token for it."""
        return {"status": "ok"}

    @app.get("/readyz", tags=["server"], responses={503: {"description": "the server ends"}})
    async def get_readyz() -> dict[str, Any]:
        """Whether the server takes calls. A program on this machine needs no token for it."""
        gateway().require_open()
        return {"status": "ok"}


def add_metrics(app: FastAPI, metrics: Any) -> None:
    """Adds the route /metrics with the text of `metrics`."""

    @app.get("/metrics", tags=["server"], response_class=Response)
    def get_metrics(request: Request) -> Response:
        """Figures for Prometheus."""
        body, kind = metrics.text(request.headers.get("accept", ""))
        return Response(body, headers={"Content-Type": kind})


def _add_config_routes(app: FastAPI, gateway: Callable[[], Any], acts: Any) -> None:
    @app.get("/api/v1/config", tags=["server"])
    def get_config() -> dict[str, Any]:
        """The settings that can be changed while the server runs."""
        return {"allowCloudFallback": gateway().guard.allowed}

    @app.put("/api/v1/config", tags=["server"])
    def put_config(config: Config, actor: str = acts) -> dict[str, Any]:
        """Changes the settings. They also hold after a restart of the server."""
        gateway().guard.allow(config.allow_cloud_fallback)
        return {"allowCloudFallback": gateway().guard.allowed}


class _RequireVisitor:
    """Refuses every request without a visitor. Also adds a request id to each answer, and answers HEAD requests.

    Without a gate no request has a visitor. So a server without a gate refuses every request, even from this machine.
    """

    def __init__(self, app: Any, calls: Mapping[str, Any]) -> None:
        """Passes POST requests for the paths of `calls` to the application there, all others to `app`."""
        self._app = app
        self._calls = calls

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            send = _with_request_id(scope, send)
        if scope["type"] == "http" and scope.get("state", {}).get("visitor") is None:
            text = "this application has no gate, so no request is admitted"
            body = _error(text, "invalid_request_error")
            answer = JSONResponse(body, 401, {"WWW-Authenticate": "Bearer"})
            return await answer(scope, receive, send)
        if scope.get("method") == "HEAD":  # a HEAD request takes the route for GET
            scope = {**scope, "method": "GET"}
            send = _without_body(send)
        call = self._calls.get(scope["path"]) if scope.get("method") == "POST" else None
        await (call or self._app)(scope, receive, send)


def _with_request_id(scope: Any, send: Send) -> Send:
    """A function like `send` that also adds the header `X-Request-Id` to the answer.

    The id is the one that the client has sent, if it is valid, or else a new one. The request log also gets it.
    """
    sent = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
    id = sent if _REQUEST_ID.fullmatch(sent) else f"req-{uuid.uuid4().hex}"
    request_id.set(id)

    async def send_with_id(message: Any) -> None:
        """Sends the `message`. The start of an answer gets the headers with the id."""
        if message["type"] == "http.response.start":
            names = [b"x-request-id"]
            if scope["path"].startswith(ANTHROPIC_PATH):
                names.append(b"request-id")  # where Anthropic's client reads it
            headers = [*message.get("headers", ()), *((name, id.encode()) for name in names)]
            message = {**message, "headers": headers}
        await send(message)

    return send_with_id


def _without_body(send: Send) -> Send:
    """A function like `send` that leaves out the bodies of answers."""

    async def send_headers(message: Any) -> None:
        if message["type"] == "http.response.body":
            message = {**message, "body": b""}
        await send(message)

    return send_headers


async def _actor(request: Request) -> str:
    """The name of the visitor who sent `request`. Raises HTTPException (403) if the visitor may not act.

    The function is async because FastAPI would otherwise call it in a thread. The thread would take a third of the
    time of a short call.
    """
    visitor = request.scope["state"]["visitor"]
    if not visitor.may_act:
        raise HTTPException(
            403,
            f"{visitor.name} may look and not act: that takes the operator's token, and a server "
            f"that is not read-only",
        )
    return visitor.name


async def _caller(request: Request) -> str:
    """The name of the visitor who sent `request`. Raises HTTPException (403) if the visitor may not call models."""
    visitor = request.scope["state"]["visitor"]
    return visitor.name if visitor.may_call else await _actor(request)


async def _known_query(request: Request) -> None:
    """Refuses (400) a `request` with a query parameter that its route does not have, such as `?dorp=true`.

    `/health` ignores such parameters, because programs that watch servers may add some.
    """
    known = [one.alias for one in request.scope["route"].dependant.query_params]
    for name in request.query_params:
        if name not in known and request.scope["path"] != "/health":
            all_known = f"Known: {listed(known)}." if known else "There is none."
            text = f"no parameter here is called {quoted(name)}. {nearest(name, known)}{all_known}"
            raise Refused(400, "bad_parameter", text, param=name[:60])


ACTS = Depends(_actor)
KNOWN_QUERY = Depends(_known_query)


async def _refused(request: Request, refused: Any) -> Response:
    path = request.scope["path"]
    body = next((body for begin, body in _ERRORS if path.startswith(begin)), Refused.body)
    return JSONResponse(body(refused), refused.status, headers=refused.headers)


async def _failed(request: Request, error: Any) -> Response:
    status = next((code for kind, code in _STATUSES if isinstance(error, kind)), 503)
    return JSONResponse(_error(" ".join(str(error).split()), type(error).__name__), status)


async def _http_error(request: Request, error: Any) -> Response:
    """The response for an HTTP `error`, in the same format as all other errors of this server."""
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    text = _no_route(request) if error.detail == "Not Found" else str(error.detail)
    body = {**_error(text, kind), "detail": error.detail}
    return JSONResponse(body, error.status_code, headers=error.headers)


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


def _error(message: str, kind: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "code": None, "param": None}}
