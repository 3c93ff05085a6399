"""The HTTP API as one application: the routes of all modules in this folder, and their description.

To add a route, add it to a router in this folder. If the router is new, also include it here.

The gate of the server puts the visitor into `scope["state"]["visitor"]`. The application refuses every request
without a visitor. Every visitor may read, except the logs of engines. A call of a model needs a visitor who may call
models. Every other action needs a visitor who may act.
"""

from __future__ import annotations

import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from fastapi_offline import FastAPIOffline
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST as OPENMETRICS
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics
from pydantic import BaseModel, ConfigDict, Field, StrictBool
from starlette.exceptions import HTTPException as StarletteError
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.routing import Match

from ...errors import BadSetting, DoesNotFit, GpuError, NotAllowed, UnknownModel
from ...facts import AllocatorMap, Event, ProblemKind, Snapshot, problems
from ...files import newest_log, part_of
from ...safe_text import listed, nearest, quoted
from ..records import MOST_DAYS, request_id
from ..requests import Json, Refused
from ..store import Store
from . import anthropic, memory, ollama, openai, responses
from .openai import Jobs
from .routes import ACTS, CallRoute, StrictRequest, StrictRoute, caller

_REQUEST_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)
ANTHROPIC_PATH = "/v1/messages"
# The format of refusals, by the begin of the path. All other paths have OpenAI's.
_ERRORS = (
    (ANTHROPIC_PATH, anthropic.error_of),
    ("/api/v1/", Refused.body),
    ("/api/", ollama.error_of),
)
MOST_LOG_BYTES = 1 << 16  # in one answer
NEXT_LOG = "X-GPU-Log-Next"
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
    app = base_application(gateway, version, store)
    app.include_router(memory.router(rt), dependencies=[KNOWN_QUERY])
    _add_engine_log(app)

    @app.get("/health", tags=["server"])
    def get_health() -> Json:
        """Whether the server works, and how full the cards are. The status is always 200."""
        return {"status": "ok", **memory.health(rt.health())}

    add_metrics(app, Metrics(rt, gateway))
    return app


def base_application(gateway: Callable[[], Any], version: str, store: Store | None) -> FastAPI:
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
    app.state.jobs = Jobs(store=store)
    routes = openai.router(gateway, app.state.jobs)
    anthropic.add_route(routes, gateway)
    responses.add_route(routes, gateway)
    routers = routes, openai.outside_router(gateway), ollama.router(gateway, version)
    for router in routers:
        app.include_router(router)
    _add_server_routes(app, gateway)
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


def _add_server_routes(app: FastAPI, gateway: Callable[[], Any]) -> None:
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
        log = newest_log(id)
        if log is not None:
            try:
                text, end = part_of(log, after, MOST_LOG_BYTES)
            except FileNotFoundError:  # the oldest logs are deleted
                log = None
            else:
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
            body = _error(text, "invalid_request_error")
            answer = JSONResponse(body, 401, {"WWW-Authenticate": "Bearer"})
            return await answer(scope, receive, send)
        if scope.get("method") == "HEAD":  # the server leaves out the body
            scope = {**scope, "method": "GET"}
        call = self._calls.get(scope["path"]) if scope.get("method") == "POST" else None
        await (call or self._app)(scope, receive, send)


def _with_request_id(scope: Any, send: Any) -> Any:
    """A function like `send` that also adds the header `X-Request-Id` to the answer.

    The id, which the request log gets too, is the one that the client has sent if it is valid, else a new one.
    """
    sent = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
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
    known = [one.alias for one in request.scope["route"].dependant.query_params]
    for name in request.query_params:
        if name not in known and request.scope["path"] != "/health":
            all_known = f"Known: {listed(known)}." if known else "There is none."
            text = f"no parameter here is called {quoted(name)}. {nearest(name, known)}{all_known}"
            raise Refused(400, "bad_parameter", text, param=name[:60])


KNOWN_QUERY = Depends(_known_query)


async def _refused(request: Request, refused: Any) -> Response:
    path = request.scope["path"]
    body = next((body for begin, body in _ERRORS if path.startswith(begin)), Refused.body)
    return JSONResponse(body(refused), refused.status, headers=refused.headers)


async def _failed(request: Request, error: Any) -> Response:
    status = next((code for kind, code in _STATUSES if isinstance(error, kind)), 503)
    return JSONResponse(_error(" ".join(str(error).split()), type(error).__name__), status)


async def _http_error(request: Request, error: Any) -> Response:
    """The response for an HTTP `error`, in the format of all errors of this server."""
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


def _error(message: str, kind: str) -> Json:
    return {"error": {"message": message, "type": kind, "code": None, "param": None}}


