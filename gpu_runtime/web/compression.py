"""Compresses the text answers of a server with gzip, if the client accepts gzip.

Streams of events are not compressed, nor are answers of less than a kilobyte. Compressed files are kept in memory, so
that the scripts of the console are compressed once for all visitors. Without compression, its first page transferred
4.6 MB.
"""

from __future__ import annotations

from collections import OrderedDict

from tornado.httputil import HTTPHeaders, HTTPServerRequest
from tornado.web import GZipContentEncoding

MOST_KEPT_BYTES = 16 * 2**20  # compressed files in memory; the scripts of the console are 1.2 MB
EVENT_STREAM = "text/event-stream"  # not compressed: an event must not wait for the next ones

_kept: OrderedDict[str, bytes] = OrderedDict()  # etag of a file -> its compressed content


class Compression(GZipContentEncoding):
    """The compression of one answer."""

    def __init__(self, request: HTTPServerRequest) -> None:
        super().__init__(request)
        self._gzipping = self._gzipping and request.method != "HEAD"
        self._etag = ""  # of the file that is being compressed; empty: the result is not kept
        self._parts: list[bytes] = []
        self._from_memory = False

    def transform_first_chunk(
        self, status_code: int, headers: HTTPHeaders, chunk: bytes, finishing: bool
    ) -> tuple[int, HTTPHeaders, bytes]:
        # Only an answer that sends a file has both headers. Its etag is a digest of the file's content.
        etag = headers.get("Etag", "") if "Last-Modified" in headers else ""
        if self._gzipping and status_code == 200 and etag in _kept:
            self._from_memory = True
            _kept.move_to_end(etag)
            headers["Vary"] = "Accept-Encoding"
            headers["Content-Encoding"] = "gzip"
            headers["Content-Length"] = str(len(_kept[etag]))
            return status_code, headers, _kept[etag]
        self._etag = etag if status_code == 200 else ""
        return super().transform_first_chunk(status_code, headers, chunk, finishing)

    def transform_chunk(self, chunk: bytes, finishing: bool) -> bytes:
        if self._from_memory:
            return b""  # the first part was the whole answer
        part = super().transform_chunk(chunk, finishing)
        if self._gzipping and self._etag:
            self._parts.append(part)
            if finishing:
                _keep(self._etag, b"".join(self._parts))
        return part

    def _compressible_type(self, ctype: str) -> bool:
        return ctype != EVENT_STREAM and super()._compressible_type(ctype)


def _keep(etag: str, content: bytes) -> None:
    """Keeps the compressed `content` of a file, and drops the least recently requested ones."""
    _kept[etag] = content
    while sum(map(len, _kept.values())) > MOST_KEPT_BYTES:
        _kept.popitem(last=False)
