"""The gate of a server. It checks every request before the request's route is looked up.

It removes the credentials from the request, so no handler, page or log sees them. It admits or refuses the request,
and stores the visitor in `request.visitor`. This module depends only on Tornado. `gpu_panels.server` adds the parts
that depend on Panel.

A browser sends a cookie to every port of the host. So it would send this server's cookie to another user's server on
the same host, if that user could guess the cookie's path. Therefore the gate redirects a browser to a *lane*: a path
that only holders of a token can know. The cookie is valid for the lane only. The lane and the cookies are derived from
the tokens. So a page stays open over a restart of the server with the same token, and not with a new one.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import hashlib
import html
import ipaddress
import os
import posixpath
import re
import socket
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import parse_qsl, urlencode

from tornado.httputil import HTTPHeaders, HTTPMessageDelegate, HTTPServerRequest, parse_cookie
from tornado.routing import ReversibleRouter
from tornado.web import GZipContentEncoding, RequestHandler, stream_request_body
from tornado.websocket import WebSocketHandler

from ..errors import BadSetting
from ..tcp_sockets import user_of_client
from . import auth
from .auth import OPERATOR, AccessRules, GuessLimiter, Role, Visitor
from .connections import Connections
from .json_body import whole_number

COOKIE = "gpu-console"
# These fields are removed from a request. A token is secret. A link with a session id would let the sender of the link
# share the visitor's session.
REMOVED_FROM_QUERY = ("token", "bokeh-session-id", "bokeh-token")
# A key is accepted in a header only. Some programs send it in the query, which stands in logs.
SECRET_IN_QUERY = re.compile(r"(.*[_-])?(api_?key|key|token|secret|password|authorization)", re.I)
MASKED = "***"
REMOVED_HEADERS = ("Authorization", "X-Api-Key", "Bokeh-Session-Id")
MOST_STRANGERS = 1024  # whose guesses are counted: the most recent ones
Limits = Callable[[str], GuessLimiter]  # by stranger
REFUSED_BODY_BYTES = 4096  # largest body of a request that is refused
# A client may finish sending a body that is too large, up to this size. Then the client can read the refusal.
DISCARDED_BODY_BYTES = 1 << 30
HEADERS = {
    "Referrer-Policy": "no-referrer",  # the browser sends the lane to no other server
    "X-Content-Type-Options": "nosniff",
    # Frames of the same origin are permitted for JupyterLab. `eval` and `blob:` are permitted because Panel compiles
    # its components in the page.
    "Content-Security-Policy": "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; object-src 'none'; "
    "base-uri 'self'; form-action 'self'; frame-ancestors 'self'",
}


@dataclass(frozen=True)
class Credentials:
    """The parts of a request that prove the role of its sender."""

    authorization: str  # the whole header
    query: str  # the value of ?token=
    cookies: dict[str, str]
    # All values of this server's cookie. A server at another port of this host may have set a cookie of the same name.
    own_cookies: tuple[str, ...]
    by_lane: bool  # the path began with the lane

    @property
    def given(self) -> bool:
        """Whether the request carries any token."""
        token = auth.bearer(self.authorization) or self.query
        return bool(token or (self.by_lane and self.own_cookies))


class Gate(ReversibleRouter):
    """The router in front of the routes of one Tornado application. The function `install` creates it.

    A subclass defines what its application adds, such as a URL prefix, a login with names, or websockets.
    """

    prefix = ""  # the first part of all paths of the application
    home = "/"  # path of the page that an unknown path is redirected to
    keeps_cookies = False  # whether the header Cookie stays in the request, for the handlers

    def __init__(
        self, app: Any, rules: AccessRules, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """The gate of `app` under these `rules`. The `clock`, in seconds, limits guesses of tokens."""
        self.rules = rules
        self.closed_because = ""  # why every request is refused; empty: the gate is open
        self.lane = _derived(rules.operator_token, "lane")[:22]
        self.connections: Connections | None = None  # set by a server that limits its connections
        recent = functools.lru_cache(MOST_STRANGERS)
        self.guesses: Limits = recent(lambda stranger: GuessLimiter(clock))
        # The limits for requests without a token, such as the first requests of a browser.
        self.refusals: Limits = recent(
            lambda stranger: GuessLimiter(clock, free=200, seconds=0.02, waiting=500)
        )
        self.max_body_bytes = DISCARDED_BODY_BYTES  # a server may set its own limit here
        self._app = app
        self._routes = app.default_router
        # A cookie contains a digest of a token. So nobody can learn the token from the cookie, and the cookie is
        # worthless once the server has a new token.
        self._cookie_rules = replace(
            rules,
            operator_token=_derived(rules.operator_token, "operator"),
            viewer_token=rules.viewer_token and _derived(rules.viewer_token, "viewer"),
        )

    def reverse_url(self, name: str, *args: Any) -> str | None:
        return self._routes.reverse_url(name, *args)

    def find_handler(self, request: HTTPServerRequest, **kwargs: Any) -> Any:
        """The handler of the route if `request` is admitted, else one that refuses it."""
        credentials = self._take_credentials(request)
        request.visitor = None
        allowed = self._has_allowed_origin(request)
        if self.closed_because:
            return self._refuse(request, 503, self.closed_because)
        if not allowed:
            return self._refuse(request, 403, FOREIGN_ORIGIN)
        if _is_probe(request):
            request.visitor = Visitor("probe", False)
            return self._route(request)
        if request.cors_origin:
            if request.method == "OPTIONS":
                return self._answer_with(request, PreflightHandler, {})
            credentials = Credentials(credentials.authorization, "", {}, (), False)
            return self._admit_by_token(request, credentials)
        return self._admit(request, credentials)

    def try_token(self, request: HTTPServerRequest, token: str) -> tuple[Role | None, float | None]:
        """The role of the typed `token`, and the seconds until a wrong one is answered (None: too many wait)."""
        role = auth.role_of_tokens(self.rules, query=token)
        return role, 0.0 if role else self._counted(self.guesses, request)

    def redirect_inside(self, handler: RequestHandler, role: Role) -> None:
        """Answers through `handler` with the cookie of `role` and a redirect to the same page below the lane."""
        rules = self._cookie_rules
        handler.set_cookie(
            COOKIE,
            rules.operator_token if role == OPERATOR else rules.viewer_token,
            path=f"{self.cookie_base()}/{self.lane}/",
            httponly=True,
            samesite="Lax",
            secure=handler.request.protocol == "https",
        )
        handler.set_header("Cache-Control", "no-store")
        handler.redirect(self._path_by_lane(handler.request))

    # -- what a subclass may replace

    def cookie_base(self) -> str:
        """The path below which the cookie is valid, without the lane and without a final slash."""
        return self.prefix

    def allowed_origins(self) -> set[str]:
        """The hosts whose pages may send requests, in addition to the server's own host."""
        return set()

    def may_join(self, request: HTTPServerRequest, visitor: Visitor) -> bool:
        """Whether this `visitor` may open the websocket that `request` names."""
        return True

    def _admit(self, request: HTTPServerRequest, credentials: Credentials) -> Any:
        sock = getattr(getattr(request.connection, "stream", None), "socket", None)
        is_local = sock is not None and sock.family == socket.AF_UNIX
        if is_local and user_of_client(sock) == os.getuid():
            return self._let_in(request, self.rules.visitor(OPERATOR))
        return self._admit_by_token(request, credentials)

    # -- who is admitted

    def _admit_by_token(self, request: HTTPServerRequest, credentials: Credentials) -> Any:
        role = self._role_of(credentials)
        if role is None:
            return self._admit_by_key(request, credentials)
        is_page = request.method in ("GET", "HEAD") and not is_websocket(request)
        if credentials.query and is_page:
            return self._answer_with(request, RedirectHandler, {"role": role})
        return self._let_in(request, self.rules.visitor(role))

    def _admit_by_key(self, request: HTTPServerRequest, credentials: Credentials) -> Any:
        """Admits a visitor with a key of `gpu serve`. A key is accepted only in a header."""
        offered = auth.bearer(credentials.authorization)
        find = self.rules.key_visitor
        visitor = find(offered) if find is not None and offered else None
        if visitor is None:
            return self._ask_for_token(request, credentials)
        if visitor.api_only and not request.path.startswith(auth.API_PATHS):
            return self._refuse(request, 403, KEY_IS_FOR_CALLS)
        return self._let_in(request, visitor)

    def _role_of(self, credentials: Credentials) -> Role | None:
        role = auth.role_of_tokens(
            self.rules, authorization=credentials.authorization, query=credentials.query
        )
        if role is not None or not credentials.by_lane:
            return role
        for value in credentials.own_cookies:
            role = auth.role_of_tokens(self._cookie_rules, cookie=value)
            if role is not None:
                return role
        return None

    def _ask_for_token(self, request: HTTPServerRequest, credentials: Credentials) -> Any:
        if not credentials.given:
            wait = self._counted(self.refusals, request)
            wait = TOO_MANY_SECONDS if wait is None else wait
            return self._refuse(request, 403, TOKEN_NEEDED, form=True, wait=wait)
        wait = self._counted(self.guesses, request)
        if wait is None:
            return self._refuse(request, 429, TOO_MANY_GUESSES, wait=TOO_MANY_SECONDS)
        return self._refuse(request, 403, WRONG_TOKEN, form=True, wait=wait)

    def _counted(self, limits: Limits, request: HTTPServerRequest) -> float | None:
        """Counts a refused `request`. Returns the seconds by which its answer is delayed; None if too many wait."""
        limiter = limits(self._stranger(request))
        wait = limiter.wait_seconds()
        if wait is not None:
            limiter.count()
        return wait

    def _stranger(self, request: HTTPServerRequest) -> str:
        """The stranger who sent `request`; "" if the server does not limit its connections."""
        stream = getattr(request.connection, "stream", None)
        return self.connections.stranger(stream) if self.connections is not None else ""

    def _has_allowed_origin(self, request: HTTPServerRequest) -> bool:
        """Whether `request` may be answered: no web page sent it, or a page whose origin is allowed.

        Removes the headers that name the origin, so that Bokeh does not check it again: Bokeh's own list of hosts lacks
        the addresses of SSH tunnels and proxies. Sets `request.cors_origin` to the page's origin if GPU_SERVE_CORS is
        the only reason why the page is allowed, else to "".
        """
        request.cors_origin = ""
        names = [name for name in ("Origin", "Sec-Websocket-Origin") if name in request.headers]
        origins = [request.headers.pop(name) for name in names]
        allowed = self.allowed_origins()
        foreign = [name for name in origins if not auth.same_origin(name, request.host, allowed)]
        if not foreign:
            return True
        if is_websocket(request) or not self.rules.cors & {foreign[0].lower(), ANY}:
            return False
        request.cors_origin = foreign[0]
        return len(foreign) == 1

    # -- how a request is answered

    def _let_in(self, request: HTTPServerRequest, visitor: Visitor) -> Any:
        request.visitor = visitor
        if self.connections is not None:
            self.connections.admit(getattr(request.connection, "stream", None))
        if is_websocket(request) and not self.may_join(request, visitor):
            return self._refuse(request, 403, OTHER_VISITORS_SESSION)
        return self._route(request)

    def _route(self, request: HTTPServerRequest) -> Any:
        found = self._routes.find_handler(request)
        if found is None:
            return self._refuse(request, 404, "There is nothing here.")
        length = request.headers.get("Content-Length")
        size = 0 if length is None else whole_number(length.strip())
        if size is None:
            return self._refuse(request, 400, "The header Content-Length must be a whole number.")
        if self.max_body_bytes < size <= DISCARDED_BODY_BYTES:
            # Without this call, Tornado itself would refuse the body, and the client would not learn why.
            request.connection.set_max_body_size(size)  # type: ignore[union-attr]
            text = f"The body has {size:,} bytes; the limit is {self.max_body_bytes:,}."
            return self._answer_with(request, TooLargeHandler, {"status": 413, "text": text})
        found.handler_class = harden(found.handler_class)
        return found

    def _refuse(
        self,
        request: HTTPServerRequest,
        status: int,
        text: str,
        *,
        form: bool = False,
        wait: float = 0.0,
    ) -> Any:
        connection = request.connection
        if connection is not None and hasattr(connection, "set_max_body_size"):
            connection.set_max_body_size(REFUSED_BODY_BYTES)
        options = {"status": status, "text": text, "form": form, "wait": wait}
        return self._answer_with(request, RefusalHandler, options)

    def _answer_with(
        self, request: HTTPServerRequest, handler: type[RequestHandler], options: dict[str, Any]
    ) -> Any:
        return self._app.get_handler_delegate(request, harden(handler), {"gate": self, **options})

    def _path_by_lane(self, request: HTTPServerRequest) -> str:
        """The URL, below the lane, of the page that `request` names. It is relative, since a proxy may add a prefix."""
        here = request.path.removeprefix(self.prefix)
        # A path with the lane of an earlier token is unknown too.
        there = here if self._routes.find_handler(request) is not None else self.home
        if not here:  # the request's path is the prefix without its slash
            up = posixpath.basename(self.prefix) + "/"
        else:
            levels = here.count("/") - (0 if request.by_lane else 1)
            up = "../" * levels or "./"
        query = f"?{request.query}" if request.query else ""
        return f"{up}{self.lane}/{there.lstrip('/')}{query}"

    # -- credentials

    def _take_credentials(self, request: HTTPServerRequest) -> Credentials:
        """Removes the credentials from `request`, and the lane from its path. Returns the credentials."""
        sent_cookies = request.headers.get("Cookie", "")
        authorization = request.headers.get("Authorization", "")
        if not authorization and "X-Api-Key" in request.headers:  # as Anthropic's clients send it
            authorization = f"Bearer {request.headers['X-Api-Key']}"
        if not self.keeps_cookies:  # Bokeh would show other servers' cookies too
            request.headers.pop("Cookie", None)
        for name in REMOVED_HEADERS:
            request.headers.pop(name, None)
        path, _, query = (request.uri or "").partition("?")
        token = self._take_from_query(request, query)
        by_lane = self._take_lane(request, path)
        request.uri = f"{request.path}?{request.query}" if request.query else request.path
        parsed = map(parse_cookie, sent_cookies.split(";"))
        own = tuple(found[COOKIE] for found in parsed if COOKIE in found)
        return Credentials(authorization, token, parse_cookie(sent_cookies), own, by_lane)

    def _take_from_query(self, request: HTTPServerRequest, query: str) -> str:
        """Removes tokens from the `query` of `request`, and masks other secrets there. Returns the last token."""
        pairs = parse_qsl(query, keep_blank_values=True)
        kept = [
            (name, MASKED if SECRET_IN_QUERY.fullmatch(name) else value)
            for name, value in pairs
            if name not in REMOVED_FROM_QUERY
        ]
        request.query = urlencode(kept)
        for name in REMOVED_FROM_QUERY:
            request.arguments.pop(name, None)
            request.query_arguments.pop(name, None)
        tokens = [value for name, value in pairs if name == "token"]
        return tokens[-1] if tokens else ""

    def _take_lane(self, request: HTTPServerRequest, path: str) -> bool:
        """Sets the path of `request` to `path` without the lane. Returns whether `path` contains the lane."""
        rest = path.removeprefix(self.prefix)
        by_lane = path.startswith(self.prefix) and rest.startswith(f"/{self.lane}/")
        request.path = self.prefix + rest[len(self.lane) + 1 :] if by_lane else path
        request.by_lane = by_lane
        return by_lane


