"""The route `/usage`: the calls and tokens of each visitor, by model. The visitor of a key sees only its own rows."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Query, Request

from ..usage import MOST_DAYS


def add_route(app: FastAPI, gateway: Any) -> None:
    """Adds the route `/usage` to `app`. `gateway()` returns the Gateway."""

    @app.get("/usage", tags=["server"])
    def get_usage(request: Request, days: int = Query(30, ge=1, le=MOST_DAYS)) -> dict[str, Any]:
        """Calls and tokens of the last days, today included, for each visitor and model. Days are those of UTC."""
        visitor = request.scope["state"]["visitor"]
        only = visitor.name if visitor.api_only else None
        return {"object": "list", "days": days, "data": gateway().usage.of(days, only)}
