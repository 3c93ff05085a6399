"""The classes of the routes, whose bodies are read once, by the strict reader of JSON; and who may call a route."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Depends, HTTPException, Request
from fastapi.routing import APIRoute

from ...web import json_body
from ..requests import Refused


class StrictRequest(Request):
    """A request whose JSON is read strictly. FastAPI's own reader accepts NaN and lone surrogates."""

    async def json(self) -> Any:
        """The body. Raises Refused (400) if it is no JSON."""
        if not hasattr(self, "_json"):
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
