"""Serves the console: by `gpu console`, or as the script of `panel serve`. Either way behind the gate.

`panel serve` runs a script only when the first page is asked for (with `--warm`: when it starts). So that first request
only puts up the gate, and is sent back to come in by it.
"""

from __future__ import annotations

import asyncio
import gc
import getpass
import html
import logging
import os
import secrets
import signal
import socket
import sys
import tempfile
import webbrowser
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakSet

import panel as pn
from bokeh.server.server import BaseServer
from panel.io.server import get_server
from tornado.ioloop import IOLoop
from tornado.websocket import WebSocketClosedError

from gpu_runtime.errors import GpuError, NotAllowed
from gpu_runtime.settings import Settings, masked
from gpu_runtime.web import auth, gate, sockets, unsafe_options
from gpu_runtime.web.auth import Terms, Visitor

DEFAULT_PORT = 8211
PORTS_TRIED = 50  # on a shared box others' consoles lie at the first ones
TITLE = "GPU console"
LOGS = ("tornado.access", "tornado.application", "tornado.general")

Page = Callable[[Visitor], Any]
_guarded: WeakSet[Any] = (
    WeakSet()
)  # Bokeh's application contexts, of servers at which the gate stands


def serve_page(page: Page | None = None) -> None:
    """Makes the page of the session that `panel serve` is opening, for those who came through the gate."""
    context = getattr(pn.state.curdoc, "session_context", None)
    if (
        context is None or context.server_context is None
    ):  # run to warm up, before there is a server
        IOLoop.current().add_callback(_close_all, exit_when_shut=True)
        return
    ours = context.server_context.application_context
    if ours not in _guarded:
        server = next(
            (one for one in _servers() if ours in one._tornado.applications.values()), None
        )
        if server is None:  # such as Django's or FastAPI's, which no gate of ours stands before
            raise GpuError("the console is served by `gpu console` and by `panel serve` only")
        stood = gate.COOKIE in server._tornado.settings
        _close(server)
        if not stood:
            pn.config.authorize_callback = lambda user, path: _again(
                context.request
            )  # of this session only
            return
    try:
        visitor = auth.visitor()
    except (
        NotAllowed
    ):  # a guest of Panel's login: their page stays empty, and the gate opens no websocket to it
        return
    pn.panel((page or _console)(visitor)).servable(title=TITLE)


class Beside(NamedTuple):
    """What a server answers beside the page, by the same gate."""

    name: str  # of all of it, for people
    patterns: tuple[Any, ...] = ()  # Tornado's routes
    most_body_bytes: int = 1 << 20  # that a request may bring
    close: Callable[[], Awaitable[None]] | None = None  # at the end, in the server's event loop


ALONE = Beside("The GPU console")


def run(
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    socket_path: str | None = None,
    read_only: bool = False,
    browser: bool = True,
    page: Page | None = None,
    beside: Beside = ALONE,
) -> None:
    """Serves the console until it is interrupted, and prints the URL to open. Raises GpuError where it cannot."""
    made = terms(read_only=read_only)
    where: dict[str, Any]
    if socket_path is not None:
        where = {"unix_socket": os.fspath(sockets.prepare(socket_path))}
    else:
        port = sockets.free_port(
            host, DEFAULT_PORT if port is None else port, PORTS_TRIED if port is None else 1
        )
        where = {"port": port, "address": host}
    pn.config.reuse_sessions = False
    try:
        server = get_server(
            {"/": lambda: (page or _console)(auth.visitor())},
            title=TITLE,
            sign_sessions=True,
            http_server_kwargs={"max_body_size": beside.most_body_bytes},
            secret_key=secrets.token_bytes(32),
            extra_patterns=list(beside.patterns),
            server_id=gate.COOKIE,
            **where,
        )
    except OSError as error:  # somebody was faster
        raise GpuError(
            f"nothing can listen there ({error.strerror}). Try again:  gpu console"
        ) from None
    # Panel turns a page's relative URLs into absolute ones for servers that it knows of (Location._sync_pathname), and
    # so out of the lane.
    del pn.state._servers[gate.COOKIE]
    gate.close(server._tornado, made).most_body_bytes = beside.most_body_bytes
    _mask_logs()
    if page is None:
        _warm_up()
    opened = None
    try:
        if socket_path is not None:
            print(
                f"{beside.name} listens on {where['unix_socket']}, for {made.user} alone.",
                flush=True,
            )
        else:
            address = url(host, where["port"], "", made.operator_token)
            print(f"{beside.name} runs until you press Ctrl-C. Open:\n    {address}", flush=True)
            if host not in ("127.0.0.1", "::1", "localhost"):
                print(
                    "gpu: what is sent between browser and console is not encrypted; on a network that others can "
                    "read, put it behind a proxy with TLS.",
                    file=sys.stderr,
                )
            opened = _open(address) if browser else None
        server.io_loop.asyncio_loop.set_exception_handler(_quietly)
        signal.signal(
            signal.SIGTERM, lambda *_: server.io_loop.add_callback_from_signal(server.io_loop.stop)
        )
        server.start()
        server.io_loop.start()
    finally:
        if server._http is not None:
            server._http.stop()  # who comes now is not let in; who is in is told
        if beside.close is not None:
            server.io_loop.asyncio_loop.run_until_complete(_ended(beside.close()))
        server.stop(wait=False)
        for left in (opened, Path(where["unix_socket"]) if socket_path is not None else None):
            if left is not None:
                left.unlink(missing_ok=True)


