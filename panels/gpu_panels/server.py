"""Serves the console behind the gate: for `gpu console`, for `gpu serve`, or as the script of `panel serve`.

`panel serve` runs a script only when the first page is requested (with `--warm`: when the server starts). So the gate
does not exist before the first request. This request installs the gate, and is then redirected to the same URL.
"""

from __future__ import annotations

import atexit
import gc
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any
from weakref import WeakSet

import panel as pn
from bokeh.resources import Resources
from bokeh.server.auth_provider import NullAuth
from bokeh.server.server import BaseServer
from bokeh.server.views.ico_handler import IcoHandler
from bokeh.server.views.metadata_handler import MetadataHandler
from bokeh.server.views.multi_root_static_handler import MultiRootStaticHandler
from bokeh.server.views.static_handler import StaticHandler
from bokeh.settings import settings
from bokeh.util.token import get_session_id
from panel.auth import BasicAuthProvider, OAuthProvider
from panel.config import config
from panel.io.liveness import LivenessHandler
from panel.io.server import (
    AuthenticatedStaticFileHandler,
    AutoloadJsHandler,
    ComponentResourceHandler,
    DocHandler,
    RootHandler,
    WSHandler,
    get_server,
)
from panel.io.state import state
from tornado import process
from tornado.httputil import HTTPServerRequest
from tornado.ioloop import IOLoop
from tornado.web import FallbackHandler, StaticFileHandler, decode_signed_value

from gpu_runtime.attribution import own_name
from gpu_runtime.errors import GpuError, NotAllowed
from gpu_runtime.facts import Snapshot
from gpu_runtime.web import auth, gate, http_server
from gpu_runtime.web.auth import AccessRules, Visitor
from gpu_runtime.web.connections import Connections
from gpu_runtime.web.gate import Credentials, Gate
from gpu_runtime.web.http_server import Address, MakeServer, Service, WebServer

# -- the gate of a server that Panel runs, and the options of `panel serve` with which it cannot protect the console
#
# It adds the parts that depend on Panel: its login with names, its URL prefix, and the owners of its websockets. The
# rules for every server are in `gpu_runtime.web.gate`.
#
# The gate of `panel serve` exists only after the script has run. Routes that an option adds are open before this time,
# and other options make the gate useless. A server with such an option shows no console; its error names the option.


def current_visitor() -> Visitor:
    """The visitor of the page that Panel is making. Raises NotAllowed if the gate did not admit the request."""
    context = getattr(pn.state.curdoc, "session_context", None)
    found = getattr(getattr(context, "request", None), "visitor", None)
    if not isinstance(found, Visitor):
        raise NotAllowed(
            "the console needs the token of its URL, and this request was not admitted",
            verb="console",
        )
    return found


