"""HTTP clients of the application with a visitor, and a gateway that answers at once."""

from __future__ import annotations

import asyncio
import json
import time
from types import SimpleNamespace
from typing import Any

from starlette.testclient import TestClient

from gpu_runtime.serving.api.app import application
from gpu_runtime.serving.records import CallFigures, CallRecord, Usage
from gpu_runtime.serving.requests import Refused, Reply, read_call
from gpu_runtime.web.auth import Visitor
from tests.serving.harness import Guard

OPERATOR, VIEWER = Visitor("ann", True), Visitor("viewer", False)


class Words:
    """A stream of `count` chunks, `pause` seconds apart. `closed` is True once the stream was closed."""

    def __init__(self, count: int, pause: float = 0.0) -> None:
        self.sent, self.closed, self._count, self._pause = 0, False, count, pause

    def __aiter__(self) -> Words:
        return self

    async def __anext__(self) -> dict[str, Any]:
        await asyncio.sleep(self._pause)
        if self.sent == self._count:
            raise StopAsyncIteration
        self.sent += 1
        return {"n": self.sent}

    async def aclose(self) -> None:
        self.closed = True


class Gateway:
    """A gateway that answers with the call itself.

    The model in `slow` never answers, and the one in `known` does. `let_go` is True once a call of it was cancelled.
    """

    def __init__(self) -> None:
        self.guard, self.let_go, self.words = Guard(True), False, Words(3)
        self.slow, self.known = "slow", "echo"
        self.figures = CallFigures()
        self.usage = Usage()

    def models(self, client: str = "") -> list[dict[str, Any]]:
        return [{"id": "echo", "object": "model", "created": 0, "owned_by": "local"}]

    def facts(self, name: str) -> None:
        return None

    def leases(self) -> dict[str, Any]:
        return {}

    def require_open(self) -> None:
        pass

    def state(self) -> Any:
        return SimpleNamespace(
            waiting={"echo": 2},
            running={"echo": 1},
            counts={"answered": 3, "streamed": 2},
            breakers={
                "echo": SimpleNamespace(state="open"),
                "idle": SimpleNamespace(state="closed"),
            },
        )

    def record(self, kind: str, client_name: str) -> CallRecord:
        return CallRecord(time.monotonic, kind, client_name)

    async def answer(
        self, kind: str, body: Any, client_name: str, record: CallRecord | None = None
    ) -> Reply:
        call = read_call(kind, body, client_name)
        if call.model == self.slow:
            try:
                await asyncio.Event().wait()
            finally:
                self.let_go = True
        if call.model != self.known:
            raise Refused(404, "no_model", f"no model is called {call.model!r}", param="model")
        if call.stream:
            return Reply("echo", "echo", "", events=self.words)
        told = {"kind": kind, "body": call.body, "client": call.client}
        return Reply("echo", "echo", "", json=told, headers={"X-Model": "echo"})


def with_visitor(app: Any, visitor: Visitor | None) -> Any:
    """The application as it is behind a gate that admitted `visitor`. With None, there is no gate."""

    async def gated(scope: Any, receive: Any, send: Any) -> None:
        if visitor is not None:
            scope = {**scope, "state": {"visitor": visitor}}
        await app(scope, receive, send)

    return gated


def client(
    rt: Any, visitor: Visitor | None = OPERATOR, gateway: Gateway | None = None
) -> TestClient:
    made = gateway or Gateway()
    return TestClient(
        with_visitor(application(rt, lambda: made), visitor), raise_server_exceptions=False
    )


class Exchange:
    """One request to the application, and what was sent for it so far. The client leaves once `left` is set.

    The body is JSON, or any bytes. An `app` that was made before takes the place of a new one.
    """

    def __init__(
        self, rt: Any, gateway: Any, path: str, body: Any, method: str = "POST", *, app: Any = None
    ) -> None:
        self.status, self.kind, self.sent = 0, "", b""
        self.left = asyncio.Event()
        self._body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self._is_sent = False
        app = app or with_visitor(application(rt, lambda: gateway), OPERATOR)
        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": method, "path": path, "headers": headers}
        scope |= {"query_string": b"", "http_version": "1.1", "root_path": ""}
        self.done = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self) -> Any:
        if not self._is_sent:
            self._is_sent = True
            return {"type": "http.request", "body": self._body}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.kind = dict(message["headers"])[b"content-type"].decode()
        self.sent += message.get("body", b"")