# -- `/metrics`: the figures for alerts, in Prometheus' format
#
# Gauges are read from one Snapshot at each scrape. Counters from the host's book may restart from 0 when the host
# boots; Prometheus expects that counters can restart. Counters by reason, and histograms of durations, count only the
# events that the journal records after the start of this server.

SECONDS_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
EVICTION_ACTIONS = ("offloaded", "unloaded", "lost")
VERDICT_ACTIONS = ("granted", "waiting", "refused")
BREAKER_VALUES = {"closed": 0, "half-open": 1, "open": 2}
TOTALS = {
    "evictions": "Models that left a card or the warm pool",
    "offloads": "Moves to host memory",
    "unloads": "Models dropped",
    "restorations": "Returns from host memory",
    "loads": "Models loaded",
    "refusals": "Requests refused",
}

# Counters that do not say how a call ended. `gpu_calls` counts the same calls too, by how they ended.
_NO_ENDS = {
    "streamed": "Calls that were answered as a stream",
    "stood_in": "Calls that another model answered, because the first one failed",
    "reloads": "Models that were reloaded because their engine could not decode",
}


class Scraped:
    """A registry with figures that are read anew at each scrape, by `collect`, and with those of the process."""

    def __init__(self, gateway: Callable[[], Any]) -> None:
        """Registers this object. `gateway()` returns the gateway of the server."""
        disable_created_metrics()
        self._gateway = gateway
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.registry.register(self)

    def text(self, accepts: str) -> tuple[bytes, str]:
        """The metrics and their content type, in the format of the scraper's header `accepts`."""
        if "application/openmetrics-text" in accepts:
            return openmetrics(self.registry), OPENMETRICS
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    def calls(self) -> Iterator[Any]:
        """Yields the figures of the gateway.

        A model that has a breaker but no call now gets the value 0, else Prometheus could not sum over models.
        """
        state = self._gateway().state()
        idle = dict.fromkeys(state.breakers, 0)
        waiting, running = {**idle, **state.waiting}, {**idle, **state.running}
        yield gauge("gpu_queue_depth", "Calls that wait for a model", ["model"], waiting.items())
        text = "Calls that a model is answering"
        yield gauge("gpu_active_calls", text, ["model"], running.items())
        values = [(model, BREAKER_VALUES[one.state]) for model, one in state.breakers.items()]
        yield gauge("gpu_breaker_state", "0 closed, 1 half open, 2 open", ["model"], values)
        ends = [(end, count) for end, count in state.counts.items() if end not in _NO_ENDS]
        text = "Calls by how they ended, since this server began"
        yield _labelled(CounterMetricFamily("gpu_calls", text, labels=["ended"]), ends)
        for name, text in _NO_ENDS.items():
            yield CounterMetricFamily(f"gpu_{name}", text, value=state.counts.get(name, 0))
        yield from self._gateway().figures.collect()

    def describe(self) -> list[Any]:
        """No names of metrics. Without this method, the registry would call `collect` to learn them."""
        return []


class Metrics(Scraped):
    """The metrics of one server."""

    def __init__(self, rt: Any, gateway: Callable[[], Any]) -> None:
        """The metrics of the runtime `rt` and of its gateway."""
        super().__init__(gateway)
        self._rt = rt
        self._lock = threading.Lock()
        registry = self.registry
        text = "Models that left a card or the warm pool"
        labels = ["reason", "action"]
        self._evictions = Counter("gpu_evictions_by_reason", text, labels, registry=registry)
        text = "Requests for memory: granted, waiting, refused"
        self._verdicts = Counter("gpu_verdicts", text, ["verdict", "reason"], registry=registry)
        self._seconds = {
            action: Histogram(
                f"gpu_{name}_seconds",
                f"Seconds that a {name} took",
                buckets=SECONDS_BUCKETS,
                registry=registry,
            )
            for action, name in (("loaded", "load"), ("restored", "restore"))
        }
        snapshot = rt.status()
        events = ((event.wall, event.seq) for event in snapshot.events)
        self._seen = max(events, default=(snapshot.wall, 0))  # of the last counted event

    def text(self, accepts: str) -> tuple[bytes, str]:
        """See `Scraped.text`. The new events are counted first."""
        self._count_new_events()
        return super().text(accepts)

    def collect(self) -> Iterator[Any]:
        snapshot: Snapshot = self._rt.status()
        yield from devices([((), snapshot)])
        for name, text in TOTALS.items():
            value = snapshot.totals.get(name, 0)
            yield CounterMetricFamily(f"gpu_{name}", f"{text}, since the boot", value)
        waiting = len(snapshot.tickets)
        yield GaugeMetricFamily("gpu_waiting_requests", "Requests for memory that wait", waiting)
        yield GaugeMetricFamily("gpu_processes", "Processes that take part", len(snapshot.sections))
        yield from _problems(snapshot)
        yield from _allocators(self._rt.allocator_maps(), snapshot)
        yield from self.calls()

    def _count_new_events(self) -> None:
        with self._lock:
            pause = max(0.0, time.time() - self._seen[0])
            history = self._rt.history(pause + 60.0, 2).events  # other clocks may be a little late
            new = [event for event in history if (event.wall, event.seq) > self._seen]
            for event in new:
                self._count(event)
            self._seen = max([self._seen, *((event.wall, event.seq) for event in new)])

    def _count(self, event: Event) -> None:
        if event.action in EVICTION_ACTIONS:
            self._evictions.labels(event.reason, event.action).inc()
        elif event.action in VERDICT_ACTIONS:
            self._verdicts.labels(event.action, event.reason).inc()
        if event.action in self._seconds:  # 0 seconds mean less than a millisecond
            self._seconds[event.action].observe(event.seconds)