class PanelGate(Gate):
    """The gate in front of one Bokeh application. With Panel's own login, the name decides the role, not a token."""

    def __init__(self, app: Any, rules: AccessRules) -> None:
        super().__init__(app, rules)
        self.prefix = app.prefix
        self.home = next(iter(app.applications))

    @property
    def login(self) -> bool:
        """Whether Panel's own options ask visitors for a name and a password."""
        return not isinstance(self._app.auth_provider, NullAuth)

    @property
    def keeps_cookies(self) -> bool:  # type: ignore[override]
        """Whether cookies stay in the request. This is needed for Panel's login, which reads its own cookies."""
        return self.login

    def cookie_base(self) -> str:
        """The path that Panel's option sets for cookies. If the option is not set, the URL prefix."""
        return (config.cookie_path or "/").rstrip("/") or self.prefix

    def allowed_origins(self) -> set[str]:
        """The hosts of `--allow-websocket-origin` and of Bokeh's setting of that name."""
        return {*self._app.websocket_origins, *(settings.allowed_ws_origin() or ())}

    def may_join(self, request: HTTPServerRequest, visitor: Visitor) -> bool:
        """Whether the session that `request` names was made for this `visitor`, whose rights a page in it has."""
        words = request.headers.get("Sec-WebSocket-Protocol", "").split(",")
        if len(words) != 2:
            return True  # Bokeh refuses such a request itself
        try:
            session = get_session_id(words[1].strip())
        except Exception:  # it is not Bokeh's token; several types of exceptions mean that
            return False
        return all(owner == visitor for owner in self._owners_of(session))

    def _owners_of(self, session_id: str) -> Iterator[Visitor | None]:
        for context in self._app.applications.values():
            for session in context.sessions:
                if session.id == session_id:
                    request = getattr(session.document.session_context, "request", None)
                    yield getattr(request, "visitor", None)

    def _admit(self, request: HTTPServerRequest, credentials: Credentials) -> Any:
        if self.login:
            return self._admit_by_name(request, credentials)
        return super()._admit(request, credentials)

    def _admit_by_name(self, request: HTTPServerRequest, credentials: Credentials) -> Any:
        """Admits a visitor whose proved name has a role. All others get only the login page."""
        name = self._name(credentials.cookies)
        role = auth.role_of_name(name, self.rules)
        if role is not None:
            return self._let_in(request, self.rules.visitor(role, name))
        handler = self._route(request)
        logins = tuple(known for _, known in self._app.auth_provider.endpoints)
        if issubclass(handler.handler_class, logins):
            if request.method == "POST" and not self._may_try_password(request):
                return self._refuse(request, 429, gate.TOO_MANY_GUESSES)
            return handler
        if name:
            return self._refuse(
                request,
                403,
                f"{name} has logged in, and has no role here. The user who runs the server "
                "gives one with GPU_CONSOLE_OPERATORS or GPU_CONSOLE_VIEWERS.",
            )
        if issubclass(handler.handler_class, (DocHandler, RootHandler)):
            return handler  # redirects to the login, since nobody is logged in
        return self._refuse(request, 403, "Log in first.")

    def _name(self, cookies: dict[str, str]) -> str:
        """The name in the cookie that Panel's login signed, or ""."""
        value = decode_signed_value(
            self._app.settings.get("cookie_secret") or secrets.token_hex(),
            "user",
            cookies.get("user"),
            max_age_days=config.oauth_expiry,
        )
        return value.decode("utf-8", "replace") if value else ""

    def _may_try_password(self, request: HTTPServerRequest) -> bool:
        """Whether Panel may check a password for the stranger who sent `request` now.

        Panel checks passwords itself, so the gate does not know which passwords are right. Therefore every try counts
        as a guess.
        """
        limiter = self.guesses(self._stranger(request))
        if limiter.wait_seconds() != 0.0:
            return False
        limiter.count()
        return True


KNOWN_HANDLERS = {
    DocHandler,
    WSHandler,
    AutoloadJsHandler,
    MetadataHandler,
    RootHandler,
    StaticHandler,
    MultiRootStaticHandler,
    IcoHandler,
    ComponentResourceHandler,
}
OPTION_OF_HANDLER = {
    LivenessHandler: "--liveness",
    FallbackHandler: "--rest-provider",
    AuthenticatedStaticFileHandler: "--static-dirs",
    StaticFileHandler: "--static-dirs",
}
# Options with a secret. Every user of the machine can read a command line, and could forge a login with the secret.
SECRET_OPTIONS = {
    "--cookie-secret": "PANEL_COOKIE_SECRET",
    "--oauth-secret": "PANEL_OAUTH_SECRET",
    "--oauth-encryption-key": "PANEL_OAUTH_ENCRYPTION",
}


def _objections(app: Any, rules: AccessRules, argv: Sequence[str]) -> Iterator[str]:
    for option in _options_with_open_routes(app):
        yield f"{option} opens a route that is not guarded. Start the console without it."
    if len({context.application for context in app.applications.values()}) > 1:
        yield "The console shares its process with no other application. Serve panels/console.py by itself."
    if config.reuse_sessions:
        yield "--reuse-sessions would show one visitor's page to another. Start the console without it."
    if process.task_id() is not None:
        yield "--num-procs would make a console, and a token, for each process. Start the console without it."
    if not isinstance(app.auth_provider, NullAuth):
        yield from _objections_to_login(app, rules, argv)


def _options_with_open_routes(app: Any) -> Iterator[str]:
    if state._admin_context is not None:
        yield "--admin"
    known = KNOWN_HANDLERS | {handler for _, handler in app.auth_provider.endpoints}
    for rule in app.wildcard_router.rules:
        if rule.target not in known:
            yield _option_of(rule.target)


def _option_of(handler: Any) -> str:
    if handler.__module__.startswith("panel.io.rest"):
        return "--rest-provider or --rest-session-info"
    plugin = f"--plugins ({handler.__module__}.{handler.__qualname__})"
    return OPTION_OF_HANDLER.get(handler, plugin)


