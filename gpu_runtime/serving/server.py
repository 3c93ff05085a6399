"""The server of `gpu serve`: the memory API, OpenAI's routes and metrics on one port, behind one gate.

The caller may add a console's page on the same port. This module does not import Panel. `serve` is the server of one
host of a fleet: it runs in the agent of the host, which passes its URL and token to `gpu serve --fleet`.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from tornado.httpserver import HTTPServer
from tornado.iostream import StreamClosedError
from tornado.netutil import bind_sockets, bind_unix_socket
from tornado.web import Application, RequestHandler

from .. import access_keys
from ..access_keys import Keys, KeysFile
from ..attribution import own_name
from ..errors import GpuError
from ..settings import Settings
from ..threads import start
from ..web import gate, http_server
from ..web.auth import CALLS, AccessRules
from ..web.connections import Connections
from ..web.gate import COOKIE, origins_of
from ..web.http_server import Address, MakeServer, Service, WebServer, bound, mask_logs
from ..web.json_body import whole_number
from . import records
from .access import visitor_of
from .api.app import application
from .gateway import Gateway
from .metrics import Metrics, MetricsHandler
from .records import served
from .requests import Refused
from .store import Store
from .store import default_file as default_store
from .tasks import default_file, read_serving_config

DEFAULT_PORT, EXPORTER_PORT = 8210, 9835
METRICS = "/metrics"
_WORDS = r"memory v1 v2 api health livez readyz metrics usage docs openapi\.json".split()
ROUTES = rf"/(?:{'|'.join([*_WORDS, *CALLS])}|static-offline-docs)(?:/.*)?"
HOME = "/docs"  # the first page of a server without a console
ANSWER_SECONDS = 0.5  # when the server ends: the time to send answers to waiting callers
MAX_BODY_BYTES = 32 << 20  # bodies may contain images


class HeadlessServer(WebServer):
    """A Tornado server with the routes of a service and no console."""

    def __init__(self, service: Service, rules: AccessRules, address: Address) -> None:
        """Binds the `address` and installs the gate with these `rules`. Raises OSError if binding fails."""
        app = Application(list(service.routes))
        installed = gate.install(app, rules)
        installed.home = service.home
        installed.max_body_bytes = service.max_body_bytes
        self._http = HTTPServer(app, max_body_size=service.max_body_bytes)
        if address.socket_path is not None:
            self._http.add_sockets([bind_unix_socket(os.fspath(address.socket_path))])
        else:
            self._http.add_sockets(bind_sockets(address.port, address.host))
        installed.connections = Connections(self._http)

    def stop_listening(self) -> None:
        """Stops accepting new connections."""
        self._http.stop()


@contextmanager
def messages_shown(level: str) -> Iterator[None]:
    """In this block, messages of this `level` (debug, info, …) or graver go to standard error."""
    log = logging.getLogger("gpu_runtime")
    before = log.level, log.propagate
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.propagate = False  # otherwise a handler of another library would show the messages again
    log.setLevel(level.upper())
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before[0])
        log.propagate = before[1]


def run(rt: Any, **options: Any) -> None:
    """Serves the models of the runtime `rt` until the process is interrupted. For `options` see `run_app`."""
    run_app(
        lambda gateway, store: application(rt, gateway, store),
        lambda keys, store: Gateway(rt, keys=keys, store=store),
        rt.settings,
        snapshot=rt.status,
        **options,
    )


def run_app(
    make_app: Callable[[Callable[[], Gateway], Store], Any],
    make_gateway: Callable[[Callable[[], Keys], Store], Gateway],
    settings: Settings,
    *,
    console: MakeServer | None = None,
    snapshot: Callable[[], Any] | None = None,
    log_level: str = "info",
    read_only: bool = False,
    **where: Any,
) -> None:
    """Serves an application until the process is interrupted, and prints the URL to open.

    `make_app(gateway, store)` makes the application. `make_gateway(keys, store)` makes its gateway. `console` makes a
    server that also has a console's page. `snapshot` is as in Service. Messages of `log_level` or graver go to standard
    error. With `read_only` no visitor may act and no model is called. `where` has the arguments host, port and
    socket_path of `http_server.run`.

    Raises GpuError if the server cannot listen, and BadDocument or BadSetting for a mistake in `tasks.yaml`, in the
    file of keys or in a setting.
    """
    read_serving_config(settings.gpu_tasks or default_file())  # so that a mistake is reported now
    origins = origins_of(settings.gpu_serve_cors)
    records.open_log(settings.gpu_serve_log, settings.gpu_serve_log_names)
    keys = _keys(settings)
    store = Store(default_store())
    gateway = make_gateway(keys, store)
    app = make_app(lambda: gateway, store)

    async def close() -> None:
        await app.state.jobs.close()
        await gateway.close()
        answering = asyncio.all_tasks() - {asyncio.current_task()}
        if answering:
            await asyncio.wait(answering, timeout=ANSWER_SECONDS)
        store.close()

    def reload() -> None:
        records.reopen_log()
        gateway.reload_tasks()

    # After this call, the garbage collector no longer searches the imported modules, which are never garbage. These
    # searches took a fifth of the server's time, and up to 0.2 s at once.
    gc.freeze()
    service = _service(
        app,
        cors=origins,
        key_visitor=lambda offered: visitor_of(keys(), offered, read_only=read_only),
        start=None if read_only else gateway.preload,
        drain=lambda: gateway.drain(settings.gpu_serve_grace_seconds),
        reload=reload,
        figures=lambda: served(gateway, app.state.jobs, time.monotonic()),
        close=close,
        snapshot=snapshot,
    )
    with messages_shown(log_level):
        http_server.run(console or HeadlessServer, service, read_only=read_only, **where)


def _service(app: Any, **more: Any) -> Service:
    return Service(
        "gpu serve",
        command="gpu serve",
        default_port=DEFAULT_PORT,
        routes=((ROUTES, Asgi, {"app": app}),),
        home=HOME,
        max_body_bytes=MAX_BODY_BYTES,
        **more,
    )


def run_exporter(rt: Any, settings: Settings, **where: Any) -> None:
    """Serves the metrics of the runtime `rt` until the process is interrupted. `where` is that of `run_app`.

    Raises GpuError if the server cannot listen, and BadDocument for a mistake in the file of keys.
    """
    metrics, keys = Metrics(rt), _keys(settings)
    service = Service(
        "gpu exporter",
        command="gpu exporter",
        default_port=EXPORTER_PORT,
        routes=((METRICS, MetricsHandler, {"metrics": lambda: metrics}),),
        home=METRICS,
        key_visitor=lambda offered: visitor_of(keys(), offered, read_only=True),
        snapshot=rt.status,
    )
    http_server.run(HeadlessServer, service, read_only=True, **where)


def _keys(settings: Settings) -> Callable[[], Keys]:
    """A function that returns the keys of `gpu keys`, from their file."""
    file = Path(settings.gpu_serve_keys or access_keys.default_file())
    return KeysFile(file, time.monotonic, logging.getLogger("gpu_runtime").warning).keys


class HostServer(NamedTuple):
    """The address of the server of a host, such as http://10.0.0.2:41234, and the token that it requires."""

    url: str
    token: str