async def _ended(closing: Awaitable[None]) -> None:
    """Closes, and ends what is still under way, such as calls of clients that wait: their threads would keep us."""
    await closing
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    if rest:
        await asyncio.wait(rest, timeout=5.0)


def terms(*, read_only: bool = False) -> Terms:
    """On what terms this server lets people in, by the settings. Its token is made anew, unless one is set."""
    settings = Settings.load()
    operator, viewer = settings.gpu_console_token, settings.gpu_console_viewer_token
    return Terms(
        user=getpass.getuser(),
        operator_token=operator.get_secret_value() if operator else secrets.token_urlsafe(32),
        viewer_token=viewer.get_secret_value() if viewer else "",
        operators=_names(settings.gpu_console_operators),
        viewers=_names(settings.gpu_console_viewers),
        read_only=read_only or settings.gpu_console_read_only,
    )


def url(host: str, port: int, prefix: str, token: str) -> str:
    """Where to find the console. An address that stands for all of them is shown as this machine's name.

    >>> url("127.0.0.1", 8211, "", "abc"), url("::1", 8211, "/gpu/console", "abc")
    ('http://127.0.0.1:8211/?token=abc', 'http://[::1]:8211/gpu/console?token=abc')
    """
    host = host or "localhost"  # Panel listens everywhere unless told otherwise, and calls it that
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"http://{f'[{host}]' if ':' in host else host}:{port}{prefix or '/'}?token={token}"


def _console(visitor: Visitor) -> Any:
    import gpu_runtime

    from . import console, poller

    rt = gpu_runtime.runtime()
    rt.guest = True  # it holds no models; what it does it asks of those who do
    return console.page(visitor, poller.of(rt))


def _warm_up() -> None:
    """Imports what the first page is made of, before anybody waits for it: half a second of the first visitor's."""
    from gpu_runtime import Runtime  # noqa: F401

    from .tabs import registry  # noqa: F401

    registry.kind(registry.titles()[0])


def _names(text: str | None) -> frozenset[str]:
    return frozenset(name.strip() for name in (text or "").split(",") if name.strip())


def _quietly(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """A browser that goes away while it is written to is no news; Bokeh lets that become a traceback."""
    if not isinstance(context.get("exception"), WebSocketClosedError):
        loop.default_exception_handler(context)


# -- panel serve


def _servers() -> list[BaseServer]:
    """Bokeh's servers in this process. A session has no way to its own; the collector knows all objects."""
    return [thing for thing in gc.get_objects() if isinstance(thing, BaseServer)]


def _close_all(exit_when_shut: bool) -> None:
    for server in _servers():
        if _close(server) and exit_when_shut:
            raise SystemExit(1)


def _close(server: BaseServer) -> str:
    """Puts up the gate of that server and tells the way in; or why nobody gets in, which is also returned."""
    app = server._tornado
    _guarded.update(app.applications.values())
    if gate.COOKIE in app.settings:
        return app.settings[gate.COOKIE].shut
    try:
        made, shut = terms(), ""
    except GpuError as error:
        made, shut = (
            Terms(getpass.getuser(), secrets.token_urlsafe(32)),
            " ".join(str(error).split()),
        )
    stands = gate.close(app, made)
    stands.shut = shut or unsafe_options.objection(app, made)
    _mask_logs()
    if stands.shut:
        print(f"gpu: no console is served. {stands.shut}", file=sys.stderr, flush=True)
    elif server.port and not stands.login:
        path = server.prefix + next(iter(app.applications)).rstrip("/")
        address = url(server.address or "", server.port, path, made.operator_token)
        print(f"The GPU console is served. Open:\n    {address}", flush=True)
    return stands.shut


def _again(request: Any) -> str:
    """The same URL, relative to itself."""
    path, _, query = (request.uri or "/").partition("?")
    return f"./{path.rpartition('/')[2]}" + (f"?{query}" if query else "")


def _mask_logs() -> None:
    """Nor does a token get into a log where a request was not the gate's to answer."""
    for name in LOGS:
        log = logging.getLogger(name)
        if _masked not in log.filters:
            log.addFilter(_masked)


def _masked(record: logging.LogRecord) -> bool:
    record.msg, record.args = masked(record.getMessage()), ()
    return True


# -- the browser


def _open(address: str) -> Path | None:
    """Opens a browser by way of a file that only its owner can read; a token on a command line could be read by all.

    None where there is no screen.
    """
    if not (
        os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY") or sys.platform == "darwin"
    ):
        return None
    handle, name = tempfile.mkstemp(prefix="gpu-console-", suffix=".html")  # mode 0600
    with os.fdopen(handle, "w") as file:
        file.write(
            f'<!doctype html><meta charset="utf-8"><meta name="referrer" content="no-referrer">'
            f'<meta http-equiv="refresh" content="0;url={html.escape(address)}">'
        )
    webbrowser.open(Path(name).as_uri())
    return Path(name)
