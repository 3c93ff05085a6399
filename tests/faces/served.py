"""Consoles that are served by real processes, and clients that can send any message."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tornado.httpclient import HTTPRequest
from tornado.websocket import websocket_connect

from tests.clock import PATIENCE
from tests.faces.conftest import FOUND_BY_CHILDREN

OPERATORS, VIEWERS = "operator-0123456789abcdef", "viewer-0123456789abcdef"
# The page of these tests: it shows the visitor, counts the actions, and has a button for a forged click.
PAGE = """
import panel as pn
from gpu_panels import server

DONE = []

def page(visitor):
    told = pn.pane.Markdown(f"SECRET of {visitor.name}, may act: {visitor.may_act}, done: {len(DONE)}")
    def act(_):
        if visitor.may_act:
            DONE.append("an operator")
        told.object = f"done by {DONE or 'nobody'}"
    return pn.Column(told, pn.widgets.Button(name="act", on_click=act))
"""
SCRIPT = PAGE + "server.serve_page(page)\n"
COMMAND = PAGE + "import sys\nserver.run(**eval(sys.argv[1]), page=page, browser=False)\n"


class Conversation:
    """A client of Bokeh's protocol that can send any message, used with `async with`."""

    def __init__(self, server: Served, path: str, subprotocol: str, **headers: str) -> None:
        given = {name: value for name, value in headers.items() if value}
        url = f"ws://127.0.0.1:{server.port}{path}"
        self._request = HTTPRequest(url, headers=given, request_timeout=PATIENCE)
        self._subprotocols = ["bokeh", subprotocol] if subprotocol else None

    async def __aenter__(self) -> Conversation:
        options = {"subprotocols": self._subprotocols, "max_message_size": 1 << 26}
        self.socket = await websocket_connect(self._request, **options)
        assert "ACK" in (await self._receive())[0]
        return self

    async def __aexit__(self, *_: object) -> None:
        self.socket.close()

    async def document(self) -> str:
        await self.send("PULL-DOC-REQ", {})
        return await self._reply()

    async def click(self, button: str) -> None:
        """Sends the event that a browser sends for a click, and waits until the server has acknowledged it."""
        values = {"type": "map", "entries": [["model", {"id": button}]]}
        await self.send_event("button_click", values)
        await self._reply()

    async def send_event(self, name: str, values: object) -> None:
        sent = {"type": "event", "name": name, "values": values}
        message = {"kind": "MessageSent", "msg_type": "bokeh_event", "msg_data": sent}
        await self.send("PATCH-DOC", {"events": [message]})

    async def send(self, kind: str, content: object) -> None:
        for part in ({"msgid": "1000", "msgtype": kind}, {}, content):
            await self.socket.write_message(json.dumps(part))

    @staticmethod
    def ids(document: str, model: str) -> list[str]:
        return re.findall(rf'"name":"{re.escape(model)}","id":"([^"]+)"', document)

    async def _receive(self) -> list[str]:
        """Receives one message of Bokeh's protocol and returns its three parts."""
        parts: list[str] = []
        while len(parts) < 3:
            part = await asyncio.wait_for(self.socket.read_message(), PATIENCE)
            if part is None:
                raise ConnectionError(f"closed: {self.socket.close_code}")
            parts.append(part)
        return parts

    async def _reply(self) -> str:
        while True:
            header, _, body = await self._receive()
            if json.loads(header).get("reqid") == "1000":
                return body


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=PATIENCE)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(PATIENCE)
        self.sock.connect(self._path)


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: str
    seconds: float

    @property
    def cookie(self) -> str:
        return self.headers.get("set-cookie", "").partition(";")[0]

    @property
    def session_token(self) -> str:
        """The token with which the page opens its websocket."""
        return re.search(r'"token":"([^"]+)"', self.body)[1]