def _allocators(maps: Iterable[AllocatorMap], snapshot: Snapshot) -> Iterator[CounterMetricFamily]:
    """Yields the counters of the allocator of each process on each card. They end with the process."""
    counters = (
        ("gpu_allocator_retries", "Allocations that needed the cache to be released first"),
        ("gpu_allocator_out_of_memory", "Allocations that failed for want of memory"),
    )
    families = [CounterMetricFamily(*one, labels=["device", "pid"]) for one in counters]
    for one in maps:
        section = snapshot.sections.get(one.owner)
        if section is None:
            continue
        for family, count in zip(families, (one.alloc_retries, one.ooms), strict=True):
            family.add_metric([one.device, str(section.owner.pid)], count)
    yield from families


def _problems(snapshot: Snapshot) -> Iterator[GaugeMetricFamily]:
    """Yields the problems of each kind, and the bytes that they concern. A kind without a problem has the value 0."""
    counts, sizes = dict.fromkeys(ProblemKind, 0), dict.fromkeys(ProblemKind, 0)
    for problem in problems(snapshot):
        counts[problem.kind] += 1
        sizes[problem.kind] += problem.bytes
    yield gauge("gpu_problems", "Problems of the host", ["kind"], counts.items())
    yield gauge("gpu_problem_bytes", "Memory in these problems", ["kind"], sizes.items())


def gauge(
    name: str, text: str, labels: list[str], values: Iterable[tuple[str, float]]
) -> GaugeMetricFamily:
    return _labelled(GaugeMetricFamily(name, text, labels=labels), values)


def _labelled(family: Any, values: Iterable[tuple[str, float]]) -> Any:
    for label, value in values:
        family.add_metric([label], value)
    return family


def _sampled(field: str) -> Callable[[Any], Any]:
    """A function that returns `field` of a device's last measurement, or None if there is none."""
    return lambda view: getattr(view.sample, field) if view.sample else None


_DEVICE_FIGURES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "total_bytes": ("Memory of the device", lambda view: view.device.total_bytes),
    "limit_bytes": ("What may be leased of it", lambda view: view.limit_bytes),
    "claimed_bytes": (
        "What is leased, moves counted on both sides",
        lambda view: view.claimed_bytes,
    ),
    "measured_bytes": ("What is in use, by the driver", lambda view: view.measured_bytes),
    "pressure_ratio": (
        "The larger of claimed / limit and measured / total",
        lambda view: view.pressure,
    ),
    "utilisation_percent": ("How busy it is", _sampled("utilisation_percent")),
    "temperature_celsius": ("Its temperature", _sampled("temperature_celsius")),
    "power_watts": ("What it draws", _sampled("power_watts")),
}


def devices(
    snapshots: Iterable[tuple[tuple[str, ...], Snapshot]], labels: tuple[str, ...] = ()
) -> Iterator[GaugeMetricFamily]:
    """Yields the figures of each device that the driver reports, of pairs of the values of `labels` and a snapshot."""
    listed = list(snapshots)
    for name, (text, figure) in _DEVICE_FIGURES.items():
        names = [*labels, "device", "name", "simulated"]
        family = GaugeMetricFamily(f"gpu_device_{name}", text, labels=names)
        for given, snapshot in listed:
            for view in snapshot.devices:
                value = figure(view)
                if value is not None:
                    device = view.device
                    simulated = str(device.simulated).lower()
                    family.add_metric([*given, device.id, device.name, simulated], value)
        yield family
