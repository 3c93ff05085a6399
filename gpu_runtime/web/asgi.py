"""A Tornado handler that passes requests to an ASGI application, so that one server has both pages and the API.

Tornado reads the whole request and its body, up to the server's limit, before it calls the application. Each part of
the answer is written when the application sends it. A connection that takes no data for WRITE_SECONDS is closed. The
admitted visitor is in `scope["state"]["visitor"]`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import unquote

from tornado.iostream import StreamClosedError
from tornado.web import RequestHandler

from .gate import COOKIE
from .json_body import whole_number

Message = MutableMapping[str, Any]
App = Callable[
    [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]],
    Awaitable[None],
]
WRITE_SECONDS = 20.0  # a client that stopped reading would otherwise hold a model for ever
# Tornado sets these headers itself.
HOP_BY_HOP = frozenset({b"connection", b"transfer-encoding", b"keep-alive", b"upgrade"})


class Asgi(RequestHandler):
    """Answers HTTP requests with the application `app`. Websockets are not passed to `app`."""

    SUPPORTED_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")

    def initialize(self, app: App, write_seconds: float = WRITE_SECONDS) -> None:
        """`app` is the ASGI application. A client that takes no data for `write_seconds` is disconnected."""
        self._write_seconds = write_seconds
        self._app = app
        self._disconnected = asyncio.Event()
        self._body_taken = False

    def compute_etag(self) -> None:
        """Makes no etag, since the answers change all the time."""

    def on_connection_close(self) -> None:
        self._disconnected.set()

    async def _answer(self) -> None:
        # If the application fails, Tornado logs the error and answers 500, or closes a connection with a begun answer.
        await self._app(self._scope(), self._receive, self._send)
        self._disconnected.set()

    get = head = post = put = patch = delete = options = _answer  # type: ignore[assignment]

    def _scope(self) -> Message:
        request = self.request
        path, _, query = request.uri.partition("?")  # type: ignore[union-attr]
        host, _, port = request.host.rpartition(":")
        by_lane = getattr(request, "by_lane", False)
        headers = [
            (name.lower().encode("latin-1"), value.encode("latin-1", "replace"))
            for name, value in request.headers.get_all()
        ]
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": request.method,
            "scheme": request.protocol,
            "path": unquote(path),
            # The prefix includes the lane (see gate.py), so that links in a page of the application include it too.
            "root_path": f"/{self.settings[COOKIE].lane}" if by_lane else "",
            "raw_path": path.encode("latin-1", "replace"),
            "query_string": query.encode("latin-1", "replace"),
            "headers": headers,
            "client": (request.remote_ip or "", 0),
            "server": (host or request.host, whole_number(port, 5) or 0),
            "state": {"visitor": getattr(request, "visitor", None)},
        }

    async def _receive(self) -> Message:
        if not self._body_taken:
            self._body_taken = True
            return {"type": "http.request", "body": self.request.body, "more_body": False}
        await self._disconnected.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start_answer(message)
        elif message["type"] == "http.response.body" and not self._finished:
            if message.get("body"):
                self.write(message["body"])
            await self._until_written(self.flush() if message.get("more_body") else self.finish())

    def _start_answer(self, message: Message) -> None:
        # Without TCP_NODELAY, the system holds back the second part of a stream for up to 40 ms. Tornado unsets this
        # option at the end of each answer.
        self._stream().set_nodelay(True)
        self.set_status(message["status"])
        self.clear_header("Content-Type")
        for name, value in message.get("headers", ()):
            if name.lower() not in HOP_BY_HOP:
                self.add_header(name.decode("latin-1"), value.decode("latin-1"))

    async def _until_written(self, write: asyncio.Future[None]) -> None:
        """Returns when `write` is done, or when the client has disconnected or takes no data for too long.

        Tornado drops the future of a write to a closed connection, so such a future never completes.
        """
        if not write.done():
            await self._wait_while_taken(write)
        if not write.done() or write.cancelled():
            return
        if isinstance(write.exception(), StreamClosedError):
            self._disconnected.set()  # `_receive` then reports the disconnection to the application

    async def _wait_while_taken(self, write: asyncio.Future[None]) -> None:
        """Waits for `write` as long as the client takes data, else closes the connection."""
        disconnected = asyncio.ensure_future(self._disconnected.wait())
        try:
            while not write.done() and not disconnected.done():
                written = self._bytes_written()
                await asyncio.wait(
                    {write, disconnected},
                    timeout=self._write_seconds,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if not write.done() and self._bytes_written() == written:
                    self._stream().close()
                    self._disconnected.set()
                    return
        finally:
            disconnected.cancel()

    def _stream(self) -> Any:
        return self.request.connection.stream  # type: ignore[union-attr]

    def _bytes_written(self) -> int:
        """The bytes that the client's connection has taken. Tornado has no public name for this number."""
        return self._stream()._total_write_done_index
