"""The HTTP face as one application: `/memory/*`, `/v1/*`, `/api/v1/config`, `/health`, `/metrics`, and its description.

It asks `scope["state"]["visitor"]` who calls, and answers nobody where none was put there: the gate of the server that
it runs in does that (`server.py`). Whoever was let in may read; only who may act may do anything but GET.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response
from fastapi_offline import FastAPIOffline
from pydantic import BaseModel, ConfigDict, Field, StrictBool
from starlette.exceptions import HTTPException as StarletteError

from ...errors import DoesNotFit, GpuError, NotAllowed, UnknownModel
from ..requests import Refused
from . import memory, openai
from .jobs import Jobs
from .metrics import Metrics

READS = ("GET", "HEAD", "OPTIONS")


class Config(BaseModel):
    """What can be changed while it runs."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)
    allow_cloud_fallback: StrictBool = Field(alias="allowCloudFallback")


def application(rt: Any, gateway: Callable[[], Any], version: str) -> FastAPI:
    """The application over that runtime. `gateway()` gives the Gateway, made when it is first asked for."""
    app = FastAPIOffline(
        title="gpu-console",
        version=version,
        docs_url="/docs",
        redoc_url=None,
        description="GPU memory that notebooks and programs share: models, memory, metrics. Every route asks for the "
        "token: `Authorization: Bearer TOKEN`.",
    )
    acts = Depends(_actor)
    jobs = Jobs()
    metrics = Metrics(rt, lambda: gateway().state())
    app.include_router(memory.router(rt, acts))
    app.include_router(openai.router(gateway, jobs, acts))
    app.state.jobs = jobs

    @app.get("/health", tags=["server"])
    def get_health() -> dict[str, Any]:
        """Whether the server works, and how full the cards are: 200 as long as it can say so."""
        return {"status": "ok", **memory.health(rt.health())}

    @app.get("/metrics", tags=["server"], response_class=Response)
    def get_metrics(request: Request) -> Response:
        """For Prometheus."""
        body, kind = metrics.text(request.headers.get("accept", ""))
        return Response(body, headers={"Content-Type": kind})

    @app.get("/api/v1/config", tags=["server"])
    def get_config() -> dict[str, Any]:
        """What can be changed while it runs."""
        return {"allowCloudFallback": gateway().guard.allowed}

    @app.put("/api/v1/config", tags=["server"])
    def put_config(config: Config, who: str = acts) -> dict[str, Any]:
        """Changes it, for this server and its next starts."""
        gateway().guard.allow(config.allow_cloud_fallback)
        return {"allowCloudFallback": gateway().guard.allowed}

    app.add_exception_handler(Refused, _refused)
    app.add_exception_handler(GpuError, _failed)
    app.add_exception_handler(StarletteError, _plain)
    app.add_middleware(_Gated)
    return app


class _Gated:
    """Answers those whom a gate let in. Where none stands before us nobody is: not even loopback is a boundary."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope.get("state", {}).get("visitor") is None:
            told = {
                "error": {
                    "message": "no gate stands before this application: nobody is let in",
                    "type": "invalid_request_error",
                    "code": None,
                    "param": None,
                }
            }
            return await JSONResponse(told, 401, {"WWW-Authenticate": "Bearer"})(
                scope, receive, send
            )
        await self._app(scope, receive, send)


async def _actor(
    request: Request,
) -> str:  # async, or FastAPI calls it in a thread: a third of a short call's time
    """The name of whoever acts. The role is asked here, at the moment of acting."""
    visitor = request.scope["state"]["visitor"]
    if not visitor.may_act:
        raise HTTPException(
            403,
            f"{visitor.name} may look and not act: that takes the operator's token, and a server "
            f"that is not read-only",
        )
    return visitor.name


async def _refused(request: Request, refused: Any) -> Response:
    return JSONResponse(refused.body(), refused.status, headers=refused.headers)


async def _failed(request: Request, error: Any) -> Response:
    status = (
        404
        if isinstance(error, UnknownModel)
        else 403
        if isinstance(error, NotAllowed)
        else 507
        if isinstance(error, DoesNotFit)
        else 503
    )
    return JSONResponse(
        {
            "error": {
                "message": " ".join(str(error).split()),
                "type": type(error).__name__,
                "code": None,
                "param": None,
            }
        },
        status,
    )


async def _plain(request: Request, error: Any) -> Response:
    """Errors of routing and of roles, in the form of all others."""
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    return JSONResponse(
        {
            "error": {"message": str(error.detail), "type": kind, "code": None, "param": None},
            "detail": error.detail,
        },
        error.status_code,
        headers=error.headers,
    )