def install(
    app: Any, rules: AccessRules, gate_class: Callable[[Any, AccessRules], Gate] = Gate
) -> Gate:
    """The gate of the Tornado application `app`, which is made with `gate_class` at the first call."""
    gate = app.settings.get(COOKIE)
    if gate is None:
        gate = app.settings[COOKIE] = gate_class(app, rules)
        app.default_router = gate
        start = app.start_request
        app.start_request = lambda *connections: _PlainHost(start(*connections))
        app.add_transform(Compression)
    return gate


class _PlainHost(HTTPMessageDelegate):
    """Removes an impossible port from the header Host. Tornado would fail before any handler."""

    def __init__(self, inner: HTTPMessageDelegate) -> None:
        self._inner = inner
        self.data_received, self.finish = inner.data_received, inner.finish  # type: ignore[method-assign]
        self.on_connection_close = inner.on_connection_close  # type: ignore[method-assign]

    def headers_received(self, start_line: Any, headers: HTTPHeaders) -> Any:
        name, colon, port = headers.get("Host", "").rpartition(":")
        if colon and "]" not in port and whole_number(port, 5) is None:
            headers["Host"] = name
        return self._inner.headers_received(start_line, headers)


def is_websocket(request: HTTPServerRequest) -> bool:
    """Whether `request` asks to become a websocket."""
    return request.headers.get("Upgrade", "").lower() == "websocket"