def serve(rt: Any, host: str) -> HostServer:
    """Starts the server of the runtime `rt` on a free port of the address `host`, in a thread.

    Returns the server's URL and token. The server runs until this process ends. Raises GpuError if it does not start.
    """
    listens = threading.Event()
    found: list[HostServer] = []

    def run() -> None:
        asyncio.run(_run(rt, host, found, listens))

    thread = start(run)
    while not listens.wait(0.1):
        if thread.wait(0.0):
            raise GpuError(f"the server of this host could not listen on {host}.")
    return found[0]


async def _run(rt: Any, host: str, found: list[HostServer], listens: threading.Event) -> None:
    gateway = Gateway(rt)
    app = application(rt, lambda: gateway)
    token = secrets.token_urlsafe(32)
    rules = AccessRules(user=own_name(), operator_token=token)
    mask_logs()
    _, address = bound(HeadlessServer, _service(app), rules, host, 0, None)
    shown = f"[{host}]" if ":" in host else host
    found.append(HostServer(f"http://{shown}:{address.port}", token))
    listens.set()
    await asyncio.Event().wait()  # until the process ends


# -- a Tornado handler that passes requests to an ASGI application, so that one server has both
# pages and the API.
#
# Tornado reads the whole request and its body, up to the server's limit, before it calls the application. Each part of
# the answer is written when the application sends it. A connection that takes no data for WRITE_SECONDS is closed. The
# admitted visitor is in `scope["state"]["visitor"]`.


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

    def write_error(self, status_code: int, **_: Any) -> None:
        """The answer of Tornado itself: to an unknown method, or after an error of the application."""
        self.finish(Refused(status_code, None, self._reason).body())

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
