"""Runs one server behind the gate until the process is interrupted: its address, its URL, its log, and its end.

The caller makes the server: `gpu_runtime.serving.server` makes a plain Tornado server, and `gpu_panels.server` makes
one with the console's page. A Unix socket is one that only its owner can reach. It is only as private as the
directories above it: a user who may rename one of them can replace the socket.
"""

from __future__ import annotations

import asyncio
import errno
import html
import logging
import os
import secrets
import signal
import socket
import stat
import sys
import tempfile
import time
import webbrowser
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tornado.ioloop import IOLoop
from tornado.websocket import WebSocketClosedError

from .. import alerts
from ..attribution import own_name
from ..errors import GpuError
from ..files import make_directory, own_process, state_home, weak_step
from ..settings import Settings, masked
from .auth import AccessRules, Visitor

MASKED_LOGS = ("tornado.access", "tornado.application", "tornado.general")
LIMITED_LOGS = (*MASKED_LOGS, "asyncio")  # strangers can cause lines in these logs
LINES_AT_ONCE, LINES_A_SECOND = 100, 2.0  # the limits of each of LIMITED_LOGS
BIND_ATTEMPTS = 5  # several servers that start at the same time find the same free port
CANCEL_SECONDS = 5.0  # the longest wait until cancelled tasks have ended


@dataclass(frozen=True)
class Service:
    """A service that a server offers besides its pages: its name, its ports and its routes."""

    name: str  # begins the line that is printed at the start
    command: str  # the command that an error advises to type
    default_port: int
    ports_tried: int = 1  # ports that are tried, from the default one on; a port that the caller names is tried alone
    routes: tuple[Any, ...] = ()  # Tornado's routes
    home: str = "/"  # the path of the first page
    max_body_bytes: int = 1 << 20  # limit of one request's body
    cors: frozenset[str] = frozenset()  # origins of pages that may send requests with a token
    key_visitor: Callable[[str], Visitor | None] | None = None  # see AccessRules
    start: Callable[[], Awaitable[None]] | None = None  # runs once the server listens, in its loop
    # Returns figures of the service for the console's page. Called in the event loop.
    figures: Callable[[], Any] | None = None
    # Runs after SIGTERM, in the server's event loop, while the server still listens. A second SIGTERM ends the server
    # without waiting for this function.
    drain: Callable[[], Awaitable[None]] | None = None
    reload: Callable[[], None] | None = None  # runs after SIGHUP, in the server's event loop
    close: Callable[[], Awaitable[None]] | None = None  # runs at the end, in the event loop
    # Returns a snapshot, whose problems are told to the destinations of GPU_ALERTS.
    snapshot: Callable[[], Any] | None = None


@dataclass(frozen=True)
class Address:
    """Where a server listens: a Unix socket if `socket_path` is not None, else a TCP port."""

    host: str
    port: int
    socket_path: Path | None = None


class WebServer:
    """A server that is bound to its address, with the gate in front of its routes."""

    def start(self) -> None:
        """Starts background tasks. The event loop runs after this call."""

    def stop_listening(self) -> None:
        """Stops accepting new connections. Open connections stay open."""
        raise NotImplementedError

    def stop(self) -> None:
        """Ends the server."""


# Makes and binds a server. Raises OSError if the address cannot be bound.
MakeServer = Callable[[Service, AccessRules, Address], WebServer]


