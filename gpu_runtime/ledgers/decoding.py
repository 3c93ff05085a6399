"""Decodes the book in a page (a stored book) or in a roster (an owner's copy of its part).

An older version of gpu-console may have written the page or the roster in this boot.
"""

from __future__ import annotations

import zlib

import msgspec
from msgspec.structs import replace

from ..facts import SCHEMA, Book, decode_book
from .liveness import Roster
from .pages import unpack

UNREADABLE = (msgspec.MsgspecError, ValueError, TypeError)


def decode_page(page: bytes, rev: int, schema: int) -> Book:
    """The book in a page, written at the revision `rev` in the format `schema`.

    Raises one of UNREADABLE.
    """
    return unpack(page, rev)[0] if schema == SCHEMA else decode_older(page, rev)


def decode_roster(roster: Roster) -> Book:
    """The owner's part of the book in its `roster`. Raises one of UNREADABLE."""
    if roster.schema == SCHEMA:
        return unpack(roster.payload, roster.rev)[0]
    return _decoded(roster.payload)


def decode_older(page: bytes, rev: int) -> Book:
    """The book in a page of an older schema, one JSON document. Raises one of UNREADABLE."""
    sealed = zlib.crc32(page[4:], rev & 0xFFFFFFFF).to_bytes(4, "big") == page[:4]
    if not sealed and not page.startswith(b"{"):  # older pages in a Redis have no checksum
        raise ValueError("its checksum is wrong")
    return _decoded(page[4:] if sealed else page)


def _decoded(content: bytes) -> Book:
    return replace(decode_book(content), schema=SCHEMA)
