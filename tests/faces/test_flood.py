"""Strangers without a token cannot keep anybody out, fill the log, or use up the server's files."""

import asyncio
import errno
import logging
import os
import resource
import socket
import subprocess
import sys
import threading

import pytest
from tornado.httpserver import HTTPServer
from tornado.netutil import bind_sockets
from tornado.web import Application, RequestHandler

from gpu_runtime.web import connections, gate
from gpu_runtime.web.auth import AccessRules
from gpu_runtime.web.connections import Connections, stranger_of
from gpu_runtime.web.gate import Gate, install
from gpu_runtime.web.http_server import LINES_AT_ONCE, LineLimit
from tests.clock import PATIENCE
from tests.faces.served import OPERATORS, Answer
from tests.impostor import NOBODY
from tests.serving.loops import until
from tests.serving.test_headless import TOKEN, start

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
HALF_OPEN = """
import os, socket, sys
port, uid, count = map(int, sys.argv[1:])
os.setgroups([]); os.setgid(uid); os.setuid(uid)
opened = []
for _ in range(count):
    one = socket.socket()
    one.settimeout(60)
    one.connect(("127.0.0.1", port))
    one.send(b"GET / HTTP/1.1\\r\\n")
    opened.append(one)
print("opened", flush=True)
input()
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with start("without Panel", tmp_path_factory.mktemp("flood")) as server:
        yield server


@pytest.mark.processes
def test_the_right_token_is_admitted_during_a_flood_of_wrong_ones(server):
    def guess(number: int) -> None:
        sent = {"Authorization": f"Bearer wrong{number}", "Accept": "text/plain"}
        wrong.append(server.get("/health", **sent))

    wrong: list[Answer] = []
    flood = [threading.Thread(target=guess, args=(number,)) for number in range(9)]
    for one in flood:
        one.start()
    answers = [server.get("/health", **TOKEN) for _ in range(10)]
    form = {"Content_Type": "application/x-www-form-urlencoded"}
    typed = server.get("/", method="POST", body=f"token={OPERATORS}", **form)
    assert {answer.status for answer in answers} == {200} and typed.status == 302
    for one in flood:
        one.join(PATIENCE)
    assert {answer.status for answer in wrong} == {401}
    assert sorted(answer.seconds for answer in answers)[5] < max(one.seconds for one in wrong)


@pytest.mark.processes
@needs_root
def test_half_open_connections_of_another_user_keep_nobody_out(tmp_path):
    """They cost neither processor time nor lines in the log."""
    with start("without Panel", tmp_path) as server:
        words = [sys.executable, "-c", HALF_OPEN, str(server.port), str(NOBODY), "1060"]
        before = server.output_file.stat().st_size
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        raised = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        flood = subprocess.Popen(words, preexec_fn=raised, **pipes)
        try:
            assert flood.stdout.readline() == "opened\n"
            files = len(os.listdir(f"/proc/{server.process.pid}/fd"))
            assert files < connections.MOST_OF_A_STRANGER + 100
            for _ in range(5):
                assert server.get("/health", **TOKEN).status == 200
            assert server.output_file.stat().st_size - before < 20_000
        finally:
            flood.communicate("\n", timeout=PATIENCE)


class Hello(RequestHandler):
    def get(self) -> None:
        self.finish("hello")


class Small:
    """A server in this process with the limits on connections, and its port."""

    def __init__(self, listening: socket.socket) -> None:
        app = Application([("/", Hello)])
        self.gate = install(app, AccessRules("ann", operator_token=OPERATORS))
        self.http = HTTPServer(app)
        self.http.add_sockets([listening])
        self.connections = self.gate.connections = Connections(self.http)
        self.port = listening.getsockname()[1]

    async def ask(self, token: str = "", times: int = 1) -> tuple[bytes, asyncio.StreamWriter]:
        """The first line of the last answer to so many requests, and the connection, which stays open."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        words = f"GET / HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {token}\r\n\r\n".encode()
        for _ in range(times - 1):
            writer.write(words)
            await reader.readuntil(b"hello")
        writer.write(words)
        return await reader.readline(), writer

    async def is_closed(self) -> bool:
        """Whether a new connection is closed without an answer."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            return await reader.read() == b""
        except ConnectionError:
            return True
        finally:
            writer.close()


@pytest.fixture
def as_strangers(monkeypatch):
    """Makes all connections of this process count as another user's. That user may have three."""
    monkeypatch.setattr(connections, "stranger_of", lambda connection, address: "uid 12345")
    monkeypatch.setattr(connections, "MOST_OF_A_STRANGER", 3)


def listening() -> socket.socket:
    return bind_sockets(0, "127.0.0.1", family=socket.AF_INET)[0]


async def test_a_stranger_may_have_few_connections_until_one_is_admitted(as_strangers):
    """A place becomes free once, when its connection is admitted or ends."""
    small = Small(listening())
    opened = [await small.ask(OPERATORS, times=2) for _ in range(5)]
    assert {line for line, _ in opened} == {b"HTTP/1.1 200 OK\r\n"} and len(small.connections) == 5
    waiting = [(await asyncio.open_connection("127.0.0.1", small.port))[1] for _ in range(3)]
    await until(lambda: len(small.connections) == 8)
    assert await small.is_closed()
    for writer in waiting:
        writer.close()
    await until(lambda: len(small.connections) == 5)
    assert (await small.ask())[0].startswith(b"HTTP/1.1 403")
    small.http.stop()