def run(
    make_server: MakeServer,
    service: Service,
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    socket_path: str | None = None,
    read_only: bool = False,
    browser: bool = False,
    announcement: str = "",
) -> None:
    """Serves `service` until the process is interrupted, and prints the URL to open. Raises GpuError if it cannot
    listen.

    `make_server` makes the server. It listens on `socket_path`, else on `port` of `host`. Without a `port`, it uses the
    service's default port; 0 means any free port. With `read_only` no visitor may act. With `browser` a browser opens
    the URL. An `announcement` is printed in place of the URL, if visitors do not use it.
    """
    rules = access_rules(read_only=read_only)
    rules = replace(rules, cors=service.cors, key_visitor=service.key_visitor)
    server, address = bound(make_server, service, rules, host, port, socket_path)
    mask_logs()
    loop = IOLoop.current()
    secret_files: list[Path | None] = []
    try:
        shown_url = ""
        if announcement:
            print(announcement, flush=True)
        else:
            shown_url, url_file = _announce(service, rules, address)
            secret_files.append(url_file)
        if browser and shown_url:
            secret_files.append(open_browser(shown_url))
        loop.asyncio_loop.set_exception_handler(_log_unless_browser_left)  # type: ignore[attr-defined]
        _handle_signals(loop, service)
        server.start()
        if service.snapshot is not None:
            alerts.start(service.snapshot, Settings.load().gpu_alerts)
        if service.start is not None:
            loop.add_callback(service.start)
        loop.start()
    finally:
        server.stop_listening()
        if service.close is not None:
            loop.asyncio_loop.run_until_complete(_close(service.close()))  # type: ignore[attr-defined]
        server.stop()
        for file in (*secret_files, address.socket_path):
            if file is not None:
                file.unlink(missing_ok=True)


def access_rules(*, read_only: bool = False) -> AccessRules:
    """The access rules from the settings, with a new operator's token if the settings have none.

    No visitor may act if `read_only` or the setting GPU_CONSOLE_READ_ONLY is true. Raises GpuError for an invalid
    setting.
    """
    settings = Settings.load()
    operator = settings.gpu_console_token
    viewer = settings.gpu_console_viewer_token
    return AccessRules(
        user=own_name(),
        operator_token=operator.get_secret_value() if operator else secrets.token_urlsafe(32),
        viewer_token=viewer.get_secret_value() if viewer else "",
        operators=names(settings.gpu_console_operators),
        viewers=names(settings.gpu_console_viewers),
        read_only=read_only or settings.gpu_console_read_only,
    )


def url(host: str, port: int, prefix: str, token: str) -> str:
    """The URL of the server on this `host` and `port`, with its path `prefix` and the `token`.

    If `host` means every address, the URL has this machine's name.

    >>> url("127.0.0.1", 8211, "", "abc"), url("::1", 8211, "/gpu/console", "abc")
    ('http://127.0.0.1:8211/?token=abc', 'http://[::1]:8211/gpu/console?token=abc')
    """
    host = host or "localhost"  # Panel listens on every address by default and prints "localhost"
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    shown_host = f"[{host}]" if ":" in host else host
    return f"http://{shown_host}:{port}{prefix or '/'}?token={token}"


def printable_address(address: str) -> tuple[str, Path | None]:
    """The text to print for the URL `address`, and a file to remove when the server ends, or None.

    `address` contains a token, which is printed only on a terminal. Output to a file or a pipe may be read by other
    people, so it names a file of mode 0600 that has the URL.
    """
    if sys.stdout.isatty():
        return address, None
    file = state_home() / f"url-{own_process()}.txt"
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
    page = address.partition("?token=")[0]
    try:
        make_directory(file.parent)
        file.unlink(missing_ok=True)  # an earlier process with this number left it
        with open(os.open(file, flags, 0o600), "w") as writing:
            writing.write(f"{address}\n")
    except OSError as error:  # a console must start on a full disk, which it is to show
        why = f"The file of its token cannot be written ({error.strerror}): {file}"
        return f"{page}\n  {why}\n  Start it on a terminal, or with a token of your own", None
    return f"{page}\n  The URL with its token:  cat {file}", file


def mask_logs() -> None:
    """Limits the lines of LIMITED_LOGS. Masks tokens, which requests that did not reach the gate would show."""
    for name in LIMITED_LOGS:
        log = logging.getLogger(name)
        if any(isinstance(known, LineLimit) for known in log.filters):
            continue
        log.addFilter(LineLimit())
        if name in MASKED_LOGS:
            log.addFilter(_mask_record)


