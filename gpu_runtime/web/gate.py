"""The gate of a server: every request passes it before any route is looked for, whatever the route and its handler.

It takes the credentials out of the request, so that neither a handler, a page nor a log sees them, lets in whom the
guard lets in, and leaves on the request who that is. Cookies know no ports: another user's server on this host would
be sent ours if its path could be guessed. So a browser is led to a *lane*, a path that each start makes anew, and the
cookie is for that path only.
"""

from __future__ import annotations

import functools
import os
import posixpath
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import parse_qsl, urlencode

from bokeh.server.auth_provider import NullAuth
from bokeh.settings import settings
from bokeh.util.token import get_session_id
from tornado.httputil import HTTPServerRequest, parse_cookie
from tornado.routing import ReversibleRouter
from tornado.web import RequestHandler, decode_signed_value

from . import auth
from . import login as door
from .auth import OPERATOR, Guesses, Role, Terms, Visitor

COOKIE = "gpu-console"
# Names of a token, and of a session that somebody else chose: who follows such a link would share it with its sender.
TAKEN_FROM_QUERY = ("token", "bokeh-session-id", "bokeh-token")
TAKEN_FROM_HEADERS = ("Authorization", "Bokeh-Session-Id")
MOST_OF_A_STRANGERS_BODY = 4096  # bytes
MOST_TO_FORGET = (
    1 << 30
)  # bytes of a body that is too large: so long a client is let finish, and hears why
HEADERS = {
    "Referrer-Policy": "no-referrer",  # the lane goes nowhere
    "X-Content-Type-Options": "nosniff",
    # JupyterLab shows its tile in a frame of the same origin. Panel compiles its components in the page (eval, blob).
    "Content-Security-Policy": "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; object-src 'none'; "
    "base-uri 'self'; form-action 'self'; frame-ancestors 'self'",
}


@dataclass(frozen=True)
class Brought:
    """What a request brought along to be let in by."""

    authorization: str
    query: str
    cookies: dict[str, str]
    ours: tuple[
        str, ...
    ]  # values of our cookie: a server at another port of this host may have set one beside it
    inside: bool  # it came by the lane

    @property
    def something(self) -> bool:
        return bool(auth.bearer(self.authorization) or self.query or (self.inside and self.ours))