def _is_probe(request: HTTPServerRequest) -> bool:
    """Whether `request` is a read of PROBES by a program on this machine, and not by a proxy for others."""
    if request.path not in auth.PROBES or request.method not in ("GET", "HEAD"):
        return False
    try:
        is_here = ipaddress.ip_address(request.remote_ip or "").is_loopback
    except ValueError:  # a Unix socket: its owner needs no token anyway
        return False
    return is_here and not is_websocket(request) and "X-Forwarded-For" not in request.headers


@functools.cache
def harden(handler: type[RequestHandler]) -> type[RequestHandler]:
    """A subclass of `handler`, whose headers allow a page to load things only from this server. HEAD is as GET."""

    def set_default_headers(self: RequestHandler) -> None:
        super(hardened, self).set_default_headers()
        for name, value in HEADERS.items():
            self.set_header(name, value)
        self.clear_header("Access-Control-Allow-Origin")
        self.clear_header("Access-Control-Allow-Credentials")
        if getattr(self.request, "cors_origin", ""):
            self.set_header("Access-Control-Allow-Origin", self.request.cors_origin)
            self.set_header("Access-Control-Expose-Headers", ANY)
            self.set_header("Vary", "Origin")

    members: dict[str, Any] = {"set_default_headers": set_default_headers}
    if issubclass(handler, WebSocketHandler):
        # Messages are compressed, because the first one has the whole page: 233 kB, or 30 kB compressed.
        members["get_compression_options"] = lambda self: {"mem_level": 5}
    elif handler.options.__module__.startswith(("bokeh.", "panel.")):
        # Bokeh's own method reads the header Origin, which the gate has removed. The gate answers
        # the preflight of an allowed origin itself.
        members["options"] = lambda self, *_: self.set_status(204)
    if handler.head is RequestHandler.head and not issubclass(handler, WebSocketHandler):
        members["head"] = handler.get  # without the body, which Tornado leaves out
    hardened = type(handler.__name__, (handler,), members)
    return hardened


