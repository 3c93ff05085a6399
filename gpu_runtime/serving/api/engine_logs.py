"""The route with the log of a model's engine, for visitors who may act: a log may contain texts of calls."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Query
from fastapi.responses import PlainTextResponse

from ...engine_logs import newest_log, part_of
from ..requests import Refused
from .strict_route import StrictRoute

MOST_BYTES = 1 << 16  # the most bytes of the log in one answer
NEXT = "X-GPU-Log-Next"


def router(acts: Any) -> APIRouter:
    """A router with the route. `acts` is the FastAPI dependency that admits visitors who may act."""
    routes = APIRouter(prefix="/v1", route_class=StrictRoute)

    @routes.get(
        "/engines/{id:path}/log",
        tags=["models"],
        response_class=PlainTextResponse,
        responses={
            403: {"description": "a viewer may not read logs"},
            404: {"description": "no engine that is a process was started for this model"},
        },
    )
    def get_log(
        id: str, after: int = Query(0, ge=0, le=2**62), actor: str = acts
    ) -> PlainTextResponse:
        """The end of the log of the model's engine. To get only newer text later, pass the value of this answer's
        header X-GPU-Log-Next as `after`.
        """
        log = newest_log(id)
        if log is not None:
            try:
                text, end = part_of(log, after, MOST_BYTES)
            except FileNotFoundError:  # the oldest logs are deleted
                log = None
            else:
                return PlainTextResponse(text, headers={NEXT: str(end)})
        why = f"{id[:64]!r} has no log: no engine that is a process was started for it here"
        raise Refused(404, "no_log", why, param="id")

    return routes
