"""The classes of the routes: a body is read once, by the strict reader of JSON."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
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
    """A route for calls of models. FastAPI describes it; `application` answers without FastAPI's routing.

    FastAPI's routing takes a seventh of the server's time for a short call.
    """
