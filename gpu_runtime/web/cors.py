"""Lets pages of other origins send requests, if the operator allows these origins.

A request of another origin needs a token in the header `Authorization` or `X-Api-Key`. A cookie, or a token in the
URL, does not count. So a page of another origin can use only a token that it was given.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from urllib.parse import urlsplit

from tornado.web import RequestHandler

from ..errors import BadSetting

ANY = "*"
METHODS = "GET, HEAD, POST, PUT, DELETE"
READABLE = "Retry-After, X-Request-Id, Request-Id, X-GPU-Asked, X-GPU-Model, X-GPU-Because"
PREFLIGHT_SECONDS = "600"  # for which a browser keeps the answer
_NAMES = re.compile(r"[\w\-, ]{1,2000}", re.ASCII)


def origins_of(text: str | None) -> frozenset[str]:
    """The origins in `text`, the value of the setting GPU_SERVE_CORS, separated by commas. Raises BadSetting.

    >>> sorted(origins_of("https://a.example, http://localhost:3000"))
    ['http://localhost:3000', 'https://a.example']
    """
    found = {name.strip() for name in (text or "").split(",")} - {""}
    for name in found - {ANY}:
        parts = urlsplit(name)
        if parts.scheme not in ("http", "https") or name != f"{parts.scheme}://{parts.netloc}":
            expected = f"origins such as https://app.example:8443, with commas, or {ANY}"
            raise BadSetting("GPU_SERVE_CORS", text, expected)
    return frozenset(name.lower() for name in found)


def allows(origins: Collection[str], origin: str) -> bool:
    """Whether a page of this `origin` may send requests, if the operator allows these `origins`.

    >>> allows({"https://a.example"}, "https://a.example"), allows({"https://a.example"}, "https://b.example")
    (True, False)
    """
    return origin.lower() in origins or ANY in origins


class PreflightHandler(RequestHandler):
    """Answers a browser's request, which needs no token, whether a page may send a request."""

    def initialize(self, gate: object) -> None:
        """All handlers of the gate receive the `gate`."""

    def options(self) -> None:
        """Permits the methods of this server, and the headers that the browser's request names."""
        self.set_status(204)
        self.set_header("Access-Control-Allow-Methods", METHODS)
        self.set_header("Access-Control-Max-Age", PREFLIGHT_SECONDS)
        names = self.request.headers.get("Access-Control-Request-Headers", "")
        if _NAMES.fullmatch(names):
            self.set_header("Access-Control-Allow-Headers", names)