@functools.cache
def _derived(token: str, purpose: str) -> str:
    """A text of 43 characters for this `purpose`, from which the `token` cannot be found.

    A token may be as short as 16 characters, so scrypt makes each guess cost 16 MiB and some 50 ms (RFC 7914).
    """
    salt = f"gpu-console {purpose}".encode()
    key = hashlib.scrypt(token.encode(), salt=salt, n=2**14, r=8, p=1, dklen=32)
    return base64.urlsafe_b64encode(key).rstrip(b"=").decode()


# -- the answers to requests that the gate has not admitted: a refusal, a form for the token, or a redirect to the page
#
# The gate decides which answer is sent. These pages load no resource, and name no user and no software.

TOKEN_NEEDED = "A token is needed. Open the URL that was printed where the server was started."
WRONG_TOKEN = (
    "This token is not valid. Each start of the server makes a new one and prints it in its URL."
)
TOO_MANY_GUESSES = "Too many wrong tokens were tried. Wait a few seconds, then try again."
TOO_MANY_SECONDS = 10.0  # until that refusal is sent
FOREIGN_ORIGIN = "This request came from a page of another origin."
KEY_IS_FOR_CALLS = "This key is for calls of models. It opens no other page."
OTHER_VISITORS_SESSION = "This session belongs to another visitor. Open the page again."
_STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { margin: 0; min-height: 100vh; display: grid; place-items: center; }
main { max-width: 32rem; padding: 2rem; }
h1 { font-size: 1.25rem; margin: 0 0 .75rem; }
p { margin: 0 0 1.25rem; }
form { display: flex; gap: .5rem; }
input { flex: 1; min-width: 0; font: inherit; padding: .5rem .75rem; border: 1px solid #8888; border-radius: .5rem; }
button { font: inherit; padding: .5rem 1rem; border: 0; border-radius: .5rem; background: #1763b6; color: #fff; }
"""
_FORM = """<form method="post">
<input name="token" type="password" autocomplete="off" aria-label="token" placeholder="token" autofocus required>
<button>Open</button></form>"""


def page(text: str, *, form: bool) -> str:
    """An HTML page with one sentence, `text`; with `form`, also with a field for the token."""
    return f"""<!doctype html><html lang="en"><head><meta charset="utf-8"><title>GPU console</title>
<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>
<body><main><h1>GPU console</h1><p>{html.escape(text)}</p>{_FORM if form else ""}</main></body></html>"""


def as_json(text: str, status: int) -> dict[str, Any]:
    """The error with the sentence `text` and the HTTP `status`, in the format that OpenAI's clients read."""
    kind = "rate_limit_error" if status == 429 else "invalid_request_error"
    return {"error": {"message": text, "type": kind, "code": None, "param": None}}


class RefusalHandler(RequestHandler):
    """Refuses the request. If the answer has a form, the visitor can type a token in it."""

    def initialize(
        self, gate: Any, status: int, text: str, form: bool = False, wait: float = 0.0
    ) -> None:
        """Sends `status` and `text` after `wait` seconds; with a `form` for a token, which `gate` checks."""
        self._gate = gate
        self._status = status
        self._text = text
        self._form = form
        self._wait = wait

    async def prepare(self) -> None:
        """Refuses the request at once, unless it is a form in which a user typed a token."""
        if not (self._form and self.request.method == "POST"):
            await self._refuse(self._status, self._text, self._wait)

    async def post(self) -> None:
        role, wait = self._gate.try_token(self.request, self.get_body_argument("token", ""))
        if role:
            self._gate.redirect_inside(self, role)
        elif wait is None:
            await self._refuse(429, TOO_MANY_GUESSES, TOO_MANY_SECONDS)
        else:
            await self._refuse(403, WRONG_TOKEN, wait)

    def check_xsrf_cookie(self) -> None:
        """Checks nothing, since the form itself contains a secret, the token."""

    async def _refuse(self, status: int, text: str, wait: float) -> None:
        if wait:
            await asyncio.sleep(wait)
        is_program = "text/html" not in self.request.headers.get("Accept", "text/html")
        if is_program and status == 403 and self._form:
            status = 401  # the same request with a token may be admitted
            self.set_header("WWW-Authenticate", "Bearer")
        self.set_status(status)
        if status == 429:
            self.set_header("Retry-After", "10")
        self.finish(as_json(text, status) if is_program else page(text, form=self._form))


@stream_request_body
class TooLargeHandler(RefusalHandler):
    """Refuses a request that announces a too large body.

    If the client sends the body without waiting for `100 Continue`, the body is read and discarded. If the server
    closed the connection instead, the client would not read the reason of the refusal.
    """

    async def prepare(self) -> None:
        """Refuses a client that waits for permission to send the body."""
        if self.request.headers.get("Expect", "").lower() == "100-continue":
            await super().prepare()

    def data_received(self, chunk: bytes) -> None:
        """Discards `chunk`."""

    async def post(self) -> None:
        """Refuses the request after its whole body was received."""
        await self._refuse(self._status, self._text, 0.0)

    get = head = put = patch = delete = options = post  # type: ignore[assignment]


class RedirectHandler(RequestHandler):
    """Redirects a request with a token in its URL, which gave the `role`, to the same page without it."""

    def initialize(self, gate: Any, role: Role) -> None:
        self._gate = gate
        self._role = role

    def get(self) -> None:
        self._gate.redirect_inside(self, self._role)

    head = get


# -- pages of other origins, if the operator allows these origins
#
# A request of another origin needs a token in the header `Authorization` or `X-Api-Key`. A cookie, or a token in the
# URL, does not count. So a page of another origin can use only a token that it was given. It may read all headers of an
# answer: as no answer permits credentials (`Access-Control-Allow-Credentials`), ANY there stands for all names.

ANY = "*"
METHODS = "GET, HEAD, POST, PUT, DELETE"
PREFLIGHT_SECONDS = "600"  # for which a browser keeps the answer
_ORIGIN = re.compile(r"https?://(\[[^][]+\](:\d+)?|[^][/?#\s]+)")
_NAMES = re.compile(r"[\w\-, ]{1,2000}", re.ASCII)


def origins_of(text: str | None) -> frozenset[str]:
    """The origins in `text`, the value of the setting GPU_SERVE_CORS, separated by commas. Raises BadSetting.

    >>> sorted(origins_of("https://a.example, http://localhost:3000"))
    ['http://localhost:3000', 'https://a.example']
    """
    found = {name.strip() for name in (text or "").split(",")} - {""}
    for name in found - {ANY}:
        if not _ORIGIN.fullmatch(name):
            expected = f"origins such as https://app.example:8443, with commas, or {ANY}"
            raise BadSetting("GPU_SERVE_CORS", text, expected)
    return frozenset(name.lower() for name in found)


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


# -- text answers are compressed with gzip, if the client accepts gzip
#
# Streams of events are not compressed, nor are answers of less than a kilobyte. Compressed files are kept in memory, so
# that the scripts of the console are compressed once for all visitors. Without compression, its first page transferred
# 4.6 MB.

MOST_KEPT_BYTES = 16 * 2**20  # compressed files in memory; the scripts of the console are 1.2 MB
EVENT_STREAM = "text/event-stream"  # not compressed: an event must not wait for the next ones

_kept: OrderedDict[str, bytes] = OrderedDict()  # etag of a file -> its compressed content


class Compression(GZipContentEncoding):
    """The compression of one answer."""

    def __init__(self, request: HTTPServerRequest) -> None:
        super().__init__(request)
        self._gzipping = self._gzipping and request.method != "HEAD"
        self._etag = ""  # of the file that is being compressed; empty: the result is not kept
        self._parts: list[bytes] = []
        self._from_memory = False

    def transform_first_chunk(
        self, status_code: int, headers: HTTPHeaders, chunk: bytes, finishing: bool
    ) -> tuple[int, HTTPHeaders, bytes]:
        # Only an answer that sends a file has both headers. Its etag is a digest of the file's content.
        etag = headers.get("Etag", "") if "Last-Modified" in headers else ""
        if self._gzipping and status_code == 200 and etag in _kept:
            self._from_memory = True
            _kept.move_to_end(etag)
            headers["Vary"] = "Accept-Encoding"
            headers["Content-Encoding"] = "gzip"
            headers["Content-Length"] = str(len(_kept[etag]))
            return status_code, headers, _kept[etag]
        self._etag = etag if status_code == 200 else ""
        return super().transform_first_chunk(status_code, headers, chunk, finishing)

    def transform_chunk(self, chunk: bytes, finishing: bool) -> bytes:
        if self._from_memory:
            return b""  # the first part was the whole answer
        part = super().transform_chunk(chunk, finishing)
        if self._gzipping and self._etag:
            self._parts.append(part)
            if finishing:
                _keep(self._etag, b"".join(self._parts))
        return part

    def _compressible_type(self, ctype: str) -> bool:
        return ctype != EVENT_STREAM and super()._compressible_type(ctype)


def _keep(etag: str, content: bytes) -> None:
    """Keeps the compressed `content` of a file, and drops the least recently requested ones."""
    _kept[etag] = content
    while sum(map(len, _kept.values())) > MOST_KEPT_BYTES:
        _kept.popitem(last=False)
