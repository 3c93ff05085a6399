"""Text answers are compressed, once for each file, and an event is never held back."""

import gzip

import pytest
from tornado.testing import AsyncHTTPTestCase
from tornado.web import Application, RequestHandler, StaticFileHandler

from gpu_runtime.web import gate

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