@dataclass
class Served:
    """A running server, and what it has printed so far."""

    process: subprocess.Popen
    port: int = 0
    socket: str = ""
    path: str = "/"
    output_file: Path = field(default_factory=Path)

    @property
    def output(self) -> str:
        return self.output_file.read_text()

    def get(
        self,
        path: str = "",
        *,
        method: str = "GET",
        body: str | None = None,
        host: str = "127.0.0.1",
        **headers: str,
    ) -> Answer:
        """Sends one request and does not follow a redirect. In the names of headers, `_` stands for `-`."""
        own = {name.replace("_", "-"): value for name, value in headers.items()}
        connection = http.client.HTTPConnection(host, self.port, timeout=PATIENCE)
        with contextlib.closing(
            UnixConnection(self.socket) if self.socket else connection
        ) as open_one:
            began = time.monotonic()
            open_one.request(method, path or self.path, body=body, headers=own)
            answer = open_one.getresponse()
            told = {name.lower(): value for name, value in answer.getheaders()}
            text = answer.read().decode("utf-8", "replace")
            return Answer(answer.status, told, text, time.monotonic() - began)

    def enter(self, token: str = OPERATORS, path: str = "") -> tuple[str, str]:
        """Opens the page with the token, as a browser does. Returns the path of the page and the cookie."""
        path = path or self.path
        answer = self.get(f"{path}?token={token}")
        assert answer.status == 302, (answer, self.output)
        base = path.rsplit("/", 1)[0]
        return f"{base}/{answer.headers['location'].removeprefix('./')}", answer.cookie


@contextmanager
def serving(
    words: list[str],
    tmp_path: Path,
    environment: Mapping[str, str] = {},
    *,
    port: int = 0,
    socket_path: str = "",
    path: str = "/",
) -> Iterator[Served]:
    """Starts a server and waits for its first answer. The server ends with the block."""
    name = f"served-{port or Path(socket_path).name}"
    output_file = tmp_path / f"{name}.txt"
    with output_file.open("wb") as out:
        process = subprocess.Popen(
            words, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=tmp_path,
            env=environ(tmp_path) | dict(environment), start_new_session=True,
        )  # fmt: skip
    served = Served(process, port, socket_path, path, output_file)
    try:
        _wait(served)
        yield served
    finally:
        end(process)


def environ(tmp_path: Path) -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": FOUND_BY_CHILDREN,
        "GPU_DEVICES": "sim:24GiB,host:64GiB",
        "GPU_LEDGER": f"keeper://{tmp_path}/ledger",
        "XDG_STATE_HOME": f"{tmp_path}/state",
        "PYTHONUNBUFFERED": "1",
    }


def end(process: subprocess.Popen) -> None:
    """Ends the process and all processes that it started. The process leads its own process group."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _wait(served: Served) -> None:
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        if served.process.poll() is not None:
            raise AssertionError(f"the server ended: {served.output}")
        try:
            if served.socket:
                with socket.socket(socket.AF_UNIX) as trial:
                    trial.connect(served.socket)
            else:
                socket.create_connection(("127.0.0.1", served.port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.05)  # the only way to learn that another process listens
    raise AssertionError(f"the server did not answer: {served.output}")


def free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return trial.getsockname()[1]


@contextmanager
def gpu_console(folder: Path, **environment: str) -> Iterator[Served]:
    """`gpu console` in a process of its own, as an operator starts it."""
    port = free_port()
    words = [sys.executable, "-m", "gpu_runtime.cli", "console", "--port", str(port)]
    tokens = {"GPU_CONSOLE_TOKEN": OPERATORS, "GPU_CONSOLE_VIEWER_TOKEN": VIEWERS}
    with serving([*words, "--no-browser"], folder, tokens | environment, port=port) as served:
        yield served


def console(tmp_path: Path, **options: object) -> list[str]:
    """The command line that serves the page of these tests as `gpu console` does."""
    script = tmp_path / "command.py"
    script.write_text(COMMAND)
    return [sys.executable, str(script), repr(options)]


def panel_serve(tmp_path: Path, *flags: str) -> list[str]:
    """The command line that serves the page of these tests as `panel serve` does."""
    script = tmp_path / "console.py"
    script.write_text(SCRIPT)
    return [sys.executable, "-m", "panel", "serve", str(script), *flags]
