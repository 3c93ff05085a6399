"""An ASGI application behind Tornado. It gets whole requests, streams its answers, and is told when
a client disconnects.
"""

import asyncio
import gzip
import socket

import pytest
from tornado.httpclient import AsyncHTTPClient, HTTPClientError
from tornado.httpserver import HTTPServer
from tornado.netutil import bind_sockets
from tornado.testing import AsyncHTTPTestCase
from tornado.web import Application, RequestHandler, StaticFileHandler

from gpu_runtime.serving.server import Asgi
from gpu_runtime.web import gate
from gpu_runtime.web.gate import COOKIE
from tests.clock import PATIENCE

FINE = {"type": "http.response.start", "status": 200, "headers": [
    (b"content-type", b"text/plain"), (b"x-a", b"1"), (b"x-a", b"2"), (b"connection", b"close"),
]}  # fmt: skip


def serving(app, talk, handler=Asgi, write_seconds=20.0, **options):
    """Serves the application and runs `talk(url, client)` against it, within bounded time."""

    async def story():
        [sock] = bind_sockets(0, "127.0.0.1", family=socket.AF_INET)
        route = (r".*", handler, {"app": app, "write_seconds": write_seconds})
        server = HTTPServer(Application([route], **{COOKIE: None}), **options)
        server.add_sockets([sock])
        client = AsyncHTTPClient(force_instance=True)
        try:
            await asyncio.wait_for(
                talk(f"http://127.0.0.1:{sock.getsockname()[1]}", client), PATIENCE
            )
        finally:
            client.close()
            server.stop()
            await server.close_all_connections()

    asyncio.run(story())


def answering(*parts, heard=None, whole=False):
    """An application that sends these parts, the last one as the last if `whole`, and notes in `heard` what follows."""

    async def app(scope, receive, send):
        await receive()
        await send(FINE)
        for number, part in enumerate(parts, 1):
            more = not (whole and number == len(parts))
            await send({"type": "http.response.body", "body": part, "more_body": more})
        if heard is not None:
            heard.append((await receive())["type"])
            await send({"type": "http.response.body", "body": b"to nobody", "more_body": True})

    return app


async def asked(url, **more):
    """A connection that has sent a request."""
    port = int(url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port, **more)
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    return reader, writer


def test_a_request_arrives_whole_and_the_answer_is_unchanged():
    seen = {}

    async def app(scope, receive, send):
        seen.update(scope, body=(await receive())["body"])
        await send(FINE)
        await send({"type": "http.response.body", "body": b"ok"})

    async def talk(url, client):
        answer = await client.fetch(
            f"{url}/a%20b/c?x=1&y=%2F", method="PUT", body=b"\x00\xff", headers={"X-Two": "é"}
        )
        assert answer.body == b"ok" and answer.headers["Content-Type"] == "text/plain"
        assert answer.headers.get_list("X-A") == ["1", "2"] and "Etag" not in answer.headers

    serving(app, talk)
    assert (seen["method"], seen["path"], seen["query_string"], seen["body"]) == (
        "PUT", "/a b/c", b"x=1&y=%2F", b"\x00\xff",
    )  # fmt: skip
    assert seen["state"] == {"visitor": None}
    assert all(name == name.lower() for name, _ in seen["headers"])


def test_each_part_is_sent_at_once():
    more = asyncio.Event()

    async def app(scope, receive, send):
        await send(FINE)
        await send({"type": "http.response.body", "body": b"one,", "more_body": True})
        await more.wait()
        await send({"type": "http.response.body", "body": b"two", "more_body": False})

    async def talk(url, client):
        parts = []

        def heard(part: bytes) -> None:
            parts.append(part)
            more.set()  # the second is sent only after the first has arrived

        await client.fetch(url, streaming_callback=heard)
        assert parts == [b"one,", b"two"]

    serving(app, talk)


def test_the_application_learns_of_a_disconnect():
    heard = []

    async def talk(url, client):
        reader, writer = await asked(url)
        await reader.readuntil(b"first")
        writer.close()
        while not heard:
            await asyncio.sleep(0.005)

    serving(answering(b"first", heard=heard), talk)
    assert heard == ["http.disconnect"]


@pytest.mark.parametrize(("write_seconds", "disconnects"), [(20.0, True), (0.1, False)])
def test_a_write_to_a_client_that_reads_nothing_ends(write_seconds, disconnects):
    """At its disconnect, or after a time. A slow client may take as long as it likes, if it reads now and then."""
    heard = []

    async def talk(url, client):
        _, writer = await asked(url, limit=1)
        if disconnects:
            await asyncio.sleep(0.2)  # until all buffers are full
            assert not heard
            writer.transport.abort()
        while not heard:
            await asyncio.sleep(0.005)
        writer.transport.abort()

    serving(answering(b"x" * (64 << 20), heard=heard), talk, write_seconds=write_seconds)
    assert heard == ["http.disconnect"]


def test_a_failing_application_is_a_server_error_without_details():
    async def app(scope, receive, send):
        raise ValueError("of its own")

    async def talk(url, client):
        with pytest.raises(HTTPClientError) as failed:
            await client.fetch(url)
        assert failed.value.code == 500 and b"of its own" not in failed.value.response.body
        assert b'"error": {"message": "Internal Server Error"' in failed.value.response.body

    serving(app, talk)


