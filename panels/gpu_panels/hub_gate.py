"""Serves the console as a service of a JupyterHub, which tells who each visitor is.

The hub starts `gpu console` and names the address and the prefix in the environment (`gpu_runtime.hub`). A visitor logs
in to the hub by OAuth. The gate asks the hub again after CHECK_SECONDS, and closes the pages of visitors who have lost
their role. No token of the console's own is valid here. This module needs the package `jupyterhub`.
"""

from __future__ import annotations

import inspect
import os
import secrets
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from jupyterhub.services.auth import HubOAuth, HubOAuthCallbackHandler, HubOAuthenticated
from tornado.httputil import HTTPMessageDelegate, HTTPServerRequest
from tornado.ioloop import IOLoop, PeriodicCallback
from tornado.web import HTTPError, RequestHandler, decode_signed_value

from gpu_runtime import hub, watching
from gpu_runtime.settings import Settings
from gpu_runtime.web import auth as tokens
from gpu_runtime.web import gate, http_server
from gpu_runtime.web.auth import AccessRules, Visitor
from gpu_runtime.web.gate import Credentials, is_websocket
from gpu_runtime.web.http_server import Address, Service

from .server import CONSOLE, PanelGate, PanelServer, make_console_server

CHECK_SECONDS = 15  # for so long the hub's answer about a visitor is used again
SESSION = "jupyterhub-session-id"  # the hub's cookie; a logout changes it
LOG_IN = "Log in to JupyterHub, and open the page again."
WRONG_TOKEN = "This token is no valid token of JupyterHub."
NO_ROLE = "{name} may not open this page. JupyterHub gives access with the scope access:services."
NO_HUB = "JupyterHub does not answer, so nobody can be admitted. Try again in a minute."
IN_A_FRAME = "This page is not shown in a page of another program. Open it in a tab of its own."


class HubGate(PanelGate):
    """The gate of a console whose visitors are users of a JupyterHub."""

    def __init__(self, app: Any, rules: AccessRules, hub_auth: HubOAuth) -> None:
        super().__init__(app, rules)
        self._hub = hub_auth
        settings = Settings.load()
        self._operator_groups = frozenset(http_server.names(settings.gpu_console_operator_groups))
        self._user_names = settings.gpu_console_user_names

    def allowed_origins(self) -> set[str]:
        """The host of the hub's public URL, which a proxy in front of the hub may hide."""
        public = urlsplit(os.environ.get("JUPYTERHUB_PUBLIC_URL", "")).netloc
        return {public} if public else set()

    def _take_credentials(self, request: HTTPServerRequest) -> Credentials:
        request.sent_cookies = request.headers.get("Cookie", "")  # type: ignore[attr-defined]
        return super()._take_credentials(request)

    def _admit(self, request: HTTPServerRequest, credentials: Credentials) -> Any:
        if request.path == f"{self.prefix}/oauth_callback":
            return self._with_cookies(request, CallbackHandler, {"hub_auth": self._hub})
        if request.path == self.prefix:  # the browser sends no cookie there
            return self._answer_with(request, SlashHandler, {})
        return _Later(self, request, credentials)

    async def decided(self, request: HTTPServerRequest, credentials: Credentials) -> Any:
        """The handler for `request`, after the hub has told who sent it."""
        name = self._hub.cookie_name
        secret = self._app.settings["cookie_secret"]
        signed = decode_signed_value(secret, name, credentials.cookies.get(name))
        offered = tokens.bearer(credentials.authorization)
        if offered and self.guesses(self._stranger(request)).wait_seconds() is None:
            return self._refuse(request, 429, gate.TOO_MANY_GUESSES, wait=gate.TOO_MANY_SECONDS)
        token = offered or (signed or b"").decode()
        session = credentials.cookies.get(SESSION, "")
        try:
            model = await self._model(token, session) if token else None
        except HTTPError:
            return self._refuse(request, 503, NO_HUB)
        if model is None and offered:
            wait = self._counted(self.guesses, request) or 0.0
            return self._refuse(request, 403, WRONG_TOKEN, wait=wait)
        if model is None:
            return self._log_in(request)
        visitor = self._visitor(model)
        if visitor is None:
            return self._refuse(request, 403, NO_ROLE.format(name=model.get("name", "")))
        if self._is_inside_another_page(request):
            return self._refuse(request, 403, IN_A_FRAME)
        request.model = lambda: self._model(token, session)  # type: ignore[attr-defined]
        return self._let_in(request, visitor)

    async def _model(self, token: str, session: str) -> dict[str, Any] | None:
        """What the hub knows of the user with this `token`; None if it is not valid (any more). Raises HTTPError."""
        return await self._hub.user_for_token(token, session_id=session, sync=False)

    def _visitor(self, model: dict[str, Any]) -> Visitor | None:
        scopes = self._hub.access_scopes
        if model.get("kind", "user") != "user" or not self._hub.check_scopes(scopes, model):
            return None
        return hub.visitor(
            model, self._operator_groups, self._user_names, read_only=self.rules.read_only
        )

    def _log_in(self, request: HTTPServerRequest) -> Any:
        """Redirects a browser that opens a page to the hub. Everything else is refused."""
        is_page = request.method in ("GET", "HEAD") and request.path == f"{self.prefix}/"
        mode = request.headers.get("Sec-Fetch-Mode", "navigate")
        if is_page and mode == "navigate" and not is_websocket(request):
            return self._with_cookies(request, LoginHandler, {"hub_auth": self._hub})
        return self._refuse(request, 403, LOG_IN)

    def _is_inside_another_page(self, request: HTTPServerRequest) -> bool:
        """Whether a script or a frame of another page requests this page, such as one of another user's server."""
        makes_session = request.path in (f"{self.prefix}/", f"{self.prefix}/autoload.js")
        return makes_session and request.headers.get("Sec-Fetch-Dest", "document") != "document"

    def _with_cookies(
        self, request: HTTPServerRequest, handler: type[RequestHandler], options: dict[str, Any]
    ) -> Any:
        """A handler of the login, which alone sees the cookies."""
        request.headers["Cookie"] = request.sent_cookies  # type: ignore[attr-defined]
        return self._answer_with(request, handler, options)

    async def check_pages(self) -> None:
        """Closes the open pages of visitors who have logged out, were removed, or have another role now."""
        for connection in list(self._app._clients):
            request = connection.session.document.session_context.request
            try:
                model = await request.model()
            except HTTPError:  # the hub does not answer; it restarts without its services
                continue
            if model is None or self._visitor(model) != request.visitor:
                connection._socket.close()


