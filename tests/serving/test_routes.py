"""All routes × methods × credentials of a server with its gate, and requests that no client library sends."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tornado.httpserver import HTTPServer
from tornado.testing import bind_unused_port
from tornado.web import Application

from gpu_runtime.access_keys import AccessKey, digest
from gpu_runtime.serving.access import visitor_of
from gpu_runtime.serving.api.app import application
from gpu_runtime.serving.server import Asgi
from gpu_runtime.web import gate
from gpu_runtime.web.auth import PROBES, AccessRules
from tests.serving.harness import Harness, harness

OPERATORS, VIEWERS = "operator-" + "o" * 20, "viewer-" + "v" * 20
BOT, LOOK, GONE = ("gpu-" + letter * 43 for letter in "blg")
KEYS = {
    "bot": AccessKey(digest(BOT), models=("w*",)),
    "look": AccessKey(digest(LOOK), role="viewer"),
}
METHODS = "GET HEAD POST PUT PATCH DELETE OPTIONS TRACE CONNECT BREW".split()
CREDENTIALS = {  # name -> headers, and the query
    "nothing": ("", ""),
    "a wrong token": ("Authorization: Bearer wrong\r\n", ""),
    "a wrong token in the query": ("", "?token=wrong"),
    "the cookie without its lane": (f"Cookie: gpu-console={OPERATORS}\r\n", ""),
    "a removed key": (f"Authorization: Bearer {GONE}\r\n", ""),
    "the viewer's token": (f"Authorization: Bearer {VIEWERS}\r\n", ""),
    "a viewer's key": (f"X-Api-Key: {LOOK}\r\n", ""),
    "a key for calls": (f"Authorization: Bearer {BOT}\r\n", ""),
    "the operator's token": (f"Authorization: Bearer {OPERATORS}\r\n", ""),
}
STRANGERS = [name for name in CREDENTIALS if name not in list(CREDENTIALS)[5:]]


class Served:
    """A real server with the application of `k` behind its gate."""

    def __init__(self, k: Harness) -> None:
        self.application = application(k.rt, lambda: k.gateway)
        rules = AccessRules(
            "ann",
            OPERATORS,
            VIEWERS,
            key_visitor=lambda offered: visitor_of(KEYS, offered, read_only=False),
        )
        app = Application([(".*", Asgi, {"app": self.application})])
        made = gate.install(app, rules)
        made.guesses = made.refusals = _NoDelay()
        self._server = HTTPServer(app)
        sock, self.port = bind_unused_port()
        self._server.add_socket(sock)

    def close(self) -> None:
        self._server.stop()

    async def send(self, request: bytes) -> tuple[int, bytes]:
        """The status and the whole answer to the bytes of a `request`; 0 without an answer."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(request)
            answer = await asyncio.wait_for(reader.read(), 60)
        finally:
            writer.close()
        return (int(answer.split()[1]) if answer else 0), answer

    async def ask(
        self, method: str, path: str, headers: str = "", body: bytes = b""
    ) -> tuple[int, bytes]:
        head = f"{method} {path} HTTP/1.1\r\nHost: box:1\r\nConnection: close\r\n{headers}"
        if body:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        return await self.send(head.encode("latin-1") + b"\r\n" + body)

    def paths(self) -> list[str]:
        """Each path of the application, with a word for each parameter."""
        found = {getattr(route, "path", "") for route in self.application.routes}
        found |= set(self.application.openapi()["paths"])
        return sorted({path.replace("{", "").replace("}", "") for path in found if path})


class _NoDelay:
    """Limits no refusals: the answers to wrong tokens are not delayed in these tests."""

    def __call__(self, stranger: str) -> _NoDelay:
        return self

    def wait_seconds(self) -> float:
        return 0.0

    def count(self) -> None:
        pass


@asynccontextmanager
async def served(**models: Any) -> AsyncIterator[Served]:
    async with harness(keys=lambda: KEYS, **models) as k:
        server = Served(k)
        try:
            yield server
        finally:
            server.close()