class Gate(ReversibleRouter):
    """Stands before the routes of one Tornado application; made and put there by `close`."""

    def __init__(self, app: Any, terms: Terms, clock: Callable[[], float] = time.monotonic) -> None:
        self.terms = terms
        self.shut = ""  # why nobody at all is let in; empty: they are
        self.lane = secrets.token_urlsafe(16)
        self.guesses = Guesses(clock)
        self.most_body_bytes = MOST_TO_FORGET  # what the server takes, where it told us
        self._app, self._routes = app, app.default_router
        # Cookies have values of their own, so that a stolen one does not tell a token that outlives this start.
        self._inside = replace(
            terms,
            operator_token=secrets.token_urlsafe(32),
            viewer_token=terms.viewer_token and secrets.token_urlsafe(32),
        )

    @property
    def login(self) -> bool:
        """Panel's own options ask for names and passwords; tokens play no part."""
        return not isinstance(self._app.auth_provider, NullAuth)

    def reverse_url(self, name: str, *args: Any) -> str | None:
        return self._routes.reverse_url(name, *args)

    def find_handler(self, request: HTTPServerRequest, **kwargs: Any) -> Any:
        """The handler of the route, for those who are let in; the door, for the others."""
        brought = self._take(request)
        request.visitor = None
        if self.shut:
            return self._refuse(request, 503, self.shut)
        if not self._own_page(request):
            return self._refuse(request, 403, door.FOREIGN)
        if self.login:
            return self._for_a_name(request, brought)
        uid = peer_uid(request)
        if uid is not None and uid == os.getuid():
            return self._let_in(request, self.terms.visitor(OPERATOR))
        return self._for_a_token(request, brought)

    def try_token(self, token: str) -> tuple[Role | None, float | None]:
        """The role of a token that somebody typed, and how long a wrong one waits; None: it was not looked at."""
        wait = self.guesses.wait_seconds()
        if wait is None:
            return None, None
        role = auth.check(self.terms, query=token)
        if role is None:
            self.guesses.count()
        return role, wait

    def welcome(self, handler: RequestHandler, role: Role) -> None:
        """Answers with the cookie of that role and the way to the same page, by the lane and without a token."""
        from panel.config import config

        request = handler.request
        base = (config.cookie_path or "/").rstrip("/") or self._app.prefix
        handler.set_cookie(
            COOKIE,
            self._inside.operator_token if role == OPERATOR else self._inside.viewer_token,
            path=f"{base}/{self.lane}/",
            httponly=True,
            samesite="Lax",
            secure=request.protocol == "https",
        )
        handler.set_header("Cache-Control", "no-store")
        handler.redirect(self._way(request))

    def _way(self, request: HTTPServerRequest) -> str:
        """From the URL that was asked for to the same by the lane; relative, since a proxy may know us elsewhere."""
        here = request.path.removeprefix(self._app.prefix)
        there = here
        if (
            self._routes.find_handler(request) is None
        ):  # such as the lane of a start before this one
            there = next(iter(self._app.applications))
        if not here:  # the prefix without its slash
            up = posixpath.basename(self._app.prefix) + "/"
        else:
            up = "../" * (here.count("/") - (not request.by_the_lane)) or "./"
        return f"{up}{self.lane}/{there.lstrip('/')}" + (
            f"?{request.query}" if request.query else ""
        )

    # -- who comes

    def _for_a_token(self, request: HTTPServerRequest, brought: Brought) -> Any:
        if brought.something and not brought.inside and self.guesses.wait_seconds() is None:
            return self._refuse(request, 429, door.MANY)
        role = auth.check(self.terms, authorization=brought.authorization, query=brought.query)
        if brought.inside and role is None:
            roles = [auth.check(self._inside, cookie=value) for value in brought.ours]
            role = next((one for one in roles if one is not None), None)
        if role is None:
            wait = 0.0
            if brought.something:
                wait = self.guesses.wait_seconds() or 0.0
                self.guesses.count()
            return self._refuse(
                request, 403, door.WRONG if brought.something else door.ASK, form=True, wait=wait
            )
        if brought.query and request.method in ("GET", "HEAD") and not is_websocket(request):
            return self._app.get_handler_delegate(
                request, harden(door.Welcome), {"gate": self, "role": role}
            )
        return self._let_in(request, self.terms.visitor(role))

    def _for_a_name(self, request: HTTPServerRequest, brought: Brought) -> Any:
        """Panel's login asks for names; here they get their roles. Strangers see the way to the login and no more."""
        name = self._name(brought.cookies)
        role = auth.role_of(name, self.terms)
        if role is not None:
            return self._let_in(request, self.terms.visitor(role, name))
        handler = self._route(request)
        if self._is_login(handler.handler_class):
            if request.method == "POST" and not self._may_try_password():
                return self._refuse(request, 429, door.MANY)
            return handler
        if name:
            return self._refuse(
                request,
                403,
                f"{name} has logged in, and has no role here. Whoever runs the server "
                "gives one with GPU_CONSOLE_OPERATORS or GPU_CONSOLE_VIEWERS.",
            )
        from panel.io.server import DocHandler, RootHandler

        if issubclass(handler.handler_class, (DocHandler, RootHandler)):
            return handler  # which leads to the login, since nobody is logged in
        return self._refuse(request, 403, "Log in first.")

    def _name(self, cookies: dict[str, str]) -> str:
        from panel.config import config

        value = decode_signed_value(
            self._app.settings.get("cookie_secret") or secrets.token_hex(),
            "user",
            cookies.get("user"),
            max_age_days=config.oauth_expiry,
        )
        return value.decode("utf-8", "replace") if value else ""

    def _is_login(self, handler: type) -> bool:
        return any(issubclass(handler, known) for _, known in self._app.auth_provider.endpoints)

    def _may_try_password(self) -> bool:
        """Passwords are looked at by Panel: each try counts, right or wrong, and one a second beyond the head start."""
        if self.guesses.wait_seconds() != 0.0:
            return False
        self.guesses.count()
        return True

    def _own_page(self, request: HTTPServerRequest) -> bool:
        """Whether no page of another origin asks. Bokeh is spared the question: its own list knows no tunnels."""
        origins = [
            request.headers.pop(name)
            for name in ("Origin", "Sec-Websocket-Origin")
            if name in request.headers
        ]
        named = {*self._app.websocket_origins, *(settings.allowed_ws_origin() or ())}
        return all(auth.same_origin(origin, request.host, named) for origin in origins)

    # -- what becomes of them

    def _let_in(self, request: HTTPServerRequest, visitor: Visitor) -> Any:
        request.visitor = visitor
        if is_websocket(request) and not self._may_join(request, visitor):
            return self._refuse(request, 403, door.OTHERS)
        return self._route(request)

    def _may_join(self, request: HTTPServerRequest, visitor: Visitor) -> bool:
        """Nobody joins a session that was made for somebody else: its page would act with that one's rights."""
        words = request.headers.get("Sec-WebSocket-Protocol", "").split(",")
        if len(words) != 2:
            return True  # Bokeh refuses it
        try:
            session = get_session_id(words[1].strip())
        except Exception:  # whatever was sent is no token of Bokeh's, which says so in several ways
            return False
        return all(owner == visitor for owner in self._visitors_of(session))

    def _visitors_of(self, session: str) -> Iterator[Visitor | None]:
        for context in self._app.applications.values():
            for one in context.sessions:
                if one.id == session:
                    yield getattr(
                        getattr(one.document.session_context, "request", None), "visitor", None
                    )

    def _route(self, request: HTTPServerRequest) -> Any:
        found = self._routes.find_handler(request)
        sent = request.headers.get("Content-Length", "")
        if (
            found is not None
            and sent.isdigit()
            and self.most_body_bytes < int(sent) <= MOST_TO_FORGET
        ):
            return self._too_large(request, int(sent))
        if found is not None:
            found.handler_class = harden(found.handler_class)
            return found
        return self._refuse(request, 404, "There is nothing here.")

    def _refuse(
        self,
        request: HTTPServerRequest,
        status: int,
        words: str,
        *,
        form: bool = False,
        wait: float = 0.0,
    ) -> Any:
        if request.connection is not None and hasattr(request.connection, "set_max_body_size"):
            request.connection.set_max_body_size(MOST_OF_A_STRANGERS_BODY)
        return self._app.get_handler_delegate(
            request,
            harden(door.Door),
            {"gate": self, "status": status, "words": words, "form": form, "wait": wait},
        )

    def _too_large(self, request: HTTPServerRequest, size: int) -> Any:
        request.connection.set_max_body_size(size)  # type: ignore[union-attr] # else Tornado answers, without a word
        words = f"The body has {size:,} bytes; at most {self.most_body_bytes:,} are taken."
        return self._app.get_handler_delegate(
            request, harden(door.TooLarge), {"gate": self, "status": 413, "words": words}
        )

    def _take(self, request: HTTPServerRequest) -> Brought:
        """The request's credentials, taken out of it, and the lane out of its path."""
        sent = request.headers.get("Cookie", "")
        cookies = parse_cookie(sent)
        ours = tuple(
            parse_cookie(one).get(COOKIE, "")
            for one in sent.split(";")
            if COOKIE in parse_cookie(one)
        )
        if (
            not self.login
        ):  # other servers' cookies come along too, and Bokeh would write them into the page
            request.headers.pop("Cookie", None)
        authorization = request.headers.get("Authorization", "")
        for name in TAKEN_FROM_HEADERS:
            request.headers.pop(name, None)
        path, _, query = (request.uri or "").partition("?")
        pairs = parse_qsl(query, keep_blank_values=True)
        tokens = [value for name, value in pairs if name == "token"]
        request.query = urlencode(
            [(name, value) for name, value in pairs if name not in TAKEN_FROM_QUERY]
        )
        for name in TAKEN_FROM_QUERY:
            request.arguments.pop(name, None)
            request.query_arguments.pop(name, None)
        before, after = self._app.prefix, path.removeprefix(self._app.prefix)
        inside = path.startswith(before) and after.startswith(f"/{self.lane}/")
        if inside:
            path = before + after[len(self.lane) + 1 :]
        request.path = path
        request.uri = f"{path}?{request.query}" if request.query else path
        request.by_the_lane = inside
        return Brought(authorization, tokens[-1] if tokens else "", cookies, ours, inside)