class _Later(HTTPMessageDelegate):
    """Receives a request whose handler is known only after the hub has answered."""

    def __init__(self, gate: HubGate, request: HTTPServerRequest, credentials: Credentials) -> None:
        self._gate, self._request, self._credentials = gate, request, credentials
        self._inner: HTTPMessageDelegate | None = None

    async def headers_received(self, start_line: Any, headers: Any) -> None:
        """Tornado reads the body of the request when this coroutine has ended."""
        self._inner = await self._gate.decided(self._request, self._credentials)
        begun = self._inner.headers_received(start_line, headers)
        if inspect.isawaitable(begun):
            await begun

    def data_received(self, chunk: bytes) -> Any:
        return self._inner.data_received(chunk) if self._inner else None

    def finish(self) -> None:
        if self._inner:
            self._inner.finish()

    def on_connection_close(self) -> None:
        if self._inner:
            self._inner.on_connection_close()


class _OfHub(HubOAuthenticated, RequestHandler):
    """A page of the login."""

    def initialize(self, hub_auth: HubOAuth, gate: Any = None) -> None:
        self.hub_auth = hub_auth


class SlashHandler(RequestHandler):
    """Redirects the prefix without its slash to the page."""

    def initialize(self, gate: HubGate) -> None:
        self._gate = gate

    def get(self) -> None:
        query = f"?{self.request.query}" if self.request.query else ""
        self.redirect(f"{self._gate.prefix}/{query}")


class LoginHandler(_OfHub):
    """Redirects the browser to the hub, which sends it back to the callback."""

    def get(self) -> None:
        self.redirect(self.get_login_url())

    head = get


class CallbackHandler(HubOAuthCallbackHandler):
    """Ends the login: stores the hub's token in a signed cookie below the service's prefix."""

    def initialize(self, hub_auth: HubOAuth, gate: Any = None) -> None:
        self.hub_auth = hub_auth


class HubServer(PanelServer):
    """The console's server below the prefix of the service."""

    def __init__(
        self,
        page: Any,
        service: Service,
        rules: AccessRules,
        address: Address,
        *,
        hub_auth: HubOAuth,
    ) -> None:
        super().__init__(
            page,
            service,
            rules,
            address,
            prefix=hub_auth.base_url.rstrip("/"),
            gate_class=partial(HubGate, hub_auth=hub_auth),
        )
        app = self._server._tornado
        app.settings["cookie_secret"] = secrets.token_bytes(32)
        self._checking = PeriodicCallback(app.default_router.check_pages, CHECK_SECONDS * 1000)

    def start(self) -> None:
        super().start()
        self._checking.start()


def _page(visitor: Visitor) -> Any:
    """The console for `visitor`. It shows the ledger of the machine, and not what other processes of root use."""
    from . import console, poller

    return console.page(visitor, poller.for_visitor(watching.default(), visitor))


def run(*, read_only: bool = False) -> None:
    """Serves the console for the hub that has started this process, until it ends. Raises GpuError."""
    hub_auth = HubOAuth(cache_max_age=CHECK_SECONDS)
    address = urlsplit(os.environ["JUPYTERHUB_SERVICE_URL"])
    IOLoop.current()  # HubOAuth's requests run in this loop
    http_server.run(
        partial(make_console_server, kind=partial(HubServer, hub_auth=hub_auth), page=_page),
        replace(CONSOLE, snapshot=lambda: watching.default().status()),
        host=address.hostname or "127.0.0.1",
        port=address.port,
        read_only=read_only,
        announcement=f"The GPU console is the service {hub_auth.base_url} of JupyterHub.",
    )