def test_a_body_longer_than_the_server_takes_is_refused_before_it_is_read():
    called = []

    async def app(scope, receive, send):
        called.append(scope)

    async def talk(url, client):
        with pytest.raises(HTTPClientError) as refused:
            await client.fetch(url, method="POST", body=b"x" * 2000)
        assert refused.value.code in (400, 413)

    serving(app, talk, max_body_size=1000)
    assert not called


def test_a_head_has_no_body():
    async def talk(url, client):
        answer = await client.fetch(url, method="HEAD")
        assert (answer.code, answer.body) == (200, b"")

    serving(answering(b"", whole=True), talk)


def test_a_slow_client_gets_everything():
    size = 8 << 20

    async def talk(url, client):
        reader, writer = await asked(url)
        await reader.readuntil(b"\r\n\r\n")
        received = 0
        while part := await reader.read(1 << 20):
            received += len(part)
        assert received >= size
        writer.close()

    serving(answering(b"x" * size, whole=True), talk, write_seconds=2.0)


def test_no_part_of_a_stream_is_held_back_by_the_system():
    """With Nagle's algorithm the second part of a stream arrived up to 40 ms late."""
    seen = []

    class Watched(Asgi):
        def flush(self, *args, **kwargs):
            connection = self.request.connection.stream.socket
            seen.append(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            return super().flush(*args, **kwargs)

    async def talk(url, client):
        await client.fetch(url)
        await client.fetch(url)  # on the same connection

    serving(answering(b"part", b"part", b"", whole=True), talk, handler=Watched)
    assert len(seen) >= 4 and all(seen)


# -- text answers are compressed -------------------------------------------------------------------
SCRIPT = "const words = 'the same words again and again';\n" * 4000  # several parts of 64 kB


class Answer(RequestHandler):
    """Answers with text of the type in the query."""

    def get(self):
        self.set_header("Content-Type", self.get_argument("type"))
        self.write("word " * 1000)


class TestCompression(AsyncHTTPTestCase):
    @pytest.fixture(autouse=True)
    def files(self, tmp_path, monkeypatch):
        (tmp_path / "page.js").write_text(SCRIPT)
        (tmp_path / "new.js").write_text(f"// new\n{SCRIPT}")
        self.path = tmp_path
        monkeypatch.setattr(gate, "_kept", type(gate._kept)())

    def get_app(self):
        app = Application(
            [("/answer", Answer), ("/(.*)", StaticFileHandler, {"path": str(self.path)})]
        )
        app.add_transform(gate.Compression)
        return app

    def ask(self, path, **more):
        more.setdefault("headers", {"Accept-Encoding": "gzip"})
        return self.fetch(path, decompress_response=False, **more)

    def test_a_file_is_compressed_once_and_both_answers_are_its_content(self):
        first, second = self.ask("/page.js"), self.ask("/page.js")
        assert len(gate._kept) == 1 and first.headers["Content-Encoding"] == "gzip"
        assert int(second.headers["Content-Length"]) == len(second.body) < len(SCRIPT) / 20
        for answer in (first, second):
            assert gzip.decompress(answer.body).decode() == SCRIPT
            assert answer.headers["Vary"] == "Accept-Encoding"

    def test_a_client_without_gzip_and_a_head_request_get_the_plain_answer(self):
        self.ask("/page.js", headers={"Accept-Encoding": "gzip", "Range": "bytes=0-4"})
        assert gzip.decompress(self.ask("/page.js").body).decode() == SCRIPT
        assert self.ask("/page.js", headers={}).body.decode() == SCRIPT
        head = self.ask("/page.js", method="HEAD")
        assert int(head.headers["Content-Length"]) == len(SCRIPT)
        part = self.ask("/page.js", headers={"Accept-Encoding": "gzip", "Range": "bytes=0-4"})
        body = part.body
        if part.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        assert (part.code, body) == (206, b"const")

    def test_an_unchanged_file_is_not_sent_again(self):
        etag = self.ask("/page.js").headers["Etag"]
        again = self.ask("/page.js", headers={"Accept-Encoding": "gzip", "If-None-Match": etag})
        assert (again.code, again.body) == (304, b"")

    def test_text_is_compressed_and_an_event_stream_is_not(self):
        for kind, compressed in (
            ("application/json", True),
            ("text/html; charset=UTF-8", True),
            ("text/event-stream", False),
            ("text/event-stream; charset=utf-8", False),
            ("image/png", False),
        ):
            found = self.ask(f"/answer?type={kind.replace(' ', '%20')}")
            assert ("Content-Encoding" in found.headers) is compressed, kind
        assert not gate._kept, "an answer that is made anew is not kept"

    def test_the_kept_files_are_bounded(self):
        """The file that was not requested for the longest time is dropped."""
        (self.path / "third.js").write_text(f"// third\n{SCRIPT}")
        sizes = [len(self.ask(path).body) for path in ("/page.js", "/new.js", "/page.js")]
        gate.MOST_KEPT_BYTES, most = sum(sizes) - 1, gate.MOST_KEPT_BYTES
        try:
            self.ask("/third.js")
        finally:
            gate.MOST_KEPT_BYTES = most
        kept = [gzip.decompress(content).decode() for content in gate._kept.values()]
        assert kept == [SCRIPT, f"// third\n{SCRIPT}"]
