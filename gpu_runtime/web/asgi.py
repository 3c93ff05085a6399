"""An ASGI application behind the gate: one server, one port, one question of who may, for pages and programs.

Tornado has read the request and its body (at most as long as the server allows); here it is handed on, and the answer
is written as it comes. Who it was that the gate let in stands in `scope["state"]["visitor"]`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import unquote

from tornado.iostream import StreamClosedError
from tornado.web import RequestHandler

from .gate import COOKIE

Message = MutableMapping[str, Any]
App = Callable[
    [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]],
    Awaitable[None],
]
HOP_BY_HOP = frozenset(
    {b"connection", b"transfer-encoding", b"keep-alive", b"upgrade"}
)  # Tornado's to say


class Asgi(RequestHandler):
    """Answers by way of `app`. HTTP alone: a websocket is no route of such an application here."""

    SUPPORTED_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")

    def initialize(self, app: App) -> None:
        self._app = app
        self._gone = asyncio.Event()
        self._asked = False

    def compute_etag(self) -> None:
        """None: what programs are told changes all the time."""

    def on_connection_close(self) -> None:
        self._gone.set()

    async def _answer(self) -> None:
        # Where the application fails, Tornado answers 500 and logs it; where the answer has begun, it hangs up.
        await self._app(self._scope(), self._receive, self._send)
        self._gone.set()

    get = head = post = put = patch = delete = options = _answer  # type: ignore[assignment]

    def _scope(self) -> Message:
        request = self.request
        path, _, query = request.uri.partition("?")  # type: ignore[union-attr]
        host, _, port = request.host.rpartition(":")
        server = (host or request.host, int(port) if port.isdigit() else 0)
        lane = f"/{self.settings[COOKIE].lane}" if getattr(request, "by_the_lane", False) else ""
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": request.method,
            "scheme": request.protocol,
            "path": unquote(path),
            "root_path": lane,  # so that a page of the application leads a browser on by the lane
            "raw_path": path.encode("latin-1", "replace"),
            "query_string": query.encode("latin-1", "replace"),
            "headers": [
                (name.lower().encode("latin-1"), value.encode("latin-1", "replace"))
                for name, value in request.headers.get_all()
            ],
            "client": (request.remote_ip or "", 0),
            "server": server,
            "state": {"visitor": getattr(request, "visitor", None)},
        }

    async def _receive(self) -> Message:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": self.request.body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.set_status(message["status"])
            self.clear_header("Content-Type")
            for name, value in message.get("headers", ()):
                if name.lower() not in HOP_BY_HOP:
                    self.add_header(name.decode("latin-1"), value.decode("latin-1"))
            return
        if message["type"] != "http.response.body" or self._finished:
            return
        if message.get("body"):
            self.write(message["body"])
        await self._on_its_way(self.flush() if message.get("more_body") else self.finish())

    async def _on_its_way(self, written: asyncio.Future[None]) -> None:
        """Until it is written, or they have hung up: the future of a write to nobody Tornado forgets, and it never
        ends."""
        if not written.done():
            gone = asyncio.ensure_future(self._gone.wait())
            try:
                await asyncio.wait({written, gone}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                gone.cancel()
        if (
            written.done()
            and not written.cancelled()
            and isinstance(written.exception(), StreamClosedError)
        ):
            self._gone.set()  # the application hears of it by `receive`