class LineLimit(logging.Filter):
    """Leaves out lines of a log after LINES_AT_ONCE and LINES_A_SECOND, so that no stranger can fill a disk."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._left, self._at = float(LINES_AT_ONCE), clock()
        self._omitted = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line of `record` is written. It then includes how many lines before it were left out."""
        now = self._clock()
        self._left = min(LINES_AT_ONCE, self._left + (now - self._at) * LINES_A_SECOND)
        self._at = now
        if self._left < 1.0:
            self._omitted += 1
            return False
        self._left -= 1.0
        if self._omitted:
            record.msg = f"{record.getMessage()} ({self._omitted} lines were left out before)"
            record.args = ()
            self._omitted = 0
        return True


def open_browser(address: str) -> Path | None:
    """Opens `address` in a browser. Returns the file that redirects the browser, or None if there is no screen.

    The file has mode 0600. If the browser got the address directly, every user of this machine could read the token on
    its command line.
    """
    has_screen = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if not has_screen and sys.platform != "darwin":
        return None
    handle, name = tempfile.mkstemp(prefix="gpu-console-", suffix=".html")  # mode 0600
    with os.fdopen(handle, "w") as file:
        file.write(
            f'<!doctype html><meta charset="utf-8"><meta name="referrer" content="no-referrer">'
            f'<meta http-equiv="refresh" content="0;url={html.escape(address)}">'
        )
    webbrowser.open(Path(name).as_uri())
    return Path(name)


def bound(
    make_server: MakeServer,
    service: Service,
    rules: AccessRules,
    host: str,
    port: int | None,
    socket_path: str | None,
) -> tuple[WebServer, Address]:
    """A server that listens, and its address. Raises GpuError if the server cannot listen.

    If `port` is None or 0 and another process takes the chosen port first, another port is chosen.
    """
    attempts_left = BIND_ATTEMPTS if not port and socket_path is None else 1
    while True:
        address = _free_address(service, host, port, socket_path)
        attempts_left -= 1
        try:
            return make_server(service, rules, address), address
        except OSError as error:  # another process has bound the port since it was found free
            if not attempts_left or error.errno != errno.EADDRINUSE:
                why = f"nothing can listen there ({error.strerror})"
                raise GpuError(f"{why}. Try again:  {service.command}") from None


def _free_address(
    service: Service, host: str, port: int | None, socket_path: str | None
) -> Address:
    if socket_path is not None:
        return Address(host, 0, prepare(socket_path))
    first = service.default_port if port is None else port
    tries = service.ports_tried if port is None else 1
    return Address(host, free_port(host, first, tries, service.command))


def _announce(service: Service, rules: AccessRules, address: Address) -> tuple[str, Path | None]:
    """Prints the address of the server. Returns its URL ("" on a Unix socket), and the file that has it, or None."""
    if address.socket_path is not None:
        print(
            f"{service.name} listens on {address.socket_path}, for {rules.user} alone.", flush=True
        )
        return "", None
    shown_url = url(address.host, address.port, "", rules.operator_token)
    text, file = printable_address(shown_url)
    print(f"{service.name} runs until you press Ctrl-C. Open:\n    {text}", flush=True)
    if address.host not in ("127.0.0.1", "::1", "localhost"):
        print(
            "gpu: the connection between browser and server is not encrypted. On a network that others can "
            "read, put the server behind a proxy with TLS.",
            file=sys.stderr,
        )
    return shown_url, file


def _handle_signals(loop: IOLoop, service: Service) -> None:
    """Ends the `loop` at SIGTERM, after `drain`; at once at a second one. SIGHUP reloads, but not on a terminal."""
    draining: list[asyncio.Task[None]] = []

    def end() -> None:
        if service.drain is None or draining:
            loop.stop()
            return
        task = asyncio.ensure_future(service.drain())
        draining.append(task)
        task.add_done_callback(lambda _: loop.stop())

    signal.signal(signal.SIGTERM, lambda *_: loop.add_callback_from_signal(end))
    if service.reload is not None and not sys.stdin.isatty():
        reload = service.reload
        signal.signal(signal.SIGHUP, lambda *_: loop.add_callback_from_signal(reload))