def close(app: Any, terms: Terms) -> Gate:
    """The gate of that application, which stands there from now on."""
    gate = app.settings.get(COOKIE)
    if gate is None:
        gate = app.settings[COOKIE] = Gate(app, terms)
        app.default_router = gate
    return gate


def is_websocket(request: HTTPServerRequest) -> bool:
    return request.headers.get("Upgrade", "").lower() == "websocket"


def peer_uid(request: HTTPServerRequest) -> int | None:
    """The user at the other end of a Unix socket, as the kernel says; None for a connection over the network."""
    sock = getattr(getattr(request.connection, "stream", None), "socket", None)
    if sock is None or sock.family != socket.AF_UNIX or not hasattr(socket, "SO_PEERCRED"):
        return None
    _, uid, _ = struct.unpack(
        "3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    return uid


@functools.cache
def harden(handler: type[RequestHandler]) -> type[RequestHandler]:
    """The handler, whose answers also tell the browser to keep to this server."""

    def set_default_headers(self: RequestHandler) -> None:
        super(hardened, self).set_default_headers()
        for name, value in HEADERS.items():
            self.set_header(name, value)
        self.clear_header("Access-Control-Allow-Origin")
        self.clear_header("Access-Control-Allow-Credentials")

    hardened = type(handler.__name__, (handler,), {"set_default_headers": set_default_headers})
    return hardened
