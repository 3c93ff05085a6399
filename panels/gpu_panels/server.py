"""Serves the console behind the gate: for `gpu console`, for `gpu serve`, or as the script of `panel serve`.

`panel serve` runs a script only when the first page is requested (with `--warm`: when the server starts). So the gate
does not exist before the first request. This request installs the gate, and is then redirected to the same URL.
"""

from __future__ import annotations

import atexit
import gc
import getpass
import os
import secrets
import sys
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakSet

import panel as pn
from bokeh.resources import Resources
from bokeh.server.server import BaseServer
from bokeh.settings import settings
from panel.io.server import get_server
from tornado.ioloop import IOLoop

from gpu_runtime.errors import GpuError, NotAllowed
from gpu_runtime.web import gate, http_server
from gpu_runtime.web.auth import AccessRules, Visitor
from gpu_runtime.web.connections import Connections
from gpu_runtime.web.http_server import Address, MakeServer, Service, WebServer

from . import panel_gate
from .panel_gate import PanelGate

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

    def __init__(self, page: Page, service: Service, rules: AccessRules, address: Address) -> None:
        """Binds the `address` and installs the gate. Raises OSError."""
        where: dict[str, Any] = {"port": address.port, "address": address.host}
        if address.socket_path is not None:
            where = {"unix_socket": os.fspath(address.socket_path)}
        pn.config.reuse_sessions = False
        self._server = get_server(
            {"/": lambda: page(panel_gate.visitor())},
            title=TITLE,
            sign_sessions=True,
            http_server_kwargs={"max_body_size": service.max_body_bytes},
            secret_key=secrets.token_bytes(32),
            extra_patterns=list(service.routes),
            server_id=gate.COOKIE,
            **where,
        )
        # For a server in `_servers`, Panel makes the relative URLs of a page absolute (Location._sync_pathname). Such
        # URLs would lack the lane, the private part of the path (`web/gate.py`). So the server is removed.
        del pn.state._servers[gate.COOKIE]
        installed = gate.install(self._server._tornado, rules, PanelGate)
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
    make_server: MakeServer = partial(PanelServer, page) if page else _make_console_server
    http_server.run(
        make_server,
        CONSOLE,
        host=host,
        port=port,
        socket_path=socket_path,
        read_only=read_only,
        browser=browser,
    )


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
        IOLoop.current().add_callback(_install_gates, exit_when_closed=True)
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
        visitor = panel_gate.visitor()
    except NotAllowed:
        return  # a guest of Panel's login gets an empty page, and the gate refuses its websocket
    pn.panel((page or _console_page)(visitor)).servable(title=TITLE)


def _make_console_server(service: Service, rules: AccessRules, address: Address) -> PanelServer:
    server = PanelServer(_console_page, service, rules, address)
    _warm_up()
    return server


def _console_page(visitor: Visitor) -> Any:
    """The console for `visitor`. It shows the ledger that is in use when the page is opened."""
    from gpu_runtime import watching

    from . import console, poller

    return console.page(visitor, poller.of(watching.followed()))


def _warm_up() -> None:
    """Imports the parts of the first page now. Without this, the first visitor would wait half a second."""
    from gpu_runtime import Runtime  # noqa: F401

    from . import tabs

    tabs.kind(tabs.titles()[0])


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


def _install_gates(exit_when_closed: bool) -> None:
    for server in _servers():
        if _install_gate(server) and exit_when_closed:
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
        rules = AccessRules(getpass.getuser(), secrets.token_urlsafe(32))
        invalid_setting = " ".join(str(error).split())
    installed = gate.install(app, rules, PanelGate)
    installed.closed_because = invalid_setting or panel_gate.objection(app, rules)
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