async def _close(closing: Awaitable[None]) -> None:
    """Closes the service, and cancels tasks that still run: their threads would keep the process alive."""
    await closing
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=CANCEL_SECONDS)


def _log_unless_browser_left(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Logs the error in `context`, unless a browser has disconnected during a write, as it may."""
    if not isinstance(context.get("exception"), WebSocketClosedError):
        loop.default_exception_handler(context)


def _mask_record(record: logging.LogRecord) -> bool:
    record.msg = masked(record.getMessage())
    record.args = ()
    return True


def names(text: str | None) -> frozenset[str]:
    """The names in `text`, which are separated by commas."""
    found = (name.strip() for name in (text or "").split(","))
    return frozenset(name for name in found if name)


MAX_PATH_BYTES = 107  # the longest path of a Unix socket on Linux


def prepare(path: str) -> Path:
    """Prepares the place for a socket, and returns the absolute `path`.

    A missing directory is made with mode 0700, and the socket of a server that has ended is removed. Raises GpuError if
    another user can enter the directory, or if `path` is the socket of a running server or no socket.
    """
    place = Path(os.path.abspath(path))
    length = len(os.fsencode(place))
    if length > MAX_PATH_BYTES:
        most = f"it has {length} bytes; {MAX_PATH_BYTES} are the most."
        raise GpuError(f"{place} is too long for a socket: {most}")
    try:
        place.parent.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise GpuError(f"{place.parent} cannot be made ({error.strerror}).") from None
    _check_directories(place.parent)
    _remove_old_socket(place)
    return place


def free_port(host: str, port: int, tries: int, command: str = "gpu console") -> int:
    """The first free of `tries` ports from `port` on; any if that is 0. Raises GpuError, which advises `command`."""
    last_error: OSError | None = None
    for candidate in range(port, port + tries):
        try:
            return _try_to_bind(host, candidate)
        except OSError as error:
            last_error = error
            if error.errno != errno.EADDRINUSE:
                break
    assert last_error is not None
    if last_error.errno == errno.EADDRINUSE:
        raise GpuError(f"port {port} of {host} is in use. Take another:  {command} --port N")
    raise GpuError(f"nothing can listen on {host}, port {port} ({last_error.strerror}).")


def _try_to_bind(host: str, port: int) -> int:
    """Binds `port` (0: the system chooses one) and releases it. Returns the port. Raises OSError."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        trial.bind(address)
        return int(trial.getsockname()[1])


def _check_directories(directory: Path) -> None:
    """Raises GpuError if another user can enter `directory`, or can replace a directory above it."""
    about = os.stat(directory)
    if about.st_uid != os.getuid() or about.st_mode & 0o077:
        raise GpuError(
            f"a socket needs a directory that is yours alone (mode 0700), and {directory} is not. "
            f"Make one:  mkdir -m 700 DIR      then:  --socket DIR/socket"
        )
    weak = weak_step(directory)
    if weak:
        raise GpuError(f"a socket in {directory} could be replaced by others: {weak}.")


def _remove_old_socket(place: Path) -> None:
    """Removes the socket at `place`. Raises GpuError if a server listens on it, or if it is no socket."""
    try:
        about = os.lstat(place)
    except FileNotFoundError:  # nothing to remove
        return
    if not stat.S_ISSOCK(about.st_mode):
        raise GpuError(f"{place} exists and is no socket; it is left as it is.")
    if _server_listens(place):
        raise GpuError(f"a server listens on {place} already.")
    place.unlink(missing_ok=True)


def _server_listens(place: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as trial:
        trial.settimeout(1.0)
        try:
            trial.connect(os.fspath(place))
        except (ConnectionRefusedError, FileNotFoundError):  # its server has ended
            return False
        except OSError:
            pass  # a server listens and is busy
    return True