def _objections_to_login(app: Any, rules: AccessRules, argv: Sequence[str]) -> Iterator[str]:
    if not isinstance(app.auth_provider, BasicAuthProvider):
        yield (
            "--auth-module tells no names, so nobody can be given a role. "
            "Use --basic-auth FILE or --oauth-provider."
        )
    for option, variable in SECRET_OPTIONS.items():
        if any(word == option or word.startswith(f"{option}=") for word in argv):
            yield f"{option} on a command line can be read by every user of this machine. Set {variable} instead."
    password = "" if isinstance(app.auth_provider, OAuthProvider) else config.basic_auth
    if password and not isinstance(password, dict) and not os.path.isfile(password):
        yield (
            "--basic-auth with one password for all proves nobody's name. Give it a file of names and passwords: "
            '{"ann": "…", "bob": "…"}, mode 0600.'
        )
    if not rules.operators and not rules.viewers:
        yield "Nobody has a role. Set GPU_CONSOLE_OPERATORS, GPU_CONSOLE_VIEWERS or both to names, such as ann,bob."


# -- the server

TITLE = "GPU console"
# Fifty ports are tried, since on a shared machine the consoles of other users use the first ports.
CONSOLE = Service("The GPU console", command="gpu console", default_port=8211, ports_tried=50)

# No chart uses WebGL, so the page does not load Bokeh's 200 kB for it.
if "bokeh-gl" in Resources._default_components:
    Resources._default_components.remove("bokeh-gl")

# Panel reads attributes that its models lack. At each such read Bokeh would search for similar names, which took
# 3 % of the server's time. This setting turns the search off.
settings.perform_error_diagnostics = False

Page = Callable[[Visitor], Any]  # makes the page of one visitor
_guarded: WeakSet[Any] = WeakSet()  # Bokeh's application contexts whose server has the gate


class PanelServer(WebServer):
    """A server with a page at "/" and the routes of a service, made by Panel."""

    def __init__(
        self,
        page: Page,
        service: Service,
        rules: AccessRules,
        address: Address,
        *,
        prefix: str = "",
        gate_class: Callable[[Any, AccessRules], PanelGate] = PanelGate,
    ) -> None:
        """Binds the `address`, and installs the gate, which `gate_class` makes. Raises OSError.

        `prefix` is the first part of all paths, without a final slash.
        """
        where: dict[str, Any] = {"port": address.port, "address": address.host}
        if address.socket_path is not None:
            where = {"unix_socket": os.fspath(address.socket_path)}
        pn.config.reuse_sessions = False
        self._server = get_server(
            {"/": lambda: page(current_visitor())},
            title=TITLE,
            sign_sessions=True,
            http_server_kwargs={"max_body_size": service.max_body_bytes},
            secret_key=secrets.token_bytes(32),
            extra_patterns=list(service.routes),
            server_id=gate.COOKIE,
            prefix=prefix,
            **where,
        )
        # For a server in `_servers`, Panel makes the relative URLs of a page absolute (Location._sync_pathname). Such
        # URLs would lack the lane, the private part of the path (`web/gate.py`). So the server is removed.
        del pn.state._servers[gate.COOKIE]
        installed = gate.install(self._server._tornado, rules, gate_class)
        installed.max_body_bytes = service.max_body_bytes
        if self._server._http is not None:
            installed.connections = Connections(self._server._http)

    def start(self) -> None:
        self._server.start()

    def stop_listening(self) -> None:
        if self._server._http is not None:
            self._server._http.stop()

    def stop(self) -> None:
        self._server.stop(wait=False)


def run(
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    socket_path: str | None = None,
    read_only: bool = False,
    browser: bool = True,
    page: Page | None = None,
) -> None:
    """Serves the console until the process is interrupted, and prints the URL to open. Raises GpuError.

    The server listens on `socket_path`, else on `port` of `host`, else on the first free port from 8211 on. With
    `read_only` no visitor may act. With `browser` a browser opens the URL. `page` replaces the console's page.
    """
    make_server: MakeServer = partial(PanelServer, page) if page else make_console_server
    http_server.run(
        make_server,
        CONSOLE if page else replace(CONSOLE, routes=_metrics_route(), snapshot=_snapshot),
        host=host,
        port=port,
        socket_path=socket_path,
        read_only=read_only,
        browser=browser,
    )


def _snapshot() -> Snapshot:
    from gpu_runtime import watching

    return watching.followed().status()


def _metrics_route() -> tuple[Any, ...]:
    """The route /metrics with the figures of the ledger in use; none without the package prometheus-client."""
    try:
        from gpu_runtime.serving.metrics import Metrics, MetricsHandler
    except ImportError:  # an installation from before the extra had it
        return ()
    from gpu_runtime import watching

    metrics = cache(lambda: Metrics(watching.followed()))
    return ((r"/metrics", MetricsHandler, {"metrics": metrics}),)