@pytest.mark.thorough
async def test_no_route_fails_and_none_answers_a_stranger(caplog):
    """65 paths × 10 methods × 9 credentials: no status of 500, no traceback, no secret in the log."""
    async with served(wabc=1, secret=1) as server:
        paths = server.paths()
        assert len(paths) > 40
        for path in paths:
            for method in METHODS:
                for name, (headers, query) in CREDENTIALS.items():
                    body = b"{}" if method in ("POST", "PUT", "PATCH") else b""
                    status, answer = await server.ask(method, path + query, headers, body)
                    case = (method, path, name, status, answer[-300:])
                    assert 200 <= status < 500 or status in (501, 503), case
                    probe = path in PROBES and method in ("GET", "HEAD") and status == 200
                    if name in STRANGERS and not probe:
                        assert status in (400, 401, 403, 405, 501), case
                        assert b"secret" not in answer, case
                    if name == "a key for calls":
                        assert b"secret" not in answer, case
                    if name in ("the viewer's token", "a viewer's key") and method != "HEAD":
                        acts = method in ("POST", "PUT", "PATCH", "DELETE")
                        assert not (acts and status == 200 and path.startswith("/memory")), case
    logged = "\n".join(record.getMessage() for record in caplog.records)
    assert "Traceback" not in caplog.text
    assert not [one for one in (OPERATORS, VIEWERS, BOT, LOOK, GONE) if one in logged]


@pytest.mark.parametrize("value", ["²", "9" * 5000, "-1", "1.5", "0x10", "１"])
async def test_a_header_that_is_no_number_is_refused_with_an_answer(value, caplog):
    """The connection was closed without an answer, and the log had a traceback."""
    async with served(wabc=1) as server:
        token = f"Authorization: Bearer {OPERATORS}\r\nConnection: close\r\n"
        text = value.encode("utf-8")
        head = b"POST /memory/preload HTTP/1.1\r\nHost: box:1\r\n" + token.encode()
        status, _ = await server.send(head + b"Content-Length: " + text + b"\r\n\r\n")
        assert status == 400
        head = b"GET /health HTTP/1.1\r\nHost: box:" + text + b"\r\n" + token.encode()
        status, _ = await server.send(head + b"\r\n")
        assert status in (200, 400)
    assert "Traceback" not in caplog.text
    assert not [record for record in caplog.records if record.exc_info]


BODIES = {
    "NaN": b'{"model": NaN, "allowCloudFallback": NaN}',
    "infinity": b'{"model": 1e999, "allowCloudFallback": 1e999}',
    "half a pair": b'{"model": "\\ud800", "allowCloudFallback": "\\ud800"}',
    "half a pair in a name": b'{"\\ud800": 1}',
    "bytes": b'{"model": "\xff"}',
    "deep": b"[" * 100_000,
    "digits": b'{"model": ' + b"9" * 5000 + b"}",
}


@pytest.mark.parametrize("name", BODIES)
async def test_every_route_reads_json_strictly(name):
    """NaN and lone surrogates were a 500 in the routes whose bodies FastAPI reads itself."""
    async with served(wabc=1) as server:
        described = server.application.openapi()["paths"]
        tried = 0
        for path, methods in described.items():
            for method, route in methods.items():
                if "requestBody" not in route:
                    continue
                tried += 1
                plain = path.replace("{", "").replace("}", "")
                token = f"Authorization: Bearer {OPERATORS}\r\n"
                status, answer = await server.ask(method.upper(), plain, token, BODIES[name])
                assert status == 400, (method, path, answer[-300:])
                packed = f"{token}Content-Encoding: gzip\r\n"
                status, answer = await server.ask(
                    method.upper(), plain, packed, gzip.compress(b"{}")
                )
                assert status == 415 and b"the body is compressed (gzip)" in answer, (method, path)
        assert tried > 8


async def test_a_method_that_no_route_has_is_refused_as_json():
    async with served(wabc=1) as server:
        status, answer = await server.ask(
            "TRACE", "/v1/models", f"Authorization: Bearer {OPERATORS}\r\n"
        )
        error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
        assert (status, error["message"]) == (405, "Method Not Allowed")


async def test_a_key_in_the_query_stands_in_no_log(caplog):
    caplog.set_level(logging.INFO)
    async with served(wabc=1) as server:
        for query in (f"?api_key={BOT}", f"?a=1&X-Api-Key={BOT}", f"?access_token={BOT}"):
            status, answer = await server.ask("GET", f"/v1/models{query}")
            assert status in (401, 403) and BOT.encode() not in answer
            token = f"Authorization: Bearer {OPERATORS}\r\n"
            await server.ask("GET", f"/memory/stats{query}", token)
    assert "/v1/models?" in caplog.text and BOT not in caplog.text


async def test_a_key_that_asks_for_an_unknown_model_learns_only_its_own_names():
    """The error suggested the names of all models."""
    async with served(wabc=1, secret=1) as server:
        body = b'{"model": "wzzz", "messages": [{"role": "user", "content": "a"}]}'
        for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"):
            token = f"Authorization: Bearer {BOT}\r\n"
            _, answer = await server.ask("POST", path, token, body)
            assert b"secret" not in answer, answer
        _, answer = await server.ask("POST", "/v1/chat/completions", token, body)
        assert b"404" in answer.split(b"\r\n")[0] and b"wabc" in answer