async def test_a_head_that_does_not_come_closes_the_connection():
    small = Small(listening())
    assert small.http.conn_params.header_timeout == connections.HEADER_SECONDS
    assert small.http.conn_params.body_timeout == connections.BODY_SECONDS
    small.http.conn_params.header_timeout = 0.05
    reader, writer = await asyncio.open_connection("127.0.0.1", small.port)
    writer.write(b"GET / HTTP/1.1\r\n")
    assert await reader.read() == b"" and len(small.connections) == 0
    small.http.stop()


class WithoutFiles(socket.socket):
    """A listening socket whose first three `accept` calls fail, as if the process had no file left."""

    refused = 0

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.setblocking(False)
        self.bind(("127.0.0.1", 0))
        self.listen()

    def accept(self):
        if self.refused < 3:
            self.refused += 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


async def test_without_files_nothing_is_accepted_for_a_while(monkeypatch, caplog):
    """The server's loop would try again at once and log each error. It can stop meanwhile."""
    monkeypatch.setattr(connections, "PAUSE_SECONDS", 0.01)
    small = Small(WithoutFiles())
    assert (await small.ask(OPERATORS))[0] == b"HTTP/1.1 200 OK\r\n"
    said = [record.getMessage() for record in caplog.records]
    assert said == ["no connection can be accepted: Too many open files"] * 3
    small.http.stop()
    monkeypatch.undo()
    sock = WithoutFiles()
    small = Small(sock)
    _, writer = await asyncio.open_connection("127.0.0.1", small.port)
    await until(lambda: sock.refused)
    small.http.stop()
    assert sock.fileno() == -1 and sock.refused == 1
    writer.close()


WANTED, NONE = connections.WANTED_FILES, resource.RLIM_INFINITY


@pytest.mark.parametrize(("soft", "hard", "limit"), [
    (256, 4096, 4096), (256, WANTED + 1, WANTED), (256, NONE, WANTED), (NONE, NONE, WANTED),
    (WANTED, WANTED, WANTED), (WANTED + 1, NONE, WANTED + 1),
])  # fmt: skip
def test_the_limit_on_files_is_raised_as_far_as_allowed(monkeypatch, soft, hard, limit):
    """With the usual soft limit of 1,024 the server would end at about a thousand connections."""
    raised = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: raised.append(both))
    assert connections.raise_file_limit() == limit
    assert raised == ([] if soft in (NONE, limit) else [(limit, hard)])


@needs_root
@pytest.mark.parametrize(
    ("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]
)
def test_a_connection_of_this_machine_has_its_users_name(family, host):
    try:
        server = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip("this machine has no such address")
    with server, socket.socket(family) as client:
        pid = os.fork()
        if pid == 0:
            try:
                os.setgid(NOBODY)
                os.setuid(NOBODY)
                with socket.socket(family) as theirs:
                    theirs.connect(server.getsockname())
                    theirs.recv(1)
            finally:
                os._exit(0)
        theirs, address = server.accept()
        with theirs:
            assert stranger_of(theirs, address) == f"uid {NOBODY}"
        os.waitpid(pid, 0)
        client.connect(server.getsockname())
        mine, address = server.accept()
        with mine:
            assert stranger_of(mine, address) == f"uid {os.geteuid()}"


def test_an_address_elsewhere_is_a_stranger_and_an_ipv6_network_is_one():
    with socket.socket() as unconnected:
        assert stranger_of(unconnected, ("192.0.2.7", 5)) == "192.0.2.7"
        for host in ("2001:db8::1", "2001:db8::ffff%eth0"):
            assert stranger_of(unconnected, (host, 5, 0, 0)) == "2001:db8::/64"


def test_each_stranger_has_a_limit_of_its_own_and_the_last_ones_are_remembered(monkeypatch):
    """A stranger that goes on guessing is not forgotten because others come."""
    monkeypatch.setattr(gate, "MOST_STRANGERS", 2)
    limits = Gate(Application([]), AccessRules("ann", OPERATORS), lambda: 0.0).guesses
    for stranger in ("uid 1", "uid 2"):
        for _ in range(20):
            limits(stranger).count()
    assert limits("uid 1").wait_seconds() is None
    assert limits("uid 3").wait_seconds() == 0.0
    assert limits("uid 1").wait_seconds() is None, "it was used later than uid 2"
    assert limits("uid 2").wait_seconds() == 0.0, "only two are remembered"


def test_a_flood_of_lines_is_left_out_of_the_log_and_counted():
    now = 0.0
    limit = LineLimit(lambda: now)
    record = logging.LogRecord("tornado.access", logging.WARNING, "", 0, "403 GET %s", ("/",), None)
    assert sum(limit.filter(record) for _ in range(1000)) == LINES_AT_ONCE
    now = 0.5
    assert limit.filter(record)
    assert record.getMessage() == f"403 GET / ({1000 - LINES_AT_ONCE} lines were left out before)"
    assert not limit.filter(record)


def test_a_page_stays_open_over_a_restart_under_the_same_token_only():
    """The browser's path and cookies are derived from the tokens, and do not reveal them."""

    def credentials(token):
        gate = Gate(Application([("/", Hello)]), AccessRules("ann", token, OPERATORS[::-1]))
        return gate.lane, gate._cookie_rules.operator_token, gate._cookie_rules.viewer_token

    before, again, other = map(credentials, (OPERATORS, OPERATORS, "another token of ann"))
    assert before == again
    assert before[0] != other[0] and before[1] != other[1]
    assert len(set(before)) == 3 and not [one for one in before if OPERATORS in one]