def with_console(rt: Any) -> MakeServer:
    """A function that makes servers with the console of the runtime `rt` at "/" and the routes of a service."""
    from . import console, poller

    def make(service: Service, rules: AccessRules, address: Address) -> PanelServer:
        """Makes the server. Its page shows the figures of `service`."""
        found = poller.of(rt)
        found.serving = service.figures
        return PanelServer(lambda visitor: console.page(visitor, found), service, rules, address)

    return make


def serve_page(page: Page | None = None) -> None:
    """Makes the page of the session that `panel serve` is opening. Raises GpuError in another server.

    `page` replaces the console's page.
    """
    context = getattr(pn.state.curdoc, "session_context", None)
    if context is None or context.server_context is None:  # `--warm`: no server exists yet
        IOLoop.current().add_callback(_install_gates)
        return
    application = context.server_context.application_context
    if application not in _guarded:
        server = _server_of(application)
        had_gate = gate.COOKIE in server._tornado.settings
        _install_gate(server)
        if not had_gate:
            # This request came before the gate. The callback, set for this session only, redirects it.
            pn.config.authorize_callback = lambda user, path: _same_url(context.request)
            return
    try:
        visitor = current_visitor()
    except NotAllowed:
        return  # a guest of Panel's login gets an empty page, and the gate refuses its websocket
    pn.panel((page or _console_page)(visitor)).servable(title=TITLE)


def make_console_server(
    service: Service,
    rules: AccessRules,
    address: Address,
    kind: Callable[..., PanelServer] = PanelServer,
    page: Page | None = None,
) -> PanelServer:
    """A server of this `kind` with the console's page, or with the `page` if one is given."""
    server = kind(page or _console_page, service, rules, address)
    # Imports the parts of the first page now. Without this, the first visitor would wait half a second.
    from gpu_runtime import Runtime  # noqa: F401

    from . import tabs  # noqa: F401

    return server


def _console_page(visitor: Visitor) -> Any:
    """The console for `visitor`. It shows the ledger that is in use when the page is opened."""
    from gpu_runtime import watching

    from . import console, poller

    return console.page(visitor, poller.for_visitor(watching.followed(), visitor))


# -- panel serve


def _servers() -> list[BaseServer]:
    """Bokeh's servers in this process, from the garbage collector: a session has no reference to its server."""
    return [thing for thing in gc.get_objects() if isinstance(thing, BaseServer)]


def _server_of(application: Any) -> BaseServer:
    """The server of the Bokeh `application` context. Raises GpuError if another web framework runs the application."""
    for server in _servers():
        if application in server._tornado.applications.values():
            return server
    # Another framework runs it, such as Django or FastAPI, where our gate cannot be installed.
    raise GpuError("the console is served by `gpu console` and by `panel serve` only")


def _install_gates() -> None:
    for server in _servers():
        if _install_gate(server):
            raise SystemExit(1)


def _install_gate(server: BaseServer) -> str:
    """Installs the gate, and prints the URL, or the reason why the gate admits nobody, which is returned too."""
    app = server._tornado
    _guarded.update(app.applications.values())
    if gate.COOKIE in app.settings:
        return app.settings[gate.COOKIE].closed_because
    try:
        rules = http_server.access_rules()
        invalid_setting = ""
    except GpuError as error:
        rules = AccessRules(own_name(), secrets.token_urlsafe(32))
        invalid_setting = " ".join(str(error).split())
    installed = gate.install(app, rules, PanelGate)
    # sys.argv is not used, because Bokeh replaces it while a script runs.
    installed.closed_because = invalid_setting or next(_objections(app, rules, sys.orig_argv), "")
    if server._http is not None:
        installed.connections = Connections(server._http)
    http_server.mask_logs()
    if installed.closed_because:
        print(f"gpu: no console is served. {installed.closed_because}", file=sys.stderr, flush=True)
    elif server.port and not installed.login:
        path = server.prefix + next(iter(app.applications)).rstrip("/")
        url = http_server.url(server.address or "", server.port, path, rules.operator_token)
        text, file = http_server.printable_address(url)
        if file is not None:
            atexit.register(file.unlink, missing_ok=True)
        print(f"The GPU console is served. Open:\n    {text}", flush=True)
    return installed.closed_because


def _same_url(request: Any) -> str:
    """The URL of `request` in a relative form, for a redirect of the browser."""
    path, _, query = (request.uri or "/").partition("?")
    return f"./{path.rpartition('/')[2]}" + (f"?{query}" if query else "")
